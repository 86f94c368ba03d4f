"""The importers of `evoengine new --from KIND:FILE`, by kind."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from evoengine.errors import UsageError
from evoengine.formats.flashinfer_trace import import_trace
from evoengine.formats.folder import NewFolder, read_text
from evoengine.formats.kernel_tuner import import_script
from evoengine.formats.kernelbench import import_model
from evoengine.formats.t1 import import_t1
from evoengine.formats.tuned_kernel import KernelText
from evoengine.workloads.folder import FolderWorkload
from evoengine.workloads.folder_reader import require_name

# The kernel that `evoengine new NAME` writes: small, correct at every size, with effective knobs.

_PROBLEM = {
    "description": "out = alpha · x + bias, row by row: replace it by what your kernel computes",
    "axes": {"rows": {"type": "var"}, "cols": {"type": "var"}},
    "inputs": {
        "x": {"shape": ["rows", "cols"], "dtype": "float32"},
        "bias": {"shape": ["cols"], "dtype": "float32"},
        "alpha": {"shape": None, "dtype": "float32"},
    },
    "outputs": {"out": {"shape": ["rows", "cols"], "dtype": "float32"}},
    "workloads": [{"axes": {"rows": 4096, "cols": 1024}, "inputs": {"alpha": {"type": "scalar", "value": 0.5}}}],
    "flops": "2 * rows * cols",
    "bytes": "4 * (2 * rows * cols + cols)",
}

_REFERENCE = '''"""What the kernel must compute.

The gate runs it in float64 and allows what rounding to the outputs' dtypes explains.
"""

import torch


def run(x, bias, alpha):
    return alpha * x + bias
'''

_SPACE = """# What is searched: each knob with its values. The template sees them by name.
kernel = "NAME"

[knobs]
threads_x = [32, 64, 128, 256]  # threads of a block, along a row
rows_per_block = [1, 2, 4, 8]
vector = [1, 2, 4]              # floats that a thread loads at once
unroll = [1, 2, 4]
cache = ["default", "streaming"]

[let]
chunk = "threads_x * vector"    # columns that a block handles at once

# What cannot be, and why. A constraint in which % meets an axis says which sizes a configuration takes: the gate keeps
# to such sizes.
[[constraint]]
expr = "cols % vector == 0"
why = "rows begin where a vector load may begin only if their length is a multiple of it"

[[constraint]]
expr = "chunk <= round_up(cols, 32)"
why = "threads beyond the end of a row have nothing to do"

[launch]
threads = "threads_x"
grid = ["1", "ceil_div(rows, rows_per_block)", "1"]
shared = 0

# What a block does, for a rough estimate where no prediction can be made from the machine code.
[cost]
fp32_flops = "2 * rows_per_block * cols"
global_bytes = "8 * rows_per_block * cols"

[[start]]  # a point that is known to be good: the search begins here
threads_x = 128
rows_per_block = 2
vector = 4
unroll = 1
cache = "default"
"""

_KERNEL = """{# Jinja fills in the knobs; what it gives is plain CUDA. #}
#define VECTOR {{ vector }}

struct __align__(4 * VECTOR) Chunk {
    float at[VECTOR];
};

// Parameters come in the order of problem.json: inputs, outputs, then the axes that a problem gives, as int.
extern "C" __global__ void __launch_bounds__({{ threads_x }}) NAME(
    const float* __restrict__ x, const float* __restrict__ bias, float alpha, float* __restrict__ out, int rows,
    int cols) {
    const int first_row = blockIdx.y * {{ rows_per_block }};
    const int last_row = min(first_row + {{ rows_per_block }}, rows);
    for (int row = first_row; row < last_row; ++row) {
        const long long begin = (long long)row * cols;
        #pragma unroll {{ unroll }}
        for (int col = threadIdx.x * VECTOR; col < cols; col += {{ threads_x }} * VECTOR) {
            const Chunk in = *reinterpret_cast<const Chunk*>(x + begin + col);
            const Chunk add = *reinterpret_cast<const Chunk*>(bias + col);
            Chunk result;
            for (int i = 0; i < VECTOR; ++i) result.at[i] = alpha * in.at[i] + add.at[i];
            {% if cache == "streaming" %}
            for (int i = 0; i < VECTOR; ++i) __stcs(out + begin + col + i, result.at[i]);
            {% else %}
            *reinterpret_cast<Chunk*>(out + begin + col) = result;
            {% endif %}
        }
    }
}
"""


def starter(name: str) -> NewFolder:
    problem = {"name": name, **_PROBLEM, "reference": _REFERENCE}
    return NewFolder(problem, _SPACE.replace("NAME", name), _KERNEL.replace("NAME", name), is_template=True)


KINDS = ("trace", "t1", "kernel-tuner", "kernelbench")


def make_folder(name: str, source: str | None, reference: Path | None = None, entry: str | None = None) -> NewFolder:
    """Return the folder `name` from `KIND:FILE`, or one with a small kernel to start from.

    Raises UsageError if the file is invalid, or if evoengine cannot represent its kernel.
    """
    require_name(name, "the folder", "a kernel")
    if source is None:
        if reference or entry:
            raise UsageError("--reference and --entry apply to an imported file; name one with --from")
        return starter(name)
    made = _imported(name, source, reference, entry)
    # parse it, so that invalid content is reported before anything is written
    FolderWorkload(name, json.dumps({**made.problem, "space": made.space}))
    return made


def _imported(name: str, source: str, reference: Path | None, entry: str | None) -> NewFolder:
    kind, colon, text = source.partition(":")
    if kind not in KINDS or not colon or not text:
        raise UsageError(f"--from {source}: it must be KIND:FILE, where KIND is one of {', '.join(KINDS)}")
    if entry and kind != "kernel-tuner":
        raise UsageError(f"--entry chooses among the kernels of a kernel-tuner script; {source} is none")
    if reference and kind == "kernelbench":
        raise UsageError("--reference: a kernelbench file is its own reference; leave it out")
    code = read_text(reference, "the reference") if reference else None
    if code is not None and reference is not None and reference.suffix in (".cu", ".cuh"):
        if kind == "trace":
            raise UsageError(f"--reference {reference}: a definition is compared with Python text; name a .py file")
        code = KernelText(code)
    match kind:
        case "trace":
            definition, _, workloads = text.partition(",")
            return import_trace(Path(definition), Path(workloads) if workloads else None, name, code)
        case "t1":
            return import_t1(Path(text), name, code)
        case "kernel-tuner":
            script, *given = shlex.split(text)
            return import_script(Path(script), name, code, entry, given)
    return import_model(Path(text), name)
