"""Tree mode: retries, compaction, sub-agents and forks, as real harnesses make them, on the OpenAI SDK."""

import asyncio
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest

from tests.api.conftest import OpenSession
from tests.support.scripted import ScriptedEngine
from tokentape_contracts import limits
from tokentape_contracts.accounting import Reason
from tokentape_contracts.events import TurnRecorded
from tokentape_contracts.samples import Sample
from tokentape_core.domain.assemble import Assembly, assemble
from tokentape_core.domain.state import fold
from tokentape_core.store import MemoryStore
from tokentape_core.text.render import ChatRenderer, NotAppendable, Prompt

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Hello"}
AGAIN = {"role": "user", "content": "And now?"}


class SdkSession(OpenSession):
    """A session whose agent is the real OpenAI SDK, with its retries."""

    async def chat(self, *messages: dict[str, Any], **fields: Any) -> httpx.Response:
        sdk = openai.AsyncOpenAI(base_url=f"http://api{self.url}/v1", api_key="-", http_client=self.api)
        conversation: Any = list(messages)
        try:
            raw = await sdk.chat.completions.with_raw_response.create(
                model="m", messages=conversation, **fields
            )
        except openai.APIStatusError as error:
            return error.response
        return raw.http_response


async def open_tree(api: httpx.AsyncClient, **fields: Any) -> SdkSession:
    reply = await api.post("/sessions", json={"mode": "tree", **fields})
    return SdkSession(api, f"/sessions/{reply.json()['session_id']}")


@pytest.fixture
async def tree(api: httpx.AsyncClient) -> SdkSession:
    return await open_tree(api)


async def answer(session: OpenSession, *messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    reply = await session.chat(*messages, **fields)
    assert reply.status_code == 200, reply.text
    message: dict[str, Any] = reply.json()["choices"][0]["message"]
    return message


async def parents(session: OpenSession) -> list[int]:
    events = (await session.api.get(session.url, params={"view": "events"})).json()["events"]
    return [event["parent"] for event in events[1:]]


async def assembled(session: OpenSession, store: MemoryStore) -> Assembly:
    state = fold(await store.read(session.url.split("/")[-1]))
    assert state is not None
    return assemble(state, lambda ids: "")


async def samples(session: OpenSession, store: MemoryStore) -> list[Sample]:
    return (await assembled(session, store)).samples


async def test_lost_first_reply(tree: OpenSession, store: MemoryStore) -> None:
    """A first turn re-sent after a lost reply is a sibling root; the next turn continues the newer.

    The lost one is accounted for.
    """
    await answer(tree, USER)
    again = await answer(tree, USER)
    await answer(tree, USER, again, AGAIN)
    assert await parents(tree) == [0, 0, 2]
    assembly = await assembled(tree, store)
    assert len(assembly.samples) == 1
    (lost,) = assembly.accounting.left_out
    assert (lost.turn, lost.reason, lost.by) == (1, Reason.RETRIED, 2)


async def test_retry_of_the_last_turn_with_a_bad_role(tree: OpenSession) -> None:
    """A bad role is 400 and leaves the old turn as it is."""
    first = await answer(tree, USER)
    await answer(tree, USER, first, AGAIN)
    before = await tree.records()
    reply = await tree.chat(USER, first, {"role": "narrator", "content": "boo"})
    assert reply.status_code == 400
    assert await tree.records() == before


async def test_few_shot_then_divergent_retry(tree: OpenSession) -> None:
    """Assistants that the client brings are prompt: a retry that changes one is a new root."""
    shots = [SYSTEM, USER, {"role": "assistant", "content": "Hi!"}, AGAIN]
    await answer(tree, *shots)
    changed = [SYSTEM, USER, {"role": "assistant", "content": "Hey!"}, AGAIN]
    await answer(tree, *changed)
    assert await parents(tree) == [0, 0]


CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a":1,"b":2}'}}
RESPELT = {**CALL, "function": {"name": "add", "arguments": '{"b": 2, "a": 1}'}}
TOOL = {"role": "tool", "tool_call_id": "c1", "content": "3"}


@pytest.mark.parametrize(("matcher", "expected"), [("strict", [0, 0, 1]), ("loose_tool_call", [0, 1, 1])])
async def test_respelt_arguments(
    api: httpx.AsyncClient, engine: ScriptedEngine, matcher: str, expected: list[int]
) -> None:
    """`strict` branches on another spelling, `loose_tool_call` extends; the canonical one extends in both."""
    session = await open_tree(api, matcher=matcher)
    engine.answer = lambda body: httpx.Response(
        200,
        json=engine.reply(
            body,
            "call",
            message={"content": "", "tool_calls": [CALL]},
            choice={"finish_reason": "tool_calls"},
        ),
    )
    await answer(session, USER)
    await answer(session, USER, {"role": "assistant", "content": None, "tool_calls": [RESPELT]}, TOOL)
    await answer(session, USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}, TOOL)
    assert await parents(session) == expected


async def test_compaction(tree: OpenSession, store: MemoryStore, renderer: ChatRenderer) -> None:
    """A summary in place of the history begins a new root with its own prompt; both leaves are trained."""
    first = await answer(tree, SYSTEM, USER)
    await answer(tree, SYSTEM, USER, first, AGAIN)
    compacted = [SYSTEM, {"role": "user", "content": "Summary: greeted. Go on."}]
    await answer(tree, *compacted)
    assert await parents(tree) == [0, 1, 0]
    kept = await samples(tree, store)
    assert [sample.metadata["leaf"]["path_node_ids"] for sample in kept] == [[0, 1], [2]]
    assert all(mask for sample in kept for mask in [sample.loss_mask.any()])
    prompt = renderer.render(compacted)
    assert kept[1].tokens[: len(prompt)].tolist() == prompt.tolist()


async def test_parallel_calls_of_one_parent(
    tree: OpenSession, engine: ScriptedEngine, store: MemoryStore
) -> None:
    """Two simultaneous calls of one parent are siblings with their own response ids, both continuable."""
    first = await answer(tree, USER)
    engine.texts = ["left", "right"]
    left, right = await asyncio.gather(
        answer(tree, USER, first, {"role": "user", "content": "left?"}),
        answer(tree, USER, first, {"role": "user", "content": "right?"}),
    )
    for side, message in (("left?", left), ("right?", right)):
        await answer(tree, USER, first, {"role": "user", "content": side}, message, AGAIN)
    assert sorted(await parents(tree)) == [0, 1, 1, 2, 3]
    kept = await samples(tree, store)
    assert len(kept) == 2
    assert len({sample.metadata["leaf"]["response_id"] for sample in kept}) == 2


async def test_fork_after_a_truncated_turn(tree: OpenSession, engine: ScriptedEngine) -> None:
    """A turn that was cut cannot be continued, not even by a resend; before it one may branch."""
    first = await answer(tree, USER)
    engine.answer = lambda body: httpx.Response(
        200, json=engine.reply(body, "cut", choice={"finish_reason": "length"})
    )
    cut = await answer(tree, USER, first, AGAIN)
    engine.answer = None
    for more in ([], [{"role": "user", "content": "Go on."}]):
        reply = await tree.chat(USER, first, AGAIN, cut, *more)
        assert (reply.status_code, reply.json()["error"]["code"]) == (409, "turn_truncated")
        assert reply.headers["x-should-retry"] == "false"
    await answer(tree, USER, first, {"role": "user", "content": "Another way"})
    assert await parents(tree) == [0, 1, 1]


async def test_exact_resend_of_a_history(tree: OpenSession, engine: ScriptedEngine) -> None:
    """A request that is exactly a recorded path, answer included, continues it with the boundary alone."""
    first = await answer(tree, USER)
    await answer(tree, USER, first)
    assert await parents(tree) == [0, 1]
    prompt, longer = (body["input_ids"] for body in engine.bodies)
    assert longer[: len(prompt)] == prompt


async def test_what_cannot_be_appended_begins_a_root(
    tree: OpenSession, engine: ScriptedEngine, renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages that the template cannot append to a turn make the whole conversation a new root."""

    def refuse(*_: Any, **__: Any) -> Prompt:
        raise NotAppendable("no")

    first = await answer(tree, USER)
    monkeypatch.setattr(ChatRenderer, "extend", refuse)
    messages = [USER, first, AGAIN]
    await answer(tree, *messages)
    assert await parents(tree) == [0, 0]
    assert engine.bodies[1]["input_ids"] == renderer.render(messages).tolist()


async def test_what_a_client_says_for_the_assistant_follows_the_turn(
    tree: OpenSession, engine: ScriptedEngine
) -> None:
    """An assistant message that was never sampled is prompt text behind the recorded tokens."""
    first = await answer(tree, USER)
    await answer(tree, USER, first, AGAIN, {"role": "assistant", "content": "injected"}, AGAIN)
    assert await parents(tree) == [0, 1]
    assert (
        engine.bodies[1]["input_ids"][: len(engine.bodies[0]["input_ids"])] == engine.bodies[0]["input_ids"]
    )


async def test_the_limit_of_nodes(tree: OpenSession, engine: ScriptedEngine, store: MemoryStore) -> None:
    """1,024 nodes are kept; one more is refused before the engine is asked, whatever it would continue."""
    session_id = tree.url.split("/")[-1]
    first = await answer(tree, USER)
    recorded = (await store.read(session_id))[1][1]
    assert isinstance(recorded, TurnRecorded)
    for seq in range(2, limits.TURNS_PER_SESSION):
        await store.append(session_id, seq, replace(recorded, id=f"{seq:032x}"))
    await answer(tree, USER, first, AGAIN)
    asked = len(engine.bodies)
    for messages in ([USER], [USER, first, AGAIN]):
        reply = await tree.chat(*messages)
        assert (reply.status_code, reply.json()["error"]["code"]) == (409, "session_full")
    assert len(engine.bodies) == asked == 2
    assert len(await parents(tree)) == 1024


async def test_a_session_with_two_hundred_leaves(tree: OpenSession, store: MemoryStore) -> None:
    """200 children of one turn with different messages are 200 leaves and as many samples."""
    first = await answer(tree, USER)
    for number in range(200):
        await answer(tree, USER, first, {"role": "user", "content": f"Task {number}"})
    tables = (await tree.api.get(tree.url)).json()["metadata"]["tree"]
    assert len(tables["leaves"]) == 200
    assembly = await assembled(tree, store)
    paths = [sample.metadata["leaf"]["path_node_ids"] for sample in assembly.samples]
    assert paths == [[0, node] for node in range(200, 0, -1)]
    assert assembly.accounting.left_out == []


async def test_rejected_and_pending_requests_change_nothing(
    tree: OpenSession, engine: ScriptedEngine
) -> None:
    """What GET shows changes only when a turn is committed."""
    first = await answer(tree, USER)
    before = (await tree.api.get(tree.url)).json()
    seen: list[Any] = []

    async def failing(_: dict[str, Any]) -> httpx.Response:
        seen.append((await tree.api.get(tree.url)).json())
        return httpx.Response(400, json={"message": "too long"})

    engine.answer = failing
    assert (await tree.chat(USER, first, AGAIN)).status_code == 400
    assert seen == [before]
    assert (await tree.api.get(tree.url)).json() == before


async def test_get_shows_the_tables(tree: OpenSession) -> None:
    """GET's metadata has the node and leaf tables; its records are the path to the newest turn."""
    await answer(tree, USER)
    await answer(tree, SYSTEM, USER)
    body = (await tree.api.get(tree.url)).json()
    assert len(body["records"]) == 1
    assert [node["parent"] for node in body["metadata"]["tree"]["nodes"]] == [None, None]
    assert len(body["metadata"]["tree"]["leaves"]) == 2
