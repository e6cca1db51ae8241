"""The composition root: parts in, Starlette application out."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tokentape_api import responses
from tokentape_api.cache import Sessions
from tokentape_api.collect import Collector
from tokentape_api.engine import Engine, EngineRefusal
from tokentape_api.recorder import Recorder
from tokentape_api.routes import chat, health, proxy, samples, sessions
from tokentape_api.services import Services
from tokentape_api.settings import ApiSettings
from tokentape_contracts.errors import MethodNotAllowed, TokentapeError
from tokentape_core.domain.match import MATCHERS
from tokentape_core.loading import load_matcher
from tokentape_core.store import Store
from tokentape_core.text.render import ChatRenderer

Handler = Callable[[Request], Awaitable[Response]]
_ANY = ["DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"]


def build_app(
    settings: ApiSettings, *, store: Store, engine: Engine, renderer: ChatRenderer, collector: Collector
) -> Starlette:
    """The application. Nothing connects before its lifespan begins.

    Raises:
        LoadError: there is no such matcher.
    """
    cached = Sessions(store)
    matchers = {**MATCHERS, settings.matcher: load_matcher(settings.matcher)}
    recorder = Recorder(cached, store, engine, renderer, matchers)
    services = Services(settings, store, cached, engine, renderer, matchers, recorder, collector)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        await collector.start()
        try:
            yield
        finally:
            await collector.close()
            await engine.close()
            await store.close()

    app = Starlette(
        routes=[
            Route("/health", health.health),
            Route("/ready", health.ready),
            Route("/sessions", sessions.open_session, methods=["POST"]),
            Route("/sessions/{sid}", sessions.get_session, methods=["GET"]),
            Route("/sessions/{sid}", sessions.delete_session, methods=["DELETE"]),
            Route("/sessions/{sid}/v1/chat/completions", _post(chat.chat_completions), methods=_ANY),
            Route("/sessions/{sid}/samples", _post(samples.collect_samples), methods=_ANY),
            Route("/sessions/{sid}/{path:path}", proxy.forward, methods=_ANY),
        ],
        exception_handlers={
            TokentapeError: responses.on_tokentape_error,
            EngineRefusal: responses.on_engine_refusal,
            HTTPException: responses.on_http_exception,
            Exception: responses.on_defect,
        },
        lifespan=lifespan,
    )
    app.state.services = services
    return app


def _post(handler: Handler) -> Handler:
    """Takes every method, so that a wrong one is refused here and does not reach the catch-all."""

    async def post_only(request: Request) -> Response:
        if request.method != "POST":
            raise MethodNotAllowed(f"{request.url.path} takes POST, not {request.method}")
        return await handler(request)

    return post_only
