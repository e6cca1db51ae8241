"""The OpenAI Agents SDK on its chat completions model."""

import openai
from agents import Agent, OpenAIChatCompletionsModel, RunConfig, Runner, function_tool

from tests.sdks.scene import INSTRUCTIONS, MODEL, QUESTION, TOOLS, TURNS

QUIET = RunConfig(tracing_disabled=True)


async def play(base_url: str, stream: bool) -> None:
    """Plays the episode."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key="-", max_retries=0) as client:
        agent = Agent(
            name="agent",
            instructions=INSTRUCTIONS,
            tools=[function_tool(function) for function in TOOLS.values()],
            model=OpenAIChatCompletionsModel(MODEL, client),
        )
        if stream:
            run = Runner.run_streamed(agent, QUESTION, run_config=QUIET)
            async for _ in run.stream_events():
                pass
            output = run.final_output
        else:
            output = (await Runner.run(agent, QUESTION, run_config=QUIET)).final_output
    assert output == TURNS[-1]["content"]
