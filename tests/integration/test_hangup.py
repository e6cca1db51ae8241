"""Agents that hang up before their answer is there."""

import asyncio
import threading
from typing import Any
from urllib.parse import urlsplit

import httpx
import orjson
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.scripted import ScriptedEngine

LONG = "word " * 30_000
"""More than uvicorn takes at once; whether it stops reading depends on the pieces that come in."""


async def _send(session: str, content: str) -> asyncio.StreamWriter:
    """Sends a chat and reads nothing."""
    url = urlsplit(session)
    assert url.hostname is not None
    _, writer = await asyncio.open_connection(url.hostname, url.port)
    body = orjson.dumps({"messages": [{"role": "user", "content": content}]})
    head = [f"POST {url.path}/v1/chat/completions HTTP/1.1", "Host: api", f"Content-Length: {len(body)}"]
    writer.write("\r\n".join([*head, "", ""]).encode())
    await asyncio.sleep(0.1)  # the API waits for the body
    writer.write(body)
    await writer.drain()
    return writer


@pytest.mark.parametrize("content", ["Hello", LONG], ids=["short", "long"])
async def test_a_chat_that_is_given_up_is_not_recorded(
    urls: list[str], client: httpx.AsyncClient, engine: ScriptedEngine, content: str
) -> None:
    """It counts as refused, and an answer that the engine has for it later is nobody's."""
    began, go_on = threading.Event(), threading.Event()  # the engine has a loop of its own

    async def late(body: dict[str, Any]) -> httpx.Response:
        began.set()
        while not go_on.is_set():
            await asyncio.sleep(0.01)
        return httpx.Response(200, json=engine.reply(body, "late"))

    engine.answer = late
    session = f"{urls[0]}/sessions/{(await client.post(f'{urls[0]}/sessions')).json()['session_id']}"
    before = await _given_up(client, urls[0])
    writer = await _send(session, content)
    assert await asyncio.to_thread(began.wait, 10)
    writer.close()
    async with asyncio.timeout(5):
        while await _given_up(client, urls[0]) == before:
            await asyncio.sleep(0.02)
    go_on.set()
    await asyncio.sleep(0.2)
    assert (await client.get(session)).json()["records"] == []


async def _given_up(client: httpx.AsyncClient, url: str) -> float:
    families = text_string_to_metric_families((await client.get(f"{url}/metrics")).text)
    (value,) = [
        sample.value
        for family in families
        for sample in family.samples
        if sample.name == "tokentape_turns_refused_total" and sample.labels["code"] == "client_gone"
    ]
    return value
