"""The episode that every SDK's agent plays, and what the recorder must make of it."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tests.assembler.support import job
from tests.support.scripted import ScriptedEngine
from tokentape_assembler.outcome import outcome_of
from tokentape_contracts.samples import SamplesReply, decode_samples
from tokentape_core.store import MemoryStore
from tokentape_core.text.render import ChatRenderer

INSTRUCTIONS = "Use the tools."
QUESTION = "Where is it warmer, and what time is it there?"
MODEL = "reference"


def weather(city: str) -> str:
    """The weather of a city."""
    return f"{len(city)} degrees in {city}"


def clock(city: str) -> str:
    """The time in a city."""
    return f"noon in {city}"


TOOLS = {"weather": weather, "clock": clock}


def _call(call_id: str, index: int, name: str, **arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": call_id, "index": index, "type": "function", "function": function}


TURNS: tuple[dict[str, Any], ...] = (
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "I begin in the north.",
        "tool_calls": [_call("call_1", 0, "weather", city="Tromsø")],
    },
    {
        "role": "assistant",
        "content": '{"city": "Tromsø"}',
        "reasoning_content": "Both at the same time.",
        "tool_calls": [
            _call("call_2", 0, "weather", city="Bergen"),
            _call("call_3", 1, "clock", city="Bergen"),
        ],
    },
    {
        "role": "assistant",
        "content": '{"city": "Bergen"}',
        "reasoning_content": "I have all of it.",
        "tool_calls": None,
    },
)
"""What the engine answers, as SGLang with its parsers does; in JSON, for the program that parses it."""


def outputs(renderer: ChatRenderer) -> list[list[int]]:
    """The ids of each turn: what the template writes for it."""
    asked = [{"role": "user", "content": QUESTION}]
    return [renderer.sample(asked, turn).tolist() for turn in TURNS]


@dataclass
class Model:
    """What a scripted engine answers: the turn that is due, and its ids."""

    engine: ScriptedEngine
    renderer: ChatRenderer

    def __call__(self, body: dict[str, Any]) -> httpx.Response:
        number = sum(message["role"] == "assistant" for message in body["messages"])
        turn, ids = TURNS[number], outputs(self.renderer)[number]
        text = self.engine.tokenizer.decode(ids).removesuffix("<|im_end|>")
        finish = "tool_calls" if turn["tool_calls"] else "stop"
        reply = self.engine.reply(body, text, message=turn, choice={"finish_reason": finish})
        usage = reply["usage"]
        usage["total_tokens"] = usage["prompt_tokens"] + usage["completion_tokens"]  # one SDK insists on it
        return httpx.Response(200, json=reply)


@dataclass
class Wiretap:
    """Keeps the chat requests exactly as an SDK sent them, and passes everything on."""

    app: ASGIApp
    bodies: list[dict[str, Any]] = field(default_factory=list)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        parts: list[bytes] = []

        async def heard() -> Message:
            message = await receive()
            if message["type"] == "http.request":
                parts.append(message.get("body", b""))
                if not message.get("more_body"):
                    self.bodies.append(json.loads(b"".join(parts)))
            return message

        chat = scope["type"] == "http" and scope["path"].endswith("/chat/completions")
        await self.app(scope, heard if chat else receive, send)


@dataclass
class Stage:
    """A running API with one session, opened as the server's defaults have it."""

    url: str
    session_id: str
    wiretap: Wiretap
    engine: ScriptedEngine
    store: MemoryStore
    renderer: ChatRenderer

    @property
    def base_url(self) -> str:
        """What an SDK calls its base URL."""
        return f"{self.url}/sessions/{self.session_id}/v1"

    async def collect(self) -> SamplesReply:
        """The samples as a driver gets them from a worker."""
        (*_, (tail, _)) = await self.store.read(self.session_id)
        asked = job(tail, self.session_id)
        decode = self.renderer.tokenizer.decode
        outcome = await outcome_of(asked, self.store, decode, renderer=self.renderer)
        if outcome.error is not None:
            raise outcome.error
        return decode_samples(outcome.payload, contract=asked.contract)

    def echoed(self) -> set[str]:
        """What the SDK did to the assistant's messages that it sent back with its last request."""
        sent = self.wiretap.bodies[-1]["messages"]
        echo = [message for message in sent if message["role"] == "assistant"]
        pairs = zip(TURNS[:-1], echo, strict=True)
        return {change for given, back in pairs for change in changes(given, back)}


def changes(given: Mapping[str, Any], back: Mapping[str, Any], where: str = "") -> Iterator[str]:
    """What was done to the parts of a message, such as `content null` or `tool_calls.index left out`."""
    for key in sorted(given.keys() | back.keys()):
        name = f"{where}{key}"
        if key not in back:
            yield f"{name} left out"
        elif key not in given:
            yield f"{name} added"
        elif key == "tool_calls" and given[key] and back[key]:
            for call, echo in zip(given[key], back[key], strict=True):
                yield from changes(call, echo, f"{name}.")
        elif key == "function":
            yield from changes(given[key], back[key], f"{name}.")
        elif given[key] != back[key]:
            yield f"{name} {'null' if back[key] is None else 'rewritten'}"
