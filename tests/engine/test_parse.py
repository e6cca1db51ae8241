"""Text becomes the message that it spells, and nothing is lost."""

from __future__ import annotations

import json

import pytest

from tokentape_engine.parse import parse_message

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "ü"}}\n</tool_call>'


def test_plain_text() -> None:
    """Text without marks is content as it stands."""
    message = parse_message(" Hello \n", tools=True)
    assert message == {
        "role": "assistant",
        "content": " Hello \n",
        "reasoning_content": None,
        "tool_calls": None,
    }


def test_reasoning_and_calls() -> None:
    """Reasoning, content and several calls are told apart; ids are unique, arguments a JSON string."""
    message = parse_message(f"<think>\nHm.\n</think>\n\nLet me see.\n{CALL}\n{CALL}", tools=True)
    first, second = message["tool_calls"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Let me see.")
    assert json.loads(first["function"]["arguments"]) == {"a": 1, "b": "ü"}
    assert first["id"].startswith("call_")
    assert first["id"] != second["id"]


def test_only_a_call_has_empty_content() -> None:
    """The content beside a call is the empty string, not null."""
    assert parse_message(f"<think>\n\n</think>\n\n{CALL}", tools=True)["content"] == ""


def test_no_tools_offered() -> None:
    """Without tools in the request a call stays text."""
    assert parse_message(CALL, tools=False)["content"] == CALL


@pytest.mark.parametrize(
    "block",
    [
        "<tool_call>\n{broken\n</tool_call>",
        '<tool_call>\n{"name": 1, "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "add", "arguments": [1]}\n</tool_call>',
        '<tool_call>\n{"name": "add", "arguments": {}}',
        "<tool_call>[]</tool_call>",
    ],
)
def test_malformed_call_stays_content(block: str) -> None:
    """A block that is no call is kept in the content, character by character."""
    message = parse_message(block, tools=True)
    assert message["content"] == block
    assert message["tool_calls"] is None


def test_unclosed_reasoning() -> None:
    """A think block that was cut off is reasoning to its end."""
    message = parse_message("<think>\nStill at", tools=True)
    assert (message["reasoning_content"], message["content"]) == ("Still at", "")
