"""/v1/cache: lines that other tuners keep by keys of their own, as Helion's RemoteCacheBackend does."""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from sqlalchemy import select
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from evoengine.errors import NothingFound, UsageError
from evoengine.ledger.heartbeat import database_time
from evoengine.ledger.service_tables import CacheRow
from evoengine.service.access import require
from evoengine.service.lanes import turn
from evoengine.service.state import state_of
from evoengine.untrusted import parse_json
from evoengine.views.encoding import SCHEMA

router = APIRouter(prefix="/v1/cache", tags=["cache"], dependencies=[Depends(turn("jobs"), scope="function")])
Key = Annotated[str, Path(pattern=r"^[A-Za-z0-9_.:=+-]{1,256}$")]
PREFIX = r"^[A-Za-z0-9_.:=+-]{0,256}$"
MOST_LISTED = 1000
PUT_BODY = {"requestBody": {"required": True, "content": {"application/json": {"schema": {"type": "object"}}}}}


@router.get("")
def entries(
    request: Request, _: Annotated[int, Depends(require("read"))],
    prefix: Annotated[str, Query(pattern=PREFIX, description="Only keys that begin so.")] = "",
    limit: Annotated[int, Query(ge=1, le=MOST_LISTED)] = 100,
) -> dict[str, Any]:  # fmt: skip
    """List entries, newest first, each as the text that was stored."""
    wanted = select(CacheRow).where(CacheRow.key.startswith(prefix, autoescape=True))
    newest = wanted.order_by(CacheRow.stored_at.desc(), CacheRow.key).limit(limit)
    with state_of(request).database.reading() as session:
        return {"schema": SCHEMA, "entries": [{"key": row.key, "data": row.data} for row in session.scalars(newest)]}


@router.get("/{key}")
def entry(request: Request, _: Annotated[int, Depends(require("read"))], key: Key) -> Response:
    """Return the text as it was stored."""
    with state_of(request).database.reading() as session:
        row = session.get(CacheRow, key)
    if row is None:
        raise NothingFound(f"nothing is stored under the key {key}")
    return Response(row.data, media_type="application/json")


@router.put("/{key}", status_code=204, openapi_extra=PUT_BODY)
async def store(request: Request, _: Annotated[int, Depends(require("work"))], key: Key) -> Response:
    """Store a JSON object under the key, replacing an earlier one; with `If-None-Match: *` only if there is none."""
    text = await _json_text(request)
    await run_in_threadpool(_put, request, key, text, request.headers.get("if-none-match", "").strip() == "*")
    return Response(status_code=204)


async def _json_text(request: Request) -> str:
    try:
        text = (await request.body()).decode()
        if not isinstance(parse_json(text), dict):
            raise ValueError("it is no JSON object")
    except (UnicodeDecodeError, json.JSONDecodeError, ValueError) as error:
        raise UsageError(f"the body cannot be stored: {error}; give a JSON object") from error
    return text


def _put(request: Request, key: str, text: str, only_new: bool) -> None:
    with state_of(request).database.writing() as session:
        known = session.get(CacheRow, key, with_for_update=True)
        if known is not None and only_new:
            raise HTTPException(HTTPStatus.PRECONDITION_FAILED, f"something is stored under the key {key} already")
        row = known or CacheRow(key=key)
        row.data, row.stored_at = text, database_time(session)
        session.add(row)
