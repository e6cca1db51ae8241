"""`GET /health` and `GET /ready`."""

import asyncio
from collections.abc import Awaitable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tokentape_api.engine import Engine
from tokentape_api.http.responses import json_response
from tokentape_api.services import Services
from tokentape_contracts import limits
from tokentape_contracts.errors import TokentapeError


async def health(_: Request) -> Response:
    """The process lives and its loop turns."""
    return json_response({"status": "ok"})


async def ready(request: Request) -> Response:
    """Redis answers, and the engine has sent what the recording needs: requests may be sent here.

    503 otherwise, with what is not so. The engine is probed by the first call, in the background: until that
    has passed, `checks.probe` holds what is missing or wrong, or says that it still runs. An engine that has
    passed may go away, for a weight update or for good: collects need none, a chat hears why it fails, and
    `checks` tells it here.
    """
    services: Services = request.app.state.services
    redis, engine = await asyncio.gather(_state(services.store.ready()), _engine(services.engine))
    checks = {"redis": redis, **engine}
    if not services.collector.is_reading():
        checks["announcements"] = "the reader has ended; the log says why. Restart the process"
    if all(state == "ok" for state in engine.values()):
        services.engine_passed.set()
    is_ready = redis == "ok" and services.engine_passed.is_set() and "announcements" not in checks
    return json_response({"ready": is_ready, "checks": checks}, 200 if is_ready else 503)


async def _engine(engine: Engine) -> dict[str, Any]:
    """Its health; and, if it is healthy and has not passed the probe, what the probe found."""
    clock = asyncio.get_running_loop().time
    began = clock()
    if (state := await _state(engine.ready())) != "ok":
        return {"engine": state}
    found = await engine.probe(max(0.0, began + limits.READY_TIMEOUT_S - clock()))
    if found is None:
        return {"engine": state, "probe": "the probe is still running"}
    failed = [check for check in found if check.state != "ok"]
    return {"engine": state, "probe": failed} if failed else {"engine": state}


async def _state(check: Awaitable[None]) -> str:
    try:
        async with asyncio.timeout(limits.READY_TIMEOUT_S):
            await check
    except TimeoutError:
        return f"no answer within {limits.READY_TIMEOUT_S:g} s"
    except TokentapeError as error:
        return error.detail
    return "ok"
