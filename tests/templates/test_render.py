from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from evoengine.errors import UsageError
from evoengine.paths import asset
from evoengine.records import Launch
from evoengine.stages.render import inert_knobs, render
from tests.support.kernel_gate import attention_target

TARGET = attention_target("b1,h2,s64,d64,fp16")


class Toy:
    """A space of one family with two knobs; what its template makes of them is up to each test."""

    kernel = "attention"

    def launch(self, config, problem):
        return Launch((problem.seq_q // 16, problem.heads, problem.batch), 64, 1024)

    def neighbours(self, config):
        return [{**config, knob: config[knob] + 1} for knob in ("width", "depth")]


CONFIG = {"family": "toy", "width": 2, "depth": 1}


@pytest.fixture
def write(tmp_path):
    """Writes a file of a templates folder; the family's own template by default."""

    def written(text: str, name: str = "attention/toy.cu.j2") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return tmp_path

    return written


def test_a_template_sees_knobs_constants_of_the_problem_and_the_launch(write):
    templates = write("{{ width }} {{ head_dim }} {{ dtype }} {{ causal }} {{ threads }} {{ shared_bytes }}\n")
    assert render(TARGET, Toy(), CONFIG, templates).text.splitlines()[-1] == "2 64 fp16 False 64 1024"


def test_a_template_cannot_bake_in_what_is_an_argument_of_the_kernel(write):
    with pytest.raises(UsageError, match=r"toy\.cu\.j2:1: 'seq_q' is undefined"):
        render(TARGET, Toy(), CONFIG, write("{{ seq_q }}\n"))


def test_the_same_text_serves_other_lengths_with_another_launch(write):
    templates = write("{{ width }}\n")
    small, large = (render(attention_target(f"b1,h2,s{s},d64,fp16"), Toy(), CONFIG, templates) for s in (64, 128))
    assert small.text == large.text
    assert (small.launch.grid, large.launch.grid) == ((4, 2, 1), (8, 2, 1))


def test_the_text_begins_with_the_family_and_the_problem(write):
    text = render(TARGET, Toy(), CONFIG, write("x\n")).text
    assert text.startswith("// attention, family toy: head_dim 64, head_dim_v 64, dtype fp16, causal False")


def test_configurations_of_equal_kernels_have_equal_text(write):
    templates = write("{{ width }}\n")
    assert (
        render(TARGET, Toy(), CONFIG, templates).sha256
        == render(TARGET, Toy(), {**CONFIG, "depth": 7}, templates).sha256
    )


def test_a_knob_that_no_text_depends_on_is_inert(write):
    assert inert_knobs(TARGET, Toy(), [CONFIG], write("{{ width }}\n")) == ("depth",)
    assert inert_knobs(TARGET, Toy(), [CONFIG], write("{{ width + depth }}\n")) == ()


def test_an_edited_template_is_read_again(write):
    templates = write("before\n")
    render(TARGET, Toy(), CONFIG, templates)
    write("a longer afterwards\n")
    assert "afterwards" in render(TARGET, Toy(), CONFIG, templates).text


def test_an_edited_include_is_read_again(write):
    write("{% include 'evo/part.cuh' %}")
    templates = write("before\n", "include/evo/part.cuh")
    render(TARGET, Toy(), CONFIG, templates)
    write("a longer afterwards\n", "include/evo/part.cuh")
    assert "afterwards" in render(TARGET, Toy(), CONFIG, templates).text


def complaint(templates: Path) -> str:
    with pytest.raises(UsageError) as caught:
        render(TARGET, Toy(), CONFIG, templates)
    return str(caught.value)


def test_a_missing_template_is_named_with_those_that_exist(write):
    found = complaint(write("x", "attention/other.cu.j2"))
    assert "attention/toy.cu.j2" in found and "families with one are other" in found


def test_a_folder_without_templates_is_said_to_be_one(tmp_path):
    assert f"there are none in {tmp_path / 'attention'}" in complaint(tmp_path)


def test_a_missing_include_is_named_with_its_place_and_the_nearest(write):
    write("ok\n", "include/evo/softmax.cuh")
    found = complaint(write("one\n{% include 'evo/sofmax.cuh' %}\n"))
    assert "toy.cu.j2:2: no template evo/sofmax.cuh" in found and "did you mean evo/softmax.cuh?" in found


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("one\n{% if %}\n", ":2: Expected an expression"),
        ("one\n{% if width %}\n", ":2: Unexpected end of template"),
        (
            'asm("{%0, %1}");\n',
            ":1: tag name expected; Jinja reads what {%, {{ or {# begins: put a space after such a brace",
        ),
        ("one\n{{ widht }}\n", ":2: 'widht' is undefined; a template here may use"),
        ("one\n\n{{ width / 0 }}\n", ":3: division by zero"),
        ("one\n{{ width + dtype }}\n", ":2: unsupported operand"),
    ],
)
@pytest.mark.parametrize("name", ["attention/toy.cu.j2", "include/evo/part.cuh.j2"])
def test_a_faulty_template_is_named_with_file_and_line(write, text, says, name):
    write("{% include 'evo/part.cuh.j2' %}\n")
    assert name + says in complaint(write(text, name))


def test_the_families_text_needs_only_cudas_own_headers(attention_gate):
    gate = attention_gate("b1,h2,s64,d64,bf16,causal")
    for config in gate.space.starts:
        included = set(re.findall(r"#include (.*)", gate.source(config).text))
        assert included <= {"<cuda_bf16.h>", "<mma.h>"}


def test_no_template_mark_is_left_in_the_text(attention_gate):
    gate = attention_gate("b1,h2,s64,d64,fp16")
    for config in [*gate.space.starts, *gate.draw(20, seed=1)]:
        assert not re.search(r"\{\{|\{%|\{#|\bundefined\b", gate.source(config).text)


def test_no_file_of_the_templates_folder_is_left_unused():
    files = {p.name for p in asset("templates").rglob("*") if p.is_file()}
    text = "".join(p.read_text() for p in asset("templates").rglob("*.j2"))
    used = {Path(name).name for name in re.findall(r"include \"([^\"]+)\"", text)}
    spaces = [tomllib.loads(path.read_text()) for path in asset("search_spaces").glob("*.toml")]
    families = {f"{family}.cu.j2" for space in spaces for family in space["knobs"]["family"]}
    assert files == used | families
