"""LangChain's agent, which is a LangGraph graph, on `ChatOpenAI`."""

import httpx
from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

from tests.sdks.scene import INSTRUCTIONS, MODEL, QUESTION, TOOLS, TURNS


async def play(base_url: str, stream: bool) -> None:
    """Plays the episode."""
    async with httpx.AsyncClient() as client:  # its own would stay open
        model = ChatOpenAI(
            model=MODEL,
            base_url=base_url,
            api_key="-",
            max_retries=0,
            streaming=stream,
            http_async_client=client,
        )
        tools = [tool(function) for function in TOOLS.values()]
        agent = create_agent(model, tools, system_prompt=INSTRUCTIONS)
        result = await agent.ainvoke({"messages": [("user", QUESTION)]})
    assert result["messages"][-1].content == TURNS[-1]["content"]
