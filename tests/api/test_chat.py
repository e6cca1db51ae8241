"""Chat: what the engine gets, what the client gets, and what is recorded."""

import asyncio

import httpx
import numpy as np
import orjson
import pytest

from tests.api.conftest import OpenSession
from tests.support.scripted import ScriptedEngine
from tokentape_core.text.render import ChatRenderer
from tokentape_core.text.tokenizer import Tokenizer

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Hello"}
AGAIN = {"role": "user", "content": "And now?"}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


async def test_first_prompt_is_the_templates_own(
    session: OpenSession, engine: ScriptedEngine, renderer: ChatRenderer
) -> None:
    """The first turn's input_ids are the whole conversation as the chat template renders it."""
    reply = await session.chat(SYSTEM, USER)
    assert reply.status_code == 200
    assert engine.bodies[0]["input_ids"] == renderer.render([SYSTEM, USER]).tolist()


async def test_next_prompt_begins_with_the_tokens_of_the_last_turn(
    session: OpenSession, engine: ScriptedEngine
) -> None:
    """Token-in, token-out: a prompt is the parent's prompt and output, then only the new suffix (INV-2)."""
    engine.texts = ["first", "second"]
    answer = (await session.chat(SYSTEM, USER)).json()
    first = engine.bodies[0]["input_ids"]
    sampled = [triple[1] for triple in answer["choices"][0]["meta_info"]["output_token_logprobs"]]
    await session.chat(SYSTEM, USER, answer["choices"][0]["message"], AGAIN)
    second = engine.bodies[1]["input_ids"]
    assert second[: len(first) + len(sampled)] == first + sampled
    assert len(second) > len(first) + len(sampled)


async def test_drifting_tokens_are_kept(
    session: OpenSession, engine: ScriptedEngine, tokenizer: Tokenizer
) -> None:
    """Sampled ids that encode differently once decoded stay as they were sampled."""
    joined = tokenizer.encode(" having")
    split = tokenizer.encode(" ha") + tokenizer.encode("ving")
    assert joined != split
    end = tokenizer.encode("<|im_end|>")
    triples = [[-0.1, token, None] for token in split + end]
    engine.answer = lambda body: httpx.Response(
        200,
        json=engine.reply(
            body,
            " having",
            meta={"output_token_logprobs": triples, "completion_tokens": len(triples)},
        ),
    )
    answer = (await session.chat(USER)).json()
    await session.chat(USER, answer["choices"][0]["message"], AGAIN)
    prompt = engine.bodies[1]["input_ids"]
    start = len(engine.bodies[0]["input_ids"])
    assert prompt[start : start + len(split)] == split


async def test_what_the_server_owns_cannot_be_overridden(
    session: OpenSession, engine: ScriptedEngine
) -> None:
    """input_ids, logprobs, meta info, trimming and replay flags are the server's; all else passes."""
    await session.chat(
        USER,
        input_ids=[1, 2],
        logprobs=False,
        return_meta_info=False,
        no_stop_trim=True,
        stream=True,
        stream_options={"include_usage": True},
        return_routed_experts=True,
        temperature=0.25,
        stop=["x"],
    )
    sent = engine.bodies[0]
    assert sent["input_ids"] != [1, 2]
    assert (sent["logprobs"], sent["return_meta_info"], sent["no_stop_trim"], sent["stream"]) == (
        True,
        True,
        False,
        False,
    )
    assert "return_routed_experts" not in sent
    assert "stream_options" not in sent
    assert (sent["temperature"], sent["stop"], sent["model"]) == (0.25, ["x"], "m")


async def test_headers(session: OpenSession, engine: ScriptedEngine) -> None:
    """The engine gets the routing key and the client's headers, less credentials and hop-by-hop ones."""
    await session.api.post(
        f"{session.url}/v1/chat/completions",
        json={"messages": [USER]},
        headers={
            "Authorization": "Bearer secret",
            "Cookie": "a=b",
            "X-Api-Key": "k",
            "Connection": "keep-alive, X-Private",
            "X-Private": "1",
            "Traceparent": "00-1-2-01",
            "X-SMG-Routing-Key": "forged",
        },
    )
    sent = engine.requests[0].headers
    assert sent["x-smg-routing-key"] == session.url.split("/")[-1]
    assert sent["traceparent"] == "00-1-2-01"
    assert {"authorization", "cookie", "x-api-key", "x-private"}.isdisjoint(sent.keys())


async def test_tools_are_inherited(session: OpenSession, engine: ScriptedEngine) -> None:
    """A request without tools has its parent turn's, in the prompt and at the engine."""
    answer = (await session.chat(USER, tools=TOOLS)).json()
    await session.chat(USER, answer["choices"][0]["message"], AGAIN)
    assert engine.bodies[1]["tools"] == TOOLS
    records = await session.records()
    assert [record["request"]["tools"] for record in records] == [TOOLS, TOOLS]


async def test_pins_win(api: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    """Sampling parameters that were pinned when the session was opened win over the agent's."""
    opened = await api.post(
        "/sessions", json={"pins": {"temperature": 1.0}, "top_p": 0.9, "evaluation": True}
    )
    session = OpenSession(api, f"/sessions/{opened.json()['session_id']}")
    await session.chat(USER, temperature=0.0, top_k=3)
    sent = engine.bodies[0]
    assert (sent["temperature"], sent["top_p"], sent["top_k"]) == (1.0, 0.9, 3)


@pytest.mark.parametrize("pinned", ["max_tokens", "max_completion_tokens"])
async def test_a_pinned_length_holds_under_either_name(
    api: httpx.AsyncClient, engine: ScriptedEngine, pinned: str
) -> None:
    """An agent cannot get around a pinned length by its other name."""
    opened = await api.post("/sessions", json={"pins": {pinned: 8}})
    session = OpenSession(api, f"/sessions/{opened.json()['session_id']}")
    await session.chat(USER, max_tokens=99, max_completion_tokens=99)
    lengths = {name: engine.bodies[0].get(name) for name in ("max_tokens", "max_completion_tokens")}
    assert lengths == {"max_tokens": None, "max_completion_tokens": None, pinned: 8}


async def test_records_show_request_and_response(session: OpenSession, engine: ScriptedEngine) -> None:
    """GET rebuilds each turn with the full prompt ids, and says what has accumulated."""
    answer = (await session.chat(SYSTEM, USER, temperature=0.5)).json()
    body = (await session.api.get(session.url)).json()
    (record,) = body["records"]
    assert record["request"]["messages"] == [SYSTEM, USER]
    assert record["request"]["input_ids"] == engine.bodies[0]["input_ids"]
    assert record["request"]["temperature"] == 0.5
    assert record["response"] == answer
    sampled = [triple[1] for triple in answer["choices"][0]["meta_info"]["output_token_logprobs"]]
    mismatch = body["metadata"].pop("tito_session_mismatch")
    assert {entry["type"] for entry in mismatch} <= {"special_token_count", "assistant_text"}
    assert body["metadata"] == {
        "accumulated_token_ids": engine.bodies[0]["input_ids"] + sampled,
        "max_trim_tokens": 0,
        "accounting": {
            "generations": 1,
            "sampled_tokens": len(sampled),
            "trained_tokens": len(sampled),
            "left_out": [],
        },
        "counters": {
            "generations": 1,
            "prefix_cache_info": {
                "cached_tokens": 0,
                "total_prompt_tokens": len(engine.bodies[0]["input_ids"]),
            },
            "spec_info": {},
        },
    }


async def test_compact_view(session: OpenSession) -> None:
    """`?view=events` gives the events themselves."""
    await session.chat(USER)
    body = (await session.api.get(session.url, params={"view": "events"})).json()
    assert [event["type"] for event in body["events"]] == ["session.opened", "turn.recorded"]
    assert body["events"][1]["messages"][0] == USER


async def test_retry_becomes_the_head(session: OpenSession, engine: ScriptedEngine) -> None:
    """A re-sent first request replaces the first answer as the active path; both are in the stream."""
    engine.texts = ["one", "two"]
    await session.chat(USER)
    await session.chat(USER)
    records = await session.records()
    assert [r["response"]["choices"][0]["message"]["content"] for r in records] == ["two"]
    events = (await session.api.get(session.url, params={"view": "events"})).json()["events"]
    assert [event.get("parent") for event in events] == [None, 0, 0]


async def test_long_jump_is_refused(session: OpenSession, engine: ScriptedEngine) -> None:
    """A linear session steps back over one turn at most; a refusal names the message, changes nothing."""
    messages = [USER]
    for _ in range(3):
        answer = (await session.chat(*messages)).json()["choices"][0]["message"]
        messages += [answer, AGAIN]
    before = await session.records()
    reply = await session.chat({"role": "user", "content": "Something else"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "cannot_extend")
    assert "message 0" in reply.json()["error"]["message"]
    assert await session.records() == before
    assert len(engine.bodies) == 3


async def test_failed_retry_costs_nothing(session: OpenSession, engine: ScriptedEngine) -> None:
    """If the retry of the last turn fails, the old turn is still the head."""
    answer = (await session.chat(USER)).json()["choices"][0]["message"]
    await session.chat(USER, answer, AGAIN)
    before = await session.records()
    reply = await session.chat(USER, answer, {"role": "narrator", "content": "boo"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "cannot_extend")
    assert "narrator" in reply.json()["error"]["message"]
    assert await session.records() == before


async def test_concurrent_turns_are_siblings(session: OpenSession, engine: ScriptedEngine) -> None:
    """Two simultaneous generations of one parent are both kept, each with its own parent."""
    replies = await asyncio.gather(*(session.chat(USER) for _ in range(8)))
    assert {reply.status_code for reply in replies} == {200}
    events = (await session.api.get(session.url, params={"view": "events"})).json()["events"]
    turns = events[1:]
    assert [turn["seq"] for turn in turns] == list(range(1, 9))
    assert {turn["parent"] for turn in turns} == {0}
    assert {turn["response_id"] for turn in turns} == {reply.json()["id"] for reply in replies}


async def test_reserialised_tool_call_extends(session: OpenSession, engine: ScriptedEngine) -> None:
    """A client that spells the arguments differently continues the turn, whose stored tokens stay."""
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a":1,"b":1000.0}'}}
    engine.answer = lambda body: httpx.Response(
        200,
        json=engine.reply(
            body,
            '<tool_call>\n{"name":"add","arguments":{"a":1,"b":1e3}}\n</tool_call>',
            message={"content": "", "tool_calls": [call]},
            choice={"finish_reason": "tool_calls"},
        ),
    )
    answer = (await session.chat(USER, tools=TOOLS)).json()
    spelt = {**call, "function": {"name": "add", "arguments": '{"b": 1e3, "a": 1}'}}
    assistant = {"role": "assistant", "content": None, "tool_calls": [spelt]}
    reply = await session.chat(USER, assistant, {"role": "tool", "tool_call_id": "c1", "content": "1001"})
    assert reply.status_code == 200
    sampled = [triple[1] for triple in answer["choices"][0]["meta_info"]["output_token_logprobs"]]
    stored = engine.bodies[0]["input_ids"] + sampled
    assert engine.bodies[1]["input_ids"][: len(stored)] == stored


@pytest.mark.parametrize("wanted", [True, False, None])
async def test_a_stream_has_the_log_probs_that_were_asked_for(
    session: OpenSession, engine: ScriptedEngine, wanted: bool | None
) -> None:
    """The engine always sends them; who did not ask gets none."""
    given = {"content": [{"token": "fine", "logprob": -0.5}]}
    engine.answer = lambda body: httpx.Response(
        200, json=engine.reply(body, "fine", choice={"logprobs": given})
    )
    reply = await session.chat(USER, stream=True, logprobs=wanted)
    events = [orjson.loads(line[6:]) for line in reply.text.split("\n\n")[:-2]]
    found = [event["choices"][0]["logprobs"] for event in events if "logprobs" in event["choices"][0]]
    assert found == ([given] if wanted else [])


@pytest.mark.parametrize("usage", [True, False])
async def test_stream(session: OpenSession, engine: ScriptedEngine, usage: bool) -> None:
    """`stream: true` gives chunks and [DONE]; the engine is never streamed from, and the turn is recorded."""
    engine.texts = ["hello there"]
    reply = await session.chat(USER, stream=True, stream_options={"include_usage": usage})
    assert reply.headers["content-type"].startswith("text/event-stream")
    events = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    parsed = [httpx.Response(200, content=event).json() for event in events[:-1]]
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in parsed if chunk["choices"])
    assert text == "hello there"
    assert any(chunk.get("usage") for chunk in parsed) is usage
    assert len(await session.records()) == 1


async def test_stored_arrays_are_what_the_engine_sent(session: OpenSession, engine: ScriptedEngine) -> None:
    """Log-probs are stored to the last bit."""
    answer = (await session.chat(USER)).json()
    events = (await session.api.get(session.url, params={"view": "events"})).json()["events"]
    sent = [triple[0] for triple in answer["choices"][0]["meta_info"]["output_token_logprobs"]]
    assert np.array_equal(events[1]["logprobs"], sent)
