"""The connection to a Tokentape server."""

import asyncio
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Literal, Self
from urllib.parse import quote

import httpx
import orjson

from tokentape_contracts import limits
from tokentape_driver.errors import TransportError, error_of_reply, transport_error, unexpected
from tokentape_driver.session import Session

AlteredAnswer = Literal["refuse", "keep"]
"""What becomes of a recorded answer that comes back altered."""


class TokentapeClient:
    """A pool of connections to one server; use one for all the episodes of an event loop.

    `async with TokentapeClient(url) as client:` closes it, and so does `aclose`. The number of connections is
    not limited: a collect holds one while the server assembles, and must not keep a DELETE waiting.

    Args:
        base_url: where the server is, e.g. `http://tokentape:8080`; a path in it is kept. User and password
            in it, for a proxy before the server, are sent by basic authentication in place of `token`, handed
            to the agent with the session's URL, and shown nowhere.
        token: sent as `Authorization: Bearer …`.
        transport: replaces the network, for tests.

    Raises:
        ValueError: `base_url` is not a URL.
    """

    def __init__(
        self,
        base_url: str,
        *,
        token: str | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        try:
            url = httpx.URL(self.base_url)
        except httpx.InvalidURL:  # whose text may quote a part of the password
            raise ValueError(
                "base_url is not a URL; special characters of a password must be percent-encoded"
            ) from None
        self._address = url.copy_with(userinfo=b"")
        self._http = httpx.AsyncClient(
            # Not by the URL of each request, which httpx logs, and which errors show.
            auth=(url.username, url.password) if url.userinfo else None,
            headers={
                # Samples are numbers, which do not shrink much; and what is packed may unpack without end.
                "Accept-Encoding": "identity",
                **({"Authorization": f"Bearer {token}"} if token is not None else {}),
            },
            event_hooks={"response": [_refuse_packed]},
            # Every call has a total deadline of its own; httpx's timeouts begin anew with every chunk.
            timeout=None,  # noqa: S113
            limits=httpx.Limits(max_connections=None, keepalive_expiry=limits.DRIVER_KEEP_ALIVE_S),
            transport=transport,
        )

    def __repr__(self) -> str:
        return f"TokentapeClient({str(self._address)!r})"

    async def open_session(
        self,
        mode: str | None = None,
        *,
        labels: Mapping[str, Any] | None = None,
        pins: Mapping[str, Any] | None = None,
        matcher: str | None = None,
        altered_answer: AlteredAnswer | None = None,
    ) -> Session:
        """Opens a session; one that is never ended expires when idle.

        Args:
            mode: `linear` or `tree`; overrides the server's default.
            labels: any JSON object, kept with the session.
            pins: sampling parameters that win over what the agent sends.
            matcher: overrides the server's default.
            altered_answer: what a linear session does with a recorded answer that the agent sends back
                altered: `refuse` the request, or `keep` the recorded one. Overrides the server's default.

        Raises:
            TransportError: no answer within `limits.DRIVER_OPEN_S`.
            UnexpectedReply: the answer names no session.
            TokentapeError: the server refused.
        """
        url = httpx.URL(f"{self._address}/sessions")
        fields = {
            "mode": mode,
            "labels": labels,
            "pins": pins,
            "matcher": matcher,
            "altered_answer": altered_answer,
        }
        body = orjson.dumps({name: value for name, value in fields.items() if value is not None})
        try:
            async with asyncio.timeout(limits.DRIVER_OPEN_S):
                response = await self._http.post(
                    url, content=body, headers={"Content-Type": "application/json"}
                )
        except httpx.RequestError as error:
            raise transport_error(error, "open", url) from error
        except TimeoutError as error:
            host = url.netloc.decode("ascii")
            raise TransportError(
                f"open: {host}: no answer within {limits.DRIVER_OPEN_S:g} s", stage="open", host=host
            ) from error
        if not response.is_success:
            raise error_of_reply(response, "open")
        session_id = _session_id(response)
        return Session(self._http, session_id, f"{self.base_url}/sessions/{quote(session_id, safe='')}", mode)

    async def aclose(self) -> None:
        """Closes the connections; sessions stay as they are."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()


async def _refuse_packed(response: httpx.Response) -> None:
    """Raises `UnexpectedReply` for a body that would have to be unpacked, before any of it is."""
    packed = response.headers.get("Content-Encoding", "identity")
    if packed.lower() != "identity":
        why = f"the body's encoding is {packed!r}, which was not asked for"
        raise unexpected(response, "reply", why, quote=False)


def _session_id(response: httpx.Response) -> str:
    try:
        content = orjson.loads(response.content)
    except orjson.JSONDecodeError:
        content = None
    session_id = content.get("session_id") if isinstance(content, dict) else None
    if not isinstance(session_id, str) or session_id in ("", ".", ".."):
        raise unexpected(response, "open", "the body names no session_id")
    return session_id
