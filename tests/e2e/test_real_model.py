"""Living agents on a real model through the real OpenAI SDK; every sampled token is recomputed."""

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest

from tests.support.processes import MODEL_DIR
from tokentape_cli.demo.agent import Agent
from tokentape_cli.demo.branches import CompactingAgent, DelegatingAgent, RetryingAgent
from tokentape_cli.demo.verify import TOLERANCE, load_model
from tokentape_driver import RolloutSample, TokentapeClient, rollout, verify
from tokentape_engine.dialogues import SYSTEM_PROMPT, TOOLS, call_tool

QUESTION = "What is the weather in Paris?"
SYSTEM = {"role": "system", "content": SYSTEM_PROMPT}


@pytest.fixture(scope="module")
def model() -> Any:
    return load_model(str(MODEL_DIR))


def sdk(base_url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=base_url, api_key="unused", max_retries=0)


async def respell(base_url: str, _: RolloutSample) -> dict[str, Any]:
    """An agent on the SDK that replays tool calls as its own JSON library spells them."""
    messages: list[Any] = [SYSTEM, {"role": "user", "content": QUESTION}]
    calls = 0
    async with sdk(base_url) as client:
        for _turn in range(4):
            reply = await client.chat.completions.create(
                model="reference", messages=messages, tools=TOOLS, temperature=1.0, max_tokens=96
            )
            message = reply.choices[0].message
            replayed = message.model_dump(exclude_none=True)
            for call in replayed.get("tool_calls") or []:
                arguments = json.loads(call["function"]["arguments"])
                backwards = dict(reversed(list(arguments.items())))
                call["function"]["arguments"] = json.dumps(backwards, indent=1)
            messages.append(replayed)
            if not message.tool_calls:
                break
            for sdk_call in message.tool_calls:
                calls += 1
                result = call_tool(sdk_call.function.name, json.loads(sdk_call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": sdk_call.id, "content": result})
    return {"calls": calls, "agent_metrics": {"total_tool_time": 0.25}}


async def test_concurrent_agents_are_verified(url: str, model: Any) -> None:
    """Eight agents at once: every sample's masked-in log-probs recompute within the tolerance."""
    questions = (QUESTION, "And in Lima?", "What is 3 plus 4?")
    async with TokentapeClient(url) as client:
        samples = await asyncio.gather(
            *(rollout(Agent(questions), RolloutSample(index=i), client=client) for i in range(8))
        )
    for sample in samples:
        assert "agent_error" not in sample.metadata
        assert sum(sample.loss_mask or []) > 0
        assert verify(sample, model).largest <= TOLERANCE
    assert any(sample.metadata["tool_calls"] for sample in samples)


async def test_a_wrong_token_would_be_seen(url: str, model: Any) -> None:
    """The proof can fail: one changed prompt token moves the log-probs by more than the tolerance."""
    async with TokentapeClient(url) as client:
        sample = await rollout(Agent((QUESTION,)), RolloutSample(), client=client)
    assert verify(sample, model).largest <= TOLERANCE
    first = len(sample.tokens) - sample.response_length
    sample.tokens[first - 4] += 1
    assert verify(sample, model).largest > TOLERANCE


async def test_respelled_tool_calls_extend(url: str, model: Any) -> None:
    """A client that re-serialises tool calls continues its turn: one sample, exact to the log-prob."""
    async with TokentapeClient(url) as client:
        samples = [await rollout(respell, RolloutSample(index=i), client=client) for i in range(3)]
    for sample in samples:
        assert "agent_error" not in sample.metadata, sample.metadata["agent_error"]
        assert verify(sample, model).largest <= TOLERANCE
        assert sample.non_generation_time == 0.25
    with_calls = [sample for sample in samples if sample.metadata["calls"]]
    assert with_calls, "no tool call in three episodes"
    assert all(isinstance(sample.metadata["lifecycle"], list) for sample in with_calls)


async def test_tokens_are_the_engines_own(url: str, system: Any) -> None:
    """The sample is what the engine says it received and produced, turn by turn."""
    async with TokentapeClient(url) as driver, httpx.AsyncClient(timeout=60.0, trust_env=False) as http:
        session = await driver.open_session()
        messages: list[Any] = [SYSTEM, {"role": "user", "content": QUESTION}]
        seen: list[int] = []
        for _ in range(2):
            # A sampled answer may run into its length, where a sample ends.
            body = {"messages": messages, "tools": TOOLS, "temperature": 0, "return_token_ids": True}
            reply = await http.post(f"{session.openai_base_url}/chat/completions", json=body)
            choice = reply.json()["choices"][0]
            assert choice["finish_reason"] != "length"
            assert choice["prompt_token_ids"][: len(seen)] == seen
            seen = choice["prompt_token_ids"] + choice["response_token_ids"]
            messages += [choice["message"], {"role": "user", "content": "And in Rome?"}]
        collected = await session.collect_samples(RolloutSample())
        gone = await http.get(session.url)
    assert collected.samples[0].tokens == seen
    assert gone.json()["error"]["code"] == "session_deleted"


async def test_sdk_streams(url: str, model: Any) -> None:
    """`stream=True` through the SDK gives the same message as the recording, tool calls included."""
    async with TokentapeClient(url) as driver:
        for _ in range(5):
            session = await driver.open_session()
            async with sdk(session.openai_base_url) as client:
                stream = await client.chat.completions.create(
                    model="reference",
                    messages=[SYSTEM, {"role": "user", "content": QUESTION}],
                    tools=TOOLS,
                    stream=True,
                    stream_options={"include_usage": True},
                    max_tokens=96,
                )
                text, calls, finish, usage = "", [], None, None
                async for chunk in stream:
                    usage = chunk.usage or usage
                    for choice in chunk.choices:
                        text += choice.delta.content or ""
                        calls += choice.delta.tool_calls or []
                        finish = choice.finish_reason or finish
            async with httpx.AsyncClient(trust_env=False) as http:
                record = (await http.get(session.url)).json()["records"][0]
            recorded = record["response"]["choices"][0]
            assert (text, finish) == (recorded["message"]["content"], recorded["finish_reason"])
            stored = recorded["message"].get("tool_calls") or []
            assert [c.function.arguments for c in calls] == [c["function"]["arguments"] for c in stored]
            assert usage is not None
            assert usage.prompt_tokens == len(record["request"]["input_ids"])
            collected = await session.collect_samples(RolloutSample())
            assert verify(collected.samples[0], model).largest <= TOLERANCE
            if calls:
                return
    pytest.fail("no tool call in five episodes")


async def test_sdk_sees_errors(url: str) -> None:
    """The SDK raises its own classes with our message, and does not retry what cannot succeed."""
    async with TokentapeClient(url) as driver:
        session = await driver.open_session()
        await session.delete()
    async with openai.AsyncOpenAI(
        base_url=session.openai_base_url, api_key="unused", max_retries=3
    ) as client:
        with pytest.raises(openai.NotFoundError, match="deleted"):
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}])


async def test_engine_refusal_reaches_the_sdk(url: str) -> None:
    """A prompt beyond the engine's context is the engine's own 400; the session goes on."""
    async with TokentapeClient(url) as driver:
        session = await driver.open_session()
        async with sdk(session.openai_base_url) as client:
            with pytest.raises(openai.BadRequestError):
                await client.chat.completions.create(
                    model="m", messages=[{"role": "user", "content": "word " * 6000}]
                )
            reply = await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "Hello"}], max_tokens=8
            )
        assert reply.choices[0].finish_reason in ("length", "stop")
        collected = await session.collect_samples(RolloutSample())
    assert len(collected.samples) == 1


async def test_truncated_turn_is_extended(url: str, model: Any) -> None:
    """A turn that was cut at its length may go on in linear mode; the sample ends at the cut turn."""
    async with TokentapeClient(url) as driver:
        session = await driver.open_session()
        messages: list[Any] = [SYSTEM, {"role": "user", "content": QUESTION}]
        async with sdk(session.openai_base_url) as client:
            for limit in (4, 32):
                reply = await client.chat.completions.create(
                    model="m", messages=messages, tools=TOOLS, max_tokens=limit
                )
                messages += [reply.choices[0].message, {"role": "user", "content": "Go on."}]
        collected = await session.collect_samples(RolloutSample())
    (sample,) = collected.samples
    assert (sample.status.value if sample.status else None, sample.response_length) == ("truncated", 4)
    assert verify(sample, model).largest <= TOLERANCE


@pytest.mark.parametrize("agent", [RetryingAgent, CompactingAgent, DelegatingAgent])
async def test_trees_are_verified(url: str, model: Any, agent: type[Agent]) -> None:
    """Retries, compaction and parallel sub-agents: every sibling recomputes, and all share a rollout id."""
    async with TokentapeClient(url) as client:
        siblings = await rollout(agent(), RolloutSample(index=7), client=client, mode="tree")
    assert {sample.rollout_id for sample in siblings} == {7}
    for sample in siblings:
        assert "agent_error" not in sample.metadata
        assert sample.loss_mask is not None
        assert verify(sample, model).largest <= TOLERANCE
    roots = [node for node in siblings[0].metadata["tree"]["nodes"] if node["parent"] is None]
    assert len(siblings) >= len(roots)
