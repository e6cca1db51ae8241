"""Around every request: its log line and its metrics."""

import logging
import re
import time
from collections.abc import Container
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tokentape_api.telemetry import OTHER_ROUTE, Telemetry
from tokentape_contracts import limits
from tokentape_contracts.errors import InternalError, TokentapeError
from tokentape_core import logs

log = logging.getLogger("tokentape.api")

_SESSION: Final = re.compile(rf"/sessions/([\w-]{{1,{limits.SESSION_ID_CHARS}}})(?:/|$)", re.ASCII)


class Observed:
    """ASGI middleware; stands outside of everything that can refuse a request.

    Args:
        quiet: routes that are asked every few seconds: their lines are at level DEBUG unless they fail.
    """

    def __init__(self, app: ASGIApp, telemetry: Telemetry, quiet: Container[str]) -> None:
        self._app = app
        self._telemetry = telemetry
        self._quiet = quiet

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, has_begun, is_cut = 500, False, False

        async def observed(message: Message) -> None:
            nonlocal status, has_begun
            if message["type"] == "http.response.start":
                status, has_begun = message["status"], True
            await send(message)

        began = time.perf_counter()
        session = _SESSION.match(scope["path"])
        ids = {"session": session[1]} if session else {}
        with logs.canonical(log, "request", **ids) as line:
            try:
                await self._app(scope, receive, observed)
            except Exception as error:
                # Starlette wraps an error for which it is too late for a reply; the server cuts the body off.
                if has_begun and isinstance(error.__cause__, TokentapeError):
                    is_cut = True
                    line["code"] = error.__cause__.code
                else:
                    # The reply is written further out.
                    line["code"] = InternalError.code
                    raise
            finally:
                route = scope["route"].name if "route" in scope else OTHER_ROUTE
                self._telemetry.requests[route, f"{min(max(status // 100, 2), 5)}xx"].inc()
                self._telemetry.request_seconds[route].observe(time.perf_counter() - began)
                if "code" in line:
                    self._telemetry.errors[line["code"]].inc()
                line |= {"method": scope["method"], "route": route, "status": status}
                caller = scope.get("state", {}).get("caller")
                if caller is not None and caller.name:
                    line["caller"] = caller.name
                if status >= 500 or is_cut:
                    line["level"] = logging.WARNING
                elif route in self._quiet:
                    line["level"] = logging.DEBUG
