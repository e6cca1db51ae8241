"""Redis over TLS, as ACL users with no more rights than docs/guides/secure.md names."""

import asyncio
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import redis
import trustme

from tests.support.access import QUEUE_USER, USER, make_users
from tests.support.processes import Fleet, fleet, wait_until
from tests.support.scripted import ScriptedEngine
from tests.support.tls import terminated
from tokentape_cli.embedded import EmbeddedValkey

PASSWORD = "s3cr3t/with:odd@signs"
QUOTED = "s3cr3t%2Fwith%3Aodd%40signs"
CHAT = {"messages": [{"role": "user", "content": "Hello"}]}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def admin() -> Iterator[redis.Redis]:
    """The server's own administrator, who has made the users."""
    with EmbeddedValkey() as valkey:
        client = redis.Redis.from_url(valkey.url)
        make_users(client, PASSWORD)
        client.valkey_port = valkey.port  # type: ignore[attr-defined]
        yield client
        client.close()


@pytest.fixture(scope="module")
def secure(
    admin: redis.Redis,
    shared_engine: ScriptedEngine,
    tokenizer_dir: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Fleet, str, str]]:
    """An empty fleet on that server, the queue's URL, and one with another server's certificate authority."""
    directory = tmp_path_factory.mktemp("tls")
    authority, stranger = trustme.CA(), trustme.CA()
    authority.cert_pem.write_to_path(str(directory / "ca.pem"))
    stranger.cert_pem.write_to_path(str(directory / "other.pem"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    with terminated(context, admin.valkey_port) as port, shared_engine.serve() as engine_url:  # type: ignore[attr-defined]
        url = f"rediss://{USER}:{QUOTED}@127.0.0.1:{port}/0?ssl_check_hostname=true&ssl_ca_certs={directory}"
        with fleet(f"{url}/ca.pem", engine_url, tokenizer_dir, directory) as running:
            yield running, f"{url}/ca.pem".replace(f"{USER}:", f"{QUEUE_USER}:", 1), f"{url}/other.pem"


def tokentape(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "tokentape_cli", *arguments], capture_output=True, text=True, timeout=60
    )


async def test_everything_works(
    secure: tuple[Fleet, str, str],
    engine: ScriptedEngine,
    client: httpx.AsyncClient,
    admin: redis.Redis,
    tmp_path: Path,
) -> None:
    """Sessions, chats, collects, deletes, the archive and the tools need no other right; none is refused."""
    system, queue_url, _ = secure
    archive = tmp_path / "archive"
    api, url = system.api("--queue-redis-url", queue_url)
    worker = system.assembler("--archive-url", archive.as_uri(), "--queue-redis-url", queue_url)
    assert (await client.get(f"{url}/ready")).json()["checks"]["redis"] == "ok"
    session_id = (await client.post(f"{url}/sessions")).json()["session_id"]
    session = f"{url}/sessions/{session_id}"
    assert (await client.post(f"{session}/v1/chat/completions", json=CHAT)).status_code == 200
    assert (await client.post(f"{session}/samples")).status_code == 200
    assert len((await client.get(session)).json()["records"]) == 1
    assert (await client.delete(session)).status_code == 204
    file = str(tmp_path / "one.tokentape")
    redis_url = ("--redis-url", system.redis_url)
    model = ("--tokenizer", str(system.tokenizer), "--family", system.family)
    for command in (
        ("export", session_id, "--output", file, *redis_url),
        ("replay", session_id, *redis_url, *model),
    ):
        result = tokentape(*command)
        assert result.returncode == 0, result.stderr
    admin.zadd("tt:sealed", {session_id: 0})
    await asyncio.to_thread(wait_until, lambda: list(archive.glob("*.tokentape")) != [], worker)
    admin.delete(f"tt:{{{session_id}}}:events", f"tt:{{{session_id}}}:audit", f"tt:{{{session_id}}}:blobs")
    result = tokentape("import", file, *redis_url)
    assert result.returncode == 0, result.stderr
    assert (api.stop(), worker.stop()) == (0, 0)
    assert admin.execute_command("ACL", "LOG") == []
    for log in (api, worker):
        assert PASSWORD not in log.output()
        assert QUOTED not in log.output()


@pytest.mark.parametrize("name", [USER, QUEUE_USER])
@pytest.mark.usefixtures("secure")
def test_the_rights_end_there(name: str, admin: redis.Redis) -> None:
    """A user can neither run scripts, nor change the server, nor touch other keys or channels."""
    user = redis.Redis(port=admin.valkey_port, username=name, password=PASSWORD)  # type: ignore[attr-defined]
    for command in (
        ("EVAL", "return 1", "0"),
        ("FLUSHALL",),
        ("CONFIG", "GET", "*"),
        ("KEYS", "*"),
        ("ACL", "LIST"),
        ("SET", "other", "x"),
        ("DEL", {USER: "arq:queue", QUEUE_USER: "tt:sealed"}[name]),
        ("PUBLISH", "tt:x", "x"),
        ("SHUTDOWN", "NOSAVE"),
    ):
        with pytest.raises(redis.exceptions.NoPermissionError):
            user.execute_command(*command)
    user.close()
    admin.execute_command("ACL", "LOG", "RESET")


async def test_a_stranger_is_not_trusted(secure: tuple[Fleet, str, str], client: httpx.AsyncClient) -> None:
    """A server whose certificate another authority signed is not talked to: the API is not ready."""
    system, _, other = secure
    stranger = Fleet(other, system.engine_url, system.tokenizer, system.directory)
    try:
        api, url = stranger.api()
        reply = await client.get(f"{url}/ready")
        assert reply.status_code == 503
        assert "within 2 s" in reply.json()["checks"]["redis"] or "certificate" in reply.text.lower()
        assert PASSWORD not in reply.text
        assert PASSWORD not in api.output()
    finally:
        stranger.stop()
