"""Run a program that proposes texts for a kernel, with one line of JSON per request and per answer.

The program may be a language model's client, a rewriting tool or a script. It has network access and may write only to
a folder of its own. docs/proposing.md describes the lines.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

from evoengine.errors import UsageError
from evoengine.gpu import AUTO
from evoengine.ledger.store import Ledger, open_ledger
from evoengine.records import Candidate, Config
from evoengine.sandbox import jail
from evoengine.sandbox.untrusted import parse_json
from evoengine.search.identity import kernel_identity
from evoengine.search.progress import OnTrial, ignore
from evoengine.stages.render import MOST_BYTES, fill
from evoengine.tuning.boards import choose_gpu
from evoengine.tuning.proposals import Kernel, Proposals, descendant, judged_json, kernel_of, require_proposable
from evoengine.tuning.setup import Echo, checked, first_of_each_family, make_target, prepare_space, silent

LINE_BYTES = 8 * MOST_BYTES
"""limit of an answer: JSON may write each character of the largest text as six"""
BAD_ANSWERS = 3
"""consecutive answers without a proposal after which the program is stopped"""
_CHUNK = 1 << 16


@dataclass(frozen=True, slots=True)
class ProposeResult:
    run: int
    best: tuple[Candidate, ...]
    """of the run, best first"""
    judged: int
    """number of proposals"""
    ended: str


def propose(
    command: str,
    problem: str | None = None,
    gpu: str = AUTO,
    *,
    proposals: int,
    timeout: float,
    kernel: Path | str | None = None,
    start: int | None = None,
    db: str | os.PathLike[str] | None = None,
    echo: Echo = silent,
    on_stage: Echo = silent,
    on_trial: OnTrial = ignore,
) -> ProposeResult:
    """Run a shell command that proposes texts for a kernel, and judge each of them.

    The first parent is the trial `start` of the ledger, else the first start point of the kernel's space. A later
    parent is the fastest correct candidate of the run. `timeout` is in seconds, for each answer.

    Raises UsageError if the command violates the protocol of docs/proposing.md, MachineError if this machine has no
    jail.
    """
    given = checked(propose, {k: v for k, v in locals().items() if k not in ("echo", "on_stage", "on_trial")})
    if proposals < 1 or not timeout > 0:
        raise UsageError(f"proposals is {proposals} and timeout {timeout}; both must be above 0")
    if not command.strip():
        raise UsageError("--with is empty; it takes a shell command")
    jail.require_jail()
    on_stage("reading the problem")
    if start is not None and (problem is not None or kernel is not None or gpu != AUTO):
        raise UsageError("--from determines problem, kernel and GPU; leave --problem, --kernel and --gpu out")
    if start is None:
        own = _own_kernel(problem, gpu, given["kernel"])
        with open_ledger(given["db"], create=True) as ledger, Proposals(ledger, own.kernel, echo) as run:
            on_stage("judging the first parent")
            first = run.start(own.config, own.templates)
            return _converse(ledger, run, first, command, proposals, timeout, on_stage, on_trial)
    with open_ledger(given["db"], create=False) as ledger:
        first = descendant(ledger, start)
        with Proposals(ledger, kernel_of(ledger, first), echo) as run:
            return _converse(ledger, run, first, command, proposals, timeout, on_stage, on_trial)


def _converse(
    ledger: Ledger,
    run: Proposals,
    first: Candidate,
    command: str,
    proposals: int,
    timeout: float,
    on_stage: Echo,
    on_trial: OnTrial,
) -> ProposeResult:
    on_trial(first)
    with Proposer(command, timeout) as proposer:
        dialogue = Dialogue(run, proposer, first, proposals, on_stage, on_trial)
        ended = dialogue.run_to_end()
    best = ledger.best(first.problem, first.gpu, top=proposals + 1, run=run.run)
    return ProposeResult(run.run, tuple(best), dialogue.judged, ended)


class _Own(NamedTuple):
    """A kernel without a trial, with the configuration and the templates of its first text."""

    kernel: Kernel
    config: Config
    templates: Path


def _own_kernel(problem: str | None, gpu: str, folder: Path | None) -> _Own:
    target = make_target(problem, choose_gpu(gpu, None).gpu, folder)
    space, templates = prepare_space(None, None, target, True, fill)
    config = first_of_each_family(space)[0]
    return _Own(Kernel(target, space, kernel_identity(target.workload)), config, templates)


# ── the dialogue ────────────────────────────────────────────────────────────────────────────────────────────────────


class Dialogue:
    """Requests and answers, until the program has no more proposals or enough were judged."""

    def __init__(
        self, run: Proposals, proposer: Proposer, first: Candidate, proposals: int, on_stage: Echo, on_trial: OnTrial
    ) -> None:
        self._run, self._proposer, self._wanted = run, proposer, proposals
        self._on_stage, self._on_trial = on_stage, on_trial
        self._parent, self._profile = first, self._profile_of(first)
        self._last: Candidate | None = None
        self.judged = 0

    def run_to_end(self) -> str:
        """Return how it ended. Raises UsageError if the program violates the protocol."""
        bad, error = 0, None
        while self.judged < self._wanted:
            self._on_stage(f"waiting for proposal {self.judged + 1}")
            answer = self._proposer.ask(self._request(error))
            if answer is None:
                return "the program ended"
            try:
                text = _proposed(answer)
            except UsageError as wrong:
                bad, error = bad + 1, str(wrong)
                if bad == BAD_ANSWERS:
                    raise UsageError(
                        f"the program gave {bad} consecutive answers without a proposal: {wrong}"
                    ) from None
                continue
            if text is None:
                return "the program has no more proposals"
            bad, error = 0, None
            self._on_stage(f"judging proposal {self.judged + 1}")
            self._judge(text)
        return "all proposals judged"

    def _judge(self, text: str) -> None:
        found = self._last = self._run.propose(self._parent, text)
        self.judged += 1
        self._on_trial(found)
        if found.outcome and found.outcome.ranked and found.ranked_by.rank_key < _rank_key(self._parent):
            self._parent, self._profile = found, self._profile_of(found)

    def _profile_of(self, candidate: Candidate) -> Mapping[str, float]:
        if not (candidate.outcome and candidate.outcome.ranked and candidate.binary):
            return {}
        profile = self._run.profile(candidate)
        return profile.figures if profile else {}

    def _request(self, error: str | None) -> dict[str, Any]:
        last = self._last if self._last and self._last.trial != self._parent.trial else None
        return {
            "schema": 1,
            "parent": {**judged_json(self._parent), "profile": dict(self._profile)},
            "last": last and judged_json(last),
            "error": error,
            "proposals_left": self._wanted - self.judged,
        }


def _rank_key(candidate: Candidate) -> tuple[bool, float]:
    ranked = candidate.outcome is not None and candidate.outcome.ranked
    return candidate.ranked_by.rank_key if ranked else (True, float("inf"))


def _proposed(answer: bytes) -> str | None:
    """Return the text of an answer, None for `done`. Raises UsageError for an invalid answer."""
    try:
        found = parse_json(answer.decode())
    except ValueError as error:
        raise UsageError(f"the answer is not JSON: {str(error)[:200]}") from None
    if not isinstance(found, dict):
        raise UsageError(f'an answer must be an object such as {{"text": "…"}}, not {type(found).__name__}')
    return None if found.get("done") is True else require_proposable(found.get("text"))


# ── the program ─────────────────────────────────────────────────────────────────────────────────────────────────────


class Proposer:
    """A shell command that answers each line of JSON with one. A context manager."""

    def __init__(self, command: str, seconds: float) -> None:
        """Start the command. `seconds` is the time limit of an answer."""
        self._seconds = seconds
        self._folder = tempfile.TemporaryDirectory(prefix="evoengine-proposer-")
        self._process = subprocess.Popen(
            jail.proposer(["/bin/sh", "-c", command], Path(self._folder.name)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdin and self._process.stdout
        self._stdin, self._stdout = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._stdin, False)
        os.set_blocking(self._stdout, False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.kill()
        with suppress(BrokenPipeError):
            self._process.communicate()
        self._folder.cleanup()

    def ask(self, request: Mapping[str, Any]) -> bytes | None:
        """Return the command's answer, a line; None if the command has ended.

        Raises UsageError for an unsolicited, too long or late answer, and if the command failed.
        """
        unsent, answer = json.dumps(request).encode() + b"\n", b""
        deadline = time.monotonic() + self._seconds
        with selectors.DefaultSelector() as ready:
            ready.register(self._stdout, selectors.EVENT_READ)
            ready.register(self._stdin, selectors.EVENT_WRITE)
            while b"\n" not in answer:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise UsageError(f"the program gave no answer within {self._seconds:g} s; --timeout sets the limit")
                for key, _ in ready.select(left):
                    if key.fd == self._stdout:
                        if not (read := os.read(self._stdout, _CHUNK)):
                            self._require_end(answer)
                            return None
                        answer += read
                    elif not (unsent := unsent[self._write(unsent) :]):
                        ready.unregister(self._stdin)
                if len(answer) > LINE_BYTES:
                    raise UsageError(f"the program's answer is longer than {LINE_BYTES >> 20} MiB")
        line, _, more = answer.partition(b"\n")
        if more or unsent:
            raise UsageError("the program wrote an answer without a request; it must read a line, then print one")
        return line

    def _write(self, data: bytes) -> int:
        try:
            return os.write(self._stdin, data[:_CHUNK])
        except BrokenPipeError:  # it no longer reads; its answer may already be in the pipe
            return len(data)

    def _require_end(self, answer: bytes) -> None:
        """Wait for the end of the command. Raises UsageError if it failed or ended within an answer."""
        code = jail.end_of(self._process.wait())
        if code or answer:
            raise UsageError(f"the program ended with exit code {code} before its answer was complete")
