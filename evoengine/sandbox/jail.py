"""Run the tools and the code of a proposed kernel isolated from the user's files, processes and network.

bubblewrap (bwrap) starts the process in namespaces of its own: no network, no other processes, and of the file system
only the system's programs and the given paths, read-only. The proposal's own code cannot start processes (seccomp).
"""

from __future__ import annotations

import os
import platform
import struct
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from evoengine.errors import MachineError
from evoengine.paths import package_folder

MARK = "// Proposed text: evoengine runs it in a jail.\n#line 1\n"
"""beginning of a text that a proposer wrote; with the text it goes into ledgers, exports and records"""
_LIMITS = ("--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL")
_SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/etc/alternatives", "/etc/ld.so.cache")
_REMEDY = "install bubblewrap (apt install bubblewrap), and allow it user namespaces"
_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LC_ALL": "C", "HOME": "/tmp"}
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""machine → AUDIT_ARCH_* in seccomp_data (linux/audit.h)"""
_STARTS = {"x86_64": (56, 57, 58), "aarch64": (220,)}
"""numbers of clone, fork and vfork"""
_CLONE3 = 435
_X32 = 0x40000000
"""__X32_SYSCALL_BIT in the number of a call of the x32 ABI"""
_inside: list[bool] = []
"""not empty in a process that is in a jail"""


def enter() -> None:
    """Note that this process is in a jail and needs no other."""
    _inside.append(True)


def needs_jail(text: str) -> bool:
    """Return whether a process must enter a jail before it handles this text or its machine code."""
    return text.startswith(MARK) and not _inside


def jailed(
    command: Sequence[str],
    readable: Iterable[Path] = (),
    writable: Iterable[Path] = (),
    environment: Mapping[str, str] | None = None,
    seccomp: int | None = None,
) -> list[str]:
    """Return the command that runs `command` in a jail, with its standard streams and limits.

    It may read the system's programs and the paths `readable`, write to the folders `writable` and a /tmp of its own,
    and dies with its parent. If a signal ends the child, the exit code is 128 plus the signal's number. `seccomp` is
    the descriptor of a filter for its system calls.
    """
    others = [path for path in readable if not path.is_relative_to("/usr")]
    paths = [*_pairs("--ro-bind-try", _SYSTEM), *_pairs("--ro-bind", others), *_pairs("--bind", writable)]
    own = ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
    variables = {**_ENVIRONMENT, **(environment or {})}
    set_all = [word for name, value in variables.items() for word in ("--setenv", name, value)]
    filtered = [] if seccomp is None else ["--seccomp", str(seccomp)]
    return ["bwrap", *_LIMITS, *filtered, "--clearenv", *set_all, *own, *paths, "--chdir", "/tmp", "--", *command]


def jailed_python(
    arguments: Sequence[str], readable: Iterable[Path] = (), environment: Mapping[str, str] | None = None
) -> list[str]:
    """Return the command that runs this Python, with evoengine and the packages it has, in a jail."""
    own = (Path(sys.prefix), Path(sys.base_prefix), package_folder())
    return jailed([sys.executable, "-I", *arguments], [*own, *readable], environment=environment)


@contextmanager
def no_new_processes() -> Iterator[int]:
    """Yield a descriptor of the filter by which a process can start neither a process nor a thread."""
    with os.fdopen(os.memfd_create("seccomp"), "wb") as file:
        file.write(_filter(platform.machine()))
        file.flush()
        file.seek(0)
        yield file.fileno()


def _filter(machine: str) -> bytes:
    """Return the program in classic BPF (seccomp(2)): calls that start processes fail with EPERM, clone3 with ENOSYS.

    A call by the convention of another machine, such as that of 32 bits, fails with EPERM.
    """
    load, equal, any_bit, answer = 0x20, 0x15, 0x45, 0x06
    allow, no_permission, no_such_call = 0x7FFF0000, 0x00050001, 0x00050026
    refused = [(equal, number, "no_permission") for number in _STARTS[machine]]
    tests = [(any_bit, _X32, "no_permission"), *refused, (equal, _CLONE3, "no_such_call")]
    answers = {"allow": allow, "no_permission": no_permission, "no_such_call": no_such_call}
    at = {name: 3 + len(tests) + n for n, name in enumerate(answers)}
    program = [(load, 0, 0, 4), (equal, 0, at["no_permission"] - 2, _AUDIT_ARCH[machine]), (load, 0, 0, 0)]
    program += [(code, at[to] - (3 + n) - 1, 0, k) for n, (code, k, to) in enumerate(tests)]
    program += [(answer, 0, 0, value) for value in answers.values()]
    return b"".join(struct.pack("=HBBI", *each) for each in program)


def proposer(command: Sequence[str], folder: Path) -> list[str]:
    """Return the command that runs a proposer in the current folder, with $TMPDIR set to `folder`.

    It has network access and may read all files. It may write only to `folder`, and sees no processes but its own.
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
    """Return why this machine cannot run a jail, with the remedy; None if it can."""
    if platform.machine() not in _AUDIT_ARCH:
        return f"{platform.machine()} is not supported, only {' and '.join(_AUDIT_ARCH)}"
    try:
        done = subprocess.run(jailed(["true"]), capture_output=True, encoding="utf-8", errors="replace", check=False)
    except OSError as error:
        return f"bwrap cannot be started ({error.strerror}): {_REMEDY}"
    if done.returncode == 0:
        return None
    said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    return f"bwrap fails ({said[-1]}): {_REMEDY}"


def require_jail() -> None:
    """Raise MachineError if this machine cannot run a jail."""
    if why := why_no_jail():
        raise MachineError(f"a proposed kernel runs only in a jail, which this machine cannot provide: {why}")


def _pairs(option: str, paths: Iterable[Path | str]) -> list[str]:
    return [word for path in dict.fromkeys(map(str, paths)) for word in (option, path, path)]
