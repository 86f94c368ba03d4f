"""What a proposed text may reach while it is compiled and run: nothing. The same text without its mark reaches all."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
from pathlib import Path

import numpy as np
import pytest

from evoengine.cuda_emulator.build import build
from evoengine.cuda_emulator.run import run
from evoengine.devices.base import KernelCrashed, KernelHung, KernelUnbuildable, TensorArgument
from evoengine.errors import MachineError
from evoengine.records import Launch, Source
from evoengine.sandbox import jail
from evoengine.sandbox.jail import MARK
from evoengine.stages.compile import CompileFailed, compile_source

CLONE = {"x86_64": 56, "aarch64": 220}.get(platform.machine())
ONE_WARP = Launch((1, 1, 1), 32, 0)
HOST = """
extern "C" {
int open(const char*, int, ...);
char* getenv(const char*);
int socket(int, int, int);
int connect(int, const void*, unsigned);
int kill(int, int);
long ptrace(int, ...);
long syscall(long, ...);
void _exit(int);
}
"""
"""of the C library: the emulator compiles a kernel's text as host code"""

pytestmark = pytest.mark.skipif(jail.why_no_jail() is not None, reason=str(jail.why_no_jail()))


def answered(text: str, seconds: float = 20) -> int:
    """What a kernel of that text leaves in its output."""
    source = Source(text, "probe", ONE_WARP)
    out = TensorArgument("out", np.zeros(32, np.float32), True)
    return int(run(build(source, "sm_90a"), "probe", ONE_WARP, [out], 1, seconds)["out"][0])


def kernel(expression: str, before: str = "") -> str:
    return f'{HOST}{before}\nextern "C" __global__ void probe(float* out) {{ out[threadIdx.x] = {expression}; }}\n'


@pytest.fixture
def secret(tmp_path, monkeypatch) -> Path:
    """A file and an environment variable of the user's."""
    monkeypatch.setenv("EVOENGINE_TEST_KEY", "secret")
    (tmp_path / "secret").write_text("secret_word = 1;\n")
    return tmp_path / "secret"


@pytest.fixture
def port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def victim():
    """A process that a kernel may try to signal or to trace."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process.pid
        process.kill()


def probes(secret: Path, port: int, victim: int) -> dict[str, str]:
    """Texts whose kernel answers 1 where it reaches what it should not."""
    address = f"""struct {{ unsigned short family, port; unsigned host; char pad[8]; }} static to = {{
        2, (unsigned short){socket.htons(port)}, {socket.htonl(0x7F000001)}u, {{}}}};"""
    starting = """static int started; static void start(long pid) { if (pid == 0) _exit(0); started = pid > 0; }
        __attribute__((constructor)) void begin() { start(syscall(%s)); }"""
    clone3 = "static unsigned long given[11] = {0, 0, 0, 0, 17};\n"
    early = f'static int early; __attribute__((constructor)) void begin() {{ early = open("{secret}", 0) >= 0; }}'
    return {
        "reads a file of the user's": kernel(f'open("{secret}", 0) >= 0'),
        "reads it before main": kernel("early", early),
        "reads /etc/passwd": kernel('open("/etc/passwd", 0) >= 0'),
        "writes into a folder of the user's": kernel(f'open("{secret.parent}/made", 0101, 0600) >= 0'),
        "reads the environment": kernel('getenv("EVOENGINE_TEST_KEY") != 0'),
        "reaches the network": kernel("connect(socket(2, 1, 0), &to, 16) == 0", address),
        "signals another process": kernel(f"kill({victim}, 0) == 0"),
        "traces another process": kernel(f"threadIdx.x == 0 && ptrace(16, {victim}, 0L, 0L) == 0"),
        "starts a process as fork does": kernel("started", starting % f"{CLONE}L, 17L, 0L, 0L, 0L, 0L"),
        "starts a process as vfork does": kernel("started", starting % f"{CLONE}L, 0x4111L, 0L, 0L, 0L, 0L"),
        "starts a process by clone3": kernel("started", clone3 + starting % "435L, given, sizeof given"),
        "sees another process": kernel(f'open("/proc/{victim}/environ", 0) >= 0'),
    }


@pytest.mark.parametrize("name", probes(Path("/x/x"), 1, 1))
def test_a_kernel_in_the_jail_reaches_nothing(name, secret, port, victim):
    text = probes(secret, port, victim)[name]
    assert answered(MARK + text) == 0
    assert answered(text) == 1, "the probe shows nothing: the same text outside the jail does not reach it"


IN_32_BITS = """import ctypes, mmap
code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
code.write(bytes.fromhex("53b802000000cd805bc3"))  # push rbx; mov eax, 2 (fork); int 0x80; pop rbx; ret
fork = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))
print(fork())
"""
"""prints what a call of fork by the convention of 32 bits returns"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the code is x86-64's")
@pytest.mark.parametrize(
    "code",
    [
        "import os; os.fork()",
        "import threading; threading.Thread(target=int).start()",
        "import ctypes; print(ctypes.CDLL(None).syscall(57 | 0x40000000), ctypes.get_errno())",
        IN_32_BITS,
    ],
)
def test_no_call_of_the_kernel_starts_a_process_or_a_thread(code):
    with jail.no_new_processes() as seccomp:
        command = jail.jailed(["/usr/bin/python3", "-I", "-c", code], seccomp=seccomp)
        done = subprocess.run(command, capture_output=True, text=True, pass_fds=[seccomp], check=False)
    refused = "Operation not permitted" in done.stderr or "can't start new thread" in done.stderr
    assert refused or done.stdout.split()[:1] == ["-1"], done


def test_limits_and_reports_are_those_outside():
    with pytest.raises(KernelHung, match="no end after 2 s"):
        answered(MARK + kernel("0", "").replace("out[", "for (volatile int i = 0;; ++i) out["), seconds=2)
    with pytest.raises(KernelCrashed, match="out-of-bounds write of out: 272 bytes past its end"):
        answered(MARK + kernel("0").replace("out[thr", "out[100 + thr"))


@pytest.mark.parametrize("place", ["/etc/passwd", "{secret}", "{secret.parent}/../secret"])
def test_no_compiler_includes_a_file_of_the_users(place, secret):
    text = f'#include "{place.format(secret=secret)}"\n{kernel("0").replace(HOST, "")}'
    with pytest.raises(CompileFailed, match="cannot open source file"):
        compile_source(Source(MARK + text, "probe", ONE_WARP), "sm_90a")
    with pytest.raises(KernelUnbuildable, match="No such file"):
        build(Source(MARK + text, "probe", ONE_WARP), "sm_90a")
    if place == "{secret}":
        with pytest.raises(CompileFailed, match=r"secret\(1\)"):
            compile_source(Source(text, "probe", ONE_WARP), "sm_90a")


def test_the_jail_compiles_what_is_compiled_outside():
    text = "#include <cuda_fp16.h>\n" + kernel("__half2float(__float2half(2.0f))").replace(HOST, "")
    inside, outside = (compile_source(Source(m + text, "probe", ONE_WARP), "sm_90a") for m in (MARK, ""))
    assert inside.cubin == outside.cubin
    assert answered(MARK + text) == answered(text) == 2


def test_without_bubblewrap_nothing_of_a_proposal_is_run(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    jail.why_no_jail.cache_clear()
    try:
        with pytest.raises(MachineError, match="install bubblewrap"):
            compile_source(Source(MARK + kernel("0").replace(HOST, ""), "probe", ONE_WARP), "sm_90a")
        with pytest.raises(MachineError, match="install bubblewrap"):
            build(Source(MARK + kernel("3"), "probe", ONE_WARP), "sm_90a")
    finally:
        monkeypatch.undo()
        jail.why_no_jail.cache_clear()


def test_a_proposer_writes_only_into_its_own_folder(tmp_path):
    own = tmp_path / "own"
    own.mkdir()
    remount = f"mount -o remount,rw,bind / ; echo a > {tmp_path}/elsewhere"
    tries = f'{remount}; echo b > "$TMPDIR/mine"; cat {__file__} > /dev/null && echo read; ls /proc'
    done = subprocess.run(jail.proposer(["/bin/sh", "-c", tries], own), capture_output=True, text=True, check=False)
    assert "Read-only file system" in done.stderr and not (tmp_path / "elsewhere").exists()
    assert (own / "mine").read_text() == "b\n" and "read" in done.stdout
    assert str(os.getpid()) not in done.stdout.split()
