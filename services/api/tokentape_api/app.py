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
from tokentape_api.http.access import Guard, Identified, Tokens
from tokentape_api.http.bodies import Bodies
from tokentape_api.http.observed import Observed
from tokentape_api.recording.cache import Sessions
from tokentape_api.recording.recorder import Recorder
from tokentape_api.routes import chat, health, metrics, proxy, samples, sessions
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

Handler = Callable[[Request], Awaitable[Response]]
_ANY = ["DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"]


def build_app(
    settings: ApiSettings,
    *,
    store: Store,
    engine: Engine,
    renderer: ChatRenderer,
    collector: Collector,
    telemetry: Telemetry | None = None,
) -> Starlette:
    """The application. Nothing connects before its lifespan begins.

    Args:
        telemetry: None for one that traces nothing.

    Raises:
        LoadError: there is no such matcher.
        TokensError: the tokens file cannot be used.
    """
    tokens = Tokens(settings.tokens_file) if settings.tokens_file is not None else None
    telemetry = telemetry or Telemetry()
    cached = Sessions(store, telemetry)
    matchers = {**MATCHERS, settings.matcher: load_matcher(settings.matcher)}
    guard = Guard(cached)
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

    app = Starlette(
        routes=guard.before(
            [
                # First the one that is asked most: the router tries them in this order.
                _route("POST /sessions/{sid}/v1/chat/completions", _post(chat.chat_completions), _ANY),
                _route("GET /health", health.health),
                _route("GET /ready", health.ready),
                _route("GET /metrics", metrics.metrics),
                _route("POST /sessions", sessions.open_session),
                _route("GET /sessions/{sid}", sessions.get_session),
                _route("DELETE /sessions/{sid}", sessions.delete_session),
                _route("POST /sessions/{sid}/samples", _post(samples.collect_samples), _ANY),
                _route("ANY /sessions/{sid}/{path:path}", proxy.forward, _ANY),
            ]
        ),
        exception_handlers={
            TokentapeError: responses.on_tokentape_error,
            EngineRefusal: responses.on_engine_refusal,
            HTTPException: responses.on_http_exception,
            ClientDisconnect: responses.on_client_gone,
            Exception: responses.on_defect,
        },
        middleware=[
            Middleware(Observed, telemetry),
            Middleware(Identified, tokens, responses.error_response),
        ],
        lifespan=lifespan,
    )
    # A redirect would name the host that the client says we are.
    app.router.redirect_slashes = False
    app.state.services = services
    return app


def _route(name: str, handler: Handler, methods: list[str] | None = None) -> Route:
    """A route, by the name that metrics, logs and docs have for it."""
    method, path = name.split()
    return Route(path, handler, methods=methods or [method], name=name.replace("{path:path}", "{path}"))


def _post(handler: Handler) -> Handler:
    """Takes every method, so that a wrong one is refused here and does not reach the catch-all."""

    async def post_only(request: Request) -> Response:
        if request.method != "POST":
            raise MethodNotAllowed(f"{request.url.path} takes POST, not {request.method}")
        return await handler(request)

    return post_only
