"""Bearer tokens: who may do what, whose sessions are whose, and what happens when the file changes."""

import hmac
import logging
import os
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.conftest import OpenSession
from tests.api.test_refusals import check
from tests.docs.markdown import DOCS, sections
from tests.support.scripted import ScriptedEngine
from tokentape_api.engine import SGLangEngine
from tokentape_api.http import access
from tokentape_api.http.access import Caller, Tokens, TokensError, read_tokens, token_digest
from tokentape_api.operations import operations
from tokentape_api.routes.proxy import GENERATING, HARMLESS
from tokentape_api.settings import ApiSettings
from tokentape_cli.main import main
from tokentape_contracts import limits
from tokentape_contracts.errors import EngineUnavailable, Unauthenticated
from tokentape_contracts.http import SCOPES
from tokentape_core.store import MemoryStore

USER = {"role": "user", "content": "Hello"}
Ask = Callable[[httpx.AsyncClient, str, str], Any]


def entry(token: str, *scopes: str, tenant: str = "a", name: str = "n") -> str:
    """An entry of a tokens file."""
    listed = ", ".join(f'"{scope}"' for scope in scopes)
    return (
        f'[[token]]\nname = "{name}"\ntenant = "{tenant}"\nscopes = [{listed}]\n'
        f'sha256 = "{token_digest(token)}"\n'
    )


TOKENS = "".join(
    [
        entry("agent-a", "agent"),
        entry("driver-a", "driver"),
        entry("both-a", "agent", "driver"),
        entry("both-b", "agent", "driver", tenant="b"),
        entry("admin", "admin", tenant="ops"),
    ]
)


@pytest.fixture
def tokens_file(tmp_path: Path) -> Path:
    path = tmp_path / "tokens.toml"
    path.write_text(TOKENS)
    return path


@pytest.fixture
def settings(tokens_file: Path) -> ApiSettings:
    return ApiSettings(
        engine_url="http://engine", tokenizer="-", redis_url="-", family="qwen3", tokens_file=tokens_file
    )


@pytest.fixture
async def session(api: httpx.AsyncClient) -> OpenSession:
    """A session of tenant a; its client sends no token by itself."""
    reply = await api.post("/sessions", headers=bearer("driver-a"))
    return OpenSession(api, f"/sessions/{reply.json()['session_id']}")


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


CHAT = {"model": "m", "messages": [USER]}
REQUESTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "open": ("POST", "/sessions", {}),
    "show": ("GET", "{session}", {}),
    "events": ("GET", "{session}?view=events", {}),
    "collect": ("POST", "{session}/samples", {"json": {"deadline_s": 0.05}}),
    "chat": ("POST", "{session}/v1/chat/completions", {"json": CHAT}),
    "models": ("GET", "{session}/v1/models", {}),
    "engine": ("POST", "{session}/flush_cache", {}),
    "delete": ("DELETE", "{session}", {}),
}
DRIVER = {"open", "show", "events", "collect", "delete"}
AGENT = {"chat", "models"}
ALLOWED = {
    "agent-a": AGENT,
    "driver-a": DRIVER,
    "both-a": DRIVER | AGENT,
    "admin": set(REQUESTS),
}


@pytest.mark.parametrize("token", ALLOWED)
async def test_scopes(session: OpenSession, engine: ScriptedEngine, token: str) -> None:
    """Each scope allows its routes; the others are 403, and the engine hears nothing of them."""
    for name, (method, path, more) in REQUESTS.items():
        asked = len(engine.requests)
        url = path.format(session=session.url)
        reply = await session.api.request(method, url, headers=bearer(token), **more)
        if name in ALLOWED[token]:
            assert reply.status_code in ((504,) if name == "collect" else (200, 204)), name
        else:
            await check(reply, 403, "forbidden")
            assert len(engine.requests) == asked


@pytest.mark.parametrize("name", sorted(REQUESTS.keys() - {"open", "engine"}))
async def test_another_tenants_session_is_not_there(session: OpenSession, name: str) -> None:
    """For another tenant a session is the same 404 as one that never was, deleted or not."""
    method, path, more = REQUESTS[name]
    unknown = await session.api.request(
        method, path.format(session="/sessions/nope"), headers=bearer("both-b"), **more
    )
    await check(unknown, 404, "session_not_found")
    for _ in range(2):
        url = path.format(session=session.url)
        reply = await session.api.request(method, url, headers=bearer("both-b"), **more)
        assert (reply.status_code, reply.content) == (unknown.status_code, unknown.content)
        assert (await session.api.delete(session.url, headers=bearer("driver-a"))).status_code == 204


async def test_a_stranger_changes_nothing(session: OpenSession, engine: ScriptedEngine) -> None:
    """A chat and a DELETE of another tenant leave the session as it was, also if its owner has used it."""
    chat = f"{session.url}/v1/chat/completions"
    assert (await session.api.post(chat, json=CHAT, headers=bearer("both-a"))).status_code == 200
    asked = len(engine.requests)
    await check(await session.api.post(chat, json=CHAT, headers=bearer("both-b")), 404, "session_not_found")
    await check(await session.api.delete(session.url, headers=bearer("both-b")), 404, "session_not_found")
    assert len(engine.requests) == asked
    shown = await session.api.get(session.url, headers=bearer("driver-a"))
    assert len(shown.json()["records"]) == 1


async def test_the_tenant_is_recorded(api: httpx.AsyncClient, store: MemoryStore) -> None:
    """`session.opened` says whose session it is: the tenant of the token that opened it."""
    for token, tenant in (("driver-a", "a"), ("both-b", "b"), ("admin", "ops")):
        session_id = (await api.post("/sessions", headers=bearer(token))).json()["session_id"]
        [(_, event)] = await store.read(session_id)
        assert event.tenant == tenant  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("Authorization", "")],
        [("Authorization", "Bearer")],
        [("Authorization", "Bearer  ")],
        [("Authorization", "Basic ZHJpdmVyLWE6")],
        [("Authorization", "driver-a")],
        [("Authorization", "Bearer driver")],
        [("Authorization", "Bearer driver-a2")],
        [("Authorization", "Bearer DRIVER-A")],
        [("Authorization", "Bearer driver-a, both-b")],
        [("Authorization", f"Bearer {token_digest('driver-a')}")],
        [("Authorization", "Bearer driver-a"), ("Authorization", "Bearer both-b")],
        [("Authorization", b"Bearer \xff\xfe")],
        [("X-Api-Key", "driver-a")],
    ],
)
async def test_without_a_valid_token(session: OpenSession, headers: Any) -> None:
    """No token, a wrong one, a second one or a digest is 401 on every route, and says that one is needed."""
    for method, path, more in REQUESTS.values():
        url = path.format(session=session.url)
        reply = await session.api.request(method, url, headers=headers, **more)
        await check(reply, 401, "unauthenticated")
        assert reply.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(
    ("method", "path", "code"),
    [
        ("GET", "/nothing", "route_not_found"),
        ("GET", "/", "route_not_found"),
        ("GET", "/sessions", "method_not_allowed"),
        ("PUT", "/sessions/x", "method_not_allowed"),
        ("BREW", "/sessions", "method_not_allowed"),
        ("GET", "/sessions/x/samples", "method_not_allowed"),
        ("GET", "/sessions/x/v1/chat/completions", "method_not_allowed"),
        ("POST", "/sessions/", "route_not_found"),
        ("GET", "/sessions/x/", "route_not_found"),
        ("GET", "/health/", "route_not_found"),
        ("GET", "/HEALTH", "route_not_found"),
        ("GET", "//health", "route_not_found"),
        ("GET", "/metrics;x", "route_not_found"),
    ],
)
async def test_strangers_do_not_learn_which_paths_there_are(
    api: httpx.AsyncClient, method: str, path: str, code: str
) -> None:
    """Without a token every path and method is 401, known or not; with one they are what they are."""
    await check(await api.request(method, path), 401, "unauthenticated")
    await check(await api.request(method, path, headers=bearer("nobody")), 401, "unauthenticated")
    reply = await api.request(method, path, headers=bearer("admin"))
    assert reply.json()["error"]["code"] == code


async def test_the_scheme_is_read_in_any_case(api: httpx.AsyncClient) -> None:
    """`bearer` is `Bearer`: schemes have no case (RFC 9110)."""
    reply = await api.post("/sessions", headers={"authorization": "bearer driver-a"})
    assert reply.status_code == 200


async def test_health_and_ready_are_open(api: httpx.AsyncClient) -> None:
    """Probes of a supervisor carry no token."""
    assert (await api.get("/health")).status_code == 200
    assert (await api.get("/ready")).status_code == 200


async def test_a_refused_request_is_not_read(api: httpx.AsyncClient) -> None:
    """Without a token nobody can make the server take in a body."""
    read = 0

    async def body() -> Any:
        nonlocal read
        for _ in range(100):
            read += 1
            yield b" " * limits.MiB

    reply = await api.post("/sessions", content=body())
    await check(reply, 401, "unauthenticated")
    assert read == 0


async def test_the_token_reaches_neither_the_engine_nor_the_log(
    session: OpenSession, engine: ScriptedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """Chat and catch-all forward no credential, and no log line, error or answer holds one."""
    caplog.set_level(logging.DEBUG)
    sent = {
        **bearer("both-a"),
        "Cookie": "c=both-a",
        "X-Api-Key": "both-a",
        "Api-Key": "both-a",
        "Proxy-Authorization": "Basic both-a",
    }
    replies = [
        await session.api.post(f"{session.url}/v1/chat/completions", json=CHAT, headers=sent),
        await session.api.get(f"{session.url}/v1/models", headers=sent),
        await session.api.get("/sessions/nope", headers=sent),
        await session.api.post(f"{session.url}/flush_cache", headers=sent),
        await session.api.get(session.url, headers=bearer("both-a-wrong")),
    ]
    assert [reply.status_code for reply in replies] == [200, 200, 404, 403, 401]
    assert len(engine.requests) == 2
    for request in engine.requests:
        assert "both-a" not in str(request.headers.raw)
    assert not any(b"both-a" in reply.content or "both-a" in str(reply.headers) for reply in replies)
    assert "both-a" not in caplog.text


async def test_generating_paths_are_refused(session: OpenSession, engine: ScriptedEngine) -> None:
    """What the engine would generate there, nobody would record: 404, also for an admin, however spelled."""
    for path in GENERATING:
        for spelled in (path, f"{path}/", f"/{path}", path.replace("/", "//"), path.upper()):
            reply = await session.api.post(f"{session.url}/{spelled}", headers=bearer("admin"), json={})
            await check(reply, 404, "route_not_found", "v1/chat/completions")
    assert engine.requests == []


def test_both_lists_are_documented() -> None:
    """http.md names every path that is refused, and every one that an agent reaches."""
    section = sections(DOCS / "reference" / "http.md")["`ANY /sessions/{sid}/{path}`"]
    assert [path for path in GENERATING | HARMLESS if f"`{path}`" not in section] == []


async def test_what_an_agent_reaches_of_the_engine(session: OpenSession, engine: ScriptedEngine) -> None:
    """An agent asks for models and token counts; what pauses or reloads an engine needs `admin`."""
    for path in (*HARMLESS, "v1/models/m"):
        reply = await session.api.get(f"{session.url}/{path}", headers=bearer("agent-a"))
        assert reply.status_code == 200, path
    asked = len(engine.requests)
    for path in ("get_server_info", "update_weights_from_disk", "v1/models2", "v1", "metrics"):
        await check(
            await session.api.post(f"{session.url}/{path}", headers=bearer("agent-a")), 403, "forbidden"
        )
    assert len(engine.requests) == asked


# The table


def test_what_takes_no_token() -> None:
    """Every operation says what a token must have; those that take none hold nothing of any session."""
    scopes = {operation.name: operation.scope for operation in operations()}
    assert set(scopes.values()) <= {None, *SCOPES}
    assert {name for name, scope in scopes.items() if scope is None} == {
        *("GET /health", "GET /ready", "GET /metrics")
    }


# The file


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


async def test_a_changed_file_counts_after_a_moment(tokens_file: Path) -> None:
    """A token that is taken out, or added, counts after `TOKENS_RELOAD_S`, without a restart."""
    clock = Clock()
    tokens = Tokens(tokens_file, clock)
    assert (await tokens.caller("agent-a")).tenant == "a"
    tokens_file.write_text(entry("fresh", "driver", tenant="c"))
    clock.now = limits.TOKENS_RELOAD_S - 0.01
    assert (await tokens.caller("agent-a")).tenant == "a"
    clock.now = limits.TOKENS_RELOAD_S
    with pytest.raises(Unauthenticated):
        await tokens.caller("agent-a")
    assert (await tokens.caller("fresh")).tenant == "c"


async def test_an_exchanged_file_is_seen(tokens_file: Path) -> None:
    """Kubernetes renames a new file over the old one; one of equal size and time is seen too."""
    clock = Clock()
    tokens = Tokens(tokens_file, clock)
    before = tokens_file.stat()
    new = tokens_file.with_name("new")
    new.write_text(TOKENS.replace(token_digest("agent-a"), token_digest("agent-z")))
    os.utime(new, ns=(before.st_atime_ns, before.st_mtime_ns))
    new.rename(tokens_file)
    clock.now = limits.TOKENS_RELOAD_S
    assert (await tokens.caller("agent-z")).name == "n"


@pytest.mark.parametrize("broken", ["not = [toml", "", None])
async def test_a_broken_file_keeps_the_last_good_one(
    tokens_file: Path, broken: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """A file that is broken or gone changes nothing, is logged once, and counts again once it is mended."""
    clock = Clock()
    tokens = Tokens(tokens_file, clock)
    if broken is None:
        tokens_file.unlink()
    else:
        tokens_file.write_text(broken)
    for _ in range(3):
        clock.now += limits.TOKENS_RELOAD_S
        assert (await tokens.caller("agent-a")).tenant == "a"
    assert caplog.text.count("tokens_refused") == 1
    tokens_file.write_text(entry("fresh", "driver"))
    clock.now += limits.TOKENS_RELOAD_S
    await tokens.caller("fresh")


SECRET = "tt_this-is-the-token-itself"
GOOD = {"name": '"n"', "tenant": '"t"', "scopes": '["agent"]', "sha256": f'"{"0" * 64}"'}


def written(**changes: str | None) -> str:
    fields = {**GOOD, **changes}
    return "[[token]]\n" + "".join(f"{key} = {value}\n" for key, value in fields.items() if value is not None)


BROKEN: dict[str, tuple[str, str]] = {
    "not TOML": ("[[token", "is not TOML: see at end of document"),
    "a secret in it": (f"token = {SECRET}", "is not TOML"),
    "nested": ("a = " + "[" * 9999, "is not TOML"),
    "empty": ("", "at least one"),
    "none": ("token = []", "at least one"),
    "a table": ("[token]\nname = 'n'", "at least one"),
    "more": (written() + "[other]\n", "nothing else"),
    "text": ("token = ['x']", "token 1 must have exactly"),
    "no tenant": (written(tenant=None), "token 1 must have exactly"),
    "a misspelt field": (written(expiry='"x"'), "token 1 must have exactly"),
    "name a number": (written(name="1"), "name must be"),
    "tenant empty": (written(tenant='""'), "tenant must be"),
    "tenant with a brace": (written(tenant='"a}b"'), "tenant must be"),
    "tenant with a line": (written(tenant='"a\\nb"'), "tenant must be"),
    "no scope": (written(scopes="[]"), "scopes must be"),
    "unknown scope": (written(scopes='["root"]'), "scopes must be"),
    "scope a list": (written(scopes='[["agent"]]'), "scopes must be"),
    "scopes a text": (written(scopes='"agent"'), "scopes must be"),
    "the token itself": (written(sha256=f'"{SECRET}"'), "not the token itself"),
    "upper case": (written(sha256=f'"{"A" * 64}"'), "sha256 must be"),
    "twice": (written() + written(), "token 2 has the sha256 of an earlier one"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_stops_the_start(tmp_path: Path, name: str) -> None:
    """It is refused with the entry and the field, and the message quotes nothing of the file."""
    text, mention = BROKEN[name]
    path = tmp_path / "tokens.toml"
    path.write_text(text)
    with pytest.raises(TokensError, match=mention) as caught:
        Tokens(path)
    assert SECRET not in str(caught.value)
    assert caught.value.__cause__ is None


def test_a_missing_or_binary_file(tmp_path: Path) -> None:
    """A file that is not there, is a directory or is not text is refused too."""
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\x00")
    for path in (tmp_path / "none", binary):
        with pytest.raises(TokensError):
            read_tokens(path)


@pytest.mark.parametrize("kind", ["pipe", "device", "directory", "socket", "link to a pipe"])
def test_what_is_no_regular_file(tmp_path: Path, kind: str) -> None:
    """It is refused at once, where reading it would wait for ever."""
    path = tmp_path / "tokens.toml"
    if "pipe" in kind:
        os.mkfifo(path)
        if "link" in kind:
            (tmp_path / "link").symlink_to(path)
            path = tmp_path / "link"
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(path))
    else:
        path = Path("/dev/zero") if kind == "device" else tmp_path
    with pytest.raises(TokensError, match="is not a regular file"):
        read_tokens(path)


def test_file_limits(tmp_path: Path) -> None:
    """As many tokens, as many bytes and as long names as the limits say; not one more."""
    path = tmp_path / "tokens.toml"
    path.write_text("".join(entry(str(number), "agent") for number in range(limits.TOKENS)))
    assert len(read_tokens(path)) == limits.TOKENS
    path.write_text("".join(entry(str(number), "agent") for number in range(limits.TOKENS + 1)))
    with pytest.raises(TokensError, match=f"{limits.TOKENS} are allowed"):
        read_tokens(path)
    text = written()
    path.write_text(text + "#" * (limits.TOKENS_FILE_BYTES - len(text)))
    assert len(read_tokens(path)) == 1
    path.write_text(text + "#" * (limits.TOKENS_FILE_BYTES - len(text) + 1))
    with pytest.raises(TokensError, match="longer than"):
        read_tokens(path)
    path.write_text(written(tenant=f'"{"t" * limits.TENANT_CHARS}"'))
    assert len(read_tokens(path)) == 1
    path.write_text(written(tenant=f'"{"t" * (limits.TENANT_CHARS + 1)}"'))
    with pytest.raises(TokensError, match="tenant must be"):
        read_tokens(path)


async def test_every_entry_is_compared_in_constant_time(
    tokens_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A right, a first and a wrong token cost the same: `hmac.compare_digest` with every entry."""
    compared: list[int] = []

    real = hmac.compare_digest

    def count(one: bytes, other: bytes) -> bool:
        compared.append(len(one))
        return real(one, other)

    tokens = Tokens(tokens_file)
    monkeypatch.setattr(access.hmac, "compare_digest", count)
    for token in ("agent-a", "admin"):
        await tokens.caller(token)
    with pytest.raises(Unauthenticated):
        await tokens.caller("wrong")
    assert compared == [32] * (3 * TOKENS.count("[[token]]"))


async def test_metrics_and_settings_hold_no_secret(
    session: OpenSession, settings: ApiSettings, tokens_file: Path
) -> None:
    """`/metrics` names no token, tenant or session, and the settings do not show the Redis URL."""
    await session.api.post(f"{session.url}/v1/chat/completions", json=CHAT, headers=bearer("both-a"))
    text = (await session.api.get("/metrics")).text
    for secret in ("both-a", token_digest("both-a"), session.url.rpartition("/")[2], 'tenant="'):
        assert secret not in text
    shown = repr(ApiSettings(engine_url="http://e", tokenizer="t", redis_url="redis://:hunter2@h"))
    assert "hunter2" not in shown


async def test_an_error_does_not_show_the_engines_password() -> None:
    """An agent that reads why the engine cannot be reached does not read how to log in there."""
    engine = SGLangEngine("http://user:hunter2@127.0.0.1:1", timeout_s=1.0)
    with pytest.raises(EngineUnavailable) as caught:
        async with engine.forward("s", "GET", "v1/models", "", {}, b""):
            raise AssertionError
    await engine.close()
    assert "127.0.0.1:1" in caught.value.detail
    assert "hunter2" not in caught.value.detail


# The command


def test_token_create(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The entry is what the file wants, for a new token of 256 random bits that is shown once."""
    path, tokens = tmp_path / "tokens.toml", []
    for _ in range(2):
        assert main([*CREATE, "--scope", "driver", "--scope", "agent"]) == 0
        shown = capsys.readouterr()
        with path.open("a") as file:
            file.write(shown.out)
        tokens.append(shown.err.split()[-1])
        assert tokens[-1] not in shown.out
    callers = read_tokens(path)
    assert [bytes.fromhex(token_digest(token)) for token in tokens] == list(callers)
    assert set(callers.values()) == {Caller("n", "team-a", frozenset({"agent", "driver"}))}
    for token in tokens:
        assert re.fullmatch(r"tt_[\w-]{43}", token)


CREATE = ["token", "create", "--name", "n", "--tenant", "team-a"]


@pytest.mark.parametrize(
    "wrong",
    [
        CREATE,
        [*CREATE, "--scope", "root"],
        [*CREATE, "--scope", "agent", "--tenant", 'a"\n'],
        [*CREATE, "--scope", "agent", "--name", "x" * (limits.TENANT_CHARS + 1)],
    ],
)
def test_token_create_refuses(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """What the file would not take is exit code 2, and no token is shown."""
    try:
        code = main(wrong)
    except SystemExit as error:
        code = int(str(error.code))
    assert code == 2
    assert "tt_" not in capsys.readouterr().err
