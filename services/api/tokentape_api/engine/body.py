"""An engine's answer, taken apart while it comes in: routing replay payloads on one side, JSON on the other.

An answer may be half a gigabyte of JSON of which all but some kilobytes are one base64 string. Parsing that
in one go would stop the event loop for seconds. So the bytes are searched for the payloads' keys as they
arrive; a long string behind such a key goes to its decoder, and the JSON keeps a mark in its place.

A quote inside a JSON string stands behind a backslash, and outside of strings there are no backslashes: so a
key's text that no backslash precedes and a colon follows is a key and nothing else. A *short* string stays
where it is, whatever it belongs to: the search makes the parsing cheap, and decides nothing.
"""

import json
import re
import secrets
from collections.abc import Collection
from typing import Any, Final

import orjson

from tokentape_api.engine.payload import NewValues, Payload
from tokentape_contracts.errors import EngineReplyInvalid
from tokentape_core.domain.replay import KINDS

NOT_JSON: Final = "the engine answered 200 with a body that is not JSON"
SHORT: Final = 64 * 1024
"""A payload's text up to this length stays in the JSON."""

_KEY: Final = re.compile(rb'"(%s)"[ \t\r\n]*:[ \t\r\n]*"' % "|".join(KINDS).encode())
_OVERLAP: Final = 64
"""A key that is cut in two by a chunk's end is found from so far before it; with more white space than fits,
the string stays in the JSON."""


class Body:
    """The bytes of one answer.

    Args:
        wanted: the kinds of payload that are decoded; others are left out.
        new_values: makes what takes a payload's decoded bytes.

    Attributes:
        size: bytes that came in.
        not_json: why what was parsed is no JSON, None if it is. The standard library reads more than that
            (NaN, half a character): only so that the checks of an answer can say where it stands.
    """

    def __init__(self, wanted: Collection[str], new_values: NewValues) -> None:
        self.size = 0
        self.not_json: str | None = None
        self._wanted = wanted
        self._new_values = new_values
        self._json = bytearray()
        self._seen = 0
        """Up to here the JSON has been searched: for a key, or for the end of the string at `_start`."""
        self._start: int | None = None
        self._kind = ""
        self._open: Payload | None = None
        self._mark = secrets.token_hex(16)
        self._marked: dict[str, Payload] = {}

    def feed(self, chunk: bytes) -> None:
        """Takes the next bytes.

        Raises:
            EngineReplyInvalid: a payload is above its limit.
        """
        self.size += len(chunk)
        while chunk:
            chunk = self._search(chunk) if self._open is None else self._pass_on(self._open, chunk)

    def parse(self) -> Any:
        """The JSON, with marks in place of the long payloads, or what is nearly JSON (`not_json`).

        Raises:
            EngineReplyInvalid: it is not even nearly JSON.
        """
        try:
            return orjson.loads(self._json)
        except orjson.JSONDecodeError as strict:
            self.not_json = str(strict)
            try:
                return json.loads(self._json)
            except (ValueError, RecursionError) as error:
                raise EngineReplyInvalid(f"{NOT_JSON}: {error}") from error

    def claim(self, kind: str, text: str) -> Payload:
        """The payload of a string that was found in the parsed JSON under the name of a payload."""
        if (marked := self._marked.pop(text, None)) is not None:
            return marked
        payload = self._new_payload(kind)
        payload.feed(text.encode(errors="replace"))
        payload.close()
        return payload

    @property
    def unclaimed(self) -> list[str]:
        """The kinds of payloads that nobody has claimed: their marks still stand in the JSON."""
        return [payload.kind for payload in self._marked.values()]

    def _new_payload(self, kind: str) -> Payload:
        return Payload(kind, self._new_values() if kind in self._wanted else None)

    def _search(self, chunk: bytes) -> bytes:
        """Adds to the JSON; returns what of it belongs to a long payload that begins here."""
        self._json += chunk
        while True:
            if self._start is None and not self._find_key():
                return b""
            if (long := self._find_end()) is not None:
                return long
            if self._start is not None:
                return b""

    def _find_key(self) -> bool:
        found = _KEY.search(self._json, self._seen)
        while found and self._json[found.start() - 1 : found.start()] == b"\\":
            found = _KEY.search(self._json, found.start() + 1)
        if found is None:
            self._seen = max(self._seen, len(self._json) - _OVERLAP)
            return False
        self._kind = found[1].decode()
        self._start = self._seen = found.end()
        return True

    def _find_end(self) -> bytes | None:
        """Looks for the end of the string at `_start`; takes the string out as soon as it is long."""
        start = self._start or 0
        end = self._json.find(b'"', self._seen)
        self._seen = len(self._json) if end < 0 else end + 1
        if self._seen - start > SHORT:
            text = bytes(memoryview(self._json)[start:])
            del self._json[start:]
            mark = f"{self._mark}{len(self._marked)}"
            self._json += mark.encode()
            self._open = self._marked[mark] = self._new_payload(self._kind)
            self._start = None
            return text
        if end >= 0:
            self._start = None
        return None

    def _pass_on(self, payload: Payload, chunk: bytes) -> bytes:
        """Feeds the open payload; returns what follows it."""
        end = chunk.find(b'"')
        if end < 0:
            payload.feed(chunk)
            return b""
        payload.feed(chunk[:end])
        payload.close()
        self._open = None
        self._seen = len(self._json) + 1
        return chunk[end:]
