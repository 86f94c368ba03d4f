"""Run the tools and the code of a proposed kernel where they can neither read nor reach anything of the user's.

bubblewrap (bwrap) starts the process in namespaces of its own: no network, no other processes, and of the file system
only the system's programs and the given paths, read-only.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

from evoengine.errors import MachineError
from evoengine.paths import package_folder

MARK = "// Proposed text: evoengine runs it in a jail.\n#line 1\n"
"""beginning of a text that a proposer wrote; with the text it goes into ledgers, exports and records"""
_LIMITS = ("--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL")
_SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/etc/alternatives", "/etc/ld.so.cache")
_REMEDY = "install bubblewrap (apt install bubblewrap), and allow it user namespaces"


def needs_jail(text: str) -> bool:
    """Return whether the text of a kernel must be compiled and run in a jail."""
    return text.startswith(MARK)


def jailed(command: Sequence[str], readable: Iterable[Path] = (), writable: Iterable[Path] = ()) -> list[str]:
    """Return the command that runs `command` in a jail, with its standard streams and limits.

    It reads the system's programs and the paths `readable`, writes into the folders `writable` and a /tmp of its own,
    and dies with its parent. A child that a signal ends makes it exit with 128 and the signal's number.
    """
    others = [path for path in readable if not path.is_relative_to("/usr")]
    paths = [*_pairs("--ro-bind-try", _SYSTEM), *_pairs("--ro-bind", others), *_pairs("--bind", writable)]
    own = ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
    environment = ["--clearenv", "--setenv", "PATH", "/usr/bin:/bin", "--setenv", "LC_ALL", "C"]
    return ["bwrap", *_LIMITS, *environment, *own, *paths, "--chdir", "/tmp", "--", *command]


def jailed_python(arguments: Sequence[str], readable: Iterable[Path] = ()) -> list[str]:
    """Return the command that runs this Python, with evoengine and the packages it has, in a jail."""
    own = (Path(sys.prefix), Path(sys.base_prefix), package_folder())
    return jailed([sys.executable, "-I", *arguments], [*own, *readable])


def proposer(command: Sequence[str], folder: Path) -> list[str]:
    """Return the command that runs a proposer in the current folder, with $TMPDIR set to `folder`.

    It reaches the network and reads all files. It writes into `folder` only, and sees no process but its own.
    """
    paths = ["--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "--bind", *(str(folder),) * 2]
    return [
        "bwrap",
        *_LIMITS,
        "--share-net",
        *paths,
        "--setenv",
        "TMPDIR",
        str(folder),
        "--chdir",
        os.getcwd(),
        "--",
        *command,
    ]


def end_of(code: int) -> int:
    """Return the exit code of the process in the jail, negative for a signal, from that of the jail."""
    return 128 - code if code > 128 else code


@cache
def why_no_jail() -> str | None:
    """Return why this machine cannot run a jail, with the remedy; None where it can."""
    try:
        done = subprocess.run(jailed(["true"]), capture_output=True, encoding="utf-8", errors="replace", check=False)
    except OSError as error:
        return f"bwrap cannot be started ({error.strerror}): {_REMEDY}"
    if done.returncode == 0:
        return None
    said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    return f"bwrap fails ({said[-1]}): {_REMEDY}"


def require_jail() -> None:
    """Raise MachineError where this machine cannot run a jail."""
    if why := why_no_jail():
        raise MachineError(f"a proposed kernel runs in a jail only, and there is none: {why}")


def _pairs(option: str, paths: Iterable[Path | str]) -> list[str]:
    return [word for path in dict.fromkeys(map(str, paths)) for word in (option, path, path)]
