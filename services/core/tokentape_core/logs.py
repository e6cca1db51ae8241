"""Log lines: how they look, and one canonical line for each request or job.

Code logs through the standard library. `configure`, called by the command, decides how a line looks: short
for people, or one JSON object with all that is known. Whoever embeds the code need not call it.

A line says who, what, how it ended and how long it took. It never holds payloads, tokens, messages or
credentials; neither do the tracebacks of defects, which are written without the values of variables.
"""

import json
import logging
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, Final, Literal, TextIO

import orjson

Format = Literal["console", "json"]

SESSION_DIGITS: Final = 8
"""So many of a session id's digits tell sessions apart on a terminal."""

_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_COLORS: Final = MappingProxyType(
    {"info": "\033[32m", "warning": "\033[33m", "error": "\033[31m", "critical": "\033[31m"}
)
_DIM, _SESSION_COLOR, _RESET = "\033[2m", "\033[36m", "\033[0m"
_SHORT: Final = ("route", "outcome", "status", "code", "detail")
"""What a short line has of a canonical line's fields, in this order."""

_line: ContextVar[dict[str, Any] | None] = ContextVar("line", default=None)
_ids: ContextVar[Mapping[str, str]] = ContextVar("ids", default=MappingProxyType({}))


def configure(form: Format | None = None) -> None:
    """Writes all logs of this process to standard error.

    Args:
        form: None takes `console` on a terminal and `json` elsewhere.
    """
    # No line holds what a record would otherwise look up.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    handler = logging.StreamHandler()
    if (form or ("console" if sys.stderr.isatty() else "json")) == "json":
        handler.setFormatter(_Json())
    else:
        handler.setFormatter(_Short(colors=wants_color(sys.stderr)))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    for client in ("httpx", "httpx2"):  # these log every request at INFO
        logging.getLogger(client).setLevel(logging.WARNING)


def wants_color(stream: TextIO) -> bool:
    """Whether the stream is a terminal, and nobody said that colours are not wanted (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR")


class _Json(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        event: dict[str, Any] = {
            **_ids.get(),
            "event": record.getMessage(),
            "level": record.levelname.lower(),
            "logger": record.name,
            **getattr(record, "fields", {}),
            "timestamp": datetime.fromtimestamp(record.created, UTC).isoformat().replace("+00:00", "Z"),
        }
        if record.exc_info:
            event["exception"] = self.formatException(record.exc_info)
        try:
            return orjson.dumps(event, default=str).decode()
        except TypeError:  # a lone surrogate, or an integer beyond 64 bits
            return json.dumps(event, default=str)


class _Short(logging.Formatter):
    """Time of day, level, session, what happened and how long it took."""

    def __init__(self, *, colors: bool) -> None:
        super().__init__()
        self._colors = colors

    def format(self, record: logging.LogRecord) -> str:
        level = record.levelname.lower()
        fields = {**_ids.get(), **getattr(record, "fields", {})}
        session = (fields.get("session") or fields.get("opened") or "")[:SESSION_DIGITS]
        words = [record.getMessage(), *(str(fields[name]) for name in _SHORT if name in fields)]
        if "duration_ms" in fields:
            words.append(f"{fields['duration_ms']:.0f} ms")
        moment = time.strftime("%H:%M:%S", time.localtime(record.created))
        parts = (
            self._paint(_DIM, moment),
            self._paint(_COLORS.get(level, ""), f"{level:<7}"),
            self._paint(_SESSION_COLOR, f"{session:<{SESSION_DIGITS}}"),
            # What a foreign error says must not steer the terminal.
            _CONTROL.sub(lambda match: repr(match[0])[1:-1], " ".join(words)),
        )
        text = " ".join(parts)
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text

    def _paint(self, color: str, text: str) -> str:
        return f"{color}{text}{_RESET}" if self._colors and color and text.strip() else text


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
    bound = _ids.set({**_ids.get(), **ids})
    began = time.perf_counter()
    try:
        yield fields
    finally:
        fields["duration_ms"] = round((time.perf_counter() - began) * 1000, 3)
        level = fields.pop("level", logging.INFO)
        if log.isEnabledFor(level):
            # `log.log` would look for the caller's line, which takes longer than all else.
            log.handle(log.makeRecord(log.name, level, "", 0, event, (), None, extra={"fields": fields}))
        _ids.reset(bound)
        _line.reset(line)


def note(**fields: Any) -> None:
    """Adds fields to the canonical line of the block that this runs in, if there is one."""
    if (line := _line.get()) is not None:
        line.update(fields)


def note_stage(stage: str, seconds: float) -> None:
    """Adds a duration to the line's `stages`, in milliseconds."""
    if (line := _line.get()) is not None:
        line.setdefault("stages", {})[stage] = round(seconds * 1000, 3)
