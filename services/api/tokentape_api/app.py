"""The composition root: parts in, Starlette application out."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from tokentape_api.collect import Collector
from tokentape_api.engine import Engine, EngineRefusal
from tokentape_api.http import responses
from tokentape_api.http.access import Identified, Tokens, ensure_allowed
from tokentape_api.http.bodies import Bodies
from tokentape_api.http.observed import Observed
from tokentape_api.operations import Operation, operations
from tokentape_api.recording.cache import Sessions
from tokentape_api.recording.recorder import Recorder
from tokentape_api.services import Services
from tokentape_api.settings import ApiSettings
from tokentape_api.telemetry import Telemetry
from tokentape_api.work import Workers
from tokentape_contracts.errors import MethodNotAllowed, TokentapeError
from tokentape_core.domain.match import MATCHERS
from tokentape_core.loading import load_matcher
from tokentape_core.metrics import observe_lag
from tokentape_core.store import Store
from tokentape_core.text.render import ChatRenderer
from tokentape_core.tracing import Tracing

_ANY = ["DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"]


def build_app(
    settings: ApiSettings,
    *,
    store: Store,
    engine: Engine,
    renderer: ChatRenderer,
    collector: Collector,
    tracing: Tracing | None = None,
) -> Starlette:
    """The application. Nothing connects before its lifespan begins.

    Args:
        tracing: where spans go; None for nowhere.

    Raises:
        LoadError: there is no such matcher.
        TokensError: the tokens file cannot be used.
    """
    tokens = Tokens(settings.tokens_file) if settings.tokens_file is not None else None
    rows = operations()
    telemetry = Telemetry(tracing, [operation.name for operation in rows])
    cached = Sessions(store, telemetry)
    matchers = {**MATCHERS, settings.matcher: load_matcher(settings.matcher)}
    workers = Workers()
    bodies = Bodies(workers)
    telemetry.work_waiting.set_function(workers.waiting)
    telemetry.bodies_bytes.set_function(lambda: bodies.held)
    recorder = Recorder(cached, store, engine, renderer, matchers, telemetry, workers)
    services = Services(
        settings,
        store,
        cached,
        engine,
        renderer,
        matchers,
        recorder,
        collector,
        telemetry,
        workers,
        bodies,
    )

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        await collector.start(lambda kind: telemetry.entries_refused[kind].inc())
        lag = asyncio.create_task(observe_lag(telemetry.loop_lag_seconds))
        try:
            yield
        finally:
            lag.cancel()
            workers.close()
            await collector.close()
            await engine.close()
            await store.close()
            await asyncio.to_thread(telemetry.tracing.close)

    unguarded = [operation for operation in rows if operation.scope is None]
    app = Starlette(
        routes=[_route(operation, cached.tenant) for operation in rows],
        exception_handlers={
            TokentapeError: responses.on_tokentape_error,
            EngineRefusal: responses.on_engine_refusal,
            HTTPException: responses.on_http_exception,
            ClientDisconnect: responses.on_client_gone,
            Exception: responses.on_defect,
        },
        middleware=[
            Middleware(Observed, telemetry, {operation.name for operation in unguarded}),
            Middleware(
                Identified, tokens, {operation.path for operation in unguarded}, responses.error_response
            ),
        ],
        lifespan=lifespan,
    )
    # A redirect would name the host that the client says we are.
    app.router.redirect_slashes = False
    app.state.services = services
    return app


def _route(operation: Operation, tenant_of: Callable[[str], Awaitable[str | None]]) -> Route:
    """An operation's route: who may not use it hears only that."""
    path = operation.path.replace("{path}", "{path:path}")
    if operation.scope is None:
        return Route(path, operation.handler, methods=[operation.method], name=operation.name)
    scope, method, handler = operation.scope, operation.method, operation.handler
    # Below a session any method is taken: what is refused here must not reach the catch-all.
    is_below = operation.below_session is not None

    async def guarded(request: Request) -> Response:
        await ensure_allowed(request, scope, tenant_of)
        if is_below and method not in ("ANY", request.method):
            raise MethodNotAllowed(f"{request.url.path} takes {method}, not {request.method}")
        return await handler(request)

    return Route(path, guarded, methods=_ANY if is_below else [method], name=operation.name)
