"""Kernels out of binaries: found in every kind of file, executed as launch.json says, and refused in a sentence."""

from __future__ import annotations

import json
import struct
import subprocess
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from evoengine.cli.main import evoengine as commands
from evoengine.errors import UsageError
from evoengine.gpu import find_gpu
from evoengine.records import Launch, Source
from evoengine.sass import fatbin
from evoengine.sass.fatbin import images, unpack_lz4
from evoengine.stages.compile import compile_source
from evoengine.virtual import device
from evoengine.virtual.cubin_file import find, kernels_in
from tests.support.machine_code import require_tools

TEXT = """
struct Box { float scale; int n; const float* shift; };
extern "C" __global__ void scaled(const float* x, float* out, Box box) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < box.n) out[i] = x[i] * box.scale + box.shift[i % 7];
}
extern "C" __global__ void summed(const float* const* rows, float* out, int count, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  float sum = 0;
  for (int k = 0; k < count; k++) sum += rows[k][i];
  if (i < n) out[i] = sum;
}
extern "C" __global__ void halved(float* out, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] *= 0.5f;
}
extern "C" __global__ void endless(float* out) { for (int k = 0; k < 50000; k++) out[k & 31] += k; }
"""
REFERENCE = "def scaled(x, shift, n):\n    return 1.5 * x + shift[[i % 7 for i in range(n)]]\n"
LAUNCH = {
    "tensors": {
        "x": {"dtype": "fp32", "shape": [500]},
        "shift": {"dtype": "fp32", "shape": [7], "draw": "uniform"},
        "out": {"dtype": "fp32", "shape": [500], "draw": "nan"},
    },
    "grid": [4],
    "block": [128],
    "arguments": [
        "x",
        "out",
        {"struct": 16, "at": {"0": {"fp32": 1.5}, "4": {"int32": 500, "name": "n"}, "8": "shift"}},
    ],
}


def compiled(arch: str) -> bytes:
    require_tools()
    return compile_source(Source(TEXT, "scaled", Launch((1, 1, 1), 32, 0)), arch).cubin


@pytest.fixture(scope="module")
def cubin():
    return compiled("sm_90a")


@pytest.fixture
def folder(tmp_path, cubin, monkeypatch):
    """A folder with a cubin, a launch and a reference, which is the current one."""
    (tmp_path / "k.cubin").write_bytes(cubin)
    (tmp_path / "ref.py").write_text(REFERENCE)
    monkeypatch.chdir(tmp_path)
    write(LAUNCH)
    return tmp_path


def write(launch: object) -> None:
    Path("launch.json").write_text(json.dumps(launch))


def changed(**fields: object) -> dict[str, object]:
    return {**LAUNCH, **fields}


def verify(*arguments: str, entry: str = "scaled", gpu: str = "h100"):
    given = ["--cubin", "k.cubin", "--entry", entry, "--launch", "launch.json", "--gpu", gpu, "--seed", "1"]
    return CliRunner().invoke(commands, ["verify", *given, *arguments], standalone_mode=False)


def refusal(*arguments: str, **named: str) -> str:
    """The sentence with which a command is refused."""
    with pytest.raises(UsageError) as refused:
        raise verify(*arguments, **named).exception
    return str(refused.value)


# ── files ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def entry(payload: bytes, arch: int, flags: int = 0x11, size: int = 0, kind: int = 2) -> bytes:
    padded = payload + bytes(-len(payload) % 8)
    packed = len(payload) if size else 0
    return (
        struct.pack("<HHIQIIHHIIIQQQ", kind, 0x101, 64, len(padded), packed, 0, 7, 1, arch, 0, 0, flags, 0, size)
        + padded
    )


def container(*entries: bytes) -> bytes:
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, sum(map(len, entries))) + b"".join(entries)


def as_lz4(data: bytes) -> bytes:
    """A block of literals alone."""
    rest = len(data) - 15
    return bytes([0xF0]) + b"\xff" * (rest // 255) + bytes([rest % 255]) + data


def test_a_cubin_a_fatbin_and_a_library_hold_the_same_kernels(folder, cubin):
    old = compiled("sm_80")
    packed = container(entry(as_lz4(cubin), 90, 0x2011, len(cubin)), entry(b"// PTX", 90, kind=1))
    Path("k.fatbin").write_bytes(packed + bytes(8) + container(entry(old, 80)))
    Path("held.s").write_text('.section .nv_fatbin,"a"\n.incbin "k.fatbin"\n')
    subprocess.run(["gcc", "-shared", "-nostdlib", "-o", "k.so", "held.s"], check=True)
    names = {"scaled", "summed", "halved", "endless"}
    assert {(k.entry, k.arch) for k in kernels_in(Path("k.cubin"))} == {(name, 90) for name in names}
    both = {(name, arch) for name in names for arch in (80, 90)}
    assert {(k.entry, k.arch) for k in kernels_in(Path("k.fatbin"))} == both
    assert {(k.entry, k.arch) for k in kernels_in(Path("k.so"))} == both
    assert find(Path("k.so"), "scaled", find_gpu("h100")) == cubin
    assert find(Path("k.so"), "scaled", find_gpu("a10")) == old  # sm_86 runs what was made for sm_80
    listed = CliRunner().invoke(commands, ["cubins", "k.so", "--arch", "80"]).stdout
    assert "sm_80" in listed and "sm_90" not in listed and "8 8 16" in listed
    code = CliRunner().invoke(commands, ["cubins", "k.so", "--entry", "halved"]).stdout
    assert "EXIT" in code and "FMUL" in code


def test_what_zstandard_packed_is_unpacked(folder, cubin):
    zstd = pytest.importorskip("backports.zstd" if find_spec("compression") is None else "compression.zstd")
    Path("k.fatbin").write_bytes(container(entry(zstd.compress(cubin), 90, 0x8011, len(cubin))))
    assert find(Path("k.fatbin"), "scaled", find_gpu("h100")) == cubin


def test_lz4_repeats_what_was_before():
    # five literals, six bytes from three back (which overlap themselves), then the last literal
    assert unpack_lz4(bytes([0x52, *b"abcde", 3, 0, 0x10, *b"!"]), 12) == b"abcdecdecde!"


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "it is empty"),
        (b"PK\x03\x04 something", "it is no cubin, no fatbin and no library: it begins with 504b0304"),
        (container(entry(b"x" * 8, 90))[:-1], "a fatbin is damaged: no container"),
        (container(entry(b"x" * 8, 90)[:64]), "a fatbin is damaged: its entry at byte 16 ends behind its container"),
        (container(entry(b"\x1fab", 90, 0x2011, 1 << 40)), "an image of 1099511627776 bytes when it is unpacked"),
        (container(entry(bytes([0x1F, 97, 1, 0, *[255] * 900, 0]), 90, 0x2011, 500)), "unpack to its 500 bytes"),
        (container(entry(b"\x10", 90, 0x2011, 9)), "does not unpack to its 9 bytes"),
        (container(entry(b"\x00\x05\x00\x00", 90, 0x2011, 9)), "does not unpack to its 9 bytes"),
    ],
)  # fmt: skip # a table
def test_bytes_that_are_none_or_claim_too_much_are_refused_in_a_sentence(folder, data, said):
    Path("bad").write_bytes(data)
    with pytest.raises(UsageError, match="^bad: ") as refused:
        list(kernels_in(Path("bad")))
    assert said in str(refused.value)


def test_images_that_are_too_large_together_are_refused(folder, cubin, monkeypatch):
    monkeypatch.setattr(fatbin, "LARGEST_IN_ALL", len(cubin))
    Path("k.fatbin").write_bytes(container(entry(cubin, 90), entry(cubin, 90)))
    assert list(images(memoryview(Path("k.fatbin").read_bytes())))
    Path("held.s").write_text('.section .nv_fatbin,"a"\n.incbin "k.fatbin"\n')
    subprocess.run(["gcc", "-shared", "-nostdlib", "-o", "k.so", "held.s"], check=True)
    with pytest.raises(UsageError, match="its images have more than"):
        list(kernels_in(Path("k.so")))


# ── launches ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_launch_is_executed_compared_with_the_reference_under_each_draw_and_predicted(folder):
    done = verify("--reference", "ref.py::scaled")
    assert done.return_value == 0, done.output
    assert "scaled  correct         5" in done.stdout and "out: 500 elements written" in done.output
    assert "profile: model, h100" in done.stdout and "% of waits" in done.stdout


def test_a_wrong_reference_a_nan_and_wrong_expected_values_are_found(folder):
    Path("ref.py").write_text(REFERENCE.replace("1.5 *", "1.5001 *"))
    done = verify("--reference", "ref.py::scaled", "--json")
    assert done.return_value == 1
    (attempt,) = json.loads(done.stdout)["attempts"]
    assert attempt["draw"] == "as given" and attempt["reason"].startswith("error of out")
    tensors = dict(LAUNCH["tensors"])
    write(changed(tensors={**tensors, "x": {"dtype": "fp32", "shape": [500], "draw": "nan"}}))
    assert "500 elements of out are NaN" in verify().output
    np.save("zeros.npy", np.zeros(500, np.float32))
    write(changed(tensors={**tensors, "out": {**tensors["out"], "expected": "zeros.npy"}}))
    assert "as given: error of out" in verify().output


def test_an_access_outside_of_a_tensor_is_said_with_its_instruction(folder):
    write(changed(tensors={**LAUNCH["tensors"], "x": {"dtype": "fp32", "shape": [499]}}))
    done = verify()
    assert done.return_value == 1
    assert "LDG" in done.output and "1996 bytes into x, which has 1996" in done.output


def test_kernels_run_in_order_over_the_same_tensors_and_a_table_points_to_some(folder):
    rows = [[float(k * i) for i in range(64)] for k in range(3)]
    np.save("sums.npy", np.array(rows).sum(0).astype(np.float32) / 2)
    tensors = {f"r{k}": {"dtype": "fp32", "shape": [64], "values": row} for k, row in enumerate(rows)}
    table = {"dtype": "pointer", "values": ["r0", "r1", {"pointer": "r2", "offset": 0}]}
    out = {"dtype": "fp32", "shape": [64], "draw": "nan", "expected": "sums.npy"}
    write({
        "tensors": {**tensors, "table": table, "out": out}, "grid": [2], "block": [32],
        "arguments": ["table", "out", {"int32": 3}, {"int32": 64}],
        "then": [{"entry": "halved", "grid": [2], "block": [32], "arguments": ["out", {"int32": 64}]}],
    })  # fmt: skip
    done = verify(entry="summed")
    assert done.return_value == 0, done.output
    assert "summed  correct" in done.stdout and "halved" in done.stdout


def test_a_launch_of_hours_is_refused_with_an_estimate_and_sampled_where_asked(folder, monkeypatch):
    out = {"dtype": "fp32", "shape": [32]}
    write({"tensors": {"out": out}, "grid": [400_000], "block": [32], "arguments": ["out"]})
    said = refusal(entry="endless")
    assert "executing it would take about" in said and "hours" in said and "--sample" in said
    monkeypatch.setattr(device, "SAMPLED_SECONDS", 0.1)
    done = verify("--sample", entry="endless")
    assert "blocks were executed and judged" in done.output


@pytest.mark.parametrize(
    ("launch", "said"),
    [
        (changed(arguments=LAUNCH["arguments"][:2]), "kernel scaled has 3 parameters; 2 were given"),
        (changed(arguments=["x", "out", {"int32": 4}]), "arguments[2] of kernel scaled has 16 bytes; 4 were given"),
        (changed(arguments=["x", "ou", {"int32": 4}]), "'ou', which is not a tensor; did you mean out?"),
        (changed(arguments=["x", "out", {"int32": 2**40}]), "arguments[2] is 1099511627776, no int32"),
        (changed(grid=[0]), "grid is [0]; it is one to three numbers from 1"),
        (changed(block=[64, 32]), "block has 2048 threads; a GPU takes 1024"),
        (changed(shared=300_000), "takes 300000 bytes of shared memory per block; h100 has 232448"),
        (changed(block=None), "block is None, no list"),
        (changed(girth=[1]), "the file has 'girth'"),
        (changed(tensors={"x": {"dtype": "fp12", "shape": [4]}}), "tensors.x.dtype is 'fp12'; it is one of"),
        (changed(tensors={"x": {"dtype": "fp32", "shape": [1 << 39]}}), "bytes; 8589934592 at most are taken"),
        (changed(tensors={"x": {"dtype": "int32", "shape": [4], "draw": "nan"}}), "'nan', which integers are not"),
        (changed(tensors={"x": {"dtype": "fp32", "shape": [4], "file": "none.npy"}}), "is not an array that NumPy"),
        ([], "the file is [], no object"),
    ],
)  # fmt: skip # a table
def test_a_launch_that_does_not_fit_is_refused_in_a_sentence(folder, launch, said):
    write(launch)
    assert said in refusal()


def test_a_missing_kernel_or_one_for_another_gpu_is_named(folder):
    assert "it has no kernel scale; did you mean scaled?" in refusal(entry="scale")
    assert "k.cubin: it has scaled for sm_90, which a100 (sm_80) does not run; name another --gpu" in refusal(
        gpu="a100"
    )
    write("{")
    Path("launch.json").write_text("{")
    assert "launch.json is no JSON" in refusal()
    Path("launch.json").unlink()
    assert "cannot be read: No such file" in refusal()


def test_options_of_other_kernels_are_refused(folder):
    assert "--call contradicts --cubin" in refusal("--call", "f")
    done = CliRunner().invoke(commands, ["verify", "--entry", "scaled"], standalone_mode=False)
    assert "--entry requires --cubin FILE" in str(done.exception)


def test_ptx_is_assembled_where_ptxas_is_installed(folder):
    pytest.importorskip("triton", reason="Triton, which has ptxas, is not installed")
    body = (
        ".version 8.0\n.target sm_90\n.address_size 64\n.visible .entry one(.param .u64 p) {\n.reg .b64 %r<3>;\n"
        "ld.param.u64 %r1, [p];\ncvta.to.global.u64 %r2, %r1;\nst.global.f32 [%r2], 0f3F800000;\nret;\n}\n"
    )
    Path("k.ptx").write_text(body)
    write({"tensors": {"out": {"dtype": "fp32", "shape": [1]}}, "grid": [1], "block": [1], "arguments": ["out"]})
    given = ["--cubin", "k.ptx", "--entry", "one", "--launch", "launch.json", "--gpu", "h100"]
    done = CliRunner().invoke(commands, ["verify", *given], standalone_mode=False)
    assert done.return_value == 0 and "out: 1 elements written" in done.output, done.output
    Path("k.ptx").write_text(body.replace("st.global", "st.globe"))
    assert "k.ptx: ptxas refuses it" in str(
        CliRunner().invoke(commands, ["verify", *given], standalone_mode=False).exception
    )
