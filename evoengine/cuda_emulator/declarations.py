"""Declarations in CUDA C++ as the text has them: parts, kernels, `__device__` variables, and variables without a value.

What a kernel never sets must be NaN, whatever reads it: as float, as half and as bfloat16. The compiler's own fill
(-ftrivial-auto-var-init=pattern) is 0xFE, which as float is -1.7e38 and acts as minus infinity. So each local variable
without an initialiser is filled by a call behind its declaration, and an object with a constructor by its first member.
Both are ordinary C++: no folding in the compiler can make them mean anything else. What is not recognised here keeps
the compiler's fill.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from evoengine.devices.base import KernelUnbuildable

ALIGNMENT = re.compile(r"\b(?:__align__|alignas)\s*\(([^()]*(?:\([^()]*\)[^()]*)*)\)")

_COMMENT_OR_LITERAL = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.DOTALL)
_FIRST = re.compile(r"(.*?)\b([A-Za-z_]\w*)\s*((?:\[[^\]]*\]\s*)*)\Z", re.DOTALL)
_DECLARATOR = re.compile(r"\s*([A-Za-z_]\w*)\s*((?:\[[^\]]*\]\s*)*)\Z")
_NAMESPACE = re.compile(r'(?:\bnamespace(?:\s+[\w:]+)?|\bextern\s*"[^"]*")\s*\Z')
_CLASS = re.compile(r"(?:typedef\s+)?(struct|class|union|enum)\b\s*(\w*)([^()=]*)\Z", re.DOTALL)
PREPROCESSOR = re.compile(r"^[ \t]*#(?:[^\n\\]|\\.)*", re.MULTILINE | re.DOTALL)
_LABEL = re.compile(r"\s*(?:case\b[^:?]*|\w+)\s*:(?!:)")
_TYPE = re.compile(r"[A-Za-z_][\w:]*(?:\s+[A-Za-z_][\w:]*)*\Z")
_NO_TYPE = frozenset(
    "return goto using typedef delete new throw case do else const constexpr constinit static extern friend template "
    "thread_local enum namespace operator auto void __shared__ __constant__".split()
)
_ELABORATED = frozenset({"struct", "class", "union", "typename", "volatile", "register"})


class Insertion(NamedTuple):
    position: int
    text: str


class _Scope(NamedTuple):
    kind: str  # "namespace", "class" or "block"
    name: str  # of a class that may have a constructor
    start: int
    depth: int  # of round brackets that are open around it


def blank_comments(text: str) -> str:
    """Return the text with comments blanked, every character in its place."""

    def blank(match: re.Match[str]) -> str:
        return match[0] if match[0][0] in "\"'" else re.sub(r"[^\n]", " ", match[0])

    return _COMMENT_OR_LITERAL.sub(blank, text)


def mask(text: str) -> str:
    """Return the text with what stands in comments and literals blanked, every character in its place."""

    def blank(match: re.Match[str]) -> str:
        found = match[0]
        inside = re.sub(r"[^\n]", " ", found)
        return found[0] + inside[1:-1] + found[-1] if found[0] in "\"'" else inside

    return _COMMENT_OR_LITERAL.sub(blank, text)


def split_declarators(declaration: str) -> list[str]:
    """Split a declaration at commas outside all brackets, including those of template arguments."""
    parts, depth, start = [], 0, 0
    for i, c in enumerate(declaration):
        depth += (c in "([<") - (c in ")]>")
        if c == "," and depth == 0:
            parts.append(declaration[start:i])
            start = i + 1
    return [*parts, declaration[start:]]


def read_declarators(declaration: str) -> tuple[str, list[tuple[str, str]]] | None:
    """Parse `float a[2][3], b` to `float` and [(a, [2][3]), (b, "")]; return None if it has another form."""
    parts = split_declarators(declaration)
    first = _FIRST.match(parts[0])
    if not first or not first[1].strip():
        return None
    found = [(first[2], first[3])]
    for part in parts[1:]:
        more = _DECLARATOR.match(part)
        if not more:
            return None
        found.append((more[1], more[2]))
    return " ".join(first[1].split()), [(name, " ".join(dims.split())) for name, dims in found]


def is_namespace_head(text: str) -> bool:
    """Return whether the brace after this text opens a namespace or a linkage specification."""
    return _NAMESPACE.search(text) is not None


def poison_insertions(masked: str) -> list[Insertion]:
    """Return insertions that initialise variables and members without a value to NaN.

    Literals and comments are blank in `masked`.
    """
    code = PREPROCESSOR.sub(lambda m: re.sub(r"[^\n]", " ", m[0]), masked)
    return [*_local_variables(code), *_objects_with_constructors(code)]


def _local_variables(code: str) -> Iterator[Insertion]:
    for statement, end, scopes in _statements(code):
        if scopes and scopes[-1].kind == "block" and code[end - 1] == ";" and (names := _without_value(statement)):
            yield Insertion(end, f" evo_emu::poison({', '.join(names)});")


def _objects_with_constructors(code: str) -> Iterator[Insertion]:
    for _, end, scopes in _statements(code):
        if code[end - 1] != "}" or not scopes or not scopes[-1].name:
            continue
        scope = scopes[-1]
        if _has_constructor(code[scope.start + 1 : end - 1], scope.name):
            member = f"evo_emu::Poison<{scope.name}> evo_emu_poison"
            yield Insertion(scope.start + 1, f" [[no_unique_address]] {member}{{this}};")


def _statements(code: str) -> Iterator[tuple[str, int, list[_Scope]]]:
    """Yield each statement's text, end and enclosing scopes.

    A statement ends at a `;` outside round brackets, or at a closing brace.
    """
    scopes: list[_Scope] = []
    start = depth = 0
    for mark in re.finditer(r"[;{}()]", code):
        if mark[0] in "()":
            depth += 1 if mark[0] == "(" else -1
            continue
        text = code[start : mark.start()]
        if mark[0] == "{":
            scopes.append(_scope(text, mark.start(), depth))
            depth = 0
        elif mark[0] == "}":
            yield text, mark.end(), scopes
            depth = scopes.pop().depth if scopes else 0
        elif depth == 0:
            yield text, mark.end(), scopes
        start = mark.end()


def _scope(head: str, start: int, depth: int) -> _Scope:
    if is_namespace_head(head):
        return _Scope("namespace", "", start, depth)
    plain = _without_template_arguments(ALIGNMENT.sub(" ", head))
    found = _CLASS.match(re.sub(r"\b(?:template|__shared__)\b", " ", plain).strip())
    if not found:
        return _Scope("block", "", start, depth)
    derived = ":" in found[3]  # its base is there before its first member
    return _Scope("class", found[2] if found[1] in ("struct", "class") and not derived else "", start, depth)


def _without_template_arguments(text: str) -> str:
    previous = ""
    while text != previous:
        previous, text = text, re.sub(r"<[^<>;]*>(?:\s*(::))?", r" \1", text).replace(" ::", "::")
    return text


def _without_value(statement: str) -> list[str]:
    """Return the variables that a statement in a function declares without a value."""
    if label := _LABEL.match(statement):
        statement = statement[label.end() :]
    parts = split_declarators(statement)
    bare = [part.split("=")[0] for part in parts]
    found = read_declarators(",".join(bare))
    if not found:
        return []
    words = _without_template_arguments(ALIGNMENT.sub(" ", found[0])).split()
    if not _TYPE.match(" ".join(words)) or _NO_TYPE.intersection(words) or _ELABORATED.issuperset(words):
        return []
    return [name for (name, _), part in zip(found[1], parts, strict=True) if "=" not in part]


def _has_constructor(body: str, name: str) -> bool:
    """Return whether a class has a constructor with a body, other than `= default`."""
    previous = ""
    while body != previous:
        previous, body = body, re.sub(r"\{[^{}]*\}", "@", body)
    return re.search(rf"(?<![\w~.:=>])\s*\b{name}\s*\([^;@]*\)\s*(?:noexcept\s*)?(?:@|:(?!:))", body) is not None


_WORD_AND_BRACKET = re.compile(r"(\w+)\s*\(")
_ATTRIBUTES = frozenset(
    "__launch_bounds__ __cluster_dims__ __maxnreg__ __block_size__ __attribute__ __align__ alignas __declspec".split()
)
_BOUNDARY = re.compile(r'[;{}]|\bextern\s*"[^"]*"\s*\{')
_TEMPLATE = re.compile(r"\btemplate\s*<")
_LAUNCH_BOUNDS = re.compile(r"\b__launch_bounds__\s*\(")
_CLUSTER = re.compile(r"\b__cluster_dims__\s*\(([^()]*)\)")

_DEVICE_VARIABLE = re.compile(r"\b__device__\b([^;{}()]*)([;={])")
_CONSTANT = re.compile(r"\b(?:const|constexpr|__constant__|extern)\b")

_SHARES_MEMORY = re.compile(
    r"\batomic\w*|\b__threadfence\w*|\b__nv_atomic\w*|\bcuda\s*::\s*(?:std\s*::\s*)?atomic|"
    r"\bvolatile\b|\b__nanosleep\b|\bmap_shared_rank\b|\b__cvta_shared_to_generic\b"
)
_ASM_QUALIFIER = re.compile(r"\b(?:asm|__asm__|__asm)\b\s*(?:volatile|__volatile__)\b")
_SHARES_MEMORY_IN_PTX = re.compile(
    r"\b(?:atom|red|membar|multimem)\.|\bmapa\.u64\b|\bfence\.(?:sc|acq_rel|acquire|release)\b|"
    r"\b(?:ld|st)\.[\w.:]*\b(?:relaxed|acquire|release|volatile|mmio)\b"
)
_LITERAL = re.compile(r'"(?:\\.|[^"\\\n])*"')


class KernelDefinition(NamedTuple):
    """A `__global__` function with its body; positions are in the text."""

    name: str
    least_blocks: str
    """blocks per multiprocessor that `__launch_bounds__` asks for, in the text's own words; "1" where it does not"""
    cluster: int
    """blocks of a cluster, along x"""
    body: int
    end: int
    """behind the closing brace"""


class DeviceVariables(NamedTuple):
    """Variables of one declaration that kernels may write."""

    names: list[str]
    end: int
    """behind its semicolon"""


def find_kernels(masked: str) -> list[KernelDefinition]:
    """Return the kernels of a text in order. Literals and comments are blank in `masked`.

    Templates and definitions inside macros are ignored. Raises KernelUnbuildable for a cluster that the emulator cannot
    run.
    """
    code = _without_directives(masked)
    return [found for mark in re.finditer(r"\b__global__\b", code) if (found := _definition(code, mark.start()))]


def find_device_variables(masked: str) -> list[DeviceVariables]:
    """Return the declarations of non-constant `__device__` variables in order."""
    code = _without_directives(masked)
    plain = ALIGNMENT.sub(lambda m: " " * len(m[0]), code)
    found = []
    for match in _DEVICE_VARIABLE.finditer(plain):
        start = max((m.end() for m in _BOUNDARY.finditer(plain, 0, match.start())), default=0)
        declared = read_declarators(",".join(part.split("=")[0] for part in split_declarators(match[1])))
        if not declared or _CONSTANT.search(plain, start, match.end(1)):
            continue
        end = match.end()
        while match[2] != ";" and end < len(plain) and plain[end - 1] != ";":
            end = closing_bracket(plain, end) + 1 if plain[end] in "([{" else end + 1
        found.append(DeviceVariables([name for name, _ in declared[1]], end))
    return found


def _without_directives(masked: str) -> str:
    return PREPROCESSOR.sub(lambda m: re.sub(r"[^\n]", " ", m[0]), masked)


def shares_memory(text: str) -> bool:
    """Return whether blocks of the text's kernels may communicate by what only checked kernels show.

    They may by atomics, fences, volatile or strong accesses, pointers to another block's shared memory, device
    variables, or from kernel to kernel.
    """
    masked = mask(text)
    if len(find_kernels(masked)) > 1 or find_device_variables(masked):
        return True
    if _SHARES_MEMORY.search(_ASM_QUALIFIER.sub("asm", masked)):
        return True
    return any(_SHARES_MEMORY_IN_PTX.search(literal[0]) for literal in _LITERAL.finditer(blank_comments(text)))


def _definition(code: str, at: int) -> KernelDefinition | None:
    start = max((m.end() for m in _BOUNDARY.finditer(code, 0, at)), default=0)
    if _TEMPLATE.search(code, start, at):
        return None
    for name, opening in _calls(code, at):
        if name in _ATTRIBUTES:
            continue
        behind = re.compile(r"\s*\{").match(code, closing_bracket(code, opening) + 1)
        if not behind:
            return None
        declaration = code[start:opening]
        body = behind.end() - 1
        return KernelDefinition(
            name, _least_blocks(declaration), _cluster(code, declaration, start), body, closing_bracket(code, body) + 1
        )
    return None


def _calls(code: str, at: int) -> Iterator[tuple[str, int]]:
    """Name and opening bracket of whatever looks like a call from there on, at the outermost level."""
    while (match := _WORD_AND_BRACKET.search(code, at)) and not _BOUNDARY.search(code, at, match.start()):
        yield match[1], match.end() - 1
        at = closing_bracket(code, match.end() - 1) + 1


def _least_blocks(declaration: str) -> str:
    match = _LAUNCH_BOUNDS.search(declaration)
    if not match:
        return "1"
    bounds = split_declarators(declaration[match.end() : closing_bracket(declaration, match.end() - 1)])
    return f"({' '.join(bounds[1].split())})" if len(bounds) > 1 else "1"


def _cluster(code: str, declaration: str, start: int) -> int:
    match = _CLUSTER.search(declaration)
    if not match:
        return 1
    x, *others = (part.strip() for part in match[1].split(","))
    if not x.isdigit() or any(other != "1" for other in others):
        line = code.count("\n", 0, start + match.start()) + 1
        raise KernelUnbuildable(
            f"line {line}: __cluster_dims__({match[1]}), where the emulator requires (number, 1, 1)"
        )
    return int(x)


def closing_bracket(masked: str, opening: int) -> int:
    """Return the position of the bracket that closes the one at `opening`. Raises KernelUnbuildable if none does."""
    depth = 0
    for i in range(opening, len(masked)):
        depth += (masked[i] in "([{") - (masked[i] in ")]}")
        if depth == 0:
            return i
    line = masked.count("\n", 0, opening) + 1
    raise KernelUnbuildable(f"line {line}: a bracket that is never closed")
