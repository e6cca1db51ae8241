"""Which headers cross the proxy."""

from collections.abc import Mapping

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


def to_engine(session_id: str, headers: Mapping[str, str]) -> dict[bytes, bytes]:
    """The client's headers for the engine, with the routing key by which a router keeps cache affinity.

    They are the bytes that came in: Starlette reads any as Latin-1, httpx would refuse all but ASCII.
    """
    dropped = _HOP_BY_HOP | _FRAMING | _CREDENTIALS | {ROUTING_HEADER.lower()} | _named_in_connection(headers)
    kept = {
        name.lower().encode("latin-1"): value.encode("latin-1")
        for name, value in headers.items()
        if name.lower() not in dropped
    }
    return {**kept, ROUTING_HEADER.encode(): session_id.encode()}


def to_client(session_id: str, base_url: str, headers: Mapping[str, str]) -> dict[str, str]:
    """The engine's headers for the client; a redirect within the engine stays within the session."""
    dropped = _HOP_BY_HOP | _FRAMING | _IDENTITY | _named_in_connection(headers) | {"location"}
    kept = {name: value for name, value in headers.items() if name.lower() not in dropped}
    target = headers.get("location")
    if target is not None and target.startswith(f"{base_url}/"):
        target = target.removeprefix(base_url)
    if target is not None and target.startswith("/") and not target.startswith("//"):
        kept["location"] = f"/sessions/{session_id}{target}"
    return kept


def _named_in_connection(headers: Mapping[str, str]) -> frozenset[str]:
    """Also if there are several such headers."""
    named = [value for name, value in headers.items() if name.lower() == "connection"]
    return frozenset(name.strip().lower() for name in ",".join(named).split(","))
