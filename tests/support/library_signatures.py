"""The signatures of other libraries' functions, recorded from their sources, by which our calls of them are checked.

`python -m tests.support.library_signatures FLASH_ATTN FLASHINFER` reads the folders of a checkout of FlashAttention and
of an unpacked wheel of flashinfer-python and records them again.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).parent / "libraries" / "signatures.json"
WRAPPER = ("__init__", "plan", "run")
SOURCES = {
    "flash_attn": {
        "flash_attn/flash_attn_interface.py": {
            "flash_attn_func": (), "flash_attn_varlen_func": (), "flash_attn_with_kvcache": (),
        },
    },
    "flash_attn_interface": {
        "hopper/flash_attn_interface.py": {
            "flash_attn_func": (), "flash_attn_varlen_func": (), "flash_attn_with_kvcache": (),
        },
    },
    "flashinfer": {
        "flashinfer/decode.py": {"BatchDecodeWithPagedKVCacheWrapper": ("__init__", "_plan_impl", "run")},
        "flashinfer/prefill.py": {
            "BatchPrefillWithPagedKVCacheWrapper": WRAPPER, "BatchPrefillWithRaggedKVCacheWrapper": WRAPPER,
        },
        "flashinfer/mla/_batch_mla/_wrapper.py": {"BatchMLAPagedAttentionWrapper": WRAPPER},
    },
}  # fmt: skip # a table
"""package → file → function, or class with its methods; `plan` of decoding passes its keywords on to `_plan_impl`"""
VERSIONS = {
    "flash_attn": "flash_attn/__init__.py",
    "flash_attn_interface": "hopper/__init__.py",
    "flashinfer": "flashinfer/_build_meta.py",
}


def signature(package: str, name: str) -> inspect.Signature:
    """Return the recorded signature of a function or `CLASS.METHOD`."""
    parameters: str = json.loads(RECORDED.read_text())[package]["signatures"][name]
    return inspect.signature(eval(f"lambda {parameters}: None"))


def record(folders: dict[str, Path]) -> dict[str, Any]:
    return {package: _package(package, folder) for package, folder in folders.items()}


def _package(package: str, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for file, wanted in SOURCES[package].items():
        for node in ast.parse((folder / file).read_text()).body:
            for name, methods in wanted.items():
                if getattr(node, "name", "") != name:
                    continue
                if isinstance(node, ast.FunctionDef):
                    found[name] = _parameters(node)
                elif isinstance(node, ast.ClassDef):
                    of_class = {f.name: f for f in node.body if isinstance(f, ast.FunctionDef)}  # the last overload
                    for method in methods:
                        found[f"{name}.{method.replace('_plan_impl', 'plan')}"] = _parameters(of_class[method])
    version = re.search(r'__version__ = "(.+)"', (folder / VERSIONS[package]).read_text())
    assert version
    return {"version": version[1], "signatures": found}


def _parameters(function: ast.FunctionDef) -> str:
    """Return the parameters, with None in place of each default."""
    given = function.args
    for each in (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg):
        if each:
            each.annotation = None
    given.defaults = [ast.Constant(None) for _ in given.defaults]
    given.kw_defaults = [default and ast.Constant(None) for default in given.kw_defaults]
    return ast.unparse(given)


if __name__ == "__main__":
    flash_attn, flashinfer = map(Path, sys.argv[1:])
    made = record({"flash_attn": flash_attn, "flash_attn_interface": flash_attn, "flashinfer": flashinfer})
    RECORDED.write_text(json.dumps(made, indent=1) + "\n")
