"""Call sites × errors: every call that dispatcher, keeper, coordinator and worker pool make of the system or of the
ledger, and how each may fail.

A call that is in the code and not here fails `test_faults.py`: say what its functions of the C library are, or that
nothing of it can fail.
"""

from __future__ import annotations

import ast
import errno
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import evoengine

PACKAGE = Path(evoengine.__file__).parent
MODULES = {
    "dispatcher": "service/executors.py",
    "keeper": "sandbox/keeper.py",
    "kept_process": "sandbox/kept_process.py",
    "kept": "sandbox/kept_process.py",
    "workers": "sandbox/workers.py",
    "coordinator": "search/coordinator.py",
}
OF_INTEREST = re.compile(
    r"^(os|socket|select|shutil|signal|subprocess|tempfile|fcntl|ctypes|threading|reduction|util|resource_tracker|spawn)\."
    r"|^(open|KeptProcess|ThreadPoolExecutor|ProcessPool|_Worker|_prctl|import_module|locked_folder|sweep)$"
    r"|^self\.(_?ledger|executors|_threads|_pool|_requests|_lines|_processes|_process|_kept)\.|\bprocess\.|^guard\."
    r"|^Path\b.*\.(read|write|open|unlink|stat)"
)
"""calls, as the code writes them, that reach the system, another process or the ledger"""

OF_A_PATH = re.compile(r"^Path\(.*?\)\.(?=\w+$|\w+\()")
OF_A_TEXT = re.compile(r"\)\.(decode|split|partition|rpartition|rstrip)\b")
"""what is done with what a call gave"""

FORK = ("fork", (errno.EAGAIN, errno.ENOMEM))
OPEN = ("open", (errno.EIO, errno.ENOMEM, errno.ENOSPC))
DATABASE = ("pwrite", (errno.EIO, errno.ENOSPC))
PIPE = ("pipe", (errno.ENOMEM, errno.EMFILE))
THREAD = ("pthread_create", (errno.EAGAIN,))
UNLINK = ("unlink", (errno.EIO,))
Effects = tuple[tuple[str, tuple[int, ...]], ...]
FAILS: dict[str, Effects] = {
    "os.fork": (FORK,),
    "subprocess.Popen": (FORK, PIPE),
    "os.mkdir": (("mkdir", (errno.ENOSPC, errno.EIO)),),
    "os.open": (OPEN,),
    "Path().open": (OPEN,),
    "Path().read_bytes": (OPEN,),
    "open": (OPEN,),
    "locked_folder": (OPEN, ("mkdir", (errno.ENOSPC, errno.EIO)), ("flock", (errno.ENOLCK,))),
    "sweep": (("opendir", (errno.ENOMEM, errno.EIO)), ("flock", (errno.ENOLCK,)), UNLINK),
    "os.listdir": (("opendir", (errno.ENOMEM, errno.EIO)),),
    "os.pipe": (PIPE,),
    "os.read": (("read", (errno.EIO,)),),
    "os.write": (("write", (errno.EIO, errno.ENOSPC)),),
    "os.execve": (("execve", (errno.ENOMEM, errno.EIO)),),
    "fcntl.flock": (("flock", (errno.ENOLCK,)),),
    "shutil.rmtree": (UNLINK,),
    "select.select": (("select", (errno.ENOMEM,)),),
    "socket.recv_fds": (("recvmsg", (errno.ENOMEM, errno.EIO)),),
    "socket.send_fds": (("sendmsg", (errno.ENOMEM, errno.EAGAIN)),),
    "socket.socketpair": (("socketpair", (errno.ENOMEM, errno.EMFILE)),),
    "KeptProcess": (PIPE, ("sendmsg", (errno.ENOMEM,))),
    "ProcessPool": (PIPE, OPEN),
    "_Worker": (PIPE, THREAD, OPEN),
    "self._pool.schedule": (THREAD, PIPE),
    "self._threads.submit": (THREAD,),
    "reduction.dump": (("write", (errno.EIO,)),),
    "self._lines.readline": (("read", (errno.EIO,)),),
    "resource_tracker.ensure_running": (PIPE, FORK),
}
"""a call → functions of the C library that may fail in it, with their errors"""
DATABASES = re.compile(r"^self\.(_?ledger|executors)\.")
"""calls that write or read the ledger: all of them may fail by SQLite's writes"""
NO_ERRORS = frozenset(
    # of arithmetic, of memory that is there, or of what the kernel always does; the process may still be killed there
    "os._exit os.close os.dup2 os.getpid os.getppid os.kill os.path.exists os.path.join os.pathsep.join os.readlink "
    "os.set_blocking os.setsid os.strerror os.sysconf os.waitpid os.waitstatus_to_exitcode "
    "ctypes.CDLL ctypes.CDLL(None).prctl fcntl.fcntl import_module _prctl socket.gethostname socket.socket "
    "tempfile.gettempdir "
    "self._requests.fileno self._requests.close signal.set_wakeup_fd signal.signal threading.Event threading.Lock "
    "ThreadPoolExecutor spawn.spawn_main spawn.get_command_line spawn.get_preparation_data util.Finalize "
    "resource_tracker.getfd self._kept.append self._kept.exit_code self._lines.close self._process.poll "
    "guard.kill guard.wait "
    "running.process.kill running.process.poll running.process.terminate running.process.wait "
    "self._pool.join self._pool.stop self._processes.close self._processes.end self._processes.how_ended "
    "self._processes.output_tail self._processes.why_ended self._threads.shutdown".split()
)


NOT_REACHED = frozenset({
    # a search on a GPU, and one beside another
    "coordinator.Coordinator: self.ledger.add_candidate",
    "coordinator.Coordinator: self.ledger.claims.claim",
    "coordinator.Coordinator: self.ledger.measurements",
    "coordinator.Coordinator: self.ledger.record_baseline",
    "coordinator.Coordinator: self.ledger.record_measurement",
    "kept.KeptContext.start: spawn.get_command_line",
    # a program that is a file: the scenarios are a module
    "kept._preparation: os.path.exists",
    # the ends of processes that resist
    "dispatcher.Dispatcher._give_back_all: running.process.kill",
    "dispatcher.Dispatcher._give_back_all: running.process.poll",
    "dispatcher.Dispatcher._reap: running.process.kill",
    "keeper.guard.reap: os.waitpid",
    "kept_process.KeptProcess.stopped: Path().read_bytes",
    "kept_process.await_guard: guard.kill",
    "kept_process.await_guard: guard.wait",
    # a second fault, after the one that is tried
    "keeper.Keeper._take_request: os.close",
    "keeper.locked_folder: os.close",
    "kept_process.KeptProcess._start: os.strerror",
    "kept_process.KeptProcess._start: self._lines.close",
    "kept_process.KeptProcess._start: shutil.rmtree",
    "kept_process._Keeper._start: self._requests.close",
    "kept_process._two_pipes: os.close",
    "workers._Worker._call: self._processes.how_ended",
    "workers._Worker._give_up: self._processes.close",
    "workers._Worker._give_up: self._processes.end",
    "workers._Worker.await_start: self._processes.how_ended",
    # the interpreter tells of no call of a function of ctypes, of a lock's making, or of what ends it
    "keeper.Worker._become: ctypes.CDLL(None).prctl",
    "keeper.Worker._become: os._exit",
    "keeper._prctl: ctypes.CDLL(None).prctl",
    "kept_process.KeptProcess.__init__: threading.Lock",
    "kept_process._Keeper.__init__: threading.Lock",
    "workers.WorkerPool.__init__: threading.Lock",
    "workers._Worker.__init__: threading.Lock",
})  # fmt: skip
"""sites that no scenario comes to: none of their faults is tried"""


@dataclass(frozen=True, slots=True)
class Site:
    module: str
    function: str
    """the coordinator's as a whole: which of its methods writes what changes often, and says little"""
    call: str
    lines: tuple[tuple[int, int], ...]

    @property
    def id(self) -> str:
        return f"{self.module}.{self.function}: {self.call}"

    @property
    def effects(self) -> Effects:
        if DATABASES.match(self.call):
            return (DATABASE,)
        return FAILS.get(self.call, ())


def call_sites(sources: dict[str, str] | None = None) -> list[Site]:
    """Of the modules, or of these texts by the modules' names."""
    sources = sources or {name: (PACKAGE / path).read_text() for name, path in MODULES.items()}
    found: dict[tuple[str, str, str], list[tuple[int, int]]] = {}
    for module, text in sources.items():
        for function, call in _calls(ast.parse(text), ""):
            name = OF_A_PATH.sub("Path().", ast.unparse(call.func))
            if OF_INTEREST.search(name) and not OF_A_TEXT.search(name):
                place = function.partition(".")[0] if module == "coordinator" else function
                found.setdefault((module, place, name), []).append((call.lineno, call.end_lineno or call.lineno))
    return [Site(*key, tuple(lines)) for key, lines in found.items()]


def _calls(node: ast.AST, function: str) -> Iterator[tuple[str, ast.Call]]:
    for child in ast.iter_child_nodes(node):
        within = function
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            within = f"{function}.{child.name}".lstrip(".")
        elif isinstance(child, ast.Call):
            yield function or "module", child
        yield from _calls(child, within)
