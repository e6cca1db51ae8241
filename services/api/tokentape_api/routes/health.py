"""`GET /health` and `GET /ready`."""

import asyncio
from collections.abc import Awaitable

from starlette.requests import Request
from starlette.responses import Response

from tokentape_api.responses import json_response
from tokentape_api.services import Services
from tokentape_contracts import limits
from tokentape_contracts.errors import RetryableError


async def health(_: Request) -> Response:
    """The process lives and its loop turns."""
    return json_response({"status": "ok"})


async def ready(request: Request) -> Response:
    """Redis and the engine answer: requests may be sent here. 503 otherwise, with what does not."""
    services: Services = request.app.state.services
    checks = {"redis": services.store.ready(), "engine": services.engine.ready()}
    states = await asyncio.gather(*map(_state, checks.values()))
    report = dict(zip(checks, states, strict=True))
    is_ready = all(state == "ok" for state in states)
    return json_response({"ready": is_ready, "checks": report}, 200 if is_ready else 503)


async def _state(check: Awaitable[None]) -> str:
    try:
        async with asyncio.timeout(limits.READY_TIMEOUT_S):
            await check
    except TimeoutError:
        return f"no answer within {limits.READY_TIMEOUT_S:g} s"
    except RetryableError as error:
        return error.detail
    return "ok"
