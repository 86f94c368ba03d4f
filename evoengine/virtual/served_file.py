"""Take a kernel of vLLM or SGLang out of its file, with the functions that launch it.

The file is parsed, and not executed: it imports the whole of its framework. It stays where it is, and the kernel's text
goes into the ledger as that of any other kernel of a user's.
"""

from __future__ import annotations

import ast
from importlib.resources import files

from evoengine.errors import UsageError
from evoengine.virtual.gate import MOST_DRAWN
from evoengine.workloads.base import Host
from evoengine.workloads.triton_kernel import CLASSES, Served, with_text

FRAMEWORKS = ("vllm", "sglang")


def with_functions(host: Host) -> Host:
    """Return a file with the kernel alone, an autotuner around it, `call` and `reference`.

    Raises UsageError where the file is no text of Python, has no such kernel, or is of no framework that is known.
    """
    try:
        tree = ast.parse(host.text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UsageError(f"{host.file} is no text of Python: {error}") from None
    kernel = _extracted(host, tree)
    framework = _framework(host, tree)
    served = Served(framework, host.kernel, host.call)
    functions = files(__package__).joinpath("served.py").read_text("utf-8").replace(FUTURE, "")
    arguments = f"{host.kernel}, {framework!r}, {host.call!r}, {MOST_DRAWN}"
    return with_text(
        host,
        served,
        f"{kernel}\n\n{functions}\n\n_served = {CLASSES[host.kernel]}({arguments})\n"
        f"{host.kernel}, call, reference = _served.tuned, _served.call, _served.reference\n",
    )


FUTURE = "from __future__ import annotations\n"
IMPORTS = "import triton\nimport triton.language as tl\n"


def _extracted(host: Host, tree: ast.Module) -> str:
    """Return the text of the kernel and of what it names in its own file."""
    defined = {name: node for node in tree.body for name in _names_of(node)}
    if not isinstance(defined.get(host.kernel), ast.FunctionDef):
        raise UsageError(f"{host.file} has no kernel {host.kernel}")
    wanted, open_ = set[str](), [host.kernel]
    while open_:
        name = open_.pop()
        if name in wanted or name not in defined:
            continue
        wanted.add(name)
        open_ += [node.id for node in ast.walk(defined[name]) if isinstance(node, ast.Name)]
    nodes = {id(defined[name]): defined[name] for name in wanted}
    lines = host.text.splitlines()
    texts = ["\n".join(lines[_first_line(node) - 1 : node.end_lineno]) for node in tree.body if id(node) in nodes]
    return IMPORTS + "\n\n" + "\n\n\n".join(texts)


def _names_of(node: ast.stmt) -> list[str]:
    """Return the names that a function or a constant at the top of a file defines."""
    if isinstance(node, ast.FunctionDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _first_line(node: ast.stmt) -> int:
    decorators = node.decorator_list if isinstance(node, ast.FunctionDef) else []
    return min([node.lineno, *(each.lineno for each in decorators)])


def _framework(host: Host, tree: ast.Module) -> str:
    """Return the framework that the file's imports name."""
    for node in ast.walk(tree):
        names = [node.module] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for name in names:
            if name and name.partition(".")[0] in FRAMEWORKS:
                return name.partition(".")[0]
    raise UsageError(f"{host.file} imports neither vllm nor sglang: nothing says whose {host.kernel} it is")
