"""Requests of jobs and proposals: their models, validation against the server's limits, and error responses.

Messages are those of the command line for the same mistake.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from starlette.exceptions import HTTPException

from evoengine.errors import EvoengineError, MachineError, NothingFound, UsageError, did_you_mean, require_word
from evoengine.gpu import Gpu
from evoengine.ledger.store import Ledger
from evoengine.objectives import parse_objectives
from evoengine.search import samplers
from evoengine.search.recorded import RECORDED
from evoengine.search.targets import stored_gpu
from evoengine.service.jobs import Jobs, TooMany
from evoengine.service.settings import Settings
from evoengine.space.reader import read_definition
from evoengine.stages.render import MOST_BYTES
from evoengine.text import one_line
from evoengine.tuning.boards import find_stored_gpu, space_file_of
from evoengine.tuning.search import SearchOptions, require_several
from evoengine.workloads import find_workload, parse_problem, workloads

MOST_PROBLEMS = 100
DEVICES = ("auto", "cuda", "emulator")

Name = Annotated[str, StringConstraints(min_length=1, max_length=500)]


class JobRequest(BaseModel):
    """A search."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [{"problems": ["gemm:m4096,n4096,k4096,fp16"], "gpu": "h100", "trials": 60, "device": "auto"}]
        },
    )

    workload: Name | None = Field(default=None, description="Workload of problems that do not name one.")
    problems: list[Name] = Field(
        default_factory=list,
        max_length=MOST_PROBLEMS,
        description="Problems as in evoengine search --problem; each gets the whole budget.",
    )
    gpu: Name | None = Field(default=None, description="A GPU that evoengine gpus lists.")
    trials: int = Field(60, description="Number of trials.")
    minutes: float | None = Field(default=None, description="Start no candidate after this long.")
    sampler: Name = samplers.DEFAULT
    device: Name = Field(
        "auto",
        description="cuda waits for a server with such a GPU and times; emulator gates on the CPU and predicts; auto "
        "times if there is such a GPU, else predicts now and times once there is one; recorded:NAME replays a file of "
        "the server.",
    )
    objective: Name = "tflops"
    families: list[Name] = Field(default_factory=list, max_length=100)
    seed: int | None = Field(default=None, ge=0, le=2**32 - 1)
    priority: int = Field(0, ge=-100, le=100, description="Higher ones first.")


class RetuneRequest(BaseModel):
    """Searches of all problems in the ledger for another GPU."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"gpu": "h200"}]})

    gpu: Name
    workload: Name | None = Field(default=None, description="Only its problems.")
    trials: int = 60
    minutes: float | None = None
    sampler: Name = samplers.DEFAULT
    device: Name = "auto"
    priority: int = Field(0, ge=-100, le=100)


class CandidateRequest(BaseModel):
    """A proposed text of a kernel."""

    model_config = ConfigDict(extra="forbid")

    parent: int = Field(ge=1, le=2**31 - 1, description="Trial whose text this one replaces; its launch stays.")
    text: Annotated[str, StringConstraints(min_length=1, max_length=MOST_BYTES)] = Field(description="CUDA text.")


def checked(request: JobRequest, settings: Settings, db: str | None) -> dict[str, Any]:
    """Return the request as a job stores it, with names and problems in canonical form."""
    _require_budget(request.trials, request.minutes, settings)
    require_word(request.sampler, samplers.NAMES)
    if request.device.startswith(RECORDED):
        return _recorded(request, settings)
    if request.device not in DEVICES:
        near = did_you_mean(request.device, (*DEVICES, RECORDED))
        raise UsageError(f"{request.device!r} is not one of auto, emulator, cuda and {RECORDED}FILE{near}")
    if request.gpu is None:
        raise UsageError("a job must name its GPU, such as h100; evoengine gpus lists them")
    gpu = find_stored_gpu(db, request.gpu)
    objectives = parse_objectives(request.objective)
    if len(objectives) > 1:
        require_several(request.objective, request.sampler)
    problems = dict.fromkeys(_problem(text, request.workload) for text in request.problems)
    if not problems:
        problems = {_example(request.workload): None}
    _require_families(request.families, problems, gpu)
    for workload, _ in map(parse_problem, problems):
        if workload.host and request.device == "cuda":
            raise UsageError(f"{workload.name} is a Triton kernel, which is not timed; use the device emulator")
    SearchOptions(trials=request.trials, minutes=request.minutes, sampler=request.sampler)
    return request.model_dump(exclude={"workload"}) | {
        "problems": list(problems),
        "gpu": gpu.key,
        "objective": ",".join(o.name for o in objectives),
    }


def _require_families(families: Sequence[str], problems: Iterable[str], gpu: Gpu) -> None:
    for workload, problem in map(parse_problem, problems) if families else ():
        known = {**problem.variables(), **gpu.variables()}
        definition = read_definition(space_file_of(workload), known).restricted_to(families)
        for name, why in definition.impossible_families(gpu.variables()).items():
            raise UsageError(f"the family {name} is not possible on {gpu.key}: {why}")


def _recorded(request: JobRequest, settings: Settings) -> dict[str, Any]:
    name, files = request.device.removeprefix(RECORDED), settings.recorded_files
    if name not in files:
        near = did_you_mean(name, files) or "; the operator adds them to the folder EVOENGINE_RECORDED"
        raise UsageError(f"the server has no recorded space {name!a}{near}")
    return request.model_dump(exclude={"workload"}) | {"problems": [request.device], "gpu": "recorded"}


def _problem(text: str, workload: str | None) -> str:
    if workload is not None:
        find_workload(workload)
        if ":" not in text:
            text = f"{workload}:{text}"
    found, problem = parse_problem(text)
    if workload is not None and found.name != workload:
        raise UsageError(f"the problem {text} is of the workload {found.name}, not of {workload}")
    return str(problem)


def _example(workload: str | None) -> str:
    if workload is None:
        known = ", ".join(workloads())
        raise UsageError(f"a job must name problems, such as gemm:m4096,n4096,k4096,fp16; workloads are {known}")
    found = find_workload(workload)
    return str(found.parse(found.example))


def _require_budget(trials: int, minutes: float | None, settings: Settings) -> None:
    SearchOptions(trials=trials, minutes=minutes)
    if trials > settings.max_trials:
        raise UsageError(f"trials is {trials}; this server allows at most {settings.max_trials} per job")
    if minutes is not None and minutes > settings.max_minutes:
        raise UsageError(f"minutes is {minutes:g}; this server allows at most {settings.max_minutes:g} per job")


def retune_requests(asked: RetuneRequest, settings: Settings, ledger: Ledger, jobs: Jobs) -> list[dict[str, Any]]:
    """Return a job request per problem with a correct candidate, without problems of unfinished jobs.

    Problems with the nearest results come first, because their searches start from those. Raises NothingFound if the
    ledger has none, UsageError for invalid values.
    """
    gpu = find_stored_gpu(ledger.url, asked.gpu)
    if asked.workload is not None:
        find_workload(asked.workload)
    targets = ledger.targets.ranked()
    problems = dict.fromkeys(p for p, _ in targets if _can_be_searched(p, asked.workload))
    if not problems:
        of = f" of {asked.workload}" if asked.workload else ""
        raise NothingFound(f"the ledger holds no correct candidate{of} of a workload that this server knows")
    queued = jobs.unfinished_problems(gpu.key)
    left = sorted((p for p in problems if p not in queued), key=lambda p: _nearest_board(ledger, p, gpu, targets))
    each = asked.model_dump(exclude={"workload"})
    return [checked(JobRequest(problems=[problem], **each), settings, ledger.url) for problem in left]


def _can_be_searched(problem: str, workload: str | None) -> bool:
    name = problem.partition(":")[0]
    return name in workloads() and workload in (None, name)


def _nearest_board(ledger: Ledger, problem: str, gpu: Gpu, targets: list[tuple[str, str]]) -> float:
    """Return the distance of the nearest board with results for the problem.

    It is 0 for the same board, 1 for one of the same architecture, and more for one of another compute capability.
    """
    found = math.inf
    for key in {on for other, on in targets if other == problem}:
        try:
            board = stored_gpu(ledger, key)
        except UsageError:
            continue
        if board.key == gpu.key:
            return 0
        found = min(found, 1 if board.arch == gpu.arch else 2 + abs(board.capability - gpu.capability))
    return found


# Errors as application/problem+json (RFC 9457); `detail` is the message of the command line.

RETRY_SECONDS = 10
"""Retry-After of 429 and 503"""
STATUS: tuple[tuple[type[EvoengineError], HTTPStatus], ...] = (
    (NothingFound, HTTPStatus.NOT_FOUND),
    (UsageError, HTTPStatus.UNPROCESSABLE_ENTITY),
    (TooMany, HTTPStatus.TOO_MANY_REQUESTS),
    (MachineError, HTTPStatus.SERVICE_UNAVAILABLE),
)
RESPONSES: dict[int | str, dict[str, Any]] = {
    code: {"description": HTTPStatus(code).phrase, "content": {"application/problem+json": {}}}
    for code in (400, 401, 403, 404, 406, 408, 412, 413, 415, 422, 429, 503)
}
"""errors with which any request may be answered, for the OpenAPI description"""


def problem(status: int, detail: str, headers: dict[str, str] | None = None) -> JSONResponse:
    body = {"type": "about:blank", "title": HTTPStatus(status).phrase, "status": status, "detail": detail}
    later = {"Retry-After": str(RETRY_SECONDS)} if status in (429, 503) else {}
    return JSONResponse(body, status, {**later, **(headers or {})}, media_type="application/problem+json")


def answer_errors(app: FastAPI) -> None:
    """Make the application answer every error as application/problem+json."""

    @app.exception_handler(EvoengineError)
    async def ours(request: Request, error: EvoengineError) -> JSONResponse:
        found = next((status for kind, status in STATUS if isinstance(error, kind)), HTTPStatus.INTERNAL_SERVER_ERROR)
        return problem(found, str(error))

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        return problem(error.status_code, str(error.detail), dict(error.headers or {}))

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        return problem(HTTPStatus.UNPROCESSABLE_ENTITY, "; ".join(map(sentence, error.errors()[:3])))

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> JSONResponse:
        return problem(HTTPStatus.INTERNAL_SERVER_ERROR, "internal error; see the server's log")


def sentence(found: Mapping[str, Any]) -> str:
    """Return an error of pydantic as one line: the field, and what is wrong with it."""
    place = ".".join(str(part) for part in found["loc"] if part not in ("body", "query", "path"))
    if found["type"] == "extra_forbidden":
        return one_line(f"{place!r} is not a field of this request{did_you_mean(place, JobRequest.model_fields)}")
    return one_line(f"{place or 'the request'}: {found['msg']}")
