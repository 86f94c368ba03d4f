"""FlashAttention and FlashInfer as baselines, on stand-ins that accept what the real functions do and nothing else."""

from __future__ import annotations

import pytest

from evoengine.stages.verify import compare
from evoengine.workloads import parse_problem
from evoengine.workloads.base import Case, Drawn
from evoengine.workloads.packages import DISTRIBUTIONS, any_installed, is_installed
from tests.support.libraries_path import libraries

FA2, FA3, INFER = "flash_attn 2.8.4", "flash_attn_interface 3.0.0", "flashinfer 0.7.2.post1"
KVCACHE, DECODE = "flash_attn_with_kvcache", "BatchDecodeWithPagedKVCacheWrapper"
PAGED, RAGGED = "BatchPrefillWithPagedKVCacheWrapper", "BatchPrefillWithRaggedKVCacheWrapper"
LATENT = "BatchMLAPagedAttentionWrapper"
ONE_QUERY = [f"{INFER} {DECODE}", f"{INFER} {DECODE} on tensor cores"]
COVERED = {
    "decode:b2,h4,kv2,s40,d64,bf16,page16": [f"{FA3} {KVCACHE}", *ONE_QUERY],
    "decode:b2,h4,kv2,s300,d64,fp16,page256": [f"{FA2} {KVCACHE}", f"{FA3} {KVCACHE}", *ONE_QUERY],
    "decode:b2,h4,kv2,s40,d64,fp16,window9": [f"{FA2} {KVCACHE}", f"{FA3} {KVCACHE}", *ONE_QUERY],
    "decode:b2,h4,kv2,sq3,s40,d64,fp16,softcap5": [f"{FA2} {KVCACHE}", f"{FA3} {KVCACHE}", f"{INFER} {PAGED}"],
    "decode:b2,h4,kv2,sq3,s40,d64,fp16,page7,window9": [f"{FA3} {KVCACHE}", f"{INFER} {PAGED}"],
    "decode:b2,h4,kv2,sq2,s40,d64,fp16,alibi": [f"{FA2} {KVCACHE}"],
    "decode:b2,h4,kv2,s40,d64,fp16,sinks": [],
    "decode:b2,h4,kv2,s40,d64,bf16,cache_fp8_e4m3,page16": ONE_QUERY,
    "decode:b2,h4,kv2,sq2,s40,d64,bf16,cache_fp8_e5m2,page16": [f"{INFER} {PAGED}"],
    "decode:b2,h4,sq2,s40,d576,bf16,page16": [f"{FA3} {KVCACHE}", f"{INFER} {LATENT}"],
    "decode:b2,h4,s40,d576,bf16": [f"{FA3} {KVCACHE}", f"{INFER} {LATENT}"],
    "varlen:h4,kv2,d64,bf16,causal,lens=12+0+33,kvlens=30+5+33": [
        f"{FA2} flash_attn_varlen_func", f"{FA3} flash_attn_varlen_func", f"{INFER} {RAGGED}",
    ],
    "varlen:h4,kv2,d64,fp16,lens=12+33,kvlens=30+33,page16,pool9": [f"{FA3} {KVCACHE}", f"{INFER} {PAGED}"],
    "varlen:h4,kv2,d96,fp16,causal,lens=12+33,page256": [f"{FA2} flash_attn_varlen_func", f"{FA3} {KVCACHE}"],
    "attention:b2,h4,kv2,sq9,sk40,d64,bf16,causal,lse": [
        f"{FA2} flash_attn_func", f"{FA3} flash_attn_func", f"{INFER} {RAGGED}",
    ],
    "attention:b1,h2,s40,d192,dv128,fp16": [f"{FA3} flash_attn_func", f"{INFER} {RAGGED}"],
    "attention:b1,h2,s40,d32,fp16": [f"{FA2} flash_attn_func", f"{FA3} flash_attn_func"],
    "attention-backward:b2,h4,kv2,sq9,sk40,d64,bf16,causal": [
        f"{FA2} flash_attn_func, backward", f"{FA3} flash_attn_func, backward",
    ],
}  # fmt: skip # a table


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    with libraries(monkeypatch):
        yield


def drawn(text):
    workload, problem = parse_problem(text)
    return workload, problem, workload.tensors().draw(Case("any", problem), seed=1).inputs


@pytest.mark.parametrize("text", COVERED)
def test_what_packages_cover_is_called_as_they_want_it_and_passes_the_gates_rule(text):
    workload, problem, inputs = drawn(text)
    tensors = workload.tensors()
    covering = [one for one in tensors.package_baselines() if one.covers(problem)]
    assert [one.name for one in covering] == COVERED[text]
    seen = tensors.as_baselines_see(problem, inputs)
    for one in covering:
        outputs = one.call(problem, inputs)()
        found = compare(workload, Case("x", problem, draw="as a baseline"), Drawn(seen, seen), outputs, 1)
        assert found.correct, f"{one.name}: {found.reason}"


@pytest.mark.parametrize("text", ["decode:b2,h4,kv2,s40,d64,bf16,page16", "attention-backward:b1,h2,s40,d64,fp16"])
def test_values_that_are_one_off_do_not_pass(text, monkeypatch):
    import flash_attn_interface as package

    workload, problem, inputs = drawn(text)
    for name in ("flash_attn_func", "flash_attn_with_kvcache"):
        right = getattr(package, name)
        monkeypatch.setattr(package, name, lambda *a, right=right, **k: right(*a, **k) * 1.05)
    (one,) = [b for b in workload.tensors().package_baselines() if b.covers(problem) and FA3 in b.name]
    seen = workload.tensors().as_baselines_see(problem, inputs)
    outputs = one.call(problem, inputs)()
    assert not compare(workload, Case("x", problem, draw="as a baseline"), Drawn(seen, seen), outputs, 1).correct


def test_whatever_a_package_raises_is_said_as_a_refusal(monkeypatch):
    import flash_attn_interface as package

    def refuse(*args, **kwargs):
        raise ValueError("sm_75 is not supported\nsince 3.0")

    workload, problem, inputs = drawn("attention:b1,h2,s40,d64,fp16")
    (one,) = [b for b in workload.tensors().package_baselines() if FA3 in b.name]
    call = one.call(problem, inputs)
    monkeypatch.setattr(package, "flash_attn_func", refuse)
    with pytest.raises(RuntimeError, match="^ValueError: sm_75 is not supported$"):
        call()
    monkeypatch.delattr(package, "flash_attn_func")
    with pytest.raises(RuntimeError, match="AttributeError: .*flash_attn_func"):
        call()


def test_a_package_that_cannot_be_imported_is_a_refusal(monkeypatch, tmp_path):
    (tmp_path / "flash_attn_interface.py").write_text('raise ImportError("undefined symbol: _ZN3c10")')
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "flash_attn_interface", raising=False)
    workload, problem, inputs = drawn("attention:b1,h2,s40,d64,fp16")
    (one,) = [b for b in workload.tensors().package_baselines() if FA3 in b.name]
    with pytest.raises(RuntimeError, match="^ImportError: undefined symbol: _ZN3c10$"):
        one.call(problem, inputs)


def test_a_folder_that_packages_share_is_not_an_installed_package(monkeypatch, tmp_path):
    """flash-attn-4 has flash_attn/cute alone."""
    assert all(map(is_installed, DISTRIBUTIONS))
    monkeypatch.undo()
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path)
    assert not is_installed("flash_attn") and not any_installed()
