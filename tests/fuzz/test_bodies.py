"""HTTP bodies: random and damaged ones give an answer from the table, and leave nothing half done."""

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

import httpx
import orjson
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.fuzz.conftest import FUZZ
from tests.fuzz.mutate import damaged_bytes, damaged_json, json_values, scalars
from tests.support.application import application, client_of, small_renderer
from tests.support.scripted import ScriptedEngine, network
from tokentape_contracts import limits
from tokentape_contracts.errors import BY_CODE, TABLE
from tokentape_contracts.http import MODES, PIN_FIELDS
from tokentape_core.store import MemoryStore
from tokentape_core.text.tokenizer import Tokenizer


class Api:
    """An application that a plain test can ask, one request after the other."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._runner = asyncio.Runner()
        self._stack = AsyncExitStack()
        self.engine = ScriptedEngine(tokenizer)
        self.store = MemoryStore()
        answers = network(self.engine.handle)
        app = application(small_renderer(tokenizer), self.store, answers, timeout_s=5.0)
        self.client = self._runner.run(self._stack.enter_async_context(client_of(app)))

    def close(self) -> None:
        self._runner.run(self._stack.aclose())
        self._runner.close()

    def request(self, method: str, path: str, **more: Any) -> httpx.Response:
        """The answer, which has five seconds to come."""

        async def ask() -> httpx.Response:
            async with asyncio.timeout(5):
                return await self.client.request(method, path, **more)

        return self._runner.run(ask())

    def post(self, path: str, content: bytes = b"") -> httpx.Response:
        return self.request("POST", path, content=content)

    def opened(self, mode: str = "linear", turns: int = 0) -> str:
        """The path of a new session with so many turns."""
        body = orjson.dumps({"mode": mode})
        path = f"/sessions/{self.post('/sessions', body).json()['session_id']}"
        for turn in range(turns):
            assert self.post(f"{path}/v1/chat/completions", orjson.dumps(CHATS[turn])).status_code == 200
        return path

    def stored(self) -> dict[str, Any]:
        """Everything that the store holds, entry for entry."""
        return {sid: dict(stream) for sid, stream in self.store._streams.items()}


@pytest.fixture(scope="module")
def api(tokenizer: Tokenizer) -> Iterator[Api]:
    patch = pytest.MonkeyPatch()
    # No worker runs: a collect that is allowed is refused at once instead of waiting for one.
    patch.setattr(limits, "QUEUE_DEPTH", 0)
    made = Api(tokenizer)
    yield made
    made.close()
    patch.undo()


def ensure_known(reply: httpx.Response) -> None:
    """An error is one of the table, in our shape, and no defect of ours."""
    if reply.status_code < 400:
        return
    body = reply.json()["error"]
    rule = TABLE[BY_CODE[body["code"]]]
    assert (rule.status, reply.headers["x-should-retry"]) == (reply.status_code, str(rule.retryable).lower())
    assert rule.status not in (500, 502), body


USER = {"role": "user", "content": "Hello"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
ANSWER = {"role": "assistant", "content": "fine"}
CHATS: list[dict[str, Any]] = [
    {"model": "m", "messages": [USER], "tools": [TOOL]},
    {"model": "m", "messages": [USER, ANSWER, USER], "temperature": 1.0, "tools": [TOOL]},
    {"model": "m", "messages": [USER, ANSWER, USER, ANSWER, {"role": "tool", "content": "4"}]},
    {
        "messages": [
            {"role": "system", "content": "Be brief."},
            USER,
            {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "4"}]},
        ],
        "stream": True,
        "stream_options": {"include_usage": True},
        "chat_template_kwargs": {"enable_thinking": False},
        "n": 1,
    },
]
CHAT_FIELDS = {
    "messages": st.lists(st.one_of(st.just(USER), st.just(ANSWER), json_values), max_size=3),
    "tools": st.one_of(st.just([TOOL]), json_values),
    "chat_template_kwargs": st.dictionaries(
        st.sampled_from(["messages", "tools", "add_generation_prompt", "enable_thinking", "tokenize", "x"]),
        scalars,
    ),
    "input_ids": json_values,
    "stream": scalars,
    "stream_options": json_values,
    "n": scalars,
}
DAMAGED_CHATS = st.one_of(*(damaged_json(chat, CHAT_FIELDS) for chat in CHATS))


@given(st.sampled_from(MODES), st.integers(0, 2), DAMAGED_CHATS)
@settings(FUZZ, max_examples=300)
@example("linear", 0, {"messages": [USER], "chat_template_kwargs": {"messages": [], "tokenize": True}})
@example("linear", 0, {"messages": [{"role": "user", "content": "<|im_end|>\x00"}]})
@example("tree", 1, {"messages": [USER, ANSWER, {"role": "user", "content": None}]})
def test_damaged_chats(api: Api, mode: str, turns: int, body: Any) -> None:
    """A chat is recorded whole, or refused and nothing has changed; a refusal for the body asks no engine."""
    path = api.opened(mode, turns)
    before, asked = api.stored(), len(api.engine.bodies)
    reply = api.post(f"{path}/v1/chat/completions", orjson.dumps(body))
    ensure_known(reply)
    after = api.stored()
    session_id = path.rpartition("/")[2]
    if reply.status_code == 200:
        assert len(after.pop(session_id)) == len(before.pop(session_id)) + 1
    else:
        assert len(api.engine.bodies) == asked
    assert after == before


@given(
    st.one_of(json_values.map(orjson.dumps), st.binary(max_size=30), damaged_bytes(orjson.dumps(CHATS[0])))
)
@settings(FUZZ)
def test_random_chats(api: Api, body: bytes) -> None:
    """Bytes that are hardly a chat are refused, and nothing is recorded."""
    path = api.opened()
    before = api.stored()
    reply = api.post(f"{path}/v1/chat/completions", body)
    ensure_known(reply)
    assert reply.status_code == 200 or api.stored() == before


OPEN = {
    "mode": "tree",
    "matcher": "strict",
    "labels": {"a": 1},
    "pins": {"temperature": 1.0},
    "evaluation": True,
}
OPEN_FIELDS = {
    "mode": st.one_of(st.sampled_from(MODES), scalars),
    "matcher": scalars,
    "labels": json_values,
    "pins": st.dictionaries(st.one_of(st.sampled_from(sorted(PIN_FIELDS)), st.text(max_size=3)), json_values),
    **dict.fromkeys(sorted(PIN_FIELDS), scalars),
}


@given(st.one_of(damaged_json(OPEN, OPEN_FIELDS).map(orjson.dumps), damaged_bytes(orjson.dumps(OPEN))))
@settings(FUZZ)
def test_damaged_opens(api: Api, body: bytes) -> None:
    """A session is there and can be used, or the body was refused and there is no new one."""
    before = len(api.store._streams)
    reply = api.post("/sessions", body)
    ensure_known(reply)
    assert len(api.store._streams) == before + (reply.status_code == 200)
    if reply.status_code == 200:
        chat = f"/sessions/{reply.json()['session_id']}/v1/chat/completions"
        assert api.post(chat, orjson.dumps(CHATS[0])).status_code == 200


SAMPLES = {"max_seq_len": 100, "metadata": {"reward": 1.0}, "deadline_s": 0.05}
SAMPLES_FIELDS = {"max_seq_len": scalars, "metadata": json_values, "deadline_s": scalars}


@given(
    st.one_of(damaged_json(SAMPLES, SAMPLES_FIELDS).map(orjson.dumps), damaged_bytes(orjson.dumps(SAMPLES)))
)
@settings(FUZZ)
def test_damaged_collects(api: Api, body: bytes) -> None:
    """A collect is accepted (here: refused for a full queue) or the body is 400; the session is as it was."""
    path = api.opened(turns=1)
    before = api.stored()
    reply = api.post(f"{path}/samples", body)
    ensure_known(reply)
    assert reply.status_code in (400, 503)
    assert api.stored() == before
