"""Who may do what: bearer tokens, and what their scopes allow.

A tokens file is TOML, with one such entry for each token:

    [[token]]
    name = "trainer"
    tenant = "team-a"
    scopes = ["driver", "agent"]
    sha256 = "…"

`sha256` is the digest of the whole token, 64 hexadecimal digits; the token itself is kept nowhere. One plain
SHA-256 is right for a secret of 256 random bits (`tokentape token create`), which nobody can guess; salts and
slow hashes protect passwords, which people choose.
"""

import asyncio
import hashlib
import hmac
import logging
import os
import re
import stat
import time
import tomllib
from collections.abc import Awaitable, Callable, Container
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from tokentape_contracts import limits
from tokentape_contracts.errors import Forbidden, SessionNotFound, TokentapeError, Unauthenticated
from tokentape_contracts.http import SCOPES

log = logging.getLogger("tokentape.api")


class TokensError(Exception):
    """The tokens file cannot be used; one sentence for the operator, without anything that stands in it."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request.

    Attributes:
        name: of the token; for people.
        tenant: whose sessions these are.
        scopes: some of `SCOPES`.
    """

    name: str
    tenant: str
    scopes: frozenset[str]

    def may(self, scope: str) -> bool:
        """Whether the scopes allow what needs this one; `admin` allows everything."""
        return scope in self.scopes or "admin" in self.scopes


ANYONE: Final = Caller("", "", frozenset(SCOPES))
"""The caller of a server without tokens."""


def caller_of(request: Request) -> Caller:
    """Who sent the request; known on every path but those that are open to all."""
    caller: Caller = request.state.caller
    return caller


class Identified:
    """ASGI middleware: who sends the request; who is nobody gets its answer here, whatever the path is.

    Args:
        tokens: None for a server that asks for none.
        is_open: paths that take no token.
        refuse: the reply of an error at a path.
    """

    def __init__(
        self,
        app: ASGIApp,
        tokens: "Tokens | None",
        is_open: Container[str],
        refuse: Callable[[TokentapeError, str], Response],
    ) -> None:
        self._app = app
        self._tokens = tokens
        self._is_open = is_open
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self._is_open:
            try:
                caller = await self._tokens.caller(_bearer(Headers(scope=scope))) if self._tokens else ANYONE
            except Unauthenticated as error:
                await self._refuse(error, scope["path"])(scope, receive, send)
                return
            scope.setdefault("state", {})["caller"] = caller
        await self._app(scope, receive, send)


async def ensure_allowed(
    request: Request, scope: str, tenant_of: Callable[[str], Awaitable[str | None]]
) -> None:
    """Refuses a request whose sender may not send it, before anything of it is read.

    A session belongs to the tenant that opened it. For every other tenant there is no such session, so that
    nobody learns which ids are in use.

    Args:
        scope: what the request needs.
        tenant_of: whose a session is; None if there is none.

    Raises:
        Forbidden: the caller lacks the scope.
        SessionNotFound: it is another tenant's session, or none.
    """
    caller, session_id = caller_of(request), request.path_params.get("sid")
    if not caller.may(scope):
        raise Forbidden(f"the token {caller.name!r} lacks the scope {scope!r}")
    if session_id is not None and not caller.may("admin") and await tenant_of(session_id) != caller.tenant:
        raise SessionNotFound("there is no such session")


def _bearer(headers: Headers) -> str:
    given = headers.getlist("authorization")
    scheme, _, token = given[0].partition(" ") if len(given) == 1 else ("", "", "")
    if scheme.lower() != "bearer" or not token.strip():
        raise Unauthenticated("the request needs one header Authorization: Bearer <token>")
    return token.strip()


class Tokens:
    """The tokens of a file, which is read again when it has changed.

    A change counts at the first request after `limits.TOKENS_RELOAD_S`. A file that cannot be used any more
    changes nothing, and is logged once.

    Args:
        clock: seconds, of any origin.

    Raises:
        TokensError: the file cannot be used.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._stamp = _stamp(path)
        self._callers = read_tokens(path)
        self._looked_at = clock()

    async def caller(self, token: str) -> Caller:
        """Whose token this is. Takes the same time for every token: all entries are compared.

        Raises:
            Unauthenticated: nobody's.
        """
        if self._clock() - self._looked_at >= limits.TOKENS_RELOAD_S:
            self._looked_at = self._clock()
            await asyncio.to_thread(self._reload)
        digest = bytes.fromhex(token_digest(token))
        found: Caller | None = None
        for known, caller in self._callers.items():
            if hmac.compare_digest(known, digest):
                found = caller
        if found is None:
            raise Unauthenticated("the token is unknown")
        return found

    def _reload(self) -> None:
        stamp = _stamp(self._path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._callers = read_tokens(self._path)
        except TokensError as error:
            log.error("tokens_refused: the tokens of before stay in force: %s", error)
        else:
            log.info("tokens_read: %d tokens in %s", len(self._callers), self._path)


def token_digest(token: str) -> str:
    """What a tokens file holds of a token: its SHA-256, 64 hexadecimal digits."""
    return hashlib.sha256(token.encode("latin-1", "replace")).hexdigest()


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """Another one after every change; Kubernetes exchanges the file of a mounted secret for a new one."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def read_tokens(path: Path) -> dict[bytes, Caller]:
    """Digest → caller, of each entry of a tokens file.

    Raises:
        TokensError: which entry is wrong, and how.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # a pipe would never end, nor a device
            raise TokensError(f"{path} is not a regular file")
        with path.open("rb") as file:
            data = file.read(limits.TOKENS_FILE_BYTES + 1)
        if len(data) > limits.TOKENS_FILE_BYTES:
            raise TokensError(f"{path} is longer than {limits.TOKENS_FILE_BYTES} bytes")
        content = tomllib.loads(data.decode())
    except OSError as error:
        raise TokensError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        where = re.search(r"at (line \d+, column \d+|end of document)", str(error))
        raise TokensError(f"{path} is not TOML" + (f": see {where[0]}" if where else "")) from None
    entries = content.get("token")
    if content.keys() != {"token"} or not isinstance(entries, list) or not entries:
        raise TokensError(f"{path} must hold entries [[token]], at least one, and nothing else")
    if len(entries) > limits.TOKENS:
        raise TokensError(f"{path} holds {len(entries)} tokens; {limits.TOKENS} are allowed")
    callers: dict[bytes, Caller] = {}
    for number, entry in enumerate(entries, 1):
        digest, caller = _entry(entry, f"{path}: token {number}")
        if digest in callers:
            raise TokensError(f"{path}: token {number} has the sha256 of an earlier one")
        callers[digest] = caller
    return callers


_ENTRY: Final = ("name", "tenant", "scopes", "sha256")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def is_name(text: object) -> bool:
    """Whether this can be the name of a token or a tenant."""
    return isinstance(text, str) and len(text) <= limits.TENANT_CHARS and _NAME.fullmatch(text) is not None


def _entry(entry: Any, where: str) -> tuple[bytes, Caller]:
    if not isinstance(entry, dict) or entry.keys() != set(_ENTRY):
        raise TokensError(f"{where} must have exactly {', '.join(_ENTRY)}")
    name, tenant, scopes, sha256 = (entry[field] for field in _ENTRY)
    for field, value in (("name", name), ("tenant", tenant)):
        if not is_name(value):
            raise TokensError(
                f"{where}: {field} must be at most {limits.TENANT_CHARS} letters, digits, dots, hyphens and "
                "underscores, and begin with a letter or a digit"
            )
    if not isinstance(scopes, list) or not scopes or any(scope not in SCOPES for scope in scopes):
        raise TokensError(f"{where}: scopes must be a list of some of {', '.join(SCOPES)}")
    if not isinstance(sha256, str) or re.fullmatch("[0-9a-f]{64}", sha256) is None:
        raise TokensError(f"{where}: sha256 must be 64 lower-case hexadecimal digits, not the token itself")
    return bytes.fromhex(sha256), Caller(name, tenant, frozenset(scopes))
