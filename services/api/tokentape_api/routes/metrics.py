"""`GET /metrics`."""

import asyncio
import math

from starlette.requests import Request
from starlette.responses import Response

from tokentape_api.services import Services
from tokentape_contracts import limits
from tokentape_contracts.errors import StoreUnavailable
from tokentape_core.metrics import CONTENT_TYPE


async def metrics(request: Request) -> Response:
    """All metrics of this process, in Prometheus's text format."""
    services: Services = request.app.state.services
    services.telemetry.queue_jobs.set(await _queue_jobs(services))
    text = await asyncio.to_thread(services.telemetry.meter.expose)
    return Response(text, headers={"content-type": CONTENT_TYPE})


async def _queue_jobs(services: Services) -> float:
    try:
        async with asyncio.timeout(limits.READY_TIMEOUT_S):
            return await services.collector.jobs()
    except (StoreUnavailable, TimeoutError):
        return math.nan
