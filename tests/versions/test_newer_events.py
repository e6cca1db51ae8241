"""A release meets events of a newer version: it says so, changes nothing, and hinders nobody."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import redis.asyncio

from tests.support.processes import Running
from tests.versions.releases import Release
from tokentape_cli.embedded import EmbeddedValkey
from tokentape_contracts import keys
from tokentape_contracts.events import SEALED_ID, TYPES, SessionOpened, TurnRecorded
from tokentape_core.store import connect

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

FIRST = [{"role": "user", "content": "first"}]


@pytest.fixture
async def redis_client(server: EmbeddedValkey) -> AsyncIterator[redis.asyncio.Redis]:
    client = connect(server.url)
    yield client
    await client.aclose()


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=60.0, trust_env=False) as client:
        yield client


class Api:
    """One API process."""

    def __init__(self, http: httpx.AsyncClient, serving: tuple[Running, str]) -> None:
        self.running, self._url = serving
        self._http = http

    async def open(self) -> str:
        reply = await self._http.post(f"{self._url}/sessions", json={})
        return str(reply.json()["session_id"])

    async def chat(self, session: str, messages: list[dict[str, Any]] = FIRST) -> httpx.Response:
        url = f"{self._url}/sessions/{session}/v1/chat/completions"
        return await self._http.post(url, json={"messages": messages})

    async def get(self, session: str, view: str = "") -> httpx.Response:
        return await self._http.get(f"{self._url}/sessions/{session}", params={"view": view} if view else {})

    async def collect(self, session: str) -> httpx.Response:
        return await self._http.post(f"{self._url}/sessions/{session}/samples", json={"deadline_s": 30})

    async def delete(self, session: str) -> httpx.Response:
        return await self._http.delete(f"{self._url}/sessions/{session}")


@pytest.mark.parametrize("newer", [SessionOpened.TYPE, TurnRecorded.TYPE])
async def test_a_newer_event_is_refused(
    newer: str,
    current: Release,
    following: Release,
    http: httpx.AsyncClient,
    redis_client: redis.asyncio.Redis,
) -> None:
    """Chat, GET and collect are `event_unsupported`; nothing is written, and a newer worker collects."""
    old, new = Api(http, current.serve()), Api(http, following.serve())
    worker = current.assembler()
    if newer == SessionOpened.TYPE:
        session = await new.open()
    else:
        session = await old.open()
        first = await old.chat(session)  # so it has the session in its cache
        messages = [*FIRST, first.json()["choices"][0]["message"], {"role": "user", "content": "second"}]
        assert (await new.chat(session, messages)).status_code == 200
    written = await redis_client.xrange(keys.events(session))
    known = TYPES[newer].VERSION
    assert (written[-1][1][b"type"], written[-1][1][b"v"]) == (newer.encode(), b"%d" % (known + 1))

    requests = (old.chat(session), old.get(session), old.get(session, "events"), old.collect(session))
    for reply in await asyncio.gather(*requests):
        assert (reply.status_code, reply.json()["error"]["code"]) == (500, "event_unsupported")
        told = f"{newer} v{known + 1} is newer than this version's v{known}"
        assert told in reply.json()["error"]["message"]
        assert reply.headers["x-should-retry"] == "false"
    assert await redis_client.xrange(keys.events(session)) == written
    assert not await redis_client.exists(keys.audit(session))

    other = await old.open()
    assert [(await ask(other)).status_code for ask in (old.chat, old.get, old.collect)] == [200] * 3

    async with asyncio.timeout(10):  # it is kept for those who waited
        while await redis_client.keys(keys.samples(session, "*")):
            await asyncio.sleep(0.1)
    assert worker.stop() == 0
    following.assembler()
    results = [await api.collect(session) for api in (old, new)]
    assert [reply.status_code for reply in results] == [200, 200]
    assert results[0].content == results[1].content
    assert (await old.collect(other)).status_code == 200


async def test_what_is_not_understood_can_be_ended(
    current: Release, following: Release, http: httpx.AsyncClient, redis_client: redis.asyncio.Redis
) -> None:
    """DELETE needs no older event: it adds the seal, which every release can read, and keeps the rest."""
    old, new = Api(http, current.serve()), Api(http, following.serve())
    session = await new.open()
    assert (await new.chat(session)).status_code == 200
    written = await redis_client.xrange(keys.events(session))
    for _ in range(2):
        assert (await old.delete(session)).status_code == 204
    *kept, (last_id, last) = await redis_client.xrange(keys.events(session))
    assert kept == written
    assert (last_id.decode(), last[b"type"], last[b"v"]) == (SEALED_ID, b"session.sealed", b"1")
    reply = await new.collect(session)
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "session_deleted")


async def test_a_newer_turn_comes_first(
    current: Release, following: Release, http: httpx.AsyncClient, redis_client: redis.asyncio.Redis
) -> None:
    """A chat that loses the next place in the stream to a newer turn is refused after the engine's answer."""
    old, new = Api(http, current.serve()), Api(http, following.serve())
    refused = 0
    for _ in range(30):
        session = await old.open()
        ours, theirs = await asyncio.gather(old.chat(session), new.chat(session))
        assert theirs.status_code == 200
        if ours.status_code != 200:
            refused += 1
            assert (ours.status_code, ours.json()["error"]["code"]) == (500, "event_unsupported")
        ids = [entry_id.decode() for entry_id, _ in await redis_client.xrange(keys.events(session))]
        assert ids == (["0-1", "1-0", "2-0"] if ours.status_code == 200 else ["0-1", "1-0"])
    assert 0 < refused < 30
