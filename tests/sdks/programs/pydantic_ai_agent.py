"""Pydantic AI on its chat completions model."""

from collections.abc import AsyncIterable

import openai
from pydantic_ai import Agent, AgentStreamEvent, RunContext
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from tests.sdks.scene import INSTRUCTIONS, MODEL, QUESTION, TOOLS, TURNS


async def play(base_url: str, stream: bool) -> None:
    """Plays the episode."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key="-", max_retries=0) as client:
        model = OpenAIChatModel(MODEL, provider=OpenAIProvider(openai_client=client))
        agent = Agent(model, instructions=INSTRUCTIONS, tools=list(TOOLS.values()))
        handler = _heard if stream else None  # with one, it streams
        output = (await agent.run(QUESTION, event_stream_handler=handler)).output
    assert output == TURNS[-1]["content"]


async def _heard(_: RunContext[None], events: AsyncIterable[AgentStreamEvent]) -> None:
    async for _event in events:
        pass
