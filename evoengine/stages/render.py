"""Render a configuration to CUDA text: the family's template, filled with its knobs and the problem's constants.

A template is in the workload's folder, `templates/NAME` unless it has one of its own. Includes are searched there, in
the templates folder and in its `include/`.
"""

from __future__ import annotations

import difflib
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, Protocol

import jinja2

from evoengine.errors import UsageError
from evoengine.records import Config, Launch, Source, Value
from evoengine.sandbox.untrusted import read_limited_text
from evoengine.text import plain
from evoengine.workloads.base import Problem, Target

INCLUDE = "include"
MOST_BYTES = 1 << 20
"""size limit of a kernel's text; those of this package have a tenth of it"""
MESSAGE_CHARS = 500
"""of an error in a template, as a candidate's reason states it"""


class Folders(NamedTuple):
    """The folders of templates: a workload's own, and the one that all share."""

    own: Path
    shared: Path


class Template(NamedTuple):
    """A template and its values."""

    folders: Folders
    family: str
    values: Mapping[str, Value]
    """the problem's compile-time names and the knobs"""
    launch: Launch

    @property
    def name(self) -> str:
        return f"{self.family}.cu.j2"


def fill(template: Template) -> str:
    """Render the kernel's text.

    Raises UsageError naming file and line if a template is missing or at fault, or if the text exceeds MOST_BYTES;
    OSError if a file cannot be read.
    """
    plain = template.folders.own / f"{template.family}.cu"
    if not plain.is_file():
        return _fill(template)
    _refuse_both(plain)
    _require_small(plain.stat().st_size, plain)
    text = defined(plain, {name: value for name, value in template.values.items() if name != "family"})
    _require_small(len(text), plain)
    return text


def _refuse_both(plain: Path) -> None:
    template = plain.with_name(f"{plain.name}.j2")
    if template.is_file():
        raise UsageError(f"there are both {plain} and {template.name}, and either could be meant; remove one")


@lru_cache(maxsize=8)
def _environment(folders: Folders) -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader([*folders, folders.shared / INCLUDE]),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def _fill(template: Template) -> str:
    folders, name = template.folders, template.name
    context = {**template.values, "threads": template.launch.threads, "shared_bytes": template.launch.shared_bytes}
    try:
        pieces = _environment(folders).get_template(name).generate(context)
        return "".join(_while_small(pieces, folders.own / name))
    except jinja2.TemplateNotFound as error:
        raise UsageError(_missing(folders, name, error)) from None
    except jinja2.TemplateSyntaxError as error:
        hint = "Jinja reads what {%, {{ or {# begins: put a space after such a brace in CUDA text"
        raise UsageError(f"{error.filename or error.name}:{error.lineno}: {error.message}; {hint}") from None
    except (MemoryError, OSError, UsageError):
        raise
    except Exception as error:  # whatever an expression can raise, from an unknown name to a division by zero
        place = _place(folders, error)
        if place is None:
            raise
        known = ", ".join(sorted(context))
        hint = f"; a template here may use {known}" if isinstance(error, jinja2.UndefinedError) else ""
        raise UsageError(f"{place}: {_short(error)}{hint}") from None


def _while_small(pieces: Iterable[str], template: Path) -> Iterator[str]:
    size = 0
    for piece in pieces:
        size += len(piece)
        _require_small(size, template)
        yield piece


def _require_small(size: int, template: Path) -> None:
    if size > MOST_BYTES:
        raise UsageError(f"the kernel of {template} is larger than {MOST_BYTES >> 20} MiB; no kernel needs to be")


def _short(error: Exception) -> str:
    """Shorten an error message, which a template can make arbitrarily long."""
    said = str(error)
    return said if len(said) <= MESSAGE_CHARS else f"{said[:MESSAGE_CHARS]} …"


def _missing(folders: Folders, name: str, error: jinja2.TemplateNotFound) -> str:
    own = folders.own
    if error.name == name:
        found = sorted(p.name.partition(".")[0] for p in (*own.glob("*.cu.j2"), *own.glob("*.cu")))
        listed = f"families with one are {', '.join(found)}" if found else f"there are none in {own}"
        return f"there is no template {own / name}; {listed}"
    place = _place(folders, error) or own / name
    near = difflib.get_close_matches(str(error.name), _environment(folders).list_templates(), n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"{place}: no template {error.name} in {folders.shared} or its folder {INCLUDE}{hint}"


def _place(folders: Folders, error: Exception) -> str | None:
    """Return file and line of the innermost template in the error's traceback, which Jinja2 rewrites to name them."""
    place, trace = None, error.__traceback__
    while trace:
        file = Path(trace.tb_frame.f_code.co_filename)
        if any(file.is_relative_to(folder) for folder in folders):
            place = f"{file}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place


# A kernel as plain CUDA text with `#define` knobs: without a template language, it also compiles by itself.

_COMMENT_OR_LITERAL = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.DOTALL)


def defined(path: Path, values: Mapping[str, Value]) -> str:
    """Return the file's text after a `#define` for every value whose name it uses.

    Its own definitions of those names are removed. Lines keep their numbers by `#line`. A name that occurs only in
    comments gets no definition, so that equal kernels have equal text. Raises UsageError if the file cannot be read, or
    if a value is not a single line.
    """
    try:
        text = read_limited_text(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read as text: {error}") from None
    text = _with_own_headers(text, path.parent)
    used = set(re.findall(r"[A-Za-z_]\w*", _COMMENT_OR_LITERAL.sub(" ", text)))
    values = {name: value for name, value in values.items() if name in used}
    lines = "".join(f"#define {name} {_spelled(path, name, value)}\n" for name, value in values.items())
    return f"{lines}#line 1\n{without_own(text, values)}"


_OWN_HEADER = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"[^\n]*', re.MULTILINE)
MOST_HEADERS = 256


def _with_own_headers(text: str, folder: Path) -> str:
    """Put each file of the folder that the text includes by `"NAME"` in its place, the first time that it is included.

    What lies elsewhere stays an include. Raises UsageError if a file cannot be read.
    """
    root, seen = folder.resolve(), set[Path]()

    def put(found: re.Match[str], beside: Path) -> str:
        path = next((p for p in ((base / found[1]).resolve() for base in (beside, root)) if p.is_file()), None)
        if path is None or not path.is_relative_to(root):
            return found[0]
        if path in seen:
            return ""
        seen.add(path)
        if len(seen) > MOST_HEADERS:
            raise UsageError(f"the kernel in {folder} includes more than {MOST_HEADERS} files of its folder")
        try:
            own = read_limited_text(path)
        except (OSError, ValueError) as error:
            raise UsageError(f"{path} cannot be read as text: {error}") from None
        own = re.sub(r"^[ \t]*#[ \t]*pragma[ \t]+once[^\n]*", "", own, flags=re.MULTILINE)
        return _OWN_HEADER.sub(lambda inner: put(inner, path.parent), own)

    return _OWN_HEADER.sub(lambda found: put(found, root), text)


def _spelled(path: Path, name: str, value: Value) -> str:
    if isinstance(value, bool):
        return str(int(value))
    spelled = str(value)
    if re.search(r"[\r\n\\]", spelled):
        raise UsageError(
            f"the knob {name} of {path} has the value {spelled!r}; a #define takes a single line without \\"
        )
    return spelled


def without_own(text: str, values: Iterable[str]) -> str:
    """Blank `#define NAME …` and `#undef NAME`, also under conditions: the search decides the value."""
    names = "|".join(map(re.escape, values))
    if not names:
        return text
    own = re.compile(
        rf"^[ \t]*#[ \t]*(?:define|undef)[ \t]+(?:{names})\b(?!\()(?:[^\n\\]|\\.)*", re.MULTILINE | re.DOTALL
    )
    return own.sub(lambda match: "\n" * match[0].count("\n"), text)


Fill = Callable[[Template], str]
"""`fill`, or a function that runs it in a worker"""
INERT_SECONDS = 20.0
"""time limit of the search for inert knobs, which are only a hint"""


class Space(Protocol):
    """The part of a search space that rendering uses."""

    def launch(self, config: Config, problem: Problem) -> Launch: ...

    def neighbours(self, config: Config) -> list[dict[str, Value]]: ...


def render(target: Target, space: Space, config: Config, templates: Path, fill: Fill = fill) -> Source:
    """Render the kernel of a configuration as self-contained text, with its launch for the target's problem.

    A template sees the knobs by name, the problem's compile-time names, and `threads` and `shared_bytes` of the launch.
    Raises UsageError naming file and line if a template is missing or at fault.
    """
    workload, problem = target.workload, target.problem
    launch = space.launch(config, problem)
    if (own := workload.source_text(problem, config, target.gpu)) is not None:
        return Source(own, workload.entry, launch)
    constants = workload.constants(problem)
    folders = Folders(workload.templates() or templates / workload.name, templates)
    header = _header(workload.name, config, constants)
    text = fill(Template(folders, str(config["family"]), {**constants, **config}, launch))
    if workload.templates():
        header += _launch_line(launch)
    return Source(header + text, workload.entry, launch)


def inert_knobs(
    target: Target, space: Space, configs: Iterable[Config], templates: Path, fill: Fill = fill
) -> tuple[str, ...]:
    """Return the knobs that never change the text, from any of `configs` to any of its neighbours in the space.

    A knob that no neighbour changes alone is not reported, since nothing is known of it. Nor is any if a template fails
    or exceeds its time; the search reports that.
    """
    moved: set[str] = set()
    live: set[str] = set()
    end = time.monotonic() + INERT_SECONDS
    for config in configs:
        text = None
        for other in space.neighbours(config):
            changed = [k for k in config.keys() | other.keys() if config.get(k) != other.get(k)]
            if len(changed) != 1 or changed[0] in live:
                continue
            if time.monotonic() > end:
                return ()
            try:
                text = text or render(target, space, config, templates, fill).text
                differs = render(target, space, other, templates, fill).text != text
            except UsageError:
                return ()
            moved.add(changed[0])
            if differs:
                live.add(changed[0])
    return tuple(sorted(moved - live))


def _header(kernel: str, config: Config, constants: Mapping[str, Value]) -> str:
    """Return a comment with the family and the problem.

    It omits the other knobs, so that equal kernels have equal text.
    """
    problem = ", ".join(f"{name} {value}" for name, value in constants.items())
    named = plain(f"{kernel}, family {config['family']}: {problem}")
    return f"// {named}. Generated by evoengine.\n"


def _launch_line(launch: Launch) -> str:
    """Return a comment with the launch.

    Kernels with different launches differ even if their text is the same, since a knob may set only the launch.
    """
    grid, block = (" x ".join(map(str, sizes)) for sizes in (launch.grid, launch.block))
    line = f"// {grid} blocks of {block} threads, {launch.shared_bytes} bytes of dynamic shared memory.\n"
    return line + "".join(
        f"// {behind.entry}: {_launch_line(behind.launch).removeprefix('// ')}" for behind in launch.then
    )
