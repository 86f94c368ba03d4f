"""HTML pages without scripts: status, jobs, forms to submit and cancel one, reports, and the API's documentation."""

from __future__ import annotations

import gzip
from collections.abc import Mapping
from datetime import timedelta
from functools import cache
from http import HTTPStatus
from pathlib import Path
from typing import Annotated
from urllib.parse import parse_qsl

import jinja2
from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse
from pydantic import ValidationError

from evoengine.errors import UsageError
from evoengine.gpu import known_gpus
from evoengine.search.recorded import RECORDED
from evoengine.service.access import State, may_cancel, may_submit, require_own, require_own_page, state_of
from evoengine.service.api import Name, Number, Reader, Submitter, tagged
from evoengine.service.jobs import ENDED, Job
from evoengine.service.limits import turn
from evoengine.service.requests import DEVICES, JobRequest, checked, sentence
from evoengine.text import plain
from evoengine.views.candidate_tables import config_line, sent_figure
from evoengine.views.service import ServerView
from evoengine.views.trials import TrialView, trial_json

FOLDER = Path(__file__).with_name("templates")
SHOWN_JOBS, SHOWN_BESTS, SHOWN_EVENTS = 25, 25, 200
LONGEST_TEXT = 200
"""characters of foreign text in a table"""

router = APIRouter(include_in_schema=False)
TURN = [Depends(turn("pages"), scope="function")]


@router.get("/", response_class=HTMLResponse, dependencies=TURN)
def status(request: Request, _: Reader, before: Annotated[int | None, Query(ge=1, le=2**31 - 1)] = None) -> Response:
    """Show the latest best kernels, jobs with submitters and times, and GPUs."""
    state = state_of(request)
    jobs = state.jobs.newest(before=before, limit=SHOWN_JOBS)
    return _page(
        "status.html",
        title="evoengine",
        refresh=None if before else 5,
        jobs=jobs,
        counts=state.jobs.counts(),
        names={token.id: token.name for token in state.tokens.all()},
        executors=[(each, _doing(state, each)) for each in state.executors.known()],
        bests=_bests(state),
        may_submit=may_submit(request),
        older=jobs[-1].id if len(jobs) == SHOWN_JOBS else None,
        dashboard=state.settings.dashboard_url,
    )


@router.get("/jobs/{number}", response_class=HTMLResponse, dependencies=TURN)
def job(request: Request, _: Reader, number: Number) -> Response:
    """Show one job with its latest events."""
    state = state_of(request)
    found = state.jobs.find(number)
    last = state.jobs.events(number, max(0, found.events - SHOWN_EVENTS), SHOWN_EVENTS)
    events = [event for event in last if event.event != "progress"]  # the progress bar shows it
    return _page(
        "job.html",
        title=f"job {number} · evoengine",
        refresh=None if found.ended else 5,
        job=found,
        events=events[::-1],
        may_cancel=not found.ended and may_cancel(request, found.submitter),
    )


async def _sent(request: Request) -> dict[str, str]:
    """Return the fields of a form that a page of this server sent, without those left empty."""
    require_own_page(request)
    body = (await request.body()).decode(errors="replace")
    return {name: text.strip() for name, text in parse_qsl(body) if text.strip()}


Sent = Annotated[dict[str, str], Depends(_sent)]


@router.get("/new", response_class=HTMLResponse, dependencies=TURN)
def new(request: Request, _: Submitter) -> Response:
    """Show the form that submits a job."""
    return _form(request, {}, None)


@router.post("/new", response_class=HTMLResponse, dependencies=TURN)
def submit(request: Request, submitter: Submitter, sent: Sent) -> Response:
    """Submit the job and show it; if the input is invalid, show the form again with the error."""
    state = state_of(request)
    try:
        body = JobRequest.model_validate({**sent, "problems": sent.get("problems", "").split()})
        asked = checked(body, state.settings, state.ledger.url)
    except ValidationError as error:
        return _form(request, sent, "; ".join(map(sentence, error.errors()[:3])))
    except UsageError as error:
        return _form(request, sent, str(error))
    made = state.jobs.submit(asked, submitter, None, state.settings.max_jobs)
    return RedirectResponse(f"/jobs/{made.id}", HTTPStatus.SEE_OTHER)


@router.post("/jobs/{number}/cancel", dependencies=TURN)
def cancel(request: Request, _: Submitter, number: Number, sent: Sent) -> Response:
    """Cancel the job and show it."""
    state = state_of(request)
    require_own(request, number, state.jobs.find(number).submitter)
    state.jobs.cancel(number)
    return RedirectResponse(f"/jobs/{number}", HTTPStatus.SEE_OTHER)


def _form(request: Request, sent: Mapping[str, str], why: str | None) -> Response:
    recorded = [f"{RECORDED}{name}" for name in state_of(request).settings.recorded_files]
    status = HTTPStatus.UNPROCESSABLE_ENTITY if why else HTTPStatus.OK
    return _page(
        "new.html",
        status,
        title="new job · evoengine",
        refresh=None,
        sent=sent,
        why=plain(why or ""),
        gpus=list(known_gpus()),
        devices=[*DEVICES, *recorded],
    )


@router.get("/report", response_class=HTMLResponse)
async def report(request: Request, _: Reader, gpu: Name = None, problem: Name = None) -> Response:
    """Return what `evoengine report --html` writes.

    The page's own policy permits its two scripts; the sandbox isolates them from this origin.
    """
    state = state_of(request)
    found = await state.reports.find(problem, gpu)
    headers = {"Content-Security-Policy": "sandbox allow-scripts; frame-ancestors 'none'", "Vary": "Accept-Encoding"}
    if "gzip" in request.headers.get("accept-encoding", ""):
        return tagged(request, found.packed, found.etag, "text/html", headers | {"Content-Encoding": "gzip"})
    page = await state.polls.run(gzip.decompress, found.packed)
    return tagged(request, page, f'"plain-{found.etag.strip(chr(34))}"', "text/html", headers)


@router.get("/docs", response_class=HTMLResponse, dependencies=TURN)
def docs(request: Request, _: Reader) -> Response:
    """Show the API from the OpenAPI description."""
    described = request.app.openapi()
    paths, schemas = described["paths"], described["components"]["schemas"]
    return _page("docs.html", title="API · evoengine", refresh=None, paths=paths, schemas=schemas)


@router.get("/style.css")
def style() -> Response:
    return Response(FOLDER.joinpath("style.css").read_bytes(), media_type="text/css")


@cache
def _environment() -> jinja2.Environment:
    """Return a template environment that escapes everything."""
    loader = jinja2.FileSystemLoader(FOLDER)
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "shown": _shown,
        "figure": sent_figure,
        "config": lambda config: _shown(config_line(config)),
        "moment": lambda time: time.strftime("%Y-%m-%d %H:%M:%S UTC") if time else "",
        "share": _share,
        "took": _took,
    }
    environment.globals["ended"] = ENDED
    return environment


def _page(template: str, status: int = HTTPStatus.OK, **values: object) -> Response:
    return HTMLResponse(_environment().get_template(template).render(values), status)


def _bests(state: State) -> list[TrialView]:
    """Return the best of each problem and GPU, latest first."""
    found = (state.ledger.best(problem, gpu, top=1) for problem, gpu in state.ledger.targets.ranked()[:SHOWN_BESTS])
    return [trial_json(each[0]) for each in found if each]


def _doing(state: State, server: ServerView) -> list[Job]:
    return [job for job in state.jobs.newest("running") if job.owner == server["owner"]]


def _shown(value: object) -> str:
    """Return foreign text on one line, without control characters and shortened."""
    text = plain(str(value))
    return f"{text[:LONGEST_TEXT]}…" if len(text) > LONGEST_TEXT else text


def _took(value: timedelta) -> str:
    """Return `3 min 12 s`, `1 h 4 min`."""
    minutes, seconds = divmod(round(value.total_seconds()), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s" if minutes else f"{seconds} s"


def _share(job: Job) -> tuple[int, int]:
    """Return the number of finished trials, and the job's limit."""
    total = job.request["trials"] * len(job.parts)
    return (job.progress or {}).get("done", 0), total
