"""The previous release and this one on one Redis, under load, and what its clients were told.

The history checker assembles every delivered payload again with this release's code. So wherever a previous
worker delivered, both gave the same bytes.
"""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.faults.checker import Report, check, read_all
from tests.faults.history import History
from tests.faults.workload import Message, Workload
from tests.support.processes import Running
from tests.versions.releases import Balanced, Release
from tokentape_cli.embedded import EmbeddedValkey
from tokentape_core.store import connect
from tokentape_core.text.families import get_family
from tokentape_core.text.render import ChatRenderer
from tokentape_core.text.tokenizer import Tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

EPISODES = 3
"""At the same time."""


class Conversation:
    """One session that lives as long as the test: each of its turns is served by whoever is there then."""

    def __init__(self, workload: Workload, session: str) -> None:
        self.session = session
        self._workload = workload
        self._messages: list[Message] = []
        self._continues = ""

    async def go_on(self) -> None:
        """A turn, and a collect."""
        asked = {"role": "user", "content": f"turn {len(self._messages)}"}
        call, answer = await self._workload.turn(self.session, [*self._messages, asked], self._continues)
        self._messages, self._continues = [*self._messages, asked, answer], call.response_id
        await self._workload.collect(self.session)


@asynccontextmanager
async def load(urls: list[str], history: History) -> AsyncIterator[list[Conversation]]:
    """Episodes while the block lasts, and beside them a linear and a tree session that live throughout."""
    workload = Workload(["http://balancer"], history, 1, network=lambda: Balanced(urls))
    async with workload.running(EPISODES):
        conversations = [Conversation(workload, await workload.open(mode)) for mode in ("linear", "tree")]
        yield conversations
        for conversation in conversations:
            await conversation.go_on()
            await workload.delete(conversation.session)


async def verify(history: History, server: EmbeddedValkey, release: Release) -> Report:
    """Nothing is lost, doubled or misread, and no request failed."""
    tokenizer = Tokenizer.load(str(release.tokenizer))
    renderer = ChatRenderer(tokenizer, get_family(release.family))
    client = connect(server.url)
    try:
        recorded = await read_all(client, history.sessions)
    finally:
        await client.aclose()
    report = await check(history, recorded, tokenizer.decode, renderer)
    assert report.problems == []
    assert (report.lost, report.doubled, report.unclear) == (0, 0, 0)
    assert {call.status for call in history.calls} <= {200, 204, 404}
    # 404: collects and chats that were sent after the DELETE.
    assert {call.code for call in history.calls} <= {"", "session_deleted"}
    return report


def done(running: Running) -> int:
    """How many requests or jobs a process has done, by its canonical log lines."""
    return len(re.findall(r'"outcome":"stored"|"status":20[04]', running.output()))


async def test_both_releases_serve_the_same_sessions(
    previous: Release, current: Release, server: EmbeddedValkey
) -> None:
    """Turns, collects and DELETEs of a session alternate between both APIs, and both workers assemble."""
    apis = [release.serve() for release in (previous, current)]
    workers = [release.assembler() for release in (previous, current)]
    history = History()
    async with load([url for _, url in apis], history) as conversations:
        for _ in range(10):
            await asyncio.sleep(2)
            await asyncio.gather(*(conversation.go_on() for conversation in conversations))
    report = await verify(history, server, current)
    assert report.acknowledged > 100
    assert report.collects > 30
    assert min(map(done, (*(api for api, _ in apis), *workers))) > 10


async def test_an_upgrade_and_its_rollback(
    previous: Release, current: Release, server: EmbeddedValkey
) -> None:
    """Workers first, then the API; and back, the API first: under load, and no request fails."""
    urls: list[str] = []
    history = History()

    async def replace_api(old: Running, by: Release) -> Running:
        running, url = await asyncio.to_thread(by.serve)
        urls.append(url)
        await both()
        del urls[0]  # it leaves the balancer before it ends
        assert await asyncio.to_thread(old.stop) == 0
        return running

    async def replace_worker(old: Running, by: Release) -> Running:
        running = await asyncio.to_thread(by.assembler)
        await both()
        assert await asyncio.to_thread(old.stop) == 0
        return running

    async def both() -> None:
        """The clients meet whoever is there now."""
        await asyncio.sleep(2)
        for conversation in conversations:
            await conversation.go_on()

    api, url = previous.serve()
    urls.append(url)
    worker = previous.assembler()
    async with load(urls, history) as conversations:
        await both()
        worker = await replace_worker(worker, current)
        await both()
        api = await replace_api(api, current)
        await both()  # all is new
        api = await replace_api(api, previous)
        await both()
        await replace_worker(worker, previous)
        await both()  # all is old, and goes on with what the new ones wrote
    report = await verify(history, server, current)
    assert report.acknowledged > 100
    assert min(map(done, (*previous.started, *current.started))) > 0


async def test_an_upgrade_from_older_events(older: Release, current: Release, server: EmbeddedValkey) -> None:
    """Workers first, then the API between two requests: older sessions go on, and nothing is lost."""
    api, url = older.serve()
    current.assembler()
    urls, history = [url], History()
    workload = Workload(["http://balancer"], history, 1, network=lambda: Balanced(urls))
    async with workload:
        conversations = [Conversation(workload, await workload.open(mode)) for mode in ("linear", "tree")]

        async def go_on() -> None:
            for _ in range(5):
                await asyncio.gather(*(conversation.go_on() for conversation in conversations))

        await go_on()
        _, urls[0] = await asyncio.to_thread(current.serve)
        assert await asyncio.to_thread(api.stop) == 0
        await go_on()
        for conversation in conversations:
            await workload.delete(conversation.session)
    report = await verify(history, server, current)
    assert report.acknowledged == 2 * 2 * 5
    assert min(map(done, (*older.started, *current.started))) > 0
