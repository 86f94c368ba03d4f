"""/v1/best, /v1/kernels, /v1/problems, /v1/gpus: what is known."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from fastapi.responses import PlainTextResponse
from sqlalchemy import select

from evoengine.errors import NothingFound
from evoengine.gpu import find_gpu, known_gpus
from evoengine.ledger.tables import CandidateRow
from evoengine.ledger.transfer import is_elsewhere
from evoengine.records import Outcome
from evoengine.sass.chip import why_unmodelled
from evoengine.service.access import require
from evoengine.service.answers import Question
from evoengine.service.lanes import turn
from evoengine.service.state import State, state_of
from evoengine.service.views import executor_json
from evoengine.tuning.boards import fitting_families
from evoengine.tuning.exporting import bundle
from evoengine.tuning.fused_moe import find_fused_moe
from evoengine.views.encoding import SCHEMA, jsonable
from evoengine.views.json_shapes import compilable, gpu_json, page_json, problems_json
from evoengine.workloads import stored_problem

router = APIRouter(prefix="/v1", tags=["results"])
Reader = Annotated[int, Depends(require("read"))]
TURN = [Depends(turn("results"), scope="function")]
Name = Annotated[str | None, Query(min_length=1, max_length=500)]
Sha256 = Annotated[str, Path(pattern="^[0-9a-f]{64}$", description="Of a kernel's source, as source_sha256 has it.")]
OF_GPU = Annotated[str | None, Query(max_length=100, description="Where one source was compiled for several.")]
MOST_SHOWN = 100


def _of_type(media_type: str) -> dict[int | str, dict[str, Any]]:
    """Return the response of that media type for the OpenAPI description."""
    return {200: {"content": {media_type: {}}}}


@router.get("/best", responses={304: {"description": "It is still the one of If-None-Match."}})
async def best(
    request: Request, _: Reader, gpu: Name = None, problem: Name = None,
    top: Annotated[int | None, Query(ge=1, le=MOST_SHOWN, description="So many, as a list.")] = None,
    nearest: Annotated[bool, Query(description="Where there is none, that of the nearest problem.")] = False,
) -> Response:  # fmt: skip
    """Return the best kernel for a problem on a GPU as `evoengine best --json` prints it; by default those of the
    last run."""
    question = Question(_known_gpu(gpu), problem and stored_problem(problem), top, nearest)
    answers = state_of(request).answers
    answer = answers.kept(question)
    if answer is None:
        answer = await state_of(request).quick.run(answers.find, question)
    return tagged(request, answer.body, answer.etag, "application/json")


def tagged(
    request: Request, body: bytes, etag: str, media_type: str, headers: Mapping[str, str] | None = None
) -> Response:
    """Return the answer, or 304 if `If-None-Match` contains its ETag or is `*`."""
    own = {"ETag": etag, "Cache-Control": "no-cache", **(headers or {})}
    known = _tags(request.headers.get("if-none-match", ""))
    if etag in known or "*" in known:
        return Response(status_code=304, headers=own)
    return Response(body, media_type=media_type, headers=own)


@router.get("/kernels/{sha256}/source", response_class=PlainTextResponse, dependencies=TURN)
def source(request: Request, _: Reader, sha256: Sha256, gpu: OF_GPU = None) -> Response:
    """Return the CUDA text of a correct kernel."""
    state = state_of(request)
    found = state.database.candidate(_trial(state, sha256, gpu)).source
    assert found is not None  # it was found by it
    return _file(request, found.text.encode(), "text/plain; charset=utf-8", f"{sha256[:12]}.cu")


@router.get(
    "/kernels/{sha256}/cubin", response_class=Response, responses=_of_type("application/octet-stream"),
    dependencies=TURN,
)  # fmt: skip
def cubin(request: Request, _: Reader, sha256: Sha256, gpu: OF_GPU = None) -> Response:
    """Return the machine code of a correct kernel."""
    state = state_of(request)
    found = state.database.candidate(_trial(state, sha256, gpu), with_cubin=True)
    if found.binary is None or is_elsewhere(found.binary):
        raise NothingFound(f"the machine code of trial {found.trial} is not in this ledger: it was imported")
    return _file(request, found.binary.cubin, "application/octet-stream", f"{sha256[:12]}.cubin")


@router.get("/kernels/{sha256}/json", dependencies=TURN)
def described(request: Request, _: Reader, sha256: Sha256, gpu: OF_GPU = None) -> dict[str, Any]:
    """Return what `evoengine show --json` prints for the kernel."""
    state = state_of(request)
    trial = _trial(state, sha256, gpu)
    return {"schema": SCHEMA, **jsonable(page_json(state.database.candidate(trial), state.database.profile(trial)))}


@router.get(
    "/kernels/{sha256}/bundle", response_class=Response, responses=_of_type("application/zip"), dependencies=TURN
)
def exported(request: Request, _: Reader, sha256: Sha256, gpu: OF_GPU = None) -> Response:
    """Return what `evoengine best --export` writes as a zip file: source, machine code, loader, checksums."""
    state = state_of(request)
    files = bundle(state.database, _trial(state, sha256, gpu))
    return _file(request, _zipped(files), "application/zip", f"{sha256[:12]}.zip")


@router.get("/fused_moe", dependencies=TURN)
def fused_moe(
    request: Request, _: Reader, gpu: Annotated[str, Query(min_length=1, max_length=100)]
) -> dict[str, Any]:  # fmt: skip
    """Return the best configuration of every gemm on a GPU as files of the fused MoE kernel of vLLM and SGLang, by
    name."""
    found = find_fused_moe(state_of(request).database, find_gpu(gpu))
    return {"schema": SCHEMA, "files": found.files, "left_out": list(found.left_out)}


@router.get("/problems", dependencies=TURN)
def problems(_: Reader) -> dict[str, Any]:
    """List the workloads that jobs may name with the syntax of their problems and an example of each."""
    return {"schema": SCHEMA, "workloads": problems_json()}


@router.get("/gpus", dependencies=TURN)
def gpus(request: Request, _: Reader) -> dict[str, Any]:
    """List the supported GPUs, and the servers that run jobs with their GPUs."""
    executors = [executor_json(each) for each in state_of(request).executors.known()]
    return {"schema": SCHEMA, "gpus": _boards(), "executors": executors}


@cache
def _boards() -> list[dict[str, Any]]:
    """Return the supported GPUs, which do not change while the server runs."""
    known, able = list(known_gpus().values()), compilable()
    fitting = fitting_families(known)
    return [jsonable(gpu_json(gpu, fitting[gpu.key], why_unmodelled(gpu), able)) for gpu in known]


def _trial(state: State, sha256: str, gpu: str | None) -> int:
    """Return the last correct trial with that source. Raises NothingFound."""
    correct = [str(o) for o in Outcome if o.correct]
    wanted = select(CandidateRow.id).where(CandidateRow.source_sha256 == sha256, CandidateRow.outcome.in_(correct))
    if gpu is not None:
        wanted = wanted.where(CandidateRow.gpu == gpu)
    with state.database.reading() as session:
        found = session.scalar(wanted.order_by(CandidateRow.id.desc()).limit(1))
    if found is None:
        on = f" for {gpu}" if gpu else ""
        raise NothingFound(f"the ledger holds no correct kernel{on} whose source has the SHA-256 {sha256}")
    return found


def _file(request: Request, content: bytes, media_type: str, name: str) -> Response:
    headers = {"Content-Disposition": f'attachment; filename="{name}"', "X-Content-Type-Options": "nosniff"}
    return Response(content, media_type=media_type, headers=headers)


def _zipped(files: Mapping[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), content, zipfile.ZIP_DEFLATED)
    return packed.getvalue()


def _tags(header: str) -> set[str]:
    return {tag.strip().removeprefix("W/") for tag in header.split(",")}


def _known_gpu(name: str | None) -> str | None:
    return name.lower() if name is not None and name.lower() in known_gpus() else name
