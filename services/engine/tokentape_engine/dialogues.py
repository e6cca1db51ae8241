"""Synthetic tool dialogues: what the reference model is trained on, and what a demo agent can ask it.

Some 90 short conversations over three tools, with one to four tool calls each; some go on with a second
question. They are generated, the same on every machine. `call_tool` is the environment behind the tools, so
that an agent can really play a conversation: the model samples a call, the agent runs it and sends the answer
back.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any, TypeAlias

Message: TypeAlias = dict[str, Any]
"""One message in OpenAI's chat form."""

SYSTEM_PROMPT = "You are a helpful assistant."


def _tool(name: str, description: str, **parameters: str) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": {key: {"type": kind} for key, kind in parameters.items()},
        "required": list(parameters),
    }
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": schema},
    }


TOOLS: list[dict[str, Any]] = [
    _tool("add", "Add two numbers.", a="integer", b="integer"),
    _tool("lookup_weather", "Today's weather in a city.", city="string"),
    _tool("search", "Look up a fact.", query="string"),
]
"""The tools of every dialogue, as OpenAI's `tools` field takes them. The model knows exactly these."""

_CAPITALS = {
    "France": "Paris",
    "Italy": "Rome",
    "Norway": "Oslo",
    "Egypt": "Cairo",
    "Peru": "Lima",
    "Japan": "Tokyo",
}
_CITIES = tuple(_CAPITALS.values())
_DEGREES = dict(zip(_CITIES, (18, 24, 7, 33, 21, 16), strict=True))
_SKIES = dict(zip(_CITIES, ("sunny", "cloudy", "rainy", "windy", "foggy", "clear"), strict=True))

_WEATHER_QUESTIONS = (
    "What is the weather in {}?",
    "How is it in {} today?",
    "How warm is it in {}?",
    "Tell me the weather in {}.",
)
_CAPITAL_QUESTIONS = ("What is the capital of {}?", "Tell me the capital of {}.")


def call_tool(name: str, arguments: Mapping[str, Any]) -> str:
    """Run a tool and return the text of its `tool` message; never raises, a bad call gets an answer too.

    >>> call_tool("add", {"a": 2, "b": 3})
    '5'
    """
    try:
        if name == "add":
            return str(int(arguments["a"]) + int(arguments["b"]))
        if name == "lookup_weather":
            city = arguments["city"]
            return f"{_SKIES[city]}, {_DEGREES[city]} degrees"
        if name == "search":
            country = str(arguments["query"]).removeprefix("capital of ")
            return _CAPITALS[country]
    except (KeyError, TypeError, ValueError):
        return "error: not found"
    return "error: no such tool"


def user_prompts() -> list[str]:
    """The first user message of each dialogue: questions that the trained model can answer."""
    return [dialogue[1]["content"] for dialogue in dialogues()]


def dialogues(seed: int = 0) -> list[list[Message]]:
    """All dialogues, each a full conversation from the system prompt to the last assistant message.

    `seed` picks the cities and numbers that are combined; the default is the set that the engine trains on.
    """
    draw = random.Random(seed)  # noqa: S311 - data, not secrets
    pairs = [draw.sample(_CITIES, 2) for _ in range(8)]
    sums = [[draw.randint(1, 9) for _ in range(3)] for _ in range(16)]
    return [
        *(_weather(question.format(city), city) for question in _WEATHER_QUESTIONS for city in _CITIES),
        *(
            _capital(question.format(country), country)
            for question in _CAPITAL_QUESTIONS
            for country in _CAPITALS
        ),
        *(_sum(numbers[:2]) for numbers in sums[:10]),
        *(_sum(numbers) for numbers in sums[10:]),
        *(_warmer(one, two) for one, two in pairs),
        *(_capital_weather(country) for country in _CAPITALS),
        *(_degrees_sum(one, two) for one, two in pairs),
        *(_capital_degrees_sum(country, two) for country, (_, two) in zip(_CAPITALS, pairs, strict=False)),
        *(_weather_twice(one, two) for one, two in pairs),
    ]


def _weather(question: str, city: str) -> list[Message]:
    return _opening(question) + _look_up(city) + [_assistant("Now I know.", _weather_sentence(city))]


def _weather_twice(first: str, second: str) -> list[Message]:
    follow_up = {"role": "user", "content": f"And in {second}?"}
    answer = _assistant("Now I know.", _weather_sentence(second))
    return [*_weather(f"What is the weather in {first}?", first), follow_up, *_look_up(second), answer]


def _capital(question: str, country: str) -> list[Message]:
    answer = _assistant("Now I know.", f"The capital of {country} is {_CAPITALS[country]}.")
    return _opening(question) + _find_capital(country) + [answer]


def _capital_weather(country: str) -> list[Message]:
    city = _CAPITALS[country]
    opening = _opening(f"What is the weather in the capital of {country}?")
    return (
        opening
        + _find_capital(country)
        + _look_up(city)
        + [_assistant("Now I know.", _weather_sentence(city))]
    )


def _warmer(one: str, two: str) -> list[Message]:
    warmer = max(one, two, key=lambda city: _DEGREES[city])
    answer = _assistant("Compare the degrees.", f"{warmer} is warmer.")
    return _opening(f"Which is warmer, {one} or {two}?") + _look_up(one) + _look_up(two) + [answer]


def _sum(numbers: list[int]) -> list[Message]:
    messages = _opening(f"What is {' plus '.join(map(str, numbers))}?")
    total = numbers[0]
    for number in numbers[1:]:
        messages += _add(total, number)
        total += number
    return [*messages, _assistant("Now I know.", f"The sum is {total}.")]


def _degrees_sum(one: str, two: str) -> list[Message]:
    opening = _opening(f"Add the degrees of {one} and {two}.")
    return opening + _look_up(one) + _look_up(two) + _add_degrees(one, two)


def _capital_degrees_sum(country: str, two: str) -> list[Message]:
    one = _CAPITALS[country]
    opening = _opening(f"Add the degrees of the capital of {country} and {two}.")
    return opening + _find_capital(country) + _look_up(one) + _look_up(two) + _add_degrees(one, two)


def _add_degrees(one: str, two: str) -> list[Message]:
    total = _DEGREES[one] + _DEGREES[two]
    return [*_add(_DEGREES[one], _DEGREES[two]), _assistant("Now I know.", f"The sum is {total}.")]


def _look_up(city: str) -> list[Message]:
    return _step("I look up the weather.", "lookup_weather", city=city)


def _find_capital(country: str) -> list[Message]:
    return _step("I search the capital.", "search", query=f"capital of {country}")


def _add(a: int, b: int) -> list[Message]:
    return _step("I add the numbers.", "add", a=a, b=b)


def _weather_sentence(city: str) -> str:
    return f"It is {_SKIES[city]} in {city}, {_DEGREES[city]} degrees."


def _opening(question: str) -> list[Message]:
    return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question}]


def _step(thought: str, tool: str, **arguments: str | int) -> list[Message]:
    """A tool call and its answer."""
    function = {"name": tool, "arguments": json.dumps(arguments)}
    call = _assistant(thought, "") | {"tool_calls": [{"type": "function", "function": function}]}
    return [call, {"role": "tool", "content": call_tool(tool, arguments)}]


def _assistant(thought: str, content: str) -> Message:
    return {"role": "assistant", "reasoning_content": thought, "content": content}
