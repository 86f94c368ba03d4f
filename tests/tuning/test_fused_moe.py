"""What the ledger knows of products, written as files of vLLM's and SGLang's fused MoE kernel."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from evoengine.cli.main import evoengine
from evoengine.errors import EvoengineError
from evoengine.ledger.store import open_ledger
from tests.support.ledger_examples import a_figure, add_ranked, start_run

MMA = {
    "family": "mma", "tile_m": 64, "tile_n": 128, "tile_k": 32, "warps": 8, "warps_n": 4, "stages": 3,
    "layout": "swizzle", "group_m": 4, "min_blocks": 1,
}  # fmt: skip
WGMMA = {
    "family": "wgmma", "tile_m": 128, "tile_n": 256, "tile_k": 64, "consumers": 2, "stages": 4, "group_m": 8,
    "min_blocks": 1,
}  # fmt: skip
ROW_OF_MMA = {
    "BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 32, "GROUP_SIZE_M": 4, "num_warps": 8, "num_stages": 3,
}  # fmt: skip
ROW_OF_WGMMA = {
    "BLOCK_SIZE_M": 128, "BLOCK_SIZE_N": 256, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 8, "num_warps": 8, "num_stages": 4,
}  # fmt: skip


@pytest.fixture
def ledger(tmp_path):
    with open_ledger(str(tmp_path / "evo.db"), create=True) as made:
        yield made


@pytest.fixture
def known(ledger):
    """Enters a product and its best kernel."""
    tried = 0

    def enter(problem, config=MMA, tflops=100.0, gpu="h100"):
        nonlocal tried
        tried += 1
        run = start_run(ledger, problem=problem, gpu=gpu)
        add_ranked(ledger, run, a_figure(tflops), config, f"kernel{tried}", problem=problem, gpu=gpu)

    return enter


def write(ledger, folder, *more):
    """Exit code, and all that was said."""
    done = CliRunner().invoke(evoengine, ["best", "--fused-moe", str(folder), "--db", ledger.db, *more])
    if isinstance(done.exception, EvoengineError):
        return done.exception.exit_code, f"{done.output} {done.exception}"
    return done.exit_code, done.output


def test_a_file_per_n_has_a_row_per_m_in_order(ledger, known, tmp_path):
    known("gemm:m1024,n8192,k4096,bf16", WGMMA)
    known("gemm:m64,n8192,k4096,bf16", MMA, 50.0)
    known("gemm:m64,n8192,k4096,bf16", WGMMA, 40.0)
    known("gemm:m64,n512,k4096,fp16", MMA)
    known("gemm:m64,n512,k4096,fp16", WGMMA, 900.0, gpu="h200")
    known("rms_norm:rows4096,hidden4096,bf16", {"rows": 4})
    code, said = write(ledger, tmp_path / "configs", "--gpu", "h100")
    assert code == 0, said
    written = {path.name: json.loads(path.read_text()) for path in (tmp_path / "configs").iterdir()}
    assert written == {
        "E=1,N=4096,device_name=NVIDIA_H100_80GB_HBM3.json": {"64": ROW_OF_MMA, "1024": ROW_OF_WGMMA},
        "E=1,N=256,device_name=NVIDIA_H100_80GB_HBM3.json": {"64": ROW_OF_MMA},
    }
    assert list(written["E=1,N=4096,device_name=NVIDIA_H100_80GB_HBM3.json"]) == ["64", "1024"]


@pytest.mark.parametrize(
    ("problem", "config", "why"),
    [
        ("gemm:m64,n64,k512,fp16,bias_gelu", MMA, "has no bias_gelu"),
        ("gemm:m64,n63,k512,fp16", MMA, "n is odd"),
        ("gemm:m64,n64,k512,fp16", MMA | {"tile_n": 192}, "powers of two, and here tile_n 192"),
        ("gemm:m64,n64,k512,fp16", {"block_size_x": 32}, "its knobs are not those of gemm.toml"),
    ],
)
def test_what_the_layout_does_not_fit_is_left_out_with_its_reason(ledger, known, tmp_path, problem, config, why):
    known(problem, config)
    code, said = write(ledger, tmp_path / "alone", "--gpu", "h100")
    assert code == 1 and why in said
    assert not (tmp_path / "alone").exists()
    known("gemm:m64,n8192,k4096,bf16")
    code, said = write(ledger, tmp_path / "both", "--gpu", "h100")
    assert code == 0 and f"left out: {problem}: " in said and why in said


def test_of_one_m_and_n_the_deepest_product_is_taken(ledger, known, tmp_path):
    known("gemm:m64,n8192,k1024,bf16", WGMMA)
    known("gemm:m64,n8192,k4096,bf16", MMA)
    _, said = write(ledger, tmp_path / "configs", "--gpu", "h100")
    assert "left out: gemm:m64,n8192,k1024,bf16: the file has this M and N of another k" in said
    [file] = (tmp_path / "configs").glob("*.json")
    assert json.loads(file.read_text()) == {"64": ROW_OF_MMA}


def test_a_file_that_somebody_else_wrote_is_left_as_it_is(ledger, known, tmp_path):
    known("gemm:m64,n8192,k4096,bf16")
    known("gemm:m64,n512,k4096,bf16")
    own = tmp_path / "configs" / "E=1,N=4096,device_name=NVIDIA_H100_80GB_HBM3.json"
    own.parent.mkdir()
    own.write_text("{}")
    code, said = write(ledger, tmp_path / "configs", "--gpu", "h100")
    assert code == 2 and "exists with other contents" in said
    assert own.read_text() == "{}" and len(list((tmp_path / "configs").glob("*.json"))) == 1
    own.unlink()
    for _ in range(2):  # the second time they are there, and say the same
        assert write(ledger, tmp_path / "configs", "--gpu", "h100")[0] == 0


@pytest.mark.parametrize("more", [(), ("--gpu", "h100", "--top", "3"), ("--gpu", "h100", "--pareto")])
def test_it_goes_with_a_gpu_and_nothing_else(ledger, tmp_path, more):
    code, said = write(ledger, tmp_path / "new", *more)
    assert code == 2 and "--fused-moe goes with --gpu alone" in said
