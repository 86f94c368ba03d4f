"""/v1/jobs and /v1/retune: ask for searches, watch them, cancel them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Path, Query, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.sse import EventSourceResponse, format_sse_event

from evoengine.errors import UsageError
from evoengine.service.access import require, require_own
from evoengine.service.jobs import LONGEST_KEY, Job, JobState
from evoengine.service.lanes import busy, turn
from evoengine.service.requests import JobRequest, RetuneRequest, checked
from evoengine.service.retune import retune_requests
from evoengine.service.state import State, state_of
from evoengine.service.views import JobView, job_json
from evoengine.views.encoding import SCHEMA

LONGEST_WAIT = 60.0
"""seconds a request may wait for a job"""
POLL_SECONDS = 0.3
"""how often the database is asked for news while somebody waits"""
ALIVE_SECONDS = 15.0
"""between two comments in a stream without events, so that proxies keep it open"""
LARGEST_NUMBER = 2**31 - 1

STREAM: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}

router = APIRouter(prefix="/v1", tags=["jobs"])
Number = Annotated[int, Path(ge=1, le=LARGEST_NUMBER)]
Reader = Annotated[int, Depends(require("read"))]
Submitter = Annotated[int, Depends(require("submit"))]
TURN = [Depends(turn("jobs"), scope="function")]
Key = Annotated[str | None, Header(min_length=1, max_length=LONGEST_KEY, description="Repeats are answered alike.")]


@router.post("/jobs", status_code=202, responses={202: {"model": JobView}}, dependencies=TURN)
def submit(
    request: Request, response: Response, body: JobRequest, submitter: Submitter, idempotency_key: Key = None
) -> JSONResponse:
    """Submit a search. Answers 202 with the job and its location; the same answer for the same Idempotency-Key and
    body."""
    state = state_of(request)
    asked = checked(body, state.settings, state.database.url)
    job = state.jobs.submit(asked, submitter, idempotency_key, state.settings.max_jobs)
    return JSONResponse(job_json(job), HTTPStatus.ACCEPTED, {"Location": f"/v1/jobs/{job.id}"})


@router.post("/retune", status_code=202, dependencies=TURN)
def retune(request: Request, body: RetuneRequest, submitter: Submitter) -> JSONResponse:
    """Submit a search for another GPU of every problem in the ledger; problems that already have a job are skipped."""
    state = state_of(request)
    asked = retune_requests(body, state.settings, state.database, state.jobs)
    jobs = [state.jobs.submit(each, submitter, None, state.settings.max_jobs) for each in asked]
    return JSONResponse({"schema": SCHEMA, "jobs": [job_json(job) for job in jobs]}, HTTPStatus.ACCEPTED)


@router.get("/jobs", dependencies=TURN)
def jobs(
    request: Request, _: Reader,
    state: Annotated[JobState | None, Query(description="Only these.")] = None,
    before: Annotated[int | None, Query(ge=1, le=LARGEST_NUMBER, description="Only of lower numbers.")] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> dict[str, Any]:  # fmt: skip
    """List jobs, newest first."""
    found = state_of(request).jobs.newest(state, before, limit)
    return {"schema": SCHEMA, "jobs": [job_json(job) for job in found]}


@router.get("/jobs/{number}", responses={200: {"model": JobView}})
async def job(
    request: Request, _: Reader, number: Number,
    wait: Annotated[float, Query(ge=0, le=LONGEST_WAIT, description="Seconds to wait for its end.")] = 0,
) -> JSONResponse:  # fmt: skip
    """Return the job; with `wait`, once it has ended or cannot continue, or after so many seconds."""
    state, end = state_of(request), time.monotonic() + wait
    found = await state.polls.run(state.jobs.find, number)
    if wait and not _rests(found):
        _require_room(state)
        with _counted(state):
            while not _rests(found) and time.monotonic() < end and not state.stopping.is_set():
                await asyncio.sleep(POLL_SECONDS)
                found = await state.polls.run(state.jobs.find, number)
    return JSONResponse(job_json(found))


@router.delete("/jobs/{number}", responses={200: {"model": JobView}}, dependencies=TURN)
def cancel(request: Request, _: Submitter, number: Number) -> JSONResponse:
    """Cancel the job and keep its results. A job that has ended does not change."""
    state = state_of(request)
    require_own(request, number, state.jobs.find(number).submitter)
    return JSONResponse(job_json(state.jobs.cancel(number)))


@router.get("/jobs/{number}/events", response_class=StreamingResponse, responses=STREAM)
async def events(
    request: Request, _: Reader, number: Number,
    last_event_id: Annotated[str | None, Header(description="The last one that was received.")] = None,
) -> EventSourceResponse:  # fmt: skip
    """Stream the job's events as server-sent events numbered from 1 without a gap; the stream ends with the job."""
    state = state_of(request)
    after = _number(last_event_id)
    await state.polls.run(state.jobs.find, number)
    _require_room(state)
    return EventSourceResponse(_stream(state, number, after))


async def _stream(state: State, number: int, after: int) -> AsyncIterator[bytes]:
    with _counted(state):
        spoken = time.monotonic()
        yield format_sse_event(retry=1000)
        while not state.stopping.is_set():
            found = await state.polls.run(state.jobs.find, number)  # before its events: none comes after its end
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
                yield format_sse_event(comment="the job goes on")
            await asyncio.sleep(POLL_SECONDS)


def _require_room(state: State) -> None:
    """Raise HTTPException if too many requests wait."""
    if state.streams >= state.settings.max_streams:
        raise busy("too many requests wait for jobs")


@contextmanager
def _counted(state: State) -> Iterator[None]:
    """Count a request that waits."""
    state.streams += 1
    try:
        yield
    finally:
        state.streams -= 1


def _rests(job: Job) -> bool:
    return job.ended or job.state == "waiting"


def _number(last_event_id: str | None) -> int:
    if last_event_id is None:
        return 0
    if not (last_event_id.isascii() and last_event_id.isdigit() and len(last_event_id) < 10):
        raise UsageError(f"Last-Event-ID is {last_event_id!a}; it must be the number of an event of this job")
    return int(last_event_id)
