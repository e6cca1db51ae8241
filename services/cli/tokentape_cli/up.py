"""`tokentape up`: the whole system on one machine."""

import signal
import sys
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Final

import httpx

from tokentape_cli import options
from tokentape_cli.embedded import EmbeddedValkey, EmbeddedValkeyError
from tokentape_cli.options import Setting, UsageError
from tokentape_cli.processes import ProcessEnded, Processes, answers, ensure_free, free_port
from tokentape_core.text.errors import TokenizerError
from tokentape_core.text.hub import locate

_START_S: Final = 300.0
"""For the API and the worker, which load a tokenizer, perhaps from far away. An engine may take as long as it
likes."""
_POLL_S: Final = 0.2
_ENGINE_POLL_S: Final = 0.5
_CHECKS: Final = {"engine": "the engine", "probe": "the first answers of the engine"}
"""What `GET /ready` looks at of the engine, for people."""


def run(settings: Mapping[str, Setting]) -> int:
    """Starts everything, says when it is ready, and stops everything on SIGINT, SIGTERM or a child's end."""
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    if settings["port"].value == 0:
        raise UsageError("--port 0: `up` needs a port that it can name")
    ensure_free(settings, "port")
    ensure_free(settings, "metrics-port")
    settings = _with_tokenizer(settings)
    try:
        with ExitStack() as stack:
            settings = _with_redis(settings, stack)
            processes = stack.enter_context(Processes(stop=stop))
            start(processes, settings)
            if not stop.is_set():
                url = api_url(settings)
                print(f"tokentape up: ready at {url}; look at {url}/ready. Ctrl-C stops it", flush=True)
            while not stop.wait(_POLL_S):
                processes.check()
            print("tokentape up: stopping", flush=True)
    except (EmbeddedValkeyError, TimeoutError) as error:
        print(f"tokentape up: {error}", file=sys.stderr)
        return 1
    except ProcessEnded as error:
        print(f"tokentape up: {error}", file=sys.stderr)
        return error.code
    return 0


def start(processes: Processes, settings: Mapping[str, Setting]) -> None:
    """Starts the worker and the API and waits until both are ready, and with them the engine and Redis.

    Raises:
        ProcessEnded: one of them ended.
        TimeoutError: one of them did not start.
    """
    worker_port = settings["metrics-port"].value or free_port()
    settings = {**settings, "metrics-port": Setting(worker_port, "up")}
    for name, names in (("worker", options.ASSEMBLER), ("API", options.API)):
        command = "assembler" if name == "worker" else "api"
        processes.start(name, [command], options.environment(settings, (*names, *options.LOGS)))
    worker, api = f"http://127.0.0.1:{worker_port}/health", f"{api_url(settings)}/health"
    processes.wait_until(
        lambda: "the API" if not answers(api) else "" if answers(worker) else "the worker", _START_S
    )
    processes.wait_until(
        lambda: _missing(api_url(settings), settings["engine-url"].value), poll_s=_ENGINE_POLL_S
    )


def _missing(url: str, engine_url: str) -> str:
    """What the API at `url` waits for, and why; "" if it is ready."""
    shown = options.masked(engine_url)
    if not answers(f"{engine_url.rstrip('/')}/health"):  # asked here: the API would log each question
        return f"the engine at {shown}, whose /health does not answer"
    try:
        reply = httpx.get(f"{url}/ready", timeout=5.0, trust_env=False)
    except httpx.TransportError:
        return "the API"
    if reply.status_code == 200:
        return ""
    for name, found in reply.json()["checks"].items():
        if found != "ok":
            said = "; ".join(check["detail"] for check in found) if isinstance(found, list) else found
            return f"{_CHECKS[name]} at {shown}: {said}" if name in _CHECKS else f"{name}: {said}"
    return "the engine"


def api_url(settings: Mapping[str, Setting]) -> str:
    """Where the API of these settings answers."""
    host = settings["host"].value
    return f"http://{'127.0.0.1' if host in ('0.0.0.0', '') else host}:{settings['port'].value}"  # noqa: S104


def _with_tokenizer(settings: Mapping[str, Setting]) -> Mapping[str, Setting]:
    """The settings with a tokenizer for whose place the model hub was asked, once for all processes."""
    tokenizer = settings["tokenizer"]
    try:
        return {**settings, "tokenizer": Setting(locate(tokenizer.value), tokenizer.source)}
    except TokenizerError as error:
        raise UsageError(str(error)) from error


def _with_redis(settings: Mapping[str, Setting], stack: ExitStack) -> Mapping[str, Setting]:
    if settings["redis-url"].value is not None:
        return settings
    valkey = stack.enter_context(EmbeddedValkey())
    print(
        f"tokentape up: sessions are kept in a bundled Valkey server, until it stops: {valkey.url}",
        flush=True,
    )
    return {**settings, "redis-url": Setting(valkey.url, "embedded")}
