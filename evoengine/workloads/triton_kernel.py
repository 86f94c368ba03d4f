"""A workload that a user brings as a Triton kernel in a Python file, with a function that launches it.

Only worker processes run the file (evoengine.virtual). A candidate's source is the file's text with a last line that
states its configuration, problem and GPU, so that it can be compiled from its text alone. The kernels of vLLM and
SGLang that read tuned configurations from files are such files too, under these names.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from evoengine.devices.base import Parameter
from evoengine.errors import UsageError
from evoengine.gpu import Gpu, known_gpus
from evoengine.gpu_file import stored_fields
from evoengine.records import Config, Value
from evoengine.sandbox.jail import MARK
from evoengine.sandbox.untrusted import read_limited_text
from evoengine.workloads.base import Case, Host, Tensors, Workload
from evoengine.workloads.problem_text import read_size

LARGEST_SIZE = 2**31 - 1
LARGEST_SMALL = 300
"""maximum of the gate's small sizes"""
ODD_SIZES = 3
"""number of drawn sets of sizes"""
FIELDS = ("num_warps", "num_stages", "num_ctas", "maxnreg")
"""fields of triton.Config, in addition to the kernel's own parameters"""
LAST_LINE = "# evoengine: "
TRITON_FILE = "triton.json"
"""file in a folder of a server's operator: which file and functions make a Triton kernel that jobs may name"""
_PAIR = re.compile(r"([A-Za-z_]\w*)=(\d{1,10})\Z", re.ASCII)


@dataclass(frozen=True, slots=True)
class TritonProblem:
    """The integer arguments of the function that launches the kernel."""

    kernel: str
    sizes: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        return f"{self.kernel}:{sizes_text(dict(self.sizes), ',')}"

    def variables(self) -> Mapping[str, int]:
        return dict(self.sizes)


def sizes_text(sizes: Mapping[str, int], between: str = " ") -> str:
    return between.join(f"{name}={value}" for name, value in sizes.items())


def read_host(target: str, call: str | None, reference: str | None) -> Host:
    """Return the file and functions that FILE::KERNEL and the two options name; nothing is executed.

    Raises UsageError if `target` has another form, if no function is named that launches the kernel, or if the file is
    not Python.
    """
    file, separator, kernel = target.partition("::")
    if not separator or not kernel:
        raise UsageError(f"--triton takes FILE::KERNEL, and {target!r} names no kernel")
    call = call or next(iter(served_data(kernel)), None)
    if call is None:
        raise UsageError("--triton needs --call FUNCTION, a function of the file that launches the kernel")
    if reference is not None and call in served_data(kernel):
        raise UsageError(f"--reference is not for {kernel} with --call {call}, whose reference is evoengine's")
    path = Path(file)
    if not path.is_file():
        raise UsageError(f"there is no file {file!r}; --triton takes FILE::KERNEL")
    if path.suffix != ".py":
        raise UsageError(f"{file} is no Python file; --triton takes FILE::KERNEL")
    try:
        text = read_limited_text(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"{file} cannot be read: {error}") from None
    data = served_data(kernel)
    if data and call not in data and call not in text:
        raise UsageError(f"{file} has no function {call!r} for --call; of {kernel} it may be {', '.join(data)}")
    return Host(os.path.abspath(path), text, kernel, call, reference)


def read_folder(folder: Path) -> Host:
    """Return the file and functions that a folder's triton.json names; nothing is executed.

    It has `file`, `kernel`, `call` and, if there is one, `reference`; the folder is named after the kernel. Raises
    UsageError naming the fault.
    """
    path = folder / TRITON_FILE
    try:
        stated = json.loads(read_limited_text(path))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from None
    names = ("file", "kernel", "call", "reference")
    if not isinstance(stated, dict) or not all(isinstance(stated.get(name), str) for name in names[:3]):
        raise UsageError(f"{path} must have file, kernel and call, each a text")
    if not isinstance(stated.get("reference"), str | None) or not stated.keys() <= set(names):
        raise UsageError(f"{path} may have {', '.join(names)}, each a text, and nothing else")
    if stated["kernel"] != folder.name:
        raise UsageError(
            f"{path} names the kernel {stated['kernel']}, and its folder is {folder.name}; name them alike"
        )
    return read_host(f"{folder / stated['file']}::{stated['kernel']}", stated["call"], stated.get("reference"))


class TritonWorkload(Workload[TritonProblem]):
    """A workload read from its definition, in which form it is sent to worker processes and kept in a ledger."""

    baseline_label = "reference"
    compile_time = ()
    definition_text: str
    host: Host

    def __init__(self, definition_text: str) -> None:
        """Parse the definition. Raises UsageError if a part is missing."""
        self.definition_text = definition_text
        try:
            stated = json.loads(definition_text)
            self.host = Host(**{field.name: stated[field.name] for field in fields(Host)})
            self._sizes: dict[str, int] = {str(name): int(size) for name, size in stated["sizes"].items()}
            self._space = str(stated["space"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"the definition of a Triton kernel cannot be read: {error!r}") from None
        self.name = self.host.kernel
        self.grammar = ",".join(f"{name}=…" for name in self._sizes)
        self.example = str(TritonProblem(self.name, tuple(self._sizes.items())))

    def __reduce__(self) -> tuple[type[TritonWorkload], tuple[str]]:
        return TritonWorkload, (self.definition_text,)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TritonWorkload) and self.definition_text == other.definition_text

    def __hash__(self) -> int:
        return hash(self.definition_text)

    def parse(self, text: str) -> TritonProblem:
        """Parse `NAME:M=512,N=64`; sizes that are left out are the function's own.

        Raises UsageError naming the part that is wrong and what would be right.
        """
        given: dict[str, int] = {}
        for part in filter(None, (part.strip() for part in text.removeprefix(f"{self.name}:").split(","))):
            pair = _PAIR.match(part)
            if not pair or pair[1] not in self._sizes:
                known = f"write it like {self.example}" if self._sizes else f"{self.host.call} takes no sizes"
                raise UsageError(
                    f"the problem {text!r} has a part {part!r} that is not a size of {self.host.call}; {known}"
                )
            if pair[1] in given:
                raise UsageError(f"the problem {text!r} gives {pair[1]} twice; write it like {self.example}")
            given[pair[1]] = read_size(pair[2])
            if not 1 <= given[pair[1]] <= LARGEST_SIZE:
                raise UsageError(f"the problem {text!r} has {part}; a size is an integer from 1 to {LARGEST_SIZE}")
        return TritonProblem(self.name, tuple((self._sizes | given).items()))

    def flops(self, problem: TritonProblem) -> float:
        """Return 0, because the kernel's operations are not stated."""
        return 0.0

    def min_dram_bytes(self, problem: TritonProblem) -> float:
        return 0.0

    def cases(self, problem: TritonProblem, config: Config) -> tuple[Case[TritonProblem], ...]:
        """Return the gate's sizes: small ones, and the problem's own as the long case."""
        own = dict(problem.sizes)
        small = [sizes for sizes in gate_sizes(own, 0) if sizes != own]
        found = [Case("small", TritonProblem(self.name, tuple(sizes.items()))) for sizes in small]
        return (*found, Case("own sizes", problem, long=bool(small)))

    def parameters(self, problem: TritonProblem, config: Config) -> tuple[Parameter, ...]:
        """Return no parameters, because the function passes the arguments."""
        return ()

    def tensors(self) -> Tensors[TritonProblem]:
        raise UsageError(f"the Triton kernel {self.name} is launched by {self.host.call} alone, on the virtual GPU")

    def source_text(self, problem: TritonProblem, config: Config, gpu: Gpu) -> str:
        return with_last_line(self.host, problem, config, gpu)

    def space_text(self) -> str:
        return self._space


def is_definition(text: str) -> bool:
    """Return whether a user's own kernel that a ledger defines by this text is a Triton kernel."""
    try:
        stated = json.loads(text)
    except ValueError:
        return False
    return isinstance(stated, dict) and "call" in stated and "kernel" in stated


def define(host: Host, sizes: Mapping[str, int], space: str) -> TritonWorkload:
    """Return the workload of a file. `sizes` are the function's own, `space` is the text of the proposed space."""
    return TritonWorkload(json.dumps({**asdict(host), "sizes": dict(sizes), "space": space}))


def gate_sizes(own: Mapping[str, int], seed: int) -> list[dict[str, int]]:
    """Return the function's own sizes, then all 1, each of its own minus one, and drawn odd ones; each set once."""
    random = np.random.default_rng(seed)
    found = [dict(own)]
    if own:
        found += [dict.fromkeys(own, 1), {name: max(1, min(size, LARGEST_SMALL) - 1) for name, size in own.items()}]
        for _ in range(ODD_SIZES):
            found.append({name: _odd(random, size) for name, size in own.items()})
    return [case for place, case in enumerate(found) if case not in found[:place]]


def _odd(random: np.random.Generator, size: int) -> int:
    return int(random.integers(0, max(1, (min(size, LARGEST_SMALL) + 1) // 2))) * 2 + 1


# ── what worker processes answer ────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Examined:
    """Sizes of a function in a user's file, and the configurations of its autotuner."""

    sizes: Mapping[str, int]
    settings: Sequence[Mapping[str, Value]]


@dataclass(frozen=True, slots=True)
class AutotuneEntry:
    """An entry of Triton's autotuner's cache: the file `name` in the folder `key` of TRITON_CACHE_DIR."""

    key: str
    name: str
    text: str


def config_code(config: Config) -> str:
    """Return a configuration as Python code."""
    kwargs = {name: value for name, value in config.items() if name not in FIELDS and name != "family"}
    fields = "".join(f", {name}={config[name]}" for name in FIELDS if config.get(name))
    return f"triton.Config({kwargs!r}{fields})"


# ── the text of a candidate ─────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Stated:
    """The statements of a candidate's last line."""

    host: Host
    sizes: Mapping[str, int]
    config: Config
    gpu: Gpu


def with_last_line(host: Host, problem: TritonProblem, config: Config, gpu: Gpu) -> str:
    """Return the file's text with a last line that `read_last_line` reads."""
    stated: dict[str, Any] = {field.name: getattr(host, field.name) for field in fields(Host) if field.name != "text"}
    stated |= {"sizes": dict(problem.sizes), "config": {k: v for k, v in config.items() if k != "family"}}
    stated["gpu"] = gpu.key if known_gpus().get(gpu.key) == gpu else asdict(gpu)
    return f"{host.text.rstrip()}\n\n{LAST_LINE}{json.dumps(stated)}\n"


def is_triton(text: str) -> bool:
    """Return whether a source is a Triton kernel; a proposed text is CUDA, whatever its last line."""
    return not text.startswith(MARK) and text.rstrip().rpartition("\n")[2].startswith(LAST_LINE)


def read_last_line(text: str) -> Stated:
    """Return the statements of a candidate's last line. Raises UsageError if there is none."""
    above, _, last = text.rstrip().rpartition("\n")
    try:
        stated = json.loads(last.removeprefix(LAST_LINE))
        named = stated["gpu"]
        gpu = known_gpus()[named] if isinstance(named, str) else stored_fields(named, "the last line of the source")
        host = Host(text=above, **{field.name: stated[field.name] for field in fields(Host) if field.name != "text"})
        return Stated(host, stated["sizes"], stated["config"], gpu)
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"the last line of the source does not state a Triton configuration: {error!r}") from None


# A search space from an autotuner's list.

WARPS, STAGES = "num_warps", "num_stages"
MOST_WARPS = 32
"""1024 threads"""
LISTED = ("num_ctas", "maxnreg")
"""fields for which only the list's own values are proposed, because most kernels require one of them"""

_SPACE_HEAD = """\
# {kernel}, from the {count} of its autotuner's list: its values, the powers of two between them, and a step beyond.
# Values may be added and taken away; [[constraint]] leaves combinations out. The function that launches the kernel
# states grid and arguments, and what Triton refuses is recorded as such.
kernel = {name}
"""
_SPACE_LAUNCH = """
# what is known before a candidate is compiled; its launch is read when the function launches it
[launch]
threads = "32 * num_warps"
grid = [1, 1, 1]
shared = 0
"""


def proposed_space(kernel: str, configs: Sequence[Mapping[str, Value]]) -> str:
    """Return a space around the configurations, which are its start points. All of them have the same names."""
    count = "1 configuration" if len(configs) == 1 else f"{len(configs)} configurations"
    text = _SPACE_HEAD.format(kernel=kernel, count=count, name=json.dumps(kernel)) + "\n[knobs]\n"
    for name in configs[0]:
        text += f"{name} = {_toml(_proposed(name, [config[name] for config in configs]))}\n"
    text += _SPACE_LAUNCH
    for config in configs:
        text += "\n[[start]]\n" + "".join(f"{name} = {_toml(value)}\n" for name, value in config.items())
    return text


def _proposed(name: str, listed: Sequence[Value]) -> list[Value]:
    values = list(dict.fromkeys(listed))
    if all(type(value) is bool for value in values):
        return [False, True]
    numbers = sorted(value for value in values if type(value) is int)
    if len(numbers) < len(values) or name in LISTED:
        return sorted(values, key=str) if len(numbers) < len(values) else list(numbers)
    if name == STAGES:
        return list(range(max(1, numbers[0] - 1), numbers[-1] + 2))
    if numbers[0] < 1 or (numbers[-1] == 1 and name != WARPS) or any(n & (n - 1) for n in numbers):
        return list(numbers)
    first, last = max(1, numbers[0] // 2), numbers[-1] * 2
    return [1 << n for n in range(first.bit_length() - 1, last.bit_length()) if name != WARPS or 1 << n <= MOST_WARPS]


def _toml(value: Value | list[Value]) -> str:
    """Return JSON, which is also TOML for numbers, texts, booleans and lists of them."""
    return json.dumps(value)


MOE, BLOCK_GEMM = "FusedMoe", "BlockFp8"
"""classes of evoengine.virtual.served"""
BF16, FP8, FP8_BLOCK = "bf16", "fp8_w8a8", "fp8_w8a8_block"
CLASSES = {
    "fused_moe_kernel": MOE,
    "_w8a8_triton_block_scaled_mm": BLOCK_GEMM,  # vLLM's
    "_w8a8_block_fp8_matmul": BLOCK_GEMM,  # SGLang's
}
DATA = {MOE: (BF16, FP8, FP8_BLOCK), BLOCK_GEMM: (FP8_BLOCK,)}
FIRST_LINE = "# evoengine: kernel of "
KEYS = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M", "num_warps", "num_stages")


@dataclass(frozen=True, slots=True)
class Served:
    """The statement in the first line of a candidate's text."""

    framework: str
    """vllm or sglang"""
    kernel: str
    data: str


def is_served(host: Host) -> bool:
    """Return whether evoengine has the functions that launch the kernel and its reference: --call names the data.

    A text that contains such functions is not served: its functions are found by name.
    """
    return host.call in served_data(host.kernel) and not host.text.startswith(FIRST_LINE)


def served_data(kernel: str) -> tuple[str, ...]:
    """Return the possible values of --call for one of these kernels, the default first; none for another kernel."""
    return DATA.get(CLASSES.get(kernel, ""), ())


def with_text(host: Host, served: Served, text: str) -> Host:
    """Return the file with the kernel and its functions."""
    return replace(host, text=f"{FIRST_LINE}{json.dumps(asdict(served))}\n{text}", call="call", reference="reference")


def served_of(text: str) -> Served | None:
    """Return the statements of a candidate's text; None if its kernel is not served."""
    first, _, _ = text.partition("\n")
    try:
        return Served(**json.loads(first.removeprefix(FIRST_LINE))) if first.startswith(FIRST_LINE) else None
    except (ValueError, TypeError):
        return None


def served_file_name(served: Served, sizes: Mapping[str, int], gpu: Gpu, triton: str) -> str:
    """Return the path below the folder of the framework's configurations, as its current release reads it.

    `triton` is the version of Triton that compiled the kernel.
    """
    device = "NVIDIA_H200" if served.framework == "vllm" and "H200" in gpu.name.split() else gpu.name.replace(" ", "_")
    space = "" if served.framework == "vllm" else " "
    data = {BF16: "", FP8: ",dtype=fp8_w8a8", FP8_BLOCK: f",dtype=fp8_w8a8,block_shape=[128,{space}128]"}[served.data]
    if CLASSES[served.kernel] == BLOCK_GEMM:
        return f"N={sizes['N']},K={sizes['K']},device_name={device}{data}.json"
    name = f"E={sizes['E']},N={sizes['N']},device_name={device}{data}.json"
    return name if served.framework == "vllm" else f"configs/triton_{triton.replace('.', '_')}/{name}"


def served_entry(config: Config) -> dict[str, int]:
    """Return a configuration in the format of such a file."""
    return {key: int(str(config[key])) for key in KEYS}
