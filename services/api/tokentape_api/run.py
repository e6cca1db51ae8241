"""Running an API process."""

import signal

from starlette.applications import Starlette
from uvicorn import Config

from tokentape_api.app import build_app
from tokentape_api.collect import Collector
from tokentape_api.engine import connect_engine
from tokentape_api.http.server import BoundedHttp, BoundedServer
from tokentape_api.settings import ApiSettings
from tokentape_contracts import limits
from tokentape_core import heap, tracing
from tokentape_core.store import RedisStore, connect
from tokentape_core.text.load import load_renderer
from tokentape_core.text.without_torch import without_torch


def build(settings: ApiSettings) -> Starlette:
    """The application on real parts. Loads the tokenizer; connects to nothing yet."""
    renderer = load_renderer(settings)
    client = connect(settings.redis_url)
    return build_app(
        settings,
        store=RedisStore(
            client, retention_s=settings.retention_s, wait_replicas=settings.redis_wait_replicas
        ),
        engine=connect_engine(settings),
        renderer=renderer,
        collector=Collector(connect(settings.queue_url), connect(settings.queue_url), client),
        tracing=tracing.from_environment("tokentape-api"),
    )


def run(settings: ApiSettings) -> int:
    """Serves until SIGTERM or SIGINT, then finishes the requests that it has. Returns the exit code.

    Raises:
        TokenizerError: the tokenizer cannot be loaded or does not fit the family.
        LoadError: there is no such matcher.
    """
    without_torch()
    config = Config(
        build(settings),
        host=settings.host,
        port=settings.port,
        loop="uvloop",
        http=BoundedHttp,
        ws="none",
        access_log=False,
        proxy_headers=False,
        log_config=None,
        server_header=False,
        log_level="warning",
        timeout_graceful_shutdown=int(settings.engine_timeout_s) + limits.DRAIN_S,
        timeout_keep_alive=limits.API_KEEP_ALIVE_S,
    )
    server = BoundedServer(config)
    # uvicorn raises the signal again once it has stopped in order; that must not end us with an error.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    heap.settle()
    server.run()
    return 0 if server.started else 1
