"""A typed client of the service. It raises the errors that the same call raises locally.

with Client("https://tuner.example") as client:  # with the token of EVOENGINE_TOKEN, or token="evo_…"
    job = client.submit(problems=["gemm:m4096,n4096,k4096,fp16"], gpu="h100")
    for event in client.events(job.id): ...
    print(client.best("h100", "gemm:m4096,n4096,k4096,fp16"))
"""

from __future__ import annotations

import io
import os
import time
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import httpx2

from evoengine.errors import EvoengineError, MachineError, NothingFound, UsageError
from evoengine.publish.folder import CHECKSUMS, checksums
from evoengine.sandbox.untrusted import parse_json
from evoengine.text import printable

TIMEOUT = 30.0
"""seconds to wait for a response to start"""
JUDGE = 600.0
"""seconds to wait for the verdict on a proposal"""
LARGEST_ANSWER, LARGEST_BUNDLE = 64 << 20, 256 << 20
"""in bytes; a bundle is counted unpacked"""
MOST_FILES = 64
RECONNECT_SECONDS = 1.0
TOKEN_VARIABLE, TOKEN_FILE_VARIABLE = "EVOENGINE_TOKEN", "EVOENGINE_TOKEN_FILE"
_LONGEST_TOKEN = 4096


def stated_token() -> str | None:
    """Return the token that the environment names. Raises UsageError if it names two, or a file without one."""
    token, file = os.environ.get(TOKEN_VARIABLE), os.environ.get(TOKEN_FILE_VARIABLE)
    if token and file:
        raise UsageError(f"both {TOKEN_VARIABLE} and {TOKEN_FILE_VARIABLE} are set; keep one")
    if file:
        try:
            token = Path(file).read_text("utf-8")[:_LONGEST_TOKEN].strip()
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not text"
            raise UsageError(f"{TOKEN_FILE_VARIABLE} names {file}, which cannot be read: {why}") from error
    if token and not (token.isascii() and token.isprintable() and " " not in token):
        raise UsageError("the token has invalid characters; evoengine token new prints one line, evo_…")
    return token or None


@dataclass(frozen=True, slots=True)
class JobInfo:
    """A job as /v1/jobs returns it; docs/service.md describes the fields."""

    id: int
    state: str
    why: str | None
    request: Mapping[str, Any]
    gpu: str
    priority: int
    parts: list[dict[str, Any]]
    progress: Mapping[str, Any]
    events: int
    created_at: str | None
    started_at: str | None
    finished_at: str | None


@dataclass(frozen=True, slots=True)
class JobEvent:
    number: int
    event: str
    data: Mapping[str, Any]


class Client:
    """Connection to a service. Close it, or use it as a context manager.

    The default `token` is that of EVOENGINE_TOKEN or EVOENGINE_TOKEN_FILE; an empty string means none. Every method
    raises UsageError if the server refuses the request, NothingFound if it has no result, and MachineError if it cannot
    be reached or fails.
    """

    def __init__(self, url: str, token: str | None = None) -> None:
        parts = urlsplit(url) if isinstance(url, str) else urlsplit("")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(
                f"{printable(str(url))!r} is not the URL of a service; write http://HOST:PORT or https://HOST"
            )
        if parts.username or parts.password:
            raise UsageError(
                "the URL of a service must not hold a user name or password; set EVOENGINE_TOKEN to a token"
            )
        token = stated_token() if token is None else token
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self.url = url.rstrip("/")
        self._http = httpx2.Client(base_url=self.url, headers=headers, timeout=TIMEOUT)

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ── jobs ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def submit(self, *, idempotency_key: str | None = None, **request: Any) -> JobInfo:
        """Submit a search. `request` holds the fields of a job: problems, gpu, trials, minutes, sampler, device …"""
        headers = {"Idempotency-Key": idempotency_key} if idempotency_key else {}
        return _job(self._json("POST", "/v1/jobs", json=request, headers=headers))

    def retune(self, gpu: str, **request: Any) -> list[JobInfo]:
        """Submit searches for another GPU of all problems in the ledger."""
        return [_job(job) for job in self._json("POST", "/v1/retune", json={"gpu": gpu, **request})["jobs"]]

    def job(self, number: int, wait: float = 0) -> JobInfo:
        """Return a job; with `wait`, once it has ended or waits for a GPU, at the latest after `wait` seconds."""
        answer = self._json("GET", f"/v1/jobs/{number}", params={"wait": wait}, timeout=TIMEOUT + wait)
        return _job(answer)

    def jobs(self, state: str | None = None) -> list[JobInfo]:
        """List jobs, newest first."""
        params = {} if state is None else {"state": state}
        return [_job(job) for job in self._json("GET", "/v1/jobs", params=params)["jobs"]]

    def cancel(self, number: int) -> JobInfo:
        return _job(self._json("DELETE", f"/v1/jobs/{number}"))

    def events(self, number: int, after: int = 0, patience: float = 60.0) -> Iterator[JobEvent]:
        """Yield the job's events until it ends, each once, across lost connections and restarted servers.

        Raises MachineError if no server can be reached for `patience` seconds.
        """
        reached = time.monotonic()
        while True:
            try:
                for event in self._stream(number, after):
                    after, reached = event.number, time.monotonic()
                    yield event
                if self.job(number).state in ("done", "cancelled", "failed"):
                    return
            except MachineError:
                if time.monotonic() - reached > patience:
                    raise
            time.sleep(RECONNECT_SECONDS)

    def _stream(self, number: int, after: int) -> Iterator[JobEvent]:
        headers = {"Last-Event-ID": str(after)}
        try:
            with self._http.sse(f"/v1/jobs/{number}/events", headers=headers) as source:
                if source.response.status_code != 200:
                    raise _error(source.response.status_code, source.response.read())
                for event in source:
                    if event.id.isdigit() and int(event.id) > after:
                        after = int(event.id)
                        yield JobEvent(after, event.event, _parsed(event.data))
        except httpx2.HTTPError as error:
            raise self._unreachable(error) from error

    # ── results ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def propose(self, parent: int, text: str) -> dict[str, Any]:
        """Have a text judged in place of a trial's; return the verdict, which docs/service.md describes."""
        found: dict[str, Any] = self._json(
            "POST", "/v1/candidates", json={"parent": parent, "text": text}, timeout=JUDGE
        )
        return found

    def best(self, gpu: str | None = None, problem: str | None = None, *, nearest: bool = False) -> dict[str, Any]:
        """Return the best kernel as `evoengine best --json` prints it."""
        return self._json("GET", "/v1/best", params=_given(gpu=gpu, problem=problem, nearest=nearest or None))

    def ranking(self, gpu: str | None = None, problem: str | None = None, top: int = 10) -> dict[str, Any]:
        """Return the best kernels under `trials`."""
        return self._json("GET", "/v1/best", params=_given(gpu=gpu, problem=problem, top=top))

    def bundle(self, source_sha256: str, gpu: str | None = None) -> dict[str, bytes]:
        """Return the files of an exported kernel by name. Raises MachineError if they do not match their checksums."""
        return unpacked(self._send("GET", f"/v1/kernels/{source_sha256}/bundle", params=_given(gpu=gpu)))

    # ── caches of other tuners ──────────────────────────────────────────────────────────────────────────────────────

    def cached(self, key: str) -> str | None:
        """Return the text stored under the key, or None."""
        try:
            return self._send("GET", f"/v1/cache/{key}").decode()
        except NothingFound:
            return None

    def store(self, key: str, data: str) -> None:
        """Store a JSON object, given as text, under the key."""
        self._send("PUT", f"/v1/cache/{key}", content=data.encode(), headers={"Content-Type": "application/json"})

    def all_cached(self, prefix: str = "", limit: int = 100) -> list[str]:
        """Return the entries whose keys have the prefix, newest first."""
        answer = self._json("GET", "/v1/cache", params={"limit": limit, "prefix": prefix})
        return [entry["data"] for entry in answer["entries"]]

    # ── the wire ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _json(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        return _parsed(self._send(method, path, **options))

    def _send(self, method: str, path: str, **options: Any) -> bytes:
        try:
            with self._http.stream(method, path, **options) as answer:
                content = bytearray()
                for part in answer.iter_bytes():
                    content += part
                    if len(content) > LARGEST_ANSWER:
                        raise MachineError(f"{self.url} sent more than {LARGEST_ANSWER >> 20} MiB for {path}")
        except httpx2.HTTPError as error:
            raise self._unreachable(error) from error
        if answer.status_code >= 300:
            raise _error(answer.status_code, bytes(content))
        return bytes(content)

    def _unreachable(self, error: Exception) -> MachineError:
        return MachineError(f"{self.url} cannot be reached: {error or type(error).__name__}; is evoengine serve up?")


def unpacked(packed: bytes) -> dict[str, bytes]:
    """Return the files of a bundle without its checksums.

    Raises MachineError if it is not a bundle, or does not match them.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(packed)) as archive:
            entries = archive.infolist()
            if len(entries) > MOST_FILES or sum(entry.file_size for entry in entries) > LARGEST_BUNDLE:
                raise MachineError("the bundle is larger than any exported kernel")
            files = {entry.filename: archive.read(entry) for entry in entries}
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, RuntimeError) as error:
        raise MachineError(f"the server did not send a bundle: {error}") from error
    if wrong := next((name for name in files if "/" in name or "\\" in name or name.startswith(".") or not name), None):
        raise MachineError(f"the bundle names a file {wrong!a}, which no exported kernel has")
    stated = files.pop(CHECKSUMS, b"").decode(errors="replace")
    if stated != checksums(files):
        raise MachineError("the bundle is damaged: its files do not match their checksums")
    return files


def _given(**values: object) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _job(answer: Mapping[str, Any]) -> JobInfo:
    try:
        return JobInfo(**{field.name: answer[field.name] for field in fields(JobInfo)})
    except KeyError as error:
        raise MachineError(f"the answer is not that of an evoengine service: {error} is missing") from error


def _parsed(text: str | bytes) -> dict[str, Any]:
    try:
        found = parse_json(text if isinstance(text, str) else text.decode())
    except ValueError as error:
        raise MachineError(f"the answer is not that of an evoengine service: {error}") from error
    if not isinstance(found, dict):
        raise MachineError("the answer is not that of an evoengine service: it is not a JSON object")
    return found


def _error(status: int, content: bytes) -> EvoengineError:
    try:
        detail = str(_parsed(content)["detail"])
    except (MachineError, KeyError):
        return MachineError(f"the server answered {status} without a reason")
    if status == 404:
        return NothingFound(detail)
    if status in (401, 403):
        return UsageError(f"{detail}; set EVOENGINE_TOKEN, or EVOENGINE_TOKEN_FILE to a file that holds a token")
    return MachineError(detail) if status >= 500 or status == 429 else UsageError(detail)
