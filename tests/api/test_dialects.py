"""A second dialect needs one module and one row, and nothing else: here is one, of the test's own.

It speaks plain talk: `{"talk": ["mine", "yours", …], "aloud": true}` asks for the next thing to say.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.conftest import OpenSession
from tests.api.test_auth import bearer, entry
from tests.support.scripted import ScriptedEngine
from tokentape_api import dialects, openapi
from tokentape_api.dialects.port import Answer, Asked, Dialect, Json, read_object, take
from tokentape_api.settings import ApiSettings
from tokentape_contracts.errors import InvalidRequest, TokentapeError
from tokentape_core.domain.position import Head
from tokentape_core.domain.request import ChatRequest

USER = {"role": "user", "content": "Hello"}


@dataclass(frozen=True)
class Talk:
    """A request in plain talk."""

    request: ChatRequest

    @classmethod
    def parse(cls, body: bytes) -> Asked:
        fields, size = read_object(body)
        talk = take(fields, "talk", list, "a list of what was said")
        if not talk or not all(isinstance(said, str) for said in talk):
            raise InvalidRequest("talk must be a list of what was said")
        roles = ("user", "assistant")
        messages = [{"role": roles[index % 2], "content": said} for index, said in enumerate(talk)]
        stream = take(fields, "aloud", bool, "true or false") or False
        return cls(ChatRequest(messages, Head(None, {}), stream, fields, size))

    def reply(self, answer: Answer) -> bytes:
        text: str = answer.completion["choices"][0]["message"]["content"]
        return b'{"said": "%s"}' % text.encode()

    def events(self, answer: Answer) -> Iterator[bytes]:
        yield b"data: " + self.reply(answer) + b"\n\n"


def _error(error: TokentapeError) -> Json:
    return {"oops": error.detail}


ANY_TEXT: Json = {"type": "object", "properties": {"said": {"type": "string"}}, "required": ["said"]}
DIALECT = Dialect(
    name="talk",
    path="v0/talk",
    parse=Talk.parse,
    request_schema={"type": "object", "properties": {"talk": {"type": "array"}}, "required": ["talk"]},
    reply_schema=ANY_TEXT,
    error=_error,
    error_schema={"type": "object", "properties": {"oops": {"type": "string"}}, "required": ["oops"]},
    refusal=lambda body, _: (b'{"oops": "%d bytes"}' % len(body), "application/json"),
)


@pytest.fixture
def settings(tmp_path: Path) -> ApiSettings:
    path = tmp_path / "tokens.toml"
    path.write_text(entry("driver", "driver") + entry("agent", "agent"))
    return ApiSettings(
        engine_url="http://engine", tokenizer="-", redis_url="-", family="qwen3", tokens_file=path
    )


@pytest.fixture(autouse=True)
def _a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that the API hears of it; before the application is built."""
    monkeypatch.setattr(dialects, "DIALECTS", (*dialects.DIALECTS, DIALECT))


@pytest.fixture
async def url(_a_row: None, api: httpx.AsyncClient) -> str:
    """A session of which the agent may use either dialect."""
    reply = await api.post("/sessions", headers=bearer("driver"))
    api.headers.update(bearer("agent"))
    return f"/sessions/{reply.json()['session_id']}"


async def _records(api: httpx.AsyncClient, url: str) -> list[Any]:
    records: list[Any] = (await api.get(url, headers=bearer("driver"))).json()["records"]
    return records


async def test_it_records_turns(api: httpx.AsyncClient, url: str, engine: ScriptedEngine) -> None:
    """Plain or streamed, in the dialect's own shape; the conversation goes on, in another dialect too."""
    engine.answer = lambda body: httpx.Response(200, json=engine.reply(body, f"no {len(engine.requests)}"))
    first = await api.post(f"{url}/v0/talk", json={"talk": ["Hello"], "temperature": 0.5})
    assert (first.status_code, first.json()) == (200, {"said": "no 1"})
    said = ["Hello", "no 1", "Why?"]
    second = await api.post(f"{url}/v0/talk", json={"talk": said, "aloud": True})
    assert second.headers["content-type"].startswith("text/event-stream")
    assert second.text == 'data: {"said": "no 2"}\n\n'
    messages = [*Talk.parse(b'{"talk": ["Hello", "no 1", "Why?", "no 2"]}').request.messages, USER]
    third = await OpenSession(api, url).chat(*messages)
    assert third.status_code == 200
    records = await _records(api, url)
    assert [len(record["request"]["messages"]) for record in records] == [1, 3, 5]
    assert records[0]["request"]["temperature"] == 0.5


async def test_its_errors_have_its_shape(api: httpx.AsyncClient, url: str, engine: ScriptedEngine) -> None:
    """Whoever finds them: the dialect, the recorder, the guard, the router; and the engine's own refusal."""
    talk = {"talk": ["Hello"]}
    replies = [
        await api.post(f"{url}/v0/talk", json={"talk": "Hello"}),
        await api.post("/sessions/unknown/v0/talk", json=talk),
        await api.post(f"{url}/v0/talk", json=talk, headers={"authorization": "Bearer nobody's"}),
        await api.post(f"{url}/v0/talk", json=talk, headers=bearer("driver")),
        await api.put(f"{url}/v0/talk", json=talk),
    ]
    assert [reply.status_code for reply in replies] == [400, 404, 401, 403, 405]
    assert all(reply.json().keys() == {"oops"} for reply in replies)
    assert all(reply.headers["x-should-retry"] == "false" for reply in replies)
    engine.answer = lambda _: httpx.Response(429, text="slow down")
    refused = await api.post(f"{url}/v0/talk", json=talk)
    assert (refused.status_code, refused.json()) == (429, {"oops": "9 bytes"})
    other = await OpenSession(api, url).chat()
    assert other.json()["error"]["code"] == "invalid_request"
    assert await _records(api, url) == []


async def test_the_catch_all_leaves_it_alone(
    api: httpx.AsyncClient, url: str, engine: ScriptedEngine
) -> None:
    """Another spelling of its path does not reach the engine, where nobody would record it."""
    for path in ("v0/talk/", "v0//talk", "V0/Talk"):
        reply = await api.post(f"{url}/{path}", json={"talk": ["Hello"]})
        assert (reply.status_code, reply.json()["error"]["code"]) == (404, "route_not_found"), path
    assert engine.requests == []


async def test_it_is_counted_and_documented(api: httpx.AsyncClient, url: str) -> None:
    """Metrics have its route, and the OpenAPI document its bodies and its errors."""
    await api.post(f"{url}/v0/talk", json={"talk": ["Hello"]})
    name = "POST /sessions/{sid}/v0/talk"
    metrics = (await api.get("/metrics")).text
    assert f'tokentape_api_requests_total{{route="{name}",status="2xx"}} 1.0' in metrics
    operation = openapi.document("1")["paths"]["/sessions/{sid}/v0/talk"]["post"]
    assert operation["operationId"] == "talk"
    assert operation["security"] == [{}, {"token": ["agent"]}]
    refusals = operation["responses"]["400"]["content"]["application/json"]["schema"]
    assert refusals == DIALECT.error_schema
    assert operation["responses"]["200"]["content"]["application/json"]["schema"] == ANY_TEXT
