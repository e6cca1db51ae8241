"""Log lines: how they look, and one canonical line for each request or job.

Code logs through the standard library. `configure`, called by the command, renders every record with
structlog: for people on a console, or as one JSON object a line. Whoever embeds the code need not call it.

A line says who, what, how it ended and how long it took. It never holds payloads, tokens, messages or
credentials; neither do the tracebacks of defects, which are written without the values of variables.
"""

import logging
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal

import orjson
from structlog.contextvars import bind_contextvars, merge_contextvars, reset_contextvars
from structlog.dev import ConsoleRenderer, plain_traceback
from structlog.processors import JSONRenderer, TimeStamper, format_exc_info
from structlog.types import Processor

Format = Literal["console", "json"]

_line: ContextVar[dict[str, Any] | None] = ContextVar("line", default=None)


def configure(form: Format | None) -> None:
    """Renders all logs of this process to standard error.

    Args:
        form: None takes `console` on a terminal and `json` elsewhere.
    """
    is_terminal = sys.stderr.isatty()
    if (form or ("console" if is_terminal else "json")) == "json":
        renderers: list[Processor] = [format_exc_info, JSONRenderer(serializer=_dump)]
    else:
        renderers = [ConsoleRenderer(colors=is_terminal, exception_formatter=plain_traceback)]
    # No line holds what a record would otherwise look up.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    handler = logging.StreamHandler()
    handler.setFormatter(_Formatter([merge_contextvars, TimeStamper("iso"), *renderers]))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


class _Formatter(logging.Formatter):
    """Sends a record through structlog's processors; `ProcessorFormatter` takes twice the time."""

    def __init__(self, processors: Sequence[Processor]) -> None:
        super().__init__()
        self._processors = processors

    def format(self, record: logging.LogRecord) -> str:
        level = record.levelname.lower()
        event: Any = {
            "event": record.getMessage(),
            "level": level,
            "logger": record.name,
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            event["exc_info"] = record.exc_info
        for process in self._processors:
            event = process(None, level, event)
        return str(event)


def _dump(fields: dict[str, Any], **_: Any) -> str:
    return orjson.dumps(fields, default=str).decode()


@contextmanager
def canonical(log: logging.Logger, event: str, **ids: str) -> Iterator[dict[str, Any]]:
    """Writes one line at the end of the block, with its duration and all that was noted in it.

    Args:
        event: what the line is called.
        ids: stand in this line and in every other that is written inside the block.

    Yields:
        The line's fields. `level`, if it is set, is the line's level (default INFO) and not a field.
    """
    fields: dict[str, Any] = {}
    line = _line.set(fields)
    bound = bind_contextvars(**ids)
    began = time.perf_counter()
    try:
        yield fields
    finally:
        fields["duration_ms"] = round((time.perf_counter() - began) * 1000, 3)
        level = fields.pop("level", logging.INFO)
        if log.isEnabledFor(level):
            # `log.log` would look for the caller's line, which takes longer than all else.
            log.handle(log.makeRecord(log.name, level, "", 0, event, (), None, extra={"fields": fields}))
        reset_contextvars(**bound)
        _line.reset(line)


def note(**fields: Any) -> None:
    """Adds fields to the canonical line of the block that this runs in, if there is one."""
    if (line := _line.get()) is not None:
        line.update(fields)


def note_stage(stage: str, seconds: float) -> None:
    """Adds a duration to the line's `stages`, in milliseconds."""
    if (line := _line.get()) is not None:
        line.setdefault("stages", {})[stage] = round(seconds * 1000, 3)
