"""An agent as anyone might write one: it knows the OpenAI chat API and some tools, nothing of Tokentape."""

import json
from collections.abc import Sequence
from typing import Any

import httpx

from tokentape_engine.dialogues import SYSTEM_PROMPT, TOOLS, call_tool

MAX_CALLS = 6
"""Tool calls that an agent answers for one question."""
MAX_TOKENS = 128


class Agent:
    """Asks the model its questions one after the other and runs the tools that the model calls."""

    def __init__(self, questions: Sequence[str] = ()) -> None:
        self._questions = questions
        self.tool_calls = 0

    async def __call__(self, base_url: str, _sample: object) -> dict[str, Any]:
        """Plays one episode against `base_url`; returns metadata for the sample."""
        messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM_PROMPT}]
        async with chat_client(base_url) as client:
            for question in self._questions:
                messages.append({"role": "user", "content": question})
                if not await self.answer(client, messages):
                    break
        return {"questions": list(self._questions), "tool_calls": self.tool_calls}

    async def answer(self, client: httpx.AsyncClient, messages: list[dict[str, Any]]) -> bool:
        """Lets the model call tools until it answers; False if its answer was cut off."""
        for _ in range(MAX_CALLS):
            if not await self.step(client, messages):
                return False
            if messages[-1]["role"] == "assistant":
                return True
        return True

    async def step(self, client: httpx.AsyncClient, messages: list[dict[str, Any]]) -> bool:
        """One turn, and the results of the tools that it calls; False if it was cut at its length."""
        body = {
            "model": "reference",
            "messages": messages,
            "tools": TOOLS,
            "temperature": 1.0,
            "max_tokens": MAX_TOKENS,
        }
        reply = await client.post("/chat/completions", json=body)
        reply.raise_for_status()
        choice = reply.json()["choices"][0]
        messages.append(choice["message"])
        messages.extend(self._run(call) for call in choice["message"].get("tool_calls") or [])
        return bool(choice["finish_reason"] != "length")

    def _run(self, call: dict[str, Any]) -> dict[str, Any]:
        self.tool_calls += 1
        function = call["function"]
        try:
            arguments = json.loads(function["arguments"])
        except ValueError:
            arguments = {}
        result = call_tool(function["name"], arguments if isinstance(arguments, dict) else {})
        return {"role": "tool", "tool_call_id": call["id"], "content": result}


def chat_client(base_url: str) -> httpx.AsyncClient:
    """A client of an OpenAI-style endpoint."""
    return httpx.AsyncClient(base_url=base_url, timeout=120.0, trust_env=False)
