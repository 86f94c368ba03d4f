"""The routes under /v1: jobs, results, and the caches of other tuners.

Routes that need the database take a turn in the lane of their kind (`limits`). Response models are the shapes of
`views`; they document the answers in OpenAPI and are not validated at run time.
"""

from __future__ import annotations

import asyncio
import io
import json
import time
import zipfile
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Path, Query, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from fastapi.sse import EventSourceResponse, format_sse_event
from sqlalchemy import select
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from evoengine.errors import NothingFound, UsageError
from evoengine.gpu import find_gpu, known_gpus
from evoengine.ledger.runs import database_time
from evoengine.ledger.store import open_ledger
from evoengine.ledger.tables import CandidateRow
from evoengine.ledger.transfer import is_elsewhere
from evoengine.records import Outcome
from evoengine.sandbox.jail import why_no_jail
from evoengine.sandbox.untrusted import parse_json
from evoengine.service.access import State, require, require_own, state_of
from evoengine.service.answers import Answered, Question
from evoengine.service.jobs import LONGEST_KEY, Job, job_json
from evoengine.service.limits import busy, turn
from evoengine.service.requests import CandidateRequest, JobRequest, RetuneRequest, checked, retune_requests
from evoengine.service.tables import CacheRow
from evoengine.tuning.exporting import bundle
from evoengine.tuning.fused_moe import find_fused_moe, is_finished
from evoengine.tuning.proposals import Proposals, descendant, kernel_of, require_proposable
from evoengine.views import SCHEMA, AnswerView, jsonable
from evoengine.views import service as views
from evoengine.views.boards import BoardsView, WorkloadsView, boards_json, known_boards, workloads_json
from evoengine.views.results import ProposalView, proposal_json
from evoengine.views.trials import TrialPageView, page_json
from evoengine.workloads import stored_problem

LONGEST_WAIT = 60.0
"""seconds for which a request may wait for a job"""
POLL_SECONDS = 0.3
"""between two polls of the database while a request waits"""
ALIVE_SECONDS = 15.0
"""between two comments in a stream without events, so that proxies keep it open"""
LARGEST_NUMBER = 2**31 - 1
MOST_SHOWN = 100
MOST_LISTED = 1000
CACHE_KEY = "[A-Za-z0-9_.:=+-]"

Number = Annotated[int, Path(ge=1, le=LARGEST_NUMBER)]
Reader = Annotated[int, Depends(require("read"))]
Submitter = Annotated[int, Depends(require("submit"))]
Proposer = Annotated[int, Depends(require("propose"))]
Writer = Annotated[int, Depends(require("work"))]
Name = Annotated[str | None, Query(min_length=1, max_length=500)]
Sha256 = Annotated[str, Path(pattern="^[0-9a-f]{64}$", description="SHA-256 of a kernel's source: source_sha256.")]
OfGpu = Annotated[str | None, Query(max_length=100, description="GPU, if one source was compiled for several.")]
IdempotencyKey = Annotated[
    str | None,
    Header(
        min_length=1, max_length=LONGEST_KEY, description="A repeated request with the same key returns the same job."
    ),
]
CacheKey = Annotated[str, Path(pattern=f"^{CACHE_KEY}{{1,256}}$")]

jobs_router = APIRouter(prefix="/v1", tags=["jobs"])
results_router = APIRouter(prefix="/v1", tags=["results"])
cache_router = APIRouter(prefix="/v1/cache", tags=["cache"], dependencies=[Depends(turn("jobs"), scope="function")])
ROUTERS = (jobs_router, results_router, cache_router)
JOBS_TURN = [Depends(turn("jobs"), scope="function")]
RESULTS_TURN = [Depends(turn("results"), scope="function")]


def answer(found: AnswerView, status: int = HTTPStatus.OK, headers: Mapping[str, str] | None = None) -> JSONResponse:
    return JSONResponse(jsonable(found), status, headers)


def _of_type(media_type: str) -> dict[int | str, dict[str, Any]]:
    """Return the response of that media type for the OpenAPI description."""
    return {200: {"content": {media_type: {}}}}


# ── jobs ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@jobs_router.post("/jobs", status_code=202, response_model=views.JobView, dependencies=JOBS_TURN)
def submit(
    request: Request, body: JobRequest, submitter: Submitter, idempotency_key: IdempotencyKey = None
) -> Response:
    """Submit a search. Answers 202 with the job and its location.

    The answer is the same for the same Idempotency-Key and body.
    """
    state = state_of(request)
    asked = checked(body, state.settings, state.ledger.url)
    job = state.jobs.submit(asked, submitter, idempotency_key, state.settings.max_jobs)
    return answer(job_json(job), HTTPStatus.ACCEPTED, {"Location": f"/v1/jobs/{job.id}"})


@jobs_router.post("/retune", status_code=202, response_model=views.JobsView, dependencies=JOBS_TURN)
def retune(request: Request, body: RetuneRequest, submitter: Submitter) -> Response:
    """Submit a search for another GPU of every problem in the ledger; problems that already have a job are skipped."""
    state = state_of(request)
    asked = retune_requests(body, state.settings, state.ledger, state.jobs)
    made = [state.jobs.submit(each, submitter, None, state.settings.max_jobs) for each in asked]
    queued: views.JobsView = {"schema": SCHEMA, "jobs": [job_json(job) for job in made]}
    return answer(queued, HTTPStatus.ACCEPTED)


@jobs_router.get("/jobs", response_model=views.JobsView, dependencies=JOBS_TURN)
def jobs(
    request: Request,
    _: Reader,
    state: Annotated[views.JobState | None, Query(description="Only jobs in this state.")] = None,
    before: Annotated[int | None, Query(ge=1, le=LARGEST_NUMBER, description="Only jobs with lower numbers.")] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> Response:
    """List jobs, newest first."""
    listed: views.JobsView = {
        "schema": SCHEMA,
        "jobs": [job_json(job) for job in state_of(request).jobs.newest(state, before, limit)],
    }
    return answer(listed)


@jobs_router.get("/jobs/{number}", response_model=views.JobView)
async def job(
    request: Request,
    _: Reader,
    number: Number,
    wait: Annotated[float, Query(ge=0, le=LONGEST_WAIT, description="Seconds to wait for the job to end.")] = 0,
) -> Response:
    """Return the job; with `wait`, once it has ended or cannot continue, at the latest after `wait` seconds."""
    state, end = state_of(request), time.monotonic() + wait
    found = await state.polls.run(state.jobs.find, number)
    if wait and not _rests(found):
        _require_room(state)
        with _counted(state):
            while not _rests(found) and time.monotonic() < end and not state.stopping.is_set():
                await asyncio.sleep(POLL_SECONDS)
                found = await state.polls.run(state.jobs.find, number)
    return answer(job_json(found))


@jobs_router.delete("/jobs/{number}", response_model=views.JobView, dependencies=JOBS_TURN)
def cancel(request: Request, _: Submitter, number: Number) -> Response:
    """Cancel the job and keep its results. A job that has ended does not change."""
    state = state_of(request)
    require_own(request, number, state.jobs.find(number).submitter)
    return answer(job_json(state.jobs.cancel(number)))


@jobs_router.get("/jobs/{number}/events", response_class=StreamingResponse, responses=_of_type("text/event-stream"))
async def events(
    request: Request,
    _: Reader,
    number: Number,
    last_event_id: Annotated[str | None, Header(description="Number of the last event received.")] = None,
) -> EventSourceResponse:
    """Stream the job's events as server-sent events numbered from 1 without a gap; the stream ends with the job."""
    state = state_of(request)
    after = _event_number(last_event_id)
    await state.polls.run(state.jobs.find, number)
    _require_room(state)
    return EventSourceResponse(_stream(state, number, after))


async def _stream(state: State, number: int, after: int) -> AsyncIterator[bytes]:
    with _counted(state):
        spoken = time.monotonic()
        yield format_sse_event(retry=1000)
        while not state.stopping.is_set():
            found = await state.polls.run(state.jobs.find, number)  # before its events: none is added after the end
            news = await state.polls.run(state.jobs.events, number, after)
            for each in news:
                after, spoken = each.number, time.monotonic()
                yield format_sse_event(data_str=json.dumps(each.data), event=each.event, id=str(each.number))
            if news:
                continue
            if found.ended and after >= found.events:
                return
            if time.monotonic() - spoken > ALIVE_SECONDS:
                spoken = time.monotonic()
                yield format_sse_event(comment="keep-alive")
            await asyncio.sleep(POLL_SECONDS)


def _require_room(state: State) -> None:
    """Raise HTTPException if too many requests wait."""
    if state.streams >= state.settings.max_streams:
        raise busy("too many requests are waiting for jobs")


@contextmanager
def _counted(state: State) -> Iterator[None]:
    """Count a waiting request."""
    state.streams += 1
    try:
        yield
    finally:
        state.streams -= 1


def _rests(job: Job) -> bool:
    return job.ended or job.state == "waiting"


def _event_number(last_event_id: str | None) -> int:
    if last_event_id is None:
        return 0
    if not (last_event_id.isascii() and last_event_id.isdigit() and len(last_event_id) < 10):
        raise UsageError(f"Last-Event-ID is {last_event_id!a}; it must be the number of an event of this job")
    return int(last_event_id)


# ── results ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@results_router.get(
    "/best",
    response_model=Answered,
    responses={304: {"description": "Not modified: If-None-Match has the current ETag."}},
)
async def best(
    request: Request,
    _: Reader,
    gpu: Name = None,
    problem: Name = None,
    top: Annotated[int | None, Query(ge=1, le=MOST_SHOWN, description="Number of kernels, returned as a list.")] = None,
    nearest: Annotated[bool, Query(description="If there is none, return that of the nearest problem.")] = False,
) -> Response:
    """Return the best kernel for a problem on a GPU as `evoengine best --json` prints it.

    By default the problem and the GPU are those of the last run.
    """
    question = Question(_known_gpu(gpu), problem and stored_problem(problem), top, nearest)
    answers = state_of(request).answers
    found = answers.kept(question)
    if found is None:
        found = await state_of(request).quick.run(answers.find, question)
    return tagged(request, found.body, found.etag, "application/json")


def tagged(
    request: Request, body: bytes, etag: str, media_type: str, headers: Mapping[str, str] | None = None
) -> Response:
    """Return the answer, or 304 if `If-None-Match` contains its ETag or is `*`."""
    own = {"ETag": etag, "Cache-Control": "no-cache", **(headers or {})}
    known = {tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")}
    if etag in known or "*" in known:
        return Response(status_code=304, headers=own)
    return Response(body, media_type=media_type, headers=own)


@results_router.get("/kernels/{sha256}/source", response_class=PlainTextResponse, dependencies=RESULTS_TURN)
def source(request: Request, _: Reader, sha256: Sha256, gpu: OfGpu = None) -> Response:
    """Return the CUDA text of a correct kernel."""
    state = state_of(request)
    found = state.ledger.candidate(_trial(state, sha256, gpu)).source
    assert found is not None  # _trial finds trials by their source
    return _file(found.text.encode(), "text/plain; charset=utf-8", f"{sha256[:12]}.cu")


@results_router.get(
    "/kernels/{sha256}/cubin",
    response_class=Response,
    responses=_of_type("application/octet-stream"),
    dependencies=RESULTS_TURN,
)
def cubin(request: Request, _: Reader, sha256: Sha256, gpu: OfGpu = None) -> Response:
    """Return the machine code of a correct kernel."""
    state = state_of(request)
    found = state.ledger.candidate(_trial(state, sha256, gpu), with_cubin=True)
    if found.binary is None or is_elsewhere(found.binary):
        raise NothingFound(f"the machine code of trial {found.trial} is not in this ledger: it was imported")
    return _file(found.binary.cubin, "application/octet-stream", f"{sha256[:12]}.cubin")


@results_router.get("/kernels/{sha256}/json", response_model=TrialPageView, dependencies=RESULTS_TURN)
def described(request: Request, _: Reader, sha256: Sha256, gpu: OfGpu = None) -> Response:
    """Return what `evoengine show --json` prints for the kernel."""
    state = state_of(request)
    found = state.ledger.candidate(_trial(state, sha256, gpu))
    return answer(page_json(found, state.ledger.profile(found.trial), state.ledger.baselines(found.run)))


@results_router.get(
    "/kernels/{sha256}/bundle",
    response_class=Response,
    responses=_of_type("application/zip"),
    dependencies=RESULTS_TURN,
)
def exported(request: Request, _: Reader, sha256: Sha256, gpu: OfGpu = None) -> Response:
    """Return what `evoengine best --export` writes as a zip file: source, machine code, loader, checksums."""
    state = state_of(request)
    files = bundle(state.ledger, _trial(state, sha256, gpu))
    return _file(_zipped(files), "application/zip", f"{sha256[:12]}.zip")


@results_router.post(
    "/candidates",
    response_model=ProposalView,
    responses={501: {"description": "This server cannot run a text in a jail."}},
    dependencies=[Depends(turn("candidates"), scope="function")],
)
def propose(request: Request, body: CandidateRequest, _: Proposer) -> Response:
    """Judge a text in place of a trial's and record it in the ledger; the answer is sent when it is judged.

    Only device code is taken from it. It is compiled and run in a jail.
    """
    if why := why_no_jail():
        raise HTTPException(HTTPStatus.NOT_IMPLEMENTED, f"this server accepts no proposals: {why}")
    text = require_proposable(body.text)
    with open_ledger(state_of(request).ledger.url, create=False) as ledger:
        parent = descendant(ledger, body.parent)
        with Proposals(ledger, kernel_of(ledger, parent)) as run:
            return answer(proposal_json(run.propose(parent, text)))


@results_router.get("/fused_moe", response_model=views.FusedMoeFilesView, dependencies=RESULTS_TURN)
def fused_moe(request: Request, _: Reader, gpu: Annotated[str, Query(min_length=1, max_length=100)]) -> Response:
    """Return the best configurations of vLLM's and SGLang's Triton kernels on a GPU as the files that they read."""
    found = find_fused_moe(state_of(request).ledger, find_gpu(gpu), is_finished)
    made: views.FusedMoeFilesView = {"schema": SCHEMA, "files": found.files, "left_out": found.left_out}
    return answer(made)


@results_router.get("/problems", response_model=WorkloadsView, dependencies=RESULTS_TURN)
def problems(_: Reader) -> Response:
    """List the workloads that jobs may name with the syntax of their problems and an example of each."""
    return answer(workloads_json())


@results_router.get("/gpus", response_model=views.BoardsAndServersView, dependencies=RESULTS_TURN)
def gpus(request: Request, _: Reader) -> Response:
    """List the supported GPUs, and the servers that run jobs with their GPUs."""
    found: views.BoardsAndServersView = {**_boards(), "executors": state_of(request).executors.known()}
    return answer(found)


@cache
def _boards() -> BoardsView:
    """Return the supported GPUs, which do not change while the server runs."""
    return boards_json(known_boards())


def _trial(state: State, sha256: str, gpu: str | None) -> int:
    """Return the last correct trial with that source. Raises NothingFound."""
    correct = [str(o) for o in Outcome if o.correct]
    wanted = select(CandidateRow.id).where(CandidateRow.source_sha256 == sha256, CandidateRow.outcome.in_(correct))
    if gpu is not None:
        wanted = wanted.where(CandidateRow.gpu == gpu)
    with state.ledger.database.reading() as session:
        found = session.scalar(wanted.order_by(CandidateRow.id.desc()).limit(1))
    if found is None:
        on = f" for {gpu}" if gpu else ""
        raise NothingFound(f"the ledger holds no correct kernel{on} whose source has the SHA-256 {sha256}")
    return found


def _file(content: bytes, media_type: str, name: str) -> Response:
    headers = {"Content-Disposition": f'attachment; filename="{name}"', "X-Content-Type-Options": "nosniff"}
    return Response(content, media_type=media_type, headers=headers)


def _zipped(files: Mapping[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), content, zipfile.ZIP_DEFLATED)
    return packed.getvalue()


def _known_gpu(name: str | None) -> str | None:
    return name.lower() if name is not None and name.lower() in known_gpus() else name


# ── caches of other tuners, such as Helion's RemoteCacheBackend ─────────────────────────────────────────────────────


@cache_router.get("", response_model=views.CacheEntriesView)
def entries(
    request: Request,
    _: Reader,
    prefix: Annotated[str, Query(pattern=f"^{CACHE_KEY}{{0,256}}$", description="Only keys with this prefix.")] = "",
    limit: Annotated[int, Query(ge=1, le=MOST_LISTED)] = 100,
) -> Response:
    """List entries, newest first, each as the text that was stored."""
    wanted = select(CacheRow).where(CacheRow.key.startswith(prefix, autoescape=True))
    newest = wanted.order_by(CacheRow.stored_at.desc(), CacheRow.key).limit(limit)
    with state_of(request).ledger.database.reading() as session:
        rows: list[views.CacheEntryView] = [{"key": row.key, "data": row.data} for row in session.scalars(newest)]
    found: views.CacheEntriesView = {"schema": SCHEMA, "entries": rows}
    return answer(found)


@cache_router.get("/{key}", response_class=Response, responses=_of_type("application/json"))
def entry(request: Request, _: Reader, key: CacheKey) -> Response:
    """Return the text as it was stored."""
    with state_of(request).ledger.database.reading() as session:
        row = session.get(CacheRow, key)
    if row is None:
        raise NothingFound(f"nothing is stored under the key {key}")
    return Response(row.data, media_type="application/json")


@cache_router.put(
    "/{key}",
    status_code=204,
    openapi_extra={"requestBody": {"required": True, "content": {"application/json": {"schema": {"type": "object"}}}}},
)
async def store(request: Request, _: Writer, key: CacheKey) -> Response:
    """Store a JSON object under the key, replacing an earlier one; with `If-None-Match: *` only if there is none."""
    text = await _json_text(request)
    await run_in_threadpool(_put, request, key, text, request.headers.get("if-none-match", "").strip() == "*")
    return Response(status_code=204)


async def _json_text(request: Request) -> str:
    try:
        text = (await request.body()).decode()
        if not isinstance(parse_json(text), dict):
            raise ValueError("it is not a JSON object")
    except (UnicodeDecodeError, json.JSONDecodeError, ValueError) as error:
        raise UsageError(f"the body cannot be stored: {error}; give a JSON object") from error
    return text


def _put(request: Request, key: str, text: str, only_new: bool) -> None:
    with state_of(request).ledger.database.writing() as session:
        known = session.get(CacheRow, key, with_for_update=True)
        if known is not None and only_new:
            raise HTTPException(HTTPStatus.PRECONDITION_FAILED, f"an entry with the key {key} already exists")
        row = known or CacheRow(key=key)
        row.data, row.stored_at = text, database_time(session)
        session.add(row)
