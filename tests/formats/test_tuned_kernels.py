"""T1 files and Kernel Tuner scripts: brought in as folders that are gated; what cannot be taken is named."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from evoengine.errors import UsageError
from evoengine.formats import folder
from evoengine.formats import t1 as t1_format
from evoengine.formats.folder import NewFolder, run_script, write_folder
from evoengine.formats.importers import make_folder
from evoengine.formats.pointer_use import pointer_uses
from evoengine.sandbox.kept_process import Held
from evoengine.workloads.folder import load_folder
from evoengine.workloads.folder_check import check_reference
from tests.support.folders import gate, load
from tests.support.waiting import wait_for

ADD = """__global__ void vector_add(float* c, const float* a, const float* b, int n) {
    int i = (blockIdx.x * block_size_x + threadIdx.x) * per_thread;
    for (int k = 0; k < per_thread; k++)
        if (i + k < n) c[i + k] = a[i + k] + b[i + k];
}
"""
REFERENCE = "def run(a, b):\n    return a + b\n"
VECTOR = {"Type": "float", "MemoryType": "Vector", "Size": 100000}
T1: dict[str, Any] = {
    "General": {"FormatVersion": 1},
    "ConfigurationSpace": {
        "TuningParameters": [
            {"Name": "block_size_x", "Type": "int", "Values": "[32 * i for i in range(1, 9)]", "Default": 32},
            {"Name": "per_thread", "Type": "int", "Values": "[1, 2, 4]", "Default": 1},
        ],
        "Conditions": [
            {"Parameters": ["block_size_x", "per_thread"], "Expression": "block_size_x * per_thread <= 512"},
            {"Parameters": ["block_size_x"], "Expression": "block_size_x in set([32, 64])"},
        ],
    },
    "KernelSpecification": {
        "Language": "CUDA", "KernelName": "vector_add", "KernelFile": "add.cu", "ProblemSize": [100000],
        "GlobalSize": {"X": "ignored"}, "LocalSize": {"X": "block_size_x"}, "GridDivX": ["block_size_x", "per_thread"],
        "CompilerOptions": ["-DUNUSED=3", "--use_fast_math"], "SharedMemory": 0,
        "Arguments": [
            {"Name": "C", "AccessType": "WriteOnly", "FillType": "Constant", "FillValue": 0, **VECTOR},
            {"Name": "A", "AccessType": "ReadOnly", "FillType": "Random", "FillValue": 1.0, **VECTOR},
            {"Name": "B", "AccessType": "ReadOnly", "FillType": "Script", "DataSource": "x.py", **VECTOR},
            {"Name": "n", "Type": "int32", "MemoryType": "Scalar", "FillType": "Constant", "FillValue": 100000},
        ],
    },
}  # fmt: skip
CONFIG = {"family": "add", "block_size_x": 64, "per_thread": 2}


def t1(folder: Path, kernel: str = ADD, reference: str | None = REFERENCE, **changes: Any) -> NewFolder:
    (folder / "add.cu").write_text(kernel)
    (folder / "r.py").write_text(reference or "")
    (folder / "add.json").write_text(json.dumps(T1 | {"KernelSpecification": T1["KernelSpecification"] | changes}))
    return make_folder("add", f"t1:{folder / 'add.json'}", folder / "r.py" if reference else None)


def test_a_t1_file_becomes_a_folder_that_passes_the_gate(tmp_path):
    folder = tmp_path / "add"
    write_folder(t1(tmp_path), folder)
    target, space = load(folder)
    assert (space.valid, space.launch(CONFIG | {"UNUSED": 3}).grid) == (20, (782, 1, 1))
    assert str(target.problem) == "add:n=100000"
    verdict = gate(folder, CONFIG | {"UNUSED": 3})
    assert verdict.correct and len({case.problem for case in verdict.cases}) > 4


def test_what_a_t1_file_says_and_cannot_be_taken_is_named(tmp_path):
    remarks = "\n".join(t1(tmp_path, reference=None).remarks)
    for part in (
        "block_size_x in set([32, 64])",
        "contents of b by Script",
        "compiler option --use_fast_math",
        "a reference:",
    ):
        assert part in remarks


def test_a_fault_in_an_imported_kernel_is_seen(tmp_path):
    write_folder(t1(tmp_path, ADD.replace("i + k < n", "i + k < n - 1")), tmp_path / "add")
    assert not gate(tmp_path / "add", CONFIG | {"UNUSED": 3}).correct


def test_without_a_reference_the_kernel_at_its_start_point_is_the_reference(tmp_path):
    made = t1(tmp_path, reference=None)
    assert any("compared with the kernel itself at the space's start point" in remark for remark in made.remarks)
    write_folder(made, tmp_path / "add")
    assert load_folder(tmp_path / "add").definition.inout == {"c"}
    assert gate(tmp_path / "add", CONFIG | {"UNUSED": 3}).correct
    file = tmp_path / "add/add.cu"
    file.write_text(file.read_text().replace("i + k < n", "i + k < n - (per_thread > 1)"))
    assert not gate(tmp_path / "add", CONFIG | {"UNUSED": 3}).correct


# bytes of several frequencies, each as much later as its delay says: the form of the benchmark hub's dedispersion
DELAYED = """#include <hip/hip_runtime.h>
#define DELAYS 70
#define TIMES 230
#define FREQUENCIES 90
#define LATEST 80

extern "C" __global__ void vector_add(const unsigned char* heard, float* sums, const float* delays) {
    const int time = blockIdx.x * block_size_x + threadIdx.x;
    for (int own = 0; own < per_thread; ++own) {
        const int delay = blockIdx.y * per_thread + own;
        if (time >= TIMES || delay >= DELAYS) continue;
        float sum = 0.0f;
        for (int f = 0; f < FREQUENCIES; ++f) {
            const unsigned int later = (0.5f + delay * 0.05f) * delays[f];
            sum += heard[f * (TIMES + LATEST) + time + later];
        }
        sums[delay * TIMES + time] = sum;
    }
}
"""


def test_sums_of_bytes_at_delays_from_memory_are_right(tmp_path):
    heard = {"Type": "uint8", "AccessType": "ReadOnly", "FillType": "Random", "FillValue": 256}
    sums = {"Type": "float", "AccessType": "WriteOnly", "FillType": "Constant", "FillValue": 0}
    delays = {"Type": "float", "AccessType": "ReadOnly", "FillType": "Random", "FillValue": 19.0, "Size": 90}
    arguments = [heard | {"Size": "90 * (ProblemSize[0] + 80)"}, sums | {"Size": "ProblemSize[0] * ProblemSize[1]"}]
    changes = {
        "Arguments": [argument | {"MemoryType": "Vector"} for argument in (*arguments, delays)],
        "ProblemSize": [230, 70],
        "GridDivY": ["per_thread"],
        "GridDivX": ["block_size_x"],
    }
    folder = tmp_path / "add"
    write_folder(t1(tmp_path, DELAYED, None, **changes), folder)
    assert gate(folder, CONFIG | {"UNUSED": 3}).correct
    text = (folder / "add.cu").read_text()
    (folder / "add.cu").write_text(text.replace("+ time + later", "+ time + later + (per_thread > 1)"))
    assert not gate(folder, CONFIG | {"UNUSED": 3}).correct


NAIVE = """__global__ void naive(float* c, const float* a, const float* b, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) c[i] = a[i] + b[i];
}
"""


def test_a_naive_kernel_may_be_the_reference(tmp_path):
    (tmp_path / "naive.cu").write_text(NAIVE)
    write_folder(make_folder("add", f"kernel-tuner:{script(tmp_path)}", tmp_path / "naive.cu"), tmp_path / "add")
    assert gate(tmp_path / "add", CONFIG).correct
    (tmp_path / "add/reference.cu").write_text(NAIVE.replace("a[i] + b[i]", "a[i] - b[i]"))
    verdict = gate(tmp_path / "add", CONFIG)
    assert not verdict.correct and "error" in verdict.reason


def test_a_naive_reference_that_fails_is_named(tmp_path):
    (tmp_path / "naive.cu").write_text(NAIVE.replace("i < n", "i <= n"))
    write_folder(make_folder("add", f"kernel-tuner:{script(tmp_path)}", tmp_path / "naive.cu"), tmp_path / "add")
    workload = load_folder(tmp_path / "add")
    with pytest.raises(UsageError, match="the reference of add cannot be run: out-of-bounds read of"):
        check_reference(workload, workload.parse(workload.example))
    (tmp_path / "naive.cu").write_text(NAIVE * 2)
    with pytest.raises(
        UsageError, match="must have one __global__ function, which is run as it is; it has naive, naive"
    ):
        make_folder("sum", f"kernel-tuner:{script(tmp_path)}", tmp_path / "naive.cu")


SIZED = """#define WIDTH 4096
__global__ void scale(float* out, float* in, float* rows) {
    int x = blockIdx.x * block_size_x + threadIdx.x;
    if (x < WIDTH) out[blockIdx.y * WIDTH + x] = in[blockIdx.y * (WIDTH + 16) + x] * rows[blockIdx.y];
}
"""


def test_a_size_that_the_text_holds_becomes_an_axis_with_one_that_the_gate_can_afford(tmp_path):
    (tmp_path / "scale.cu").write_text(SIZED)
    (tmp_path / "tune.py").write_text(
        "import sys\nimport numpy as np\nimport pycuda.driver as drv\nimport cupy as cp\n"
        "from kernel_tuner import tune_kernel\n"
        "n = int(sys.argv[1])\nout = drv.pagelocked_empty(n * n, np.float32)\n"
        "args = [out, cp.random.randn((n + 16) ** 2).astype(np.float32), cp.ones(n, np.float32)]\n"
        "tune_kernel('scale', 'scale.cu', (n, n), args, {'block_size_x': [64, 128]}, grid_div_x=['block_size_x'])\n"
    )
    made = make_folder("scale", f"kernel-tuner:{tmp_path / 'tune.py'} 4096")
    assert made.problem["inputs"]["in"]["shape"] == ["WIDTH + 16", "WIDTH + 16"]
    assert [w["axes"] for w in made.problem["workloads"]] == [{"WIDTH": 256}, {"WIDTH": 4096}]
    write_folder(made, tmp_path / "scale")
    target, space = load(tmp_path / "scale")
    assert space.launch({"family": "scale", "block_size_x": 128}).grid == (2, 256, 1)
    assert gate(tmp_path / "scale", {"family": "scale", "block_size_x": 128}).correct


@pytest.mark.parametrize(
    "body, uses",
    [
        ("c[i] = a[i];", ["w", "r"]),
        ("c[i] += a[i];", ["wr", "r"]),
        ("*(c + i) = *a;", ["w", "r"]),
        ("float4* q = (float4*)(c + 4 * i); q[0] = reinterpret_cast<const float4*>(a)[i];", ["w", "r"]),
        ("reinterpret_cast<float4*>(c)[i] = ((const float4*)a)[i];", ["w", "r"]),
        ("atomicAdd(&c[i], a[i]);", ["wr", "r"]),
        ("atomicAdd(&c[(int)a[i]], 1.0f);", ["wr", "r"]),
        ("put(c + i, a[i]);", ["w", "r"]),
        ("c[i].x = __ldg(a + i);", ["w", "r"]),
        ("if (c[i] == a[i]) a[i]++;", ["r", "wr"]),
        ("// c[i] = 1\n a[0] = 1;", ["", "w"]),
    ],
)
def test_which_pointers_a_kernel_writes_is_read_from_its_text(body, uses):
    put = "__device__ void put(float* to, float v) { *to = v; }\n"
    found = pointer_uses(f"{put}__global__ void k(float* c, float* a) {{ int i = 0; {body} }}", "k")
    assert ["w" * use.written + "r" * use.read for use in found] == uses


def test_a_size_of_a_t1_file_is_evaluated(tmp_path):
    spec = {"ProblemSize": [100, 200]}
    for text, size in (
        ("ProblemSize[0]*ProblemSize[1]", "(100)*(200)"),
        ("ProblemSize[0]+max(width)-1", "(100)+9-1"),
        ("min(width) * ProblemSize", "3 * (100)"),
    ):
        assert t1_format._with_sizes(text, spec, {"width": [3, 9]}) == size


def test_a_number_of_a_t1_file_may_be_an_expression_and_its_type_that_of_c(tmp_path):
    number = {"Name": "n", "Type": "int", "MemoryType": "Scalar", "FillValue": "ProblemSize[0] // 2"}
    spec = {**T1["KernelSpecification"], "ProblemSize": [200_000, 1]}
    spec["Arguments"] = [*spec["Arguments"][:-1], number]
    made = t1(tmp_path, **spec)
    assert made.problem["workloads"] == [{**made.problem["workloads"][0], "axes": {"n": 100_000}}]
    spec["Arguments"] = [*spec["Arguments"][:-1], {**number, "FillValue": "rows"}]
    assert any("the FillValue rows of n" in remark for remark in t1(tmp_path, **spec).remarks)


def test_a_global_size_counts_threads_for_opencl_and_blocks_for_cuda(tmp_path):
    size = {"GridDivX": None, "GlobalSize": {"X": "100000 // per_thread"}}
    for kind, blocks in (("OpenCL", 782), ("CUDA", 50000)):
        folder = tmp_path / kind / "add"
        folder.parent.mkdir()
        write_folder(t1(tmp_path, GlobalSizeType=kind, **size), folder)
        assert load(folder)[1].launch(CONFIG | {"UNUSED": 3}).grid == (blocks, 1, 1)


@pytest.mark.parametrize(
    "changes, complaint",
    [
        ({"Language": "OpenCL"}, "describes a kernel in OpenCL; evoengine takes CUDA"),
        ({"KernelFile": "../../../etc/passwd"}, "it must be a file in"),
        ({"KernelFile": "/etc/passwd"}, "it must be a file in"),
        ({"KernelFile": "none.cu"}, "cannot be read: No such file"),
        ({"KernelName": "multiply"}, "has no __global__ function multiply"),
        ({"KernelName": "a b"}, "cannot name a kernel"),
        ({"Arguments": T1["KernelSpecification"]["Arguments"][:2]}, "gives 2 arguments, and vector_add takes 4"),
        ({"Arguments": [{"Type": "custom", "MemoryType": "Vector"}] * 4}, "the argument c has the type 'custom'"),
    ],
)
def test_a_t1_file_that_makes_no_kernel_is_refused_in_one_sentence(tmp_path, changes, complaint):
    with pytest.raises(UsageError) as error:
        t1(tmp_path, **changes)
    assert complaint in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["{", "[]", '{"KernelSpecification": 3, "ConfigurationSpace": {}}'])
def test_what_is_no_t1_file_is_refused(tmp_path, text):
    (tmp_path / "add.json").write_text(text)
    with pytest.raises(UsageError):
        make_folder("add", f"t1:{tmp_path / 'add.json'}")


# --- Kernel Tuner

SCRIPT = '''
import numpy as np
import kernel_tuner
from kernel_tuner import tune_kernel, run_kernel
from kernel_tuner.observers.nvml import NVMLObserver
from collections import OrderedDict

SOURCE = """
{kernel}"""

def tune():
    n = np.int32(80000)
    a = np.random.randn(n).astype(np.float32)
    b = np.random.randn(n).astype(np.float32)
    c = np.zeros_like(a)
    params = OrderedDict(block_size_x=[32 * i for i in range(1, 9)], per_thread=[1, 2, 4])
    results, env = tune_kernel("vector_add", SOURCE, 80000, [c, a, b, n], params,
                               grid_div_x=["block_size_x", "per_thread"], restrictions={restrictions},
                               answer=[a + b, None, None, None], observers=[NVMLObserver(["power"])])
    print(min(results, key=lambda r: r["time"]))

tune()
{more}
'''


def script(
    folder: Path, restrictions: str = '["block_size_x*per_thread<=512"]', more: str = "", kernel: str = ADD
) -> Path:
    path = folder / "tune.py"
    path.write_text(SCRIPT.format(kernel=kernel, restrictions=restrictions, more=more))
    (folder / "r.py").write_text(REFERENCE)
    return path


def imported(folder: Path, entry: str | None = None, **parts: str) -> NewFolder:
    return make_folder("add", f"kernel-tuner:{script(folder, **parts)}", folder / "r.py", entry)


def test_a_kernel_tuner_script_becomes_a_folder_that_passes_the_gate(tmp_path):
    made = imported(tmp_path)
    write_folder(made, tmp_path / "add")
    _, space = load(tmp_path / "add")
    assert (space.valid, space.launch(CONFIG).grid) == (20, (625, 1, 1))
    assert gate(tmp_path / "add", CONFIG).correct
    assert "the answer: arrays hold for the script's own inputs alone, a reference for all" in made.remarks


FUNCTIONS = """[
    lambda p: p['per_thread'] > 1, lambda q: q["block_size_x"] % (2 * q["per_thread"]) == 0,
    lambda per_thread, block_size_x: block_size_x / per_thread >= 2.5,
    whole, hidden, "block_size_x > 32",
]"""
DEFINED = """
LEAST = np.int32(2)

def whole(p):
    total = p["block_size_x"] * p.get("per_thread")
    if p["per_thread"] == 1:
        return False
    return total >= LEAST and math.ceil(total / 3) > 5

def hidden(p):
    return known(p["per_thread"])

def known(value):
    return value < 4
"""


def test_a_restriction_that_is_a_function_becomes_a_constraint_or_is_named(tmp_path):
    path = script(tmp_path, restrictions=FUNCTIONS)
    path.write_text(
        path.read_text().replace("def tune", f"{DEFINED}\ndef tune", 1).replace("import", "import math, ", 1)
    )
    made = make_folder("add", f"kernel-tuner:{path}", tmp_path / "r.py")
    rules = re.findall(r'^expr = "(.*)"$', made.space, re.MULTILINE)
    assert rules == [
        "per_thread > 1",
        "block_size_x % (2 * per_thread) == 0",
        "block_size_x / per_thread >= 2.5",
        "False if per_thread == 1 else block_size_x * per_thread >= 2 and ceil_div(block_size_x * per_thread, 3) > 5",
        "block_size_x > 32",
    ]
    assert [remark for remark in made.remarks if "restriction" in remark] == [
        'the restriction def hidden(p): return known(p["per_thread"]), a function: write it as a [[constraint]] of '
        "space.toml"
    ]


def test_a_function_whose_formula_gives_other_values_is_no_constraint(tmp_path):
    """A name that the script gives another meaning is misread, which the function's own values show."""
    path = script(tmp_path, restrictions="[lambda p: p['per_thread'] == min(2, p['per_thread'])]")
    other = "min = lambda *of: 4\nmin.__name__ = 'min'\n\ndef tune"
    path.write_text(path.read_text().replace("def tune", other, 1))
    made = make_folder("add", f"kernel-tuner:{path}", tmp_path / "r.py")
    assert "expr =" not in made.space and any("a function: write it as" in remark for remark in made.remarks)


SCALED = ADD.replace("__global__", "__constant__ float factors[4];\n__global__").replace(
    "+ b[i + k]", "+ factors[1] * b[i + k]"
)
BY_FACTORS = "def run(a, b, factors):\n    return a + factors[1] * b\n"


def test_constant_memory_of_a_script_is_filled(tmp_path):
    path = script(tmp_path, kernel=SCALED)
    (tmp_path / "r.py").write_text(BY_FACTORS)
    factors = "cmem_args={'factors': np.arange(3).astype(np.float32)}, answer="
    path.write_text(path.read_text().replace("answer=", factors, 1))
    write_folder(make_folder("add", f"kernel-tuner:{path}", tmp_path / "r.py"), tmp_path / "add")
    assert gate(tmp_path / "add", CONFIG).correct
    path.write_text(path.read_text().replace("np.arange(3).astype(np.float32)", "b"))
    assert make_folder("add", f"kernel-tuner:{path}").problem["constants"] == {"factors": "b"}


def test_constant_memory_of_a_t1_file_is_filled(tmp_path):
    symbol = {
        "Name": "factors",
        "Type": "float",
        "MemoryType": "Symbol",
        "FillType": "Random",
        "FillValue": 1.0,
        "Size": 3,
    }
    arguments = [*T1["KernelSpecification"]["Arguments"], symbol]
    write_folder(t1(tmp_path, SCALED, BY_FACTORS, Arguments=arguments), tmp_path / "add")
    assert gate(tmp_path / "add", CONFIG | {"UNUSED": 3}).correct


def test_an_argument_of_a_t1_file_may_be_constant_memory_too(tmp_path):
    """As in the benchmark hub's convolution, whose filter is a parameter and what a __constant__ variable holds."""
    kernel = SCALED.replace("factors", "B").replace("int n", "const float* unused, int n")
    constant = {"Name": "B", "AccessType": "ReadOnly", "FillType": "Random", "FillValue": 1.0, "MemType": "Constant"}
    *arrays, n = T1["KernelSpecification"]["Arguments"]
    made = t1(tmp_path, kernel, None, Arguments=[*arrays, VECTOR | constant | {"Size": "max(per_thread)"}, n])
    assert made.problem["constants"] == {"B": "unused"}
    plain = t1(
        tmp_path,
        kernel.replace("__constant__ float B", "__constant__ float other"),
        None,
        Arguments=[*arrays, VECTOR | constant | {"Size": 4}, n],
    )
    assert plain.problem["constants"] == {}


OTHER = "tune_kernel('other', SOURCE, 8, [np.zeros(8)], {'block_size_x': [32]})\n"


def test_a_script_that_tunes_twice_asks_which_is_meant(tmp_path):
    with pytest.raises(UsageError) as error:
        imported(tmp_path, more=OTHER)
    message = str(error.value)
    assert (
        "calls tune_kernel 2 times: vector_add at line" in message
        and "other at line" in message
        and "--entry" in message
    )
    with pytest.raises(UsageError, match="tunes no kernel third; it tunes vector_add"):
        imported(tmp_path, more=OTHER, entry="third")


def test_the_kernel_named_is_taken_of_several_and_the_first_call_of_two_alike(tmp_path):
    assert imported(tmp_path, entry="vector_add", more=OTHER).problem["entry"] == "vector_add"
    assert imported(tmp_path, more="tune()").problem["entry"] == "vector_add"


def test_a_kernel_in_a_file_beside_the_script_is_read(tmp_path):
    path = script(tmp_path)
    path.write_text(path.read_text().replace("SOURCE, 80000", '"add.cu", 80000'))
    (tmp_path / "add.cu").write_text(ADD)
    assert "vector_add" in make_folder("add", f"kernel-tuner:{path}").kernel
    path.write_text(path.read_text().replace('"add.cu"', '"../add.cu"'))
    with pytest.raises(UsageError, match="it must be a file in"):
        make_folder("add", f"kernel-tuner:{path}")


@pytest.mark.parametrize(
    "text, complaint",
    {
        "raise RuntimeError('no data here')": "described no kernel to import: RuntimeError: no data here",
        "import kernel_tuner": "it ended without a message",
        "import os; os.kill(os.getpid(), 9)": "it ended without a message",
        "def broken(:": "SyntaxError",
    }.items(),
)
def test_a_script_that_tunes_nothing_says_why(tmp_path, text, complaint):
    (tmp_path / "tune.py").write_text(text)
    with pytest.raises(UsageError) as error:
        make_folder("add", f"kernel-tuner:{tmp_path / 'tune.py'}")
    assert complaint in str(error.value)


def test_a_script_that_does_not_end_is_cut_off_with_all_that_it_started(tmp_path):
    (tmp_path / "tune.py").write_text("import subprocess\nsubprocess.run(['sleep', '600'])\n")
    with pytest.raises(UsageError, match="it did not end after 2 s"):
        run_script("kernel-tuner", tmp_path / "tune.py", seconds=2)


DAEMON = """
import os, subprocess, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execve("/bin/sh", ["/bin/sh", "-c", "echo $$ > {pid}.part && mv {pid}.part {pid} && exec sleep 600"],
                  {environment})
    os._exit(0)
while not os.path.exists({pid!r}):
    time.sleep(0.01)
"""
"""a process in a session of its own whose parent has ended"""


def lives(pid: Path) -> bool:
    """A process that waits to be taken in has no command."""
    command = Path("/proc", pid.read_text().strip(), "cmdline")
    return command.exists() and command.read_bytes() != b""


@pytest.mark.parametrize("environment", ["dict(os.environ)", "{}"])
def test_what_a_script_has_started_does_not_outlive_it_in_whatever_session_it_is(tmp_path, environment):
    """It would go on with the rights of whoever only wanted to read a file."""
    script, pid = tmp_path / "tune.py", tmp_path / "pid"
    script.write_text(DAEMON.format(pid=str(pid), environment=environment))
    with pytest.raises(UsageError, match="without a message"):
        run_script("kernel-tuner", script, seconds=60)
    assert not lives(pid)


def test_a_script_and_what_it_started_end_with_a_command_that_is_killed_and_leave_no_folder(tmp_path):
    script, pid = tmp_path / "tune.py", tmp_path / "pid"
    script.write_text(DAEMON.format(pid=str(pid), environment="{}") + "time.sleep(600)\n")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    call = f"from evoengine.formats.folder import *; run_script('kernel-tuner', Path({str(script)!r}))"
    command = subprocess.Popen([sys.executable, "-c", call], env={**os.environ, "TMPDIR": str(scratch)})
    wait_for(pid.exists)
    command.kill()
    command.wait()
    wait_for(lambda: not lives(pid) and not any(scratch.iterdir()))


def test_a_script_that_holds_too_much_is_ended_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "HELD", Held(processes=10, bytes=1 << 34))
    forks = "import os, time\nfor _ in range(20):\n    os.fork() or time.sleep(600)\ntime.sleep(600)\n"
    (tmp_path / "tune.py").write_text(forks)
    with pytest.raises(UsageError, match="it started more than 10 processes"):
        run_script("kernel-tuner", tmp_path / "tune.py", seconds=60)


def test_a_script_that_floods_its_output_does_not_fill_the_disk(tmp_path):
    """A file of its own stands for the output: what it may hold is seen in it."""
    (tmp_path / "tune.py").write_text(
        "with open('flood', 'wb') as file:\n    for _ in range(300):\n        file.write(bytes(1 << 20))\n"
    )
    with pytest.raises(UsageError, match="File too large"):
        run_script("kernel-tuner", tmp_path / "tune.py", seconds=60)
    assert (tmp_path / "flood").stat().st_size <= 256 << 20
