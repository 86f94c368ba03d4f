"""README.md, CONTRIBUTING.md, docs/ and the notes of benchmarks/: their code blocks, the commands they name, and a way
to run their shell blocks.

A block fenced as `sh` is run, unless the comment `<!-- not run: REASON -->` stands on the line before it.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
NOTES = [ROOT / "benchmarks" / "NOTES.md", *sorted((ROOT / "benchmarks" / "notes").glob("*.md"))]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")), *NOTES]
SECONDS = 300
_FENCE = re.compile(r"^(?:<!-- not run: ([^\n]+) -->\n)?```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"(?<!`)`(evoengine [a-z-][^`]*)`(?!`)")
_INDENTED = re.compile(r"^    (evoengine [a-z-].*)$", re.MULTILINE)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_COMMENT = re.compile(r"(?:^|(?<=\s))#.*$", re.MULTILINE)
_END_OF_COMMAND = {"&&", "||", "|", ";", ">", "·", "\n"}


@dataclass(frozen=True)
class Block:
    place: str
    """file and line, for people"""
    language: str
    text: str
    why_not_run: str | None = None


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(f"{page.name}:{text.count(chr(10), 0, found.start()) + 1}", found[2], found[3], found[1])
        for found in _FENCE.finditer(text)
    ]


def shell_blocks(page: Path) -> list[Block]:
    """Those that are to be run."""
    return [block for block in blocks(page) if block.language in ("sh", "console") and not block.why_not_run]


def named_commands(page: Path) -> Iterator[list[str]]:
    """The words behind `evoengine` of every command line that a page names, in blocks, spans and indented text."""
    text = page.read_text()
    scripts = [block.text for block in blocks(page) if block.language in ("sh", "console")]
    scripts += [found[1] for pattern in (_SPAN, _INDENTED) for found in pattern.finditer(text)]
    for script in scripts:
        words = _words(script)
        for i, word in enumerate(words):
            if word == "evoengine" and words[i + 1 :]:
                end = next((n for n in range(i, len(words)) if words[n] in _END_OF_COMMAND), len(words))
                yield words[i + 1 : end]


def _words(script: str) -> list[str]:
    """A script's words as the shell has them, each end of a line among them."""
    lexer = shlex.shlex(_COMMENT.sub("", script), posix=True, punctuation_chars="|&;<>\n")
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t", True, ""
    return ["\n" if not word.strip() else word for word in lexer]


def links(page: Path) -> list[Path]:
    """The files that a page links to."""
    found = [target.partition("#")[0] for target in _LINK.findall(page.read_text())]
    return [page.parent / target for target in found if target and "://" not in target]


def missing_anchors(page: Path) -> list[str]:
    """Return the links of a page to a heading that its target, a page or this one, does not have."""
    found = []
    for target in _LINK.findall(page.read_text()):
        name, _, anchor = target.partition("#")
        other = page.parent / name if name else page
        if (
            anchor
            and "://" not in target
            and other.suffix == ".md"
            and other.is_file()
            and anchor not in _anchors(other)
        ):
            found.append(target)
    return found


def _anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and MkDocs derive them."""
    titles = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S), re.M)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).lower().strip() for title in titles)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\- ]", "", title)) for title in plain}


def run(block: Block, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs a shell block in `folder`, where `evoengine` is the documented command as `documented_command` has it."""
    programs = folder / ".programs"
    programs.mkdir(exist_ok=True)
    command = programs / "evoengine"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m tests.support.documented_command "$@"\n')
    command.chmod(0o755)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{programs}:{os.environ['PATH']}"}
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.text],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS,
    )  # fmt: skip


def run_page(page: Path, folder: Path, skip: frozenset[str] = frozenset()) -> list[str]:
    """Runs a page's shell blocks in order, but those whose text is in `skip`; gives a sentence for each that fails."""
    failed = []
    for block in shell_blocks(page):
        done = run(block, folder) if block.text not in skip else None
        if done is not None and done.returncode:
            failed.append(f"{block.place} ended with {done.returncode}: {done.stderr[-2000:]}")
    return failed
