"""`POST /sessions/{sid}/samples`: one request, one binary reply."""

import asyncio
import time
from typing import Final

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from tokentape_api.http.connected import while_connected
from tokentape_api.services import Services
from tokentape_contracts import limits
from tokentape_contracts.errors import DeadlineExceeded, SessionDeleted, SessionNotFound
from tokentape_contracts.events import SEALED_ID
from tokentape_contracts.http import (
    ACCEPT_CONTRACT_HEADER,
    CONTRACT_HEADER,
    DIGEST_HEADER,
    SamplesRequest,
    choose_contract,
)
from tokentape_contracts.jobs import AssembleJob, StoredResult
from tokentape_contracts.samples import SUPPORTED_CONTRACTS

_BINARY: Final = "application/octet-stream"


async def collect_samples(request: Request) -> Response:
    """Assembles the session's samples on a worker, as of now: later turns and a DELETE change nothing."""
    services: Services = request.app.state.services
    began = time.perf_counter()
    telemetry, session_id = services.telemetry, request.path_params["sid"]
    with telemetry.collect(session_id, request.headers):
        job, result = await _collect(services, session_id, request)
    stages = _stages(result, (time.perf_counter() - began) * 1000)
    telemetry.collected(result.size, stages)
    headers = {
        CONTRACT_HEADER: str(job.contract),
        DIGEST_HEADER: f"sha-256={result.digest}",
        "Server-Timing": ", ".join(f"{name};dur={ms:.2f}" for name, ms in stages.items()),
    }
    if result.parts <= 1:
        return Response(result.first, headers=headers, media_type=_BINARY)
    # The length tells the client whether all parts came.
    headers["Content-Length"] = str(result.size)
    payload = services.collector.payload(job, result)
    return StreamingResponse(payload, headers=headers, media_type=_BINARY)


async def _collect(services: Services, session_id: str, request: Request) -> tuple[AssembleJob, StoredResult]:
    contract = choose_contract(request.headers.get(ACCEPT_CONTRACT_HEADER), SUPPORTED_CONTRACTS)
    body = services.bodies.parsed(request, limits.SMALL_BODY_BYTES, SamplesRequest.parse)
    async with body as (wanted, _):
        job, left_s = await _job(services, session_id, wanted, contract)
        result = await while_connected(request, services.collector.collect(job, left_s))
    if result.error is not None:
        raise result.error
    return job, result


async def _job(
    services: Services, session_id: str, wanted: SamplesRequest, contract: int
) -> tuple[AssembleJob, float]:
    """The job of a session as of now, and how many seconds of its deadline are left."""
    began = time.monotonic()
    try:
        async with asyncio.timeout(wanted.deadline_s):
            tail = await services.store.tail(session_id)
    except TimeoutError:
        raise DeadlineExceeded(f"Redis did not answer within {wanted.deadline_s:g} s") from None
    if tail is None:
        raise SessionNotFound("there is no such session")
    if tail == SEALED_ID:
        raise SessionDeleted("the session was deleted")
    job = AssembleJob(
        session_id=session_id,
        tail=tail,
        request=wanted.digest(tail, contract),
        contract=contract,
        max_seq_len=wanted.max_seq_len,
        metadata=wanted.metadata,
        trace=services.telemetry.tracing.headers() or None,
    )
    return job, began + wanted.deadline_s - time.monotonic()


def _stages(result: StoredResult, total_ms: float) -> dict[str, float]:
    """Stage → milliseconds; `queue` is what the worker's stages do not account for."""
    queue_ms = max(0.0, total_ms - sum(result.timing_ms.values()))
    return {"queue": queue_ms, **result.timing_ms}
