"""One compilation by NVRTC: in this process, or as a program that reads it as JSON and prints the result as JSON."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from evoengine.stages.toolchain import nvrtc


@dataclass(frozen=True, slots=True)
class Compilation:
    """A text with its name, the headers that it may include beside those of the folders, by name, and the options."""

    text: str
    name: str
    headers: Mapping[str, str]
    options: Sequence[str]

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()


@dataclass(frozen=True, slots=True)
class Compiled:
    """A cubin and the compiler's log; where it refused the text, an `error` in place of the cubin."""

    cubin: bytes
    log: str
    error: str | None

    def to_json(self) -> bytes:
        return json.dumps([base64.b64encode(self.cubin).decode(), self.log, self.error]).encode()

    @staticmethod
    def from_json(raw: bytes) -> Compiled:
        """Return what `to_json` wrote. Raises TypeError or ValueError for anything else."""
        cubin, log, error = json.loads(raw)
        if not isinstance(log, str) or not isinstance(error, str | None):
            raise TypeError("it is not a cubin, a log and an error")
        return Compiled(base64.b64decode(cubin, validate=True), log, error)


def run(given: Compilation) -> Compiled:
    """Compile. Raises MachineError without NVRTC."""
    api = nvrtc()
    headers = (tuple(each.encode() for each in column) for column in (given.headers.values(), given.headers))
    program = api.createProgram(given.text, given.name, *headers)
    try:
        try:
            api.compileProgram(program, tuple(given.options))
        except api.NVRTCError as error:
            return Compiled(b"", api.getProgramLog(program), str(error))
        return Compiled(api.getCUBIN(program), api.getProgramLog(program), None)
    finally:
        api.destroyProgram(program)


if __name__ == "__main__":
    sys.stdout.buffer.write(run(Compilation(**json.load(sys.stdin))).to_json())
