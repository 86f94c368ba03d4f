"""Errors as application/problem+json (RFC 9457); `detail` is the sentence that the command line has."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from evoengine.errors import EvoengineError, MachineError, NothingFound, UsageError
from evoengine.hints import did_you_mean
from evoengine.service.jobs import TooMany
from evoengine.service.requests import JobRequest
from evoengine.text import one_line

RETRY_SECONDS = 10
"""asked of who meets a fault of the machine, or has too many jobs"""
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
"""what any request may be answered with, for the OpenAPI description"""


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
        return problem(HTTPStatus.INTERNAL_SERVER_ERROR, "the server failed at this; its log says more")


def sentence(found: Mapping[str, Any]) -> str:
    """Return an error of pydantic's in a line: the field, and what is wrong with it."""
    place = ".".join(str(part) for part in found["loc"] if part not in ("body", "query", "path"))
    if found["type"] == "extra_forbidden":
        return one_line(f"{place!r} is not a field of this request{did_you_mean(place, JobRequest.model_fields)}")
    return one_line(f"{place or 'the request'}: {found['msg']}")
