"""The demo's agents that branch: each leaves a tree behind, of which some leaves are trained."""

import asyncio
from typing import Any

import httpx

from tokentape_cli.demo.agent import Agent, chat_client
from tokentape_engine.dialogues import SYSTEM_PROMPT

SYSTEM = {"role": "system", "content": SYSTEM_PROMPT}


class RetryingAgent(Agent):
    """Sends its second request twice, as a client does that lost the reply."""

    async def __call__(self, base_url: str, _sample: object) -> dict[str, Any]:
        messages = [SYSTEM, {"role": "user", "content": "What is the weather in Rome?"}]
        async with chat_client(base_url) as client:
            if await self.step(client, messages):
                messages.append({"role": "user", "content": "And in Oslo?"})
                await self.step(client, list(messages))
                await self.answer(client, messages)
        return {"questions": ["retries a turn"], "tool_calls": self.tool_calls}


class CompactingAgent(Agent):
    """Replaces its history by a summary and goes on."""

    async def __call__(self, base_url: str, _sample: object) -> dict[str, Any]:
        messages = [SYSTEM, {"role": "user", "content": "What is the capital of Peru?"}]
        async with chat_client(base_url) as client:
            await self.answer(client, messages)
            summary = f"So far {len(messages)} messages. What is the weather in Lima?"
            await self.answer(client, [SYSTEM, {"role": "user", "content": summary}])
        return {"questions": ["compacts its context"], "tool_calls": self.tool_calls}


class DelegatingAgent(Agent):
    """Lets two sub-agents work at the same time, each with a prompt of its own, and then goes on."""

    async def __call__(self, base_url: str, _sample: object) -> dict[str, Any]:
        messages = [SYSTEM, {"role": "user", "content": "What is 2 plus 3?"}]
        async with chat_client(base_url) as client:
            if await self.step(client, messages):
                await asyncio.gather(
                    self._delegate(client, "What is the weather in Cairo?"),
                    self._delegate(client, "Which is warmer, Paris or Tokyo?"),
                )
                await self.answer(client, messages)
        return {"questions": ["two parallel sub-agents"], "tool_calls": self.tool_calls}

    async def _delegate(self, client: httpx.AsyncClient, task: str) -> None:
        await self.answer(client, [SYSTEM, {"role": "user", "content": task}])
