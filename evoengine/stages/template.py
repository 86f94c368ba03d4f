"""Fill a template, by Jinja2, or plain CUDA text by `#define`s. Templates run code, so a worker does it.

A template is `FAMILY.cu.j2` in the workload's folder, or `FAMILY.cu` where that is one of its own.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import jinja2

from evoengine.errors import UsageError
from evoengine.records import Launch, Value
from evoengine.stages.plain_source import defined

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
        raise UsageError(f"{error.filename or error.name}:{error.lineno}: {error.message}") from None
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
