"""Export a Triton configuration: as Python code, and as the entry of Triton's autotuner's cache."""

from __future__ import annotations

import json

from evoengine import __version__
from evoengine.publish.export import describe
from evoengine.publish.readme import code, figure_section, gate_section
from evoengine.records import Candidate
from evoengine.workloads.base import Target
from evoengine.workloads.triton_kernel import AutotuneEntry, config_code

CONFIG = '''"""The configuration of kernel {kernel} that evoengine found for {problem} on {gpu}."""

import triton

CONFIG = {code}
'''


def triton_files(candidate: Candidate, target: Target, entry: AutotuneEntry | None) -> dict[str, bytes]:
    """Return the files of an export: kernel.py, kernel.cubin, kernel.json, config.py, README.md, and the cache's entry.

    Without an `entry` the last is left out.
    """
    source, binary = candidate.source, candidate.binary
    assert source is not None and binary is not None  # only ranked candidates are exported
    found = config_code(candidate.config)
    config = CONFIG.format(kernel=target.workload.name, problem=target.problem, gpu=target.gpu.key, code=found)
    described = {
        **describe(candidate, target),
        "triton": {"config": found, "autotune_cache_key": entry.key if entry else None},
    }
    files = {
        "kernel.py": source.text.encode(),
        "kernel.cubin": binary.cubin,
        "kernel.json": (json.dumps(described, indent=2) + "\n").encode(),
        "config.py": config.encode(),
        "README.md": _readme(candidate, target, entry, found).encode(errors="backslashreplace"),
    }
    return files | ({entry.name: entry.text.encode()} if entry else {})


def _readme(candidate: Candidate, target: Target, entry: AutotuneEntry | None, config: str) -> str:
    host = target.workload.host
    assert host is not None  # it is a Triton kernel
    lines = [
        f"# A configuration of {code(host.kernel)}",
        "",
        f"Found by evoengine {__version__} for {code(target.problem)} on the {code(target.gpu.name)}: trial "
        f"{candidate.trial} of run {candidate.run}.",
        "",
        "```python",
        config,
        "```",
        "",
        "`config.py` has it as `CONFIG`, for the list of `@triton.autotune`. `kernel.py` is the file with which it was",
        "judged, `kernel.cubin` what Triton made of it. `sha256sum -c SHA256SUMS` checks the files.",
        "",
    ]
    if entry:
        lines += [
            "Triton's autotuner takes it without a change of the file, and without a benchmark, from its cache:",
            "",
            "```sh",
            f"mkdir -p ~/.triton/cache/{entry.key}",
            f"cp {entry.name} ~/.triton/cache/{entry.key}/",
            "TRITON_CACHE_AUTOTUNING=1 python …",
            "```",
            "",
            "The entry holds for this version of Triton, this text of the kernel and its list, and arguments for which",
            "the autotuner's key is the same. A cache elsewhere is the folder that TRITON_CACHE_DIR names.",
            "",
        ]
    for section in (
        figure_section(candidate.measurement),
        gate_section(candidate.binary_verdict, "The machine code, executed on the CPU:"),
    ):
        lines += [*section, ""]
    return "\n".join(lines)
