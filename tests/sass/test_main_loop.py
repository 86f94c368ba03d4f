"""What a listing tells of a main loop of wgmma: start points pass, and each check fails where its cause is put back."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from evoengine.cuda_files import disassembler
from evoengine.paths import asset
from evoengine.records import KernelResources, NextKernel, Source
from evoengine.sass.listing import labels
from evoengine.sass.main_loop import count_opcode, main_loops, stall_sum, why_slow
from evoengine.stages.compile import compile_source
from evoengine.stages.render import render
from evoengine.stages.screen import screen_binary
from tests.support.kernel_gate import attention_space, attention_target

pytestmark = pytest.mark.skipif(disassembler() is None, reason="needs nvdisasm")

SCORES = "        wait_for<1>(s);"
WAIT = "        wait_for<0>(o);\n        tiles.v.release(tile - 1);"
UPDATE = "        update_max(s, rows, rescale, scale);\n        if (tile"
BESIDE = {"family": "wgmma", "overlap": True}
PAIRED = {**BESIDE, "cluster": 2}


def compiled(wanted, *changes):
    """The first start point that has these values, with these texts changed, and its binary."""
    return _compiled(tuple(wanted.items()), changes)


@cache
def _compiled(wanted, changes):
    target, space = attention_target(), attention_space()
    config = next(c for c in space.starts if dict(wanted).items() <= c.items())
    source = render(target, space, config, asset("templates"))
    text = source.text
    for old, new in changes:
        assert old in text, f"the template has no {old!r} any more"
        text = text.replace(old, new)
    changed = Source(text, source.entry, source.launch)
    return changed, compile_source(changed, target.gpu.arch)


def rejected(wanted, *changes, timed=False):
    source, binary = compiled(wanted, *changes)
    return screen_binary(binary, source, attention_target().gpu, {}, timed)


def test_the_main_loop_is_the_one_around_products_and_softmax():
    source, binary = compiled(BESIDE)
    (loop,) = main_loops(binary.listing, source.entry)
    assert loop.count("HGMMA") == 64 // 16 + 128 // 16
    # 64 scores of a thread for two rows: as many exponentials, and one more for what each maximum moved by
    assert loop.count("MUFU") == 64 + 2
    assert loop.count("R2UR") == 0
    assert not loop.fences
    beside, maxima = loop.overlapped_maxima
    assert beside == maxima == 64 + 4
    # both ways at a branch are in a step, and the shorter one, which masks nothing, is the path
    assert loop.count("FSEL") == 64
    assert count_opcode(loop.path, "FSEL") == 0
    assert count_opcode(loop.path, "MUFU") == 64 + 2
    assert len(loop.path) < len(loop.step)
    assert len(loop.path) <= stall_sum(loop.path)
    addresses = {i.address for i in loop.step}
    assert addresses & set(labels(binary.listing, source.entry).values())
    assert why_slow(binary.listing, source.entry) is None


def test_a_wait_before_the_softmax_is_found():
    moved = (WAIT, WAIT.replace("        wait_for<0>(o);\n", "")), (UPDATE, "        wait_for<0>(o);\n" + UPDATE)
    assert "waits for a product in flight before 66 of the 68 row maxima" in rejected(BESIDE, *moved)


@pytest.mark.exhaustive  # the test above shows that such a wait is found, whoever puts it there
def test_a_wait_that_the_compiler_moves_before_the_softmax_is_found():
    """In the source it stands behind it: what kept it there, the wait for the next K, is at the step's beginning."""
    elsewhere = ("        if (tile + 1 < seen) tiles.k.wait(tile + 1);\n", "")
    first = (
        "        turn.sync();\n        issue_qk",
        "        tiles.k.wait(tile);\n        turn.sync();\n        issue_qk",
    )
    found = rejected(BESIDE, elsewhere, first)
    assert found is not None
    assert "waits for a product in flight" in found


def test_a_fence_over_the_whole_gpu_at_each_step_is_found():
    plain = "mbarrier.arrive.shared::cluster.b64"
    assert rejected(PAIRED) is None
    found = rejected(PAIRED, (plain, plain.replace("arrive", "arrive.release.cluster")))
    assert found.startswith("MEMBAR.ALL.GPU in the main loop")


def test_addresses_moved_from_vector_registers_are_found():
    unknown = ("return uniform(threadIdx.x / 128)", "return threadIdx.x / 128")
    assert rejected(BESIDE, unknown).startswith("10 R2UR beside 12 HGMMA")
    assert rejected(BESIDE, unknown, timed=True) is None  # the clock judges


def test_the_main_loop_of_a_kernel_behind_the_first_is_looked_at_too():
    """The first is the start point itself, under another name."""
    source, right = compiled(BESIDE)
    _, wrong = compiled(BESIDE, ("return uniform(threadIdx.x / 128)", "return threadIdx.x / 128"))
    own = KernelResources(source.entry, wrong.registers, 0, 0, 0)
    both = replace(right, listing=right.listing.replace(source.entry, "first") + "\n" + wrong.listing, others=(own,))
    behind = replace(source.launch, then=(NextKernel(source.entry, source.launch),))
    found = screen_binary(both, Source(source.text, "first", behind), attention_target().gpu, {}, timed=False)
    assert found.startswith(f"kernel {source.entry}: 10 R2UR beside 12 HGMMA")


@pytest.mark.parametrize("timed", [False, True])
def test_products_that_the_compiler_serialises_are_rejected_with_its_words(timed):
    found = rejected(BESIDE, (SCORES, "        s.d[0] *= 2.0f;\n" + SCORES), timed=timed)
    assert found.startswith("wgmma does not run beside other work: (C7514)")
