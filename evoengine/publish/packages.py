"""Package an exported kernel as a wheel, for the Hub's `kernels`, FlashInfer-Bench or TVM-FFI, or as C++.

A wheel and a repository of `kernels` hold the files of the export and a module that checks them on import.
Formats: the Python Packaging User Guide, "Binary distribution format"; the kernels documentation, "Kernel requirements"
(0.17); FlashInfer-Bench 0.1, `flashinfer_bench.data.TraceSet`; TVM-FFI 0.1.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
import zipfile
from collections.abc import Callable, Mapping
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

from evoengine import __version__
from evoengine.errors import UsageError
from evoengine.publish.cpp_package import cpp_files, tvm_ffi_files
from evoengine.publish.folder import CHECKSUMS, MARK, TABLE, with_checksums
from evoengine.workloads import find_workload

INIT, TABLE_INIT = (Path(__file__).with_name(name) for name in ("package_init.py", "package_table_init.py"))
NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
RECORD, SOLUTION, TRACE = "record.json", "solution.json", "trace.json"
DEFINITION_KEYS = ("name", "op_type", "axes", "inputs", "outputs", "reference", "tags", "description", "constraints")
"""of FlashInfer-Trace"""
LONGEST_NAME = 96
VERSION = "1.0"
"""version of every package: another kernel has another name"""
LICENCE = "Apache-2.0"
"""licence of the templates and the loader; that of a user's own kernel is unknown"""
_EPOCH = (1980, 1, 1, 0, 0, 0)

Files = Mapping[str, bytes]
Pack = Callable[[str, Files, Mapping[str, Any]], dict[str, bytes]]


def default_name(described: Mapping[str, Any]) -> str:
    """Return a name from the problem and the GPU, such as attention-b16-h16-s2048-d64-fp16-h100."""
    problem = str(described["module"]).rpartition("_")[0]
    words = re.findall("[a-z0-9]+", f"{problem}_{described['provenance']['gpu']}".lower())
    return "-".join(words)[:LONGEST_NAME].strip("-")


def require_form(form: str, name: str | None) -> None:
    """Raise UsageError for an unknown form of a package, and for a name that a package cannot have."""
    if form not in FORMS:
        raise UsageError(f"unknown kind of package {form!r}; kinds are {', '.join(FORMS)}")
    if name is not None and (not NAME.fullmatch(name) or len(name) > LONGEST_NAME):
        raise UsageError(
            f"{name!r} is not a valid package name: use up to {LONGEST_NAME} lower-case letters and digits, in words "
            "joined by hyphens, as in attention-h100"
        )


def package_files(form: str, exported: Files, name: str | None = None) -> dict[str, bytes]:
    """Return the files of a package by their paths within its folder.

    `exported` holds the files of an export. Raises UsageError as `require_form`.
    """
    require_form(form, name)
    described = json.loads(exported[MARK])
    name = default_name(described) if name is None else name
    module = {"__init__.py": INIT.read_bytes(), **{path: data for path, data in exported.items() if path != CHECKSUMS}}
    return FORMS[form](name, with_checksums(module), described)


def require_table_form(form: str, name: str | None) -> None:
    """Raise UsageError as `require_form`, and for a form that holds one kernel alone."""
    require_form(form, name)
    if form not in TABLE_FORMS:
        raise UsageError(f"--as {form} holds one kernel; for several problems use --as {' or '.join(TABLE_FORMS)}")


def table_package_files(form: str, exported: Files, name: str | None = None) -> dict[str, bytes]:
    """Return the files of a package with the kernels of a dispatch table, by their paths within its folder.

    `exported` holds table.json and the exports beside it. Raises UsageError as `require_table_form`.
    """
    require_table_form(form, name)
    table = json.loads(exported[TABLE])
    described = json.loads(exported[f"{table['entries'][0]['folder']}/{MARK}"])
    name = f"{described['kernel']}-table-{table['gpu']}".replace("_", "-") if name is None else name
    module = {"__init__.py": TABLE_INIT.read_bytes(), "README.md": _table_readme(table), **exported}
    return FORMS[form](name, with_checksums(module), described)


def _table_readme(table: Mapping[str, Any]) -> bytes:
    rows = [
        f"| `{e['problem']}` | {e['kernel']} | {e['median_us']:.4g} | {e['regret']:.1%} | `{e['folder']}` |"
        for e in table["entries"]
    ]
    lines = [
        f"# Kernels for {len(rows)} problems on {table['gpu']}",
        "",
        "The folder of each problem has a README.md, which says how the kernel was verified and how its time is known,",
        "and a verification record. Regret is the time over that of the fastest known kernel of the problem, less 1.",
        "",
        "| problem | kernel | time, µs | regret | folder |",
        "|---|---|---|---|---|",
        *rows,
    ]
    return ("\n".join(lines) + "\n").encode()


def _wheel(name: str, module: Files, described: Mapping[str, Any]) -> dict[str, bytes]:
    """Return one wheel. Its bytes depend on its files alone, so that a build can be repeated."""
    package = name.replace("-", "_")
    info = f"{package}-{VERSION}.dist-info"
    contents = {f"{package}/{path}": data for path, data in module.items()}
    contents[f"{info}/METADATA"] = _metadata(name, module, described)
    if _is_ours(described):
        contents[f"{info}/licenses/LICENSE"] = _licence_text()
    wheel = f"Wheel-Version: 1.0\nGenerator: evoengine {__version__}\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    contents[f"{info}/WHEEL"] = wheel.encode()
    record = "".join(f"{path},sha256={_urlsafe(data)},{len(data)}\n" for path, data in contents.items())
    contents[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, data in contents.items():
            entry = zipfile.ZipInfo(path, _EPOCH)
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, data, zipfile.ZIP_DEFLATED)
    return {f"{package}-{VERSION}-py3-none-any.whl": packed.getvalue()}


def _urlsafe(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def _metadata(name: str, module: Files, described: Mapping[str, Any]) -> bytes:
    provenance = described["provenance"]
    lines = [
        "Metadata-Version: 2.4",
        f"Name: {name}",
        f"Version: {VERSION}",
        f"Summary: A CUDA kernel for {provenance['arch']}, found and verified by evoengine {__version__}",
        "Requires-Python: >=3.10",
        "Description-Content-Type: text/markdown",
    ]
    if _is_ours(described):
        lines += [f"License-Expression: {LICENCE}", "License-File: LICENSE"]
    return ("\n".join(lines) + "\n\n").encode() + module["README.md"]


def _licence_text() -> bytes:
    """Return evoengine's licence, which its own installation holds."""
    text = distribution("evoengine").read_text("licenses/LICENSE")
    assert text is not None  # pyproject.toml names it
    return text.encode()


def _is_ours(described: Mapping[str, Any]) -> bool:
    """Return whether the kernel is made from evoengine's templates."""
    try:
        return find_workload(str(described["kernel"])).definition_text is None
    except UsageError:  # a kernel of a user's own, whose folder is not registered here
        return False


def _hf_kernel(name: str, module: Files, described: Mapping[str, Any]) -> dict[str, bytes]:
    """Return a repository with one build, whose Python code is that of any torch and whose binary is for CUDA."""
    sha256 = hashlib.sha256(module[CHECKSUMS]).hexdigest()
    arch = str(described["provenance"]["arch"]).removeprefix("sm_")
    digits = "".join(filter(str.isdigit, arch))
    ours = _is_ours(described)
    metadata = {
        "name": name,
        "id": f"_{name.replace('-', '_')}_{sha256[:12]}",
        "version": 1,
        **({"license": LICENCE} if ours else {}),
        "python-depends": [],
        "backend": {"type": "cuda", "archs": [f"{digits[:-1]}.{arch[len(digits) - 1 :]}"]},
    }
    licence = LICENCE.lower() if ours else "unknown"
    front = f"---\nlibrary_name: kernels\nlicense: {licence}\ntags:\n- kernels\n---\n\n"
    build = {f"build/torch-cuda/{path}": data for path, data in module.items()}
    build["build/torch-cuda/metadata.json"] = _json(metadata)
    beside = {"LICENSE": _licence_text()} if ours else {}
    return {"README.md": front.encode() + module["README.md"], **beside, **build}


def _cpp(name: str, module: Files, described: Mapping[str, Any]) -> dict[str, bytes]:
    """Return a CMake project of an example."""
    return with_checksums({**cpp_files(name, described, module["kernel.cubin"]), **_beside(module)})


def _tvm_ffi(name: str, module: Files, described: Mapping[str, Any]) -> dict[str, bytes]:
    """Return a CMake project of a library with a function of TVM-FFI."""
    return with_checksums({**tvm_ffi_files(name, described, module["kernel.cubin"]), **_beside(module)})


def _beside(module: Files) -> dict[str, bytes]:
    """Return what says where a kernel comes from and how it was verified."""
    return {path: module[path] for path in ("kernel.cu", "kernel.json", "README.md", RECORD) if path in module}


def _flashinfer(name: str, module: Files, described: Mapping[str, Any]) -> dict[str, bytes]:
    """Return a dataset of FlashInfer-Bench with the definition, the solution and the workload.

    A workload with a measurement is a trace. Raises UsageError if the kernel cannot be a solution, or its
    definition is not one of FlashInfer-Trace.
    """
    stated = json.loads(module[RECORD]).get("definition") if RECORD in module else None
    definition = json.loads(stated) if stated is not None else {}
    if not isinstance(definition.get("reference"), str) or "outputs" not in definition:
        raise UsageError(
            f"{described['kernel']} has no FlashInfer-Trace definition; import one with evoengine new --from, and "
            "search its kernel"
        )
    if SOLUTION not in module:
        raise UsageError(
            "a FlashInfer-Trace solution cannot pass this kernel's parameters; use --as wheel or --as tvm-ffi"
        )
    kind = str(definition.setdefault("op_type", definition["name"]))
    trace = json.loads(module[TRACE])
    lines = {"workloads": {**trace, "solution": None, "evaluation": None}}
    lines |= {"traces": trace} if trace["evaluation"] else {}
    own = {key: definition[key] for key in DEFINITION_KEYS if key in definition}
    found = {
        f"definitions/{kind}/{own['name']}.json": _json(own),
        f"solutions/evoengine/{kind}/{own['name']}/{name}.json": module[SOLUTION],
        **{f"{folder}/{kind}/{own['name']}.jsonl": f"{json.dumps(line)}\n".encode() for folder, line in lines.items()},
    }
    return with_checksums({**found, **_beside(module)})


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


TABLE_FORMS = ("wheel", "hf-kernel")
"""forms that hold the kernels of several problems"""
FORMS: dict[str, Pack] = {
    "wheel": _wheel,
    "hf-kernel": _hf_kernel,
    "flashinfer": _flashinfer,
    "tvm-ffi": _tvm_ffi,
    "cpp": _cpp,
}
