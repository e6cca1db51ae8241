"""Agents on real SDKs: whatever an SDK does to a message that it sends back, the conversation stays one."""

import importlib
from collections.abc import Awaitable, Callable

import pytest

from tests.sdks.scene import Stage, outputs

Play = Callable[[str, bool], Awaitable[None]]

ECHOES: dict[str, set[str]] = {
    "openai_sdk.returned": set(),
    "openai_sdk.dumped": {"refusal added", "annotations added", "audio added", "function_call added"},
    "openai_sdk.parsed": {"parsed added", "tool_calls.function.parsed_arguments added"},
    "openai_sdk.by_hand": {"reasoning_content left out", "tool_calls.index left out"},
    "langchain_agent.play": {"reasoning_content left out", "tool_calls.index left out", "content null"},
    "openai_agents.play": {"reasoning_content left out", "tool_calls.index left out", "content null"},
    "pydantic_ai_agent.play": {
        "tool_calls.function.arguments rewritten",
        "tool_calls.index left out",
        "content null",
    },
}
"""Programs, and what each of them does at least to the messages that it sends back, streamed or not."""


def program(name: str) -> Play:
    """A program of `tests.sdks.programs`.

    Imported where it is used: SDKs take seconds, and every worker of a test run collects every module.
    """
    module, _, function = name.partition(".")
    play: Play = getattr(importlib.import_module(f"tests.sdks.programs.{module}"), function)
    return play


# OpenAI's SDK warns of the model that it has itself put into a parsed message.
@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
@pytest.mark.parametrize("name", ECHOES)
async def test_an_episode_is_one_sample(stage: Stage, name: str, stream: bool) -> None:
    """Three turns with reasoning and tools are one sample that trains every sampled token (INV-2, INV-11)."""
    await program(name)(stage.base_url, stream)
    assert {bool(body.get("stream")) for body in stage.wiretap.bodies} == {stream}
    assert stage.echoed() >= ECHOES[name]
    sampled = outputs(stage.renderer)
    prompts = [body["input_ids"] for body in stage.engine.bodies]
    assert len(prompts) == len(sampled)
    for turn, (prompt, output) in enumerate(zip(prompts[:-1], sampled[:-1], strict=True)):
        assert prompts[turn + 1][: len(prompt) + len(output)] == prompt + output
    collected = await stage.collect()
    (sample,) = collected.samples
    assert sample["tokens"] == prompts[-1] + sampled[-1]
    assert sum(sample["loss_mask"]) == sum(map(len, sampled))
    assert collected.session_metadata["tito_session_mismatch"] == []
    assert collected.session_metadata["accounting"]["left_out"] == []
