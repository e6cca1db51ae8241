"""`tokentape up`: the whole system on one machine."""

import signal
import sys
import threading
from collections.abc import Mapping
from contextlib import ExitStack

from tokentape_cli import options
from tokentape_cli.embedded import EmbeddedValkey, EmbeddedValkeyError
from tokentape_cli.options import Setting, UsageError
from tokentape_cli.processes import ProcessEnded, Processes, answers

_READY_S = 60.0
_POLL_S = 0.2


def run(settings: Mapping[str, Setting]) -> int:
    """Starts everything, says when it is ready, and stops everything on SIGINT, SIGTERM or a child's end."""
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    if settings["port"].value == 0:
        raise UsageError("--port 0: `up` needs a port that it can name")
    try:
        with ExitStack() as stack:
            settings = _with_redis(settings, stack)
            processes = stack.enter_context(Processes())
            start(processes, settings)
            print(f"tokentape up: ready at {api_url(settings)}; Ctrl-C stops it", flush=True)
            while not stop.wait(_POLL_S):
                processes.check()
            print("tokentape up: stopping", flush=True)
    except (EmbeddedValkeyError, ProcessEnded, TimeoutError) as error:
        print(f"tokentape up: {error}", file=sys.stderr)
        return 1
    return 0


def start(processes: Processes, settings: Mapping[str, Setting]) -> None:
    """Starts the worker and the API and waits until the API answers."""
    for name, names in (("assembler", options.ASSEMBLER), ("api", options.API)):
        processes.start(name, [name], options.environment(settings, (*names, *options.LOGS)))
    processes.wait_until(lambda: answers(f"{api_url(settings)}/health"), "the API", _READY_S)


def api_url(settings: Mapping[str, Setting]) -> str:
    """Where the API of these settings answers."""
    host = settings["host"].value
    return f"http://{'127.0.0.1' if host in ('0.0.0.0', '') else host}:{settings['port'].value}"  # noqa: S104


def _with_redis(settings: Mapping[str, Setting], stack: ExitStack) -> Mapping[str, Setting]:
    if settings["redis-url"].value is not None:
        return settings
    valkey = stack.enter_context(EmbeddedValkey())
    print("tokentape up: sessions are kept in a bundled Valkey server, until it stops", flush=True)
    return {**settings, "redis-url": Setting(valkey.url, "embedded")}
