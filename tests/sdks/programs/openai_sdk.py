"""Agents by hand on the `openai` package, each with another way to send back what it was given."""

import json
from collections.abc import Awaitable, Callable
from typing import Any

import openai
from openai.types.chat import ChatCompletion, ChatCompletionMessage
from pydantic import BaseModel

from tests.sdks.scene import INSTRUCTIONS, MODEL, QUESTION, TOOLS

Ask = Callable[[list[Any]], Awaitable[ChatCompletion]]
Echo = Callable[[ChatCompletionMessage], Any]


class Weather(BaseModel):
    """The weather of a city."""

    city: str


class Clock(BaseModel):
    """The time in a city."""

    city: str


class Answer(BaseModel):
    """What the agent found."""

    city: str


SCHEMAS: list[Any] = [
    openai.pydantic_function_tool(Weather, name="weather"),
    openai.pydantic_function_tool(Clock, name="clock"),
]


async def returned(base_url: str, stream: bool) -> None:
    """Sends the message object itself."""
    await _play(base_url, stream, lambda message: message)


async def dumped(base_url: str, stream: bool) -> None:
    """Sends `message.model_dump()`, nulls included."""
    await _play(base_url, stream, lambda message: message.model_dump())


async def by_hand(base_url: str, stream: bool, **settings: Any) -> None:
    """Sends what the documentation of tool calling shows: role, content and calls."""
    await _play(base_url, stream, _by_hand, **settings)


async def parsed(base_url: str, stream: bool) -> None:
    """Lets the SDK parse the answer into a model, and sends its own message object."""
    async with _client(base_url) as client:
        completions = client.chat.completions
        fields: dict[str, Any] = {"model": MODEL, "tools": SCHEMAS, "response_format": Answer}

        async def ask(messages: list[Any]) -> Any:
            if not stream:
                return await completions.parse(messages=messages, **fields)
            async with completions.stream(messages=messages, **fields) as events:
                return await events.get_final_completion()

        last: Any = await _converse(ask, lambda message: message)
        assert last.parsed == Answer(city="Bergen")


def _client(base_url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=base_url, api_key="-", max_retries=0)


async def _play(base_url: str, stream: bool, echo: Echo, **settings: Any) -> None:
    async with _client(base_url) as client:
        completions = client.chat.completions
        fields: dict[str, Any] = {"model": MODEL, "tools": SCHEMAS, **settings}

        async def ask(messages: list[Any]) -> ChatCompletion:
            if not stream:
                return await completions.create(messages=messages, **fields)
            async with completions.stream(messages=messages, **fields) as events:
                return await events.get_final_completion()

        await _converse(ask, echo)


async def _converse(ask: Ask, echo: Echo) -> ChatCompletionMessage:
    """Asks and runs tools until there is an answer."""
    messages: list[Any] = [
        {"role": "system", "content": INSTRUCTIONS},
        {"role": "user", "content": QUESTION},
    ]
    while True:
        message = (await ask(messages)).choices[0].message
        if not message.tool_calls:
            return message
        messages.append(echo(message))
        for call in message.tool_calls:
            result = TOOLS[call.function.name](**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def _by_hand(message: ChatCompletionMessage) -> dict[str, Any]:
    calls = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.function.name, "arguments": call.function.arguments},
        }
        for call in message.tool_calls or []
    ]
    return {"role": "assistant", "content": message.content, "tool_calls": calls}
