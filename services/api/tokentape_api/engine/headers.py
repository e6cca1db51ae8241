"""Which headers cross the proxy, and what of an answer's head can be passed on at all."""

from collections.abc import Iterable, Mapping

from tokentape_contracts.errors import EngineReplyInvalid
from tokentape_contracts.http import ROUTING_HEADER

_HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
"""RFC 9110, section 7.6.1: they concern one connection only."""
_FRAMING = frozenset({"accept-encoding", "content-encoding", "content-length", "expect", "host"})
"""The transport of each side writes its own."""
_CREDENTIALS = frozenset({"authorization", "cookie", "x-api-key", "api-key"})
"""They are for us, not for the engine."""
_IDENTITY = frozenset({"date", "server", "set-cookie"})
"""Ours stand in the answer already, and strict clients refuse them twice."""


_NOT_TO_ENGINE = _HOP_BY_HOP | _FRAMING | _CREDENTIALS | {ROUTING_HEADER.lower()}
_NOT_TO_CLIENT = _HOP_BY_HOP | (_FRAMING - {"content-encoding"}) | _IDENTITY | {"location"}


def to_engine(session_id: str, headers: Mapping[str, str]) -> dict[str, str]:
    """The client's headers for the engine, with the routing key by which a router keeps cache affinity."""
    return {**_without(headers, _NOT_TO_ENGINE), ROUTING_HEADER: session_id}


def to_client(session_id: str, base_url: str, headers: Mapping[str, str]) -> dict[str, str]:
    """The engine's headers for the client; a redirect within the engine stays within the session."""
    kept = _without(headers, _NOT_TO_CLIENT)
    target = headers.get("location")
    if target is not None and target.startswith(f"{base_url}/"):
        target = target.removeprefix(base_url)
    if target is not None and target.startswith("/") and not target.startswith("//"):
        kept["location"] = f"/sessions/{session_id}{target}"
    return kept


def joined(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """Headers by name in lower case, each byte a character, as Starlette writes them; equal names joined."""
    found: dict[str, str] = {}
    for raw_name, raw_value in headers:
        name, value = raw_name.decode("latin-1").lower(), raw_value.decode("latin-1")
        found[name] = f"{found[name]}, {value}" if name in found else value
    return found


def ensure_head(status: int, headers: Mapping[str, str]) -> None:
    """Raises `EngineReplyInvalid` for a status or a header that no HTTP answer may have (RFC 9110).

    Parsers of clients pass such things on. A server that repeats them breaks its own answer.
    """
    if not 200 <= status <= 599:
        raise EngineReplyInvalid(f"the engine answered with the status {status}, which HTTP does not have")
    for name, value in headers.items():
        if any((character < " " and character != "\t") or character in "\x7f" for character in name + value):
            raise EngineReplyInvalid(f"the engine's header {name!r} holds a control character")


def _without(headers: Mapping[str, str], dropped: frozenset[str]) -> dict[str, str]:
    """The other headers, without those that a `Connection` header names; there may be several of these."""
    given = [(name.lower(), name, value) for name, value in headers.items()]
    named = {
        part.strip().lower() for key, _, value in given if key == "connection" for part in value.split(",")
    }
    return {name: value for key, name, value in given if key not in dropped and key not in named}
