"""The training dialogues are what a demo agent can really play."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from tokentape_engine.dialogues import TOOLS, call_tool, dialogues, user_prompts
from tokentape_engine.model import TinyModel


def test_dialogues_are_deterministic() -> None:
    """Two calls give equal dialogues; there are about a hundred, with one to four calls each."""
    assert dialogues() == dialogues()
    calls = [sum("tool_calls" in message for message in dialogue) for dialogue in dialogues()]
    assert 80 <= len(calls) <= 120
    assert set(calls) == {1, 2, 3, 4}
    assert len(user_prompts()) == len(calls)


def test_tool_answers_are_the_environments() -> None:
    """Every tool message is what `call_tool` answers to the call before it, by a tool in TOOLS."""
    names = {tool["function"]["name"] for tool in TOOLS}
    for dialogue in dialogues():
        for call, answer in pairwise(dialogue):
            if "tool_calls" in call:
                function = call["tool_calls"][0]["function"]
                assert function["name"] in names
                assert answer["content"] == call_tool(function["name"], json.loads(function["arguments"]))


@pytest.mark.parametrize(
    ("name", "arguments"), [("add", {"a": "x", "b": 1}), ("lookup_weather", {"city": []}), ("nothing", {})]
)
def test_bad_call_is_answered(name: str, arguments: dict[str, object]) -> None:
    """A call that makes no sense gets an error text, never an exception."""
    assert call_tool(name, arguments).startswith("error: ")


def test_rendering_is_append_only() -> None:
    """Each conversation's rendering begins with those of its shorter forms, user turns included."""
    model = TinyModel.create()
    for dialogue in dialogues():
        whole = model.tokenizer.apply_chat_template(dialogue, tools=TOOLS, tokenize=False)
        for end in range(2, len(dialogue)):
            part = model.tokenizer.apply_chat_template(dialogue[:end], tools=TOOLS, tokenize=False)
            assert whole.startswith(part)
