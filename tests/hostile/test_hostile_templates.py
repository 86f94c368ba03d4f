"""Templates that loop, grow, recurse or fail in ways of their own: each costs its candidate, and the search goes on."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from evoengine.errors import MachineError, UsageError
from evoengine.records import Launch, Outcome
from evoengine.search.compilers import RENDER_LIMITS, Renderer
from evoengine.stages.render import MOST_BYTES, Folders, Template, inert_knobs
from tests.support.exhaustive import more
from tests.support.numbered_search import TARGET, NumberedSearch

SECONDS = 2.0
HOSTILE = {
    "loops": ("{% for i in range(10 ** 12) %}{% endfor %}", r"no end after 2 s"),
    "prints without end": ("{% for i in range(10 ** 12) %}x = x + 1;\n{% endfor %}", r"larger than 1 MiB"),
    "prints much at once": ("{{ 'x' * 3000000 }}", r"larger than 1 MiB"),
    "takes memory": ("{% set x = 'x' * 10 ** 12 %}", r"MemoryError.*\(the limit of a worker is 1 GiB of memory\)"),
    "takes it slowly": ("{% set n = namespace(x='x') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
                        r"MemoryError.*1 GiB of memory"),
    "includes itself": ("{% include 'hostile.cu.j2' %}", r"recursion"),
    "calls itself": ("{% macro a(x) %}{{ a(x) }}{% endmacro %}{{ a(1) }}", r"recursion"),
    "nests": ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", r"recursion"),
    "calculates": ("{{ 9 ** (9 ** 9) }}", r"no end after 2 s"),
    "ends its process": ("{{ cycler.__init__.__globals__.os._exit(3) }}", r"ended without an answer|exit code 3"),
    "kills its process": ("{{ cycler.__init__.__globals__.os.kill(cycler.__init__.__globals__.os.getpid(), 9) }}",
                          r"died \(SIGKILL\)"),
    "fails at length": ("{{ {}['" + "a" * 100_000 + "'].b }}", r"hostile\.cu\.j2:1: .{1,600}$"),
    "divides by zero": ("{{ 1 // 0 }}", r"hostile\.cu\.j2:1: "),
    "is not text": (b"\xff\xfe\x00kernel", r"UnicodeDecodeError"),
}  # fmt: skip


@pytest.fixture(scope="module")
def renderer():
    renderer = Renderer()
    yield renderer
    renderer.close()


@pytest.fixture(scope="module")
def hasty():
    """Cuts off what has no end; what has one may take longer than that where this machine is busy."""
    renderer = Renderer(replace(RENDER_LIMITS, seconds=SECONDS))
    yield renderer
    renderer.close()


def template(folder: Path, text: str | bytes, name: str = "hostile.cu.j2") -> Template:
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return Template(Folders(folder, folder), "hostile", {"family": "hostile", "a": 1}, Launch((1, 1, 1), 32, 0))


ALIKE = "takes it slowly", "loops"
"""memory is taken at once by another, and a candidate of the search below loops"""


@pytest.mark.parametrize("how", [*(how for how in HOSTILE if how not in ALIKE), *more(ALIKE)])
def test_a_hostile_template_is_refused_with_its_reason_and_the_next_is_filled(renderer, hasty, tmp_path, how):
    text, reason = HOSTILE[how]
    renderer = hasty if "no end" in reason else renderer
    with pytest.raises(UsageError, match=reason):
        renderer(template(tmp_path, text))
    assert renderer(template(tmp_path, "{{ a }}")) == "1"


def test_a_plain_kernel_that_is_too_large_or_hard_to_read_is_refused(hasty, tmp_path):
    with pytest.raises(UsageError, match=r"hostile\.cu is larger than 1 MiB"):
        hasty(template(tmp_path, "x" * (MOST_BYTES + 1), "hostile.cu"))
    with pytest.raises(UsageError, match=r"hostile cannot be filled: no end after 2 s"):
        hasty(template(tmp_path, "/* " * 300_000, "hostile.cu"))


def test_a_template_that_cannot_be_read_is_the_machines_fault(renderer, tmp_path, monkeypatch):
    asked = template(tmp_path, "{{ a }}")
    (tmp_path / "hostile.cu.j2").unlink()
    (tmp_path / "hostile.cu.j2").symlink_to("/proc/self/mem")  # opens, and every read fails
    with pytest.raises(MachineError, match="this machine failed: Input/output error"):
        renderer(asked)


LOOPS = "{% if number == 1 %}{% for i in range(10 ** 12) %}{% endfor %}{% endif %}"
MIXED = """// candidate {{ number }}
{% if number == 2 %}{{ 'x' * 3000000 }}{% endif %}
{% if number == 3 %}{{ cycler.__init__.__globals__.os._exit(3) }}{% endif %}
"""


@pytest.fixture(scope="module")
def searched(tmp_path_factory, hasty):
    """A search of six candidates, three of which have a hostile template; what it showed while it waited."""
    numbered = NumberedSearch(tmp_path_factory.mktemp("mixed"))
    shown = []
    coordinator = numbered.coordinator(range(6), fill=hasty, on_change=lambda progress: shown.append(progress.done))
    hasty.while_waiting = lambda: shown.append("waiting")
    (numbered.templates / "attention" / "numbered.cu.j2").write_text(MIXED + LOOPS)
    coordinator.search()
    yield numbered, shown
    numbered.ledger.close()


def test_hostile_templates_cost_their_candidates_and_nothing_else(searched):
    numbered, _ = searched
    ended = {c.config["number"]: c for c in numbered.candidates()}
    assert {n for n, c in ended.items() if c.outcome is Outcome.UNCOMPILABLE} == {1, 2, 3}
    assert all(c.outcome is Outcome.MEASURED for n, c in ended.items() if n not in (1, 2, 3))
    assert "no end after" in ended[1].reason and "larger than 1 MiB" in ended[2].reason
    assert ended[2].source is None and len(ended[2].reason) < 300  # nothing of it is stored


def test_the_display_goes_on_while_a_template_takes_its_time(searched):
    assert searched[1].count("waiting") > 10


def test_inert_knobs_are_not_looked_for_where_a_neighbour_is_hostile(hasty, tmp_path):
    numbered = NumberedSearch(tmp_path)
    (numbered.templates / "attention" / "numbered.cu.j2").write_text(MIXED.replace("== 2", "== 1"))
    start = {"family": "numbered", "number": 0}
    assert inert_knobs(TARGET, numbered.space(range(4)), [start], numbered.templates, hasty) == ()
    numbered.ledger.close()


def test_templates_that_are_gone_end_the_search_and_no_candidate(renderer, tmp_path):
    numbered = NumberedSearch(tmp_path)
    coordinator = numbered.coordinator(range(4), fill=renderer)
    shutil.rmtree(numbered.templates)
    with pytest.raises(MachineError, match="templates folder .* is no longer there"):
        coordinator.search()
    assert numbered.candidates() == []
    numbered.ledger.close()
