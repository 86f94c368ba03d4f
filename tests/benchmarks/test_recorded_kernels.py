"""Reading recorded kernels: launches and contents for any configuration, and files at fault."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pytest

from evoengine.accuracy.compilers import InstalledNvrtc, OldNvrtc, compile_and_list
from evoengine.accuracy.dataset import Buffer, find_kernels, read_kernel, read_recording
from evoengine.cuda_files import wheel_folders
from evoengine.errors import UsageError
from evoengine.sass.cubin import kernel_names
from evoengine.stages.compile import CompileFailed
from evoengine.stages.toolchain import compiler_version
from tests.benchmarks.conftest import CONFIGS, DESCRIPTION, ELEMENTS, made_up_us


@pytest.fixture
def read(make):
    return lambda **of: read_kernel(make(**of) / "scale")


def buffer(read, fill: str, dtype: str = "float32", elements: object = 8) -> Buffer:
    given = {"name": "x", "kind": "buffer", "dtype": dtype, "elements": elements, "fill": fill}
    return read(arguments=[given]).arguments[0]


# ── launches ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_knobs_come_before_the_text_as_defines_of_every_kind(read):
    kernel = read(knobs=["block", "repeat", "sign", "type"])
    text = kernel.source({"block": 64, "repeat": True, "sign": -1, "type": "float4"})
    assert text.startswith("#define block 64\n#define repeat 1\n#define sign -1\n#define type float4\n\n__constant__")


def test_block_and_grid_follow_the_knobs_and_are_filled_up_to_three(read):
    geometry = read().geometry({"block": 64, "repeat": 1})
    assert (geometry.threads, geometry.grid, geometry.shared_bytes) == ((64, 1, 1), (256, ELEMENTS // 64 // 256, 1), 0)
    block, grid = ["block // 4", 2, "min(block, 4)"], [1, "round_up(repeat, 8)", "1024 / block"]
    other = read(block=block, grid=grid, shared="block * 4")
    geometry = other.geometry({"block": 64, "repeat": 3})
    assert (geometry.threads, geometry.grid, geometry.shared_bytes) == ((16, 2, 4), (1, 8, 16), 256)


@pytest.mark.parametrize(
    ("block", "said"),
    [
        ("block / 3", "must be an integer"),
        ("block - 64", "an integer of at least 1"),
        ("block * 64", "more than a GPU takes"),
    ],
)
def test_a_launch_that_no_gpu_takes_is_told(read, block, said):
    with pytest.raises(UsageError, match=said):
        read(block=[block]).geometry({"block": 64, "repeat": 1})


# ── contents ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_contents_are_as_the_file_says(read):
    assert (buffer(read, "zero").contents({}) == 0).all()
    assert (buffer(read, "one", "uint8").contents({}) == 1).all()
    assert (buffer(read, "2.5", "float64").contents({}) == 2.5).all()
    halfs = buffer(read, "normal", "float16", 100_000).contents({})
    normal = halfs.astype(np.float32)
    assert halfs.dtype == np.float16 and abs(normal.mean()) < 0.02 and abs(normal.std() - 1) < 0.02
    random = buffer(read, "random", "uint8", 100_000).contents({})
    assert (random.min(), random.max()) == (0, 255)
    assert buffer(read, "random", "int32", 100_000).contents({}).min() < -(2**30)
    uniform = buffer(read, "random", "float32", 100_000).contents({})
    assert uniform.min() >= 0 and uniform.max() < 1


def test_contents_by_a_formula_may_name_the_last_element(read):
    made = buffer(read, "expr: s(c) = 4*(1/(2+0.5*c)**2 - 1/4), last element 0", elements="2 * repeat")
    expected = 4 * (1 / (2 + 0.5 * np.arange(6)) ** 2 - 1 / 4)
    expected[-1] = 0
    np.testing.assert_allclose(made.contents({"repeat": 3}), expected, rtol=1e-6)


@pytest.mark.parametrize(("named", "version"), [("NVRTC 12.1", "12.1"), ("nvcc 11.2", None), (None, None)])
def test_the_version_of_nvrtc_is_the_one_that_the_file_names(read, named, version):
    assert read(compiler=named).compiler == version


def test_a_large_buffer_holds_a_part_that_repeats(read):
    large = buffer(read, "normal", elements=1 << 30)
    argument = large.argument({})
    assert argument.bytes == 1 << 32
    assert argument.contents.nbytes == 1 << 20
    np.testing.assert_array_equal(large.contents({}), argument.contents)  # the same each time


@pytest.mark.parametrize(
    ("fill", "said"),
    [
        ("noise", "the fill 'noise'; known are zero"),
        ("expr: 3 * c", "the fill 'expr: 3 . c'; known are"),
        ("expr: f(c) = c * d", "uses d; it may use only c"),
        ("expr: f(c) = __import__('os')", "calls __import__"),
        ("expr: f(c) = c.real", "reads the attribute"),
        ("expr: f(c) = c +", "is not an expression"),
    ],
)
def test_a_fill_that_is_none_is_told(read, fill, said):
    with pytest.raises(UsageError, match=said):
        buffer(read, fill).contents({})


# ── files at fault ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("of_kernel", "said"),
    [
        ({"entry": "sca le"}, "`entry` is 'sca le'; it must be a name"),
        ({"entry": None}, "`entry` is None"),
        ({"knobs": "block"}, "`knobs` is 'block'; it must be a list"),
        ({"knobs": ["block", "re peat"]}, "the knob 're peat' is not a valid name"),
        ({"knobs": ["block\n#include"]}, "is not a valid name of a macro"),
        ({"block": []}, "block has 0 dimensions"),
        ({"block": ["block"] * 4}, "block has 4 dimensions"),
        ({"grid": ["tile"]}, "`tile` uses tile, which is not one of the knobs"),
        ({"grid": ["open('x')"]}, "calls open"),
        ({"grid": [[1]]}, "must be a number or an expression"),
        ({"shared": None}, "shared is None"),
        ({"arguments": [7]}, "7 is not an argument"),
        ({"arguments": [{"name": "x"}]}, "x has no `dtype`"),
        ({"arguments": [{"name": "x", "dtype": "float8"}]}, "dtype 'float8'; known are"),
        ({"arguments": [{"name": "x", "dtype": "float32"}]}, "x has no `elements`"),
        ({"arguments": [{"name": "x", "dtype": "float32", "kind": "image"}]}, "of the kind 'image'"),
        ({"arguments": [{"name": "x", "dtype": "float32", "kind": "scalar"}]}, "x has no `value`"),
        ({"constants": [{"name": "x", "dtype": "int32", "kind": "scalar", "value": 1}]}, "constants are buffers"),
    ],
)
def test_a_description_at_fault_names_file_and_fault(make, of_kernel, said):
    folder = make(**of_kernel) / "scale"
    with pytest.raises(UsageError, match=said) as error:
        read_kernel(folder)
    assert "kernel.json" in str(error.value)


@pytest.mark.parametrize("field", ["entry", "knobs", "arguments", "block", "grid"])
def test_a_field_that_is_missing_is_named(make, field):
    folder = make() / "scale"
    (folder / "kernel.json").write_text(json.dumps({k: v for k, v in DESCRIPTION.items() if k != field}))
    with pytest.raises(UsageError, match=f"kernel.json has no `{field}`"):
        read_kernel(folder)


def test_a_folder_without_kernels_or_text_is_told(make, tmp_path):
    with pytest.raises(UsageError, match="holds no recorded kernel"):
        find_kernels(tmp_path)
    folder = make()
    assert find_kernels(folder) == find_kernels(folder / "scale") == [folder / "scale"]
    (folder / "scale" / "kernel.cu").unlink()
    with pytest.raises(UsageError, match="cannot read .*kernel.cu: No such file"):
        read_kernel(folder / "scale")


def test_times_are_read_with_their_configurations(make):
    folder = make(gpu="RTX-3090") / "scale"
    found = read_recording(folder / "RTX-3090.json.gz", read_kernel(folder))
    assert (found.gpu, found.optimum_us, found.unreadable) == ("rtx3090", 5.5, ())
    assert [(r.config, r.time_us) for r in found.rows] == [(c, made_up_us(c)) for c in CONFIGS]


def test_the_hubs_a100_is_the_one_with_40_gb(make):
    folder = make(gpu="a100") / "scale"
    assert read_recording(folder / "a100.json.gz", read_kernel(folder)).gpu == "a100-40gb"


@pytest.mark.parametrize("time", [None, "fast", 0, -1, float("nan"), float("inf"), True])
def test_a_time_that_is_none_leaves_its_row_out(make, time):
    rows = [{"config": CONFIGS[0], "time_us": time}, {"config": CONFIGS[1], "time_us": 2.0}]
    folder = make(of_gpu={"rows": rows}) / "scale"
    found = read_recording(folder / "rtx3090.json.gz", read_kernel(folder))
    assert len(found.rows) == 1
    assert found.unreadable == (f"row 1: its time_us is {time!r}; it must be a number above 0",)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "not valid JSON"),
        (b"{}", "Not a gzipped file"),
        (gzip.compress(b"{", mtime=0), "is not valid JSON"),
        (gzip.compress(b"[1]", mtime=0), "holds no JSON object"),
        (gzip.compress(b"{}", mtime=0), "has no `rows`"),
        (gzip.compress(b'{"rows": [], "unit": "ms"}', mtime=0), "the unit is 'ms'; times must be in us"),
        (gzip.compress(b'{"rows": []}', mtime=0)[:-6], "is not valid JSON"),
        (gzip.compress(b'{"a": "\xff"}', mtime=0), "is not valid JSON"),
        (gzip.compress(b"[" * 100_000, mtime=0), "is not valid JSON"),
    ],
)
def test_a_file_of_times_at_fault_is_named(make, data, said):
    folder = make() / "scale"
    (folder / "rtx3090.json.gz").write_bytes(data)
    with pytest.raises(UsageError, match=said):
        read_recording(folder / "rtx3090.json.gz", read_kernel(folder))


def test_an_unknown_gpu_is_named_with_the_known_ones(make):
    folder = make(gpu="rx7900", of_gpu={"gpu": "RX 7900"}) / "scale"
    with pytest.raises(UsageError, match="unknown GPU 'rx7900': known are h100"):
        read_recording(folder / "rx7900.json.gz", read_kernel(folder))


# ── compilers ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def library():
    found = [p for folder in wheel_folders() for p in folder.glob("lib/libnvrtc.so*")]
    if not found:
        pytest.skip("NVRTC is not installed as a wheel")
    return found[0]


def test_an_nvrtc_of_choice_compiles_what_the_installed_one_does(library, read):
    version = compiler_version().removeprefix("nvrtc ")
    for path in (library, library.parent.parent):
        made = compile_and_list(OldNvrtc(version, path), read().source(CONFIGS[0]), "sm_86", ())
        assert made.cubin.startswith(b"\x7fELF") and "FFMA" in made.listing


def test_an_nvrtc_under_a_wrong_version_is_refused(library):
    with pytest.raises(UsageError, match="is NVRTC .*, not 11.8; name it so"):
        OldNvrtc("11.8", library)


def test_a_text_that_does_not_compile_gives_its_first_error_each_time(library):
    compiler = OldNvrtc(compiler_version().removeprefix("nvrtc "), library)
    for _ in range(2):  # the second time from the cache
        with pytest.raises(CompileFailed, match=r"kernel.cu\(1\): error: "):
            compile_and_list(compiler, "int f() { return x; }", "sm_86", ())


def test_a_text_may_include_the_headers_of_c_that_a_search_takes():
    text = "#include <stdint.h>\n#include <cfloat>\n"
    text += 'extern "C" __global__ void f(uint8_t* o, float x) { *o = x < FLT_MAX; }'
    assert kernel_names(compile_and_list(InstalledNvrtc(), text, "sm_86", ()).cubin) == ["f"]
