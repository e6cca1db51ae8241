"""Engines that send what JSON or HTTP cannot carry, over real connections on both sides."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
import orjson
import pytest

from tests.support.application import SETTINGS, application, served
from tests.support.scripted import ScriptedEngine, network
from tokentape_api.engine import SGLangEngine, VLLMEngine
from tokentape_api.settings import ApiSettings
from tokentape_contracts import limits
from tokentape_contracts.errors import EngineReplyInvalid, error_body
from tokentape_core.domain.state import fold
from tokentape_core.store import MemoryStore
from tokentape_core.text.render import ChatRenderer

CHAT = {"messages": [{"role": "user", "content": "Hello"}]}


def _deep(levels: int) -> bytes:
    return b"[" * levels + b"]" * levels


VALUES: dict[str, bytes] = {
    "half a character": rb'"\ud800"',
    "the other half": rb'"x\udfff"',
    "halves in the wrong order": rb'"\udc00\ud800"',
    "half a character in UTF-8": b'"\xed\xa0\x80"',
    "not UTF-8": b'"\xff\xfe"',
    "NaN": b"NaN",
    "infinity": b"-Infinity",
    "a number without end": b"1e400",
    "an integer of 65 bits": str(2**64).encode(),
    "a negative integer of 65 bits": str(-(2**64)).encode(),
    "an integer of 5,000 digits": b"9" * 5_000,
    "a line break in a string": b'"a\nb"',
    "one level too deep": _deep(limits.JSON_DEPTH + 1),
    "deeper than can be written": _deep(300),
    "as deep as can be read": _deep(1_000),
    "deeper than can be read": _deep(2_000),
    "a nesting bomb": _deep(100_000),
    "a key that is half a character": rb'{"\ud800": 1}',
}
HERE = "«here»"
PLACES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "the answer": lambda answer: answer.update(more=HERE),
    "the id": lambda answer: answer.update(id=HERE),
    "the usage": lambda answer: answer["usage"].update(more=HERE),
    "the choice": lambda answer: answer["choices"][0].update(more=HERE),
    "the message": lambda answer: answer["choices"][0]["message"].update(more=HERE),
    "the content": lambda answer: answer["choices"][0]["message"].update(content=HERE),
    "a tool call": lambda answer: answer["choices"][0]["message"].update(tool_calls=[{"function": HERE}]),
    "the meta": lambda answer: answer["choices"][0]["meta_info"].update(more=HERE),
    "the finish reason": lambda answer: answer["choices"][0].update(finish_reason=HERE),
    "a token's log-prob": lambda answer: answer["choices"][0]["meta_info"]["output_token_logprobs"][
        0
    ].__setitem__(0, HERE),
    "a token's text": lambda answer: answer["choices"][0]["meta_info"]["output_token_logprobs"][
        0
    ].__setitem__(2, HERE),
}
HARMLESS = {
    ("a token's log-prob", "a negative integer of 65 bits"),
    *(("a token's text", value) for value in VALUES if "65 bits" in value or value == "one level too deep"),
}
"""A log-prob is a float, and a token's text is not recorded."""
HEADS: dict[str, bytes] = {
    "status 600": b"HTTP/1.1 600 Huge\r\nContent-Length: 2\r\n\r\n{}",
    "status 999": b"HTTP/1.1 999 Huge\r\nContent-Length: 2\r\n\r\n{}",
    "status 099": b"HTTP/1.1 099 Small\r\nContent-Length: 2\r\n\r\n{}",
    "status 0": b"HTTP/1.1 0 None\r\nContent-Length: 2\r\n\r\n{}",
    "a status that is no number": b"HTTP/1.1 abc None\r\nContent-Length: 2\r\n\r\n{}",
    "another protocol": b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
    "no HTTP": b"220 smtp.example ESMTP\r\n\r\n",
    "binary": bytes(range(256)),
    "a control character": b"HTTP/1.1 400 No\r\nX-A: \x01\r\nContent-Type: \x01\r\nContent-Length: 0\r\n\r\n",
    "a zero": b"HTTP/1.1 400 No\r\nContent-Type: a\x00b\r\nX-A: a\x00b\r\nContent-Length: 2\r\n\r\n{}",
    "a delete": b"HTTP/1.1 400 No\r\nContent-Type: a\x7fb\r\nX-A: a\x7fb\r\nContent-Length: 2\r\n\r\n{}",
    "a bare CR": b"HTTP/1.1 400 No\r\nContent-Type: a\rb\r\nX-A: a\rb\r\nContent-Length: 2\r\n\r\n{}",
    "a name with a space": b"HTTP/1.1 400 No\r\nX A: b\r\nContent-Length: 2\r\n\r\n{}",
    "no name": b"HTTP/1.1 400 No\r\n: b\r\nContent-Length: 2\r\n\r\n{}",
    "two lengths": b"HTTP/1.1 400 No\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    "a negative length": b"HTTP/1.1 400 No\r\nContent-Length: -1\r\n\r\n{}",
    "a header of a megabyte": b"HTTP/1.1 400 No\r\nX-A: "
    + b"a" * limits.MiB
    + b"\r\nContent-Length: 2\r\n\r\n{}",
}
"""What no server can pass on."""
ODD: dict[str, tuple[bytes, int]] = {
    "Latin-1": (b"HTTP/1.1 400 No\r\nX-A: gr\xfcn\r\nContent-Length: 2\r\n\r\n{}", 400),
    "UTF-8": (b"HTTP/1.1 400 No\r\nX-A: \xe2\x82\xac\r\nContent-Length: 2\r\n\r\n{}", 400),
    "half of it": (b"HTTP/1.1 400 No\r\nX-A: \xe2\x82\r\nContent-Length: 2\r\n\r\n{}", 400),
    "a tab": (b"HTTP/1.1 400 No\r\nX-A: a\tb\r\nContent-Length: 2\r\n\r\n{}", 400),
    "early hints": (
        b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 400 No\r\nContent-Length: 2\r\n\r\n{}",
        400,
    ),
    "interim answers": (
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 102 Processing\r\n\r\n" * 50
        + b"HTTP/1.1 400 No\r\nContent-Length: 2\r\n\r\n{}",
        400,
    ),
    "HTTP/1.0": (b"HTTP/1.0 400 No\r\n\r\n{}", 400),
    "no length": (b"HTTP/1.1 400 No\r\n\r\n{}", 400),
    "no reason": (b"HTTP/1.1 400\r\nContent-Length: 2\r\n\r\n{}", 400),
    "not modified": (b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n", 304),
    "a status without a name": (b"HTTP/1.1 599 ?\r\nContent-Length: 2\r\n\r\n{}", 599),
    "an encoding that it has not": (
        b"HTTP/1.1 400 No\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}",
        400,
    ),
    "an encoding that nobody knows": (
        b"HTTP/1.1 400 No\r\nContent-Encoding: zip\r\nContent-Length: 2\r\n\r\n{}",
        400,
    ),
}
"""Answers that HTTP has, however odd: they are passed on."""


DOUBTFUL: dict[str, bytes] = {
    "only interim answers": b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" * 3,
    "length and chunks": b"HTTP/1.1 400 No\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"2\r\n{}\r\n0\r\n\r\n",
    "an encoding of the transfer": b"HTTP/1.1 400 No\r\nTransfer-Encoding: gzip\r\n\r\n{}",
    "HTTP/9": b"HTTP/9.9 400 No\r\nContent-Length: 2\r\n\r\n{}",
    "folded": b"HTTP/1.1 400 No\r\nX-B: a\r\n b\r\nContent-Length: 2\r\n\r\n{}",
    "many headers": b"HTTP/1.1 400 No\r\n" + b"X-B: b\r\n" * 3_000 + b"Content-Length: 2\r\n\r\n{}",
}
"""Answers that some parsers take and others refuse."""


@dataclass
class RawEngine:
    """Answers every request with the same bytes, and then hangs up."""

    says: bytes = b""
    asked: int = 0
    tasks: set["asyncio.Task[None] | None"] = field(default_factory=set)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.tasks.add(asyncio.current_task())
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = head.partition(b"content-length:")[2].partition(b"\r\n")[0]
        await reader.readexactly(int(length or 0))
        self.asked += 1
        writer.write(self.says)
        try:
            await writer.drain()
            writer.close()
            await writer.wait_closed()
        except ConnectionError:
            pass


@pytest.fixture
async def raw() -> AsyncIterator[tuple[RawEngine, str]]:
    """The engine and its URL."""
    engine = RawEngine()
    server = await asyncio.start_server(engine.serve, "127.0.0.1", 0)
    async with server:
        yield engine, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        await asyncio.gather(*filter(None, engine.tasks), return_exceptions=True)


@pytest.fixture
def settings(raw: tuple[RawEngine, str]) -> ApiSettings:
    return ApiSettings(**{**{name: getattr(SETTINGS, name) for name in _NAMES}, "engine_url": raw[1]})


_NAMES = ("tokenizer", "redis_url", "family")


@pytest.fixture
async def api(
    renderer: ChatRenderer, store: MemoryStore, settings: ApiSettings
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the application behind its real HTTP server."""
    async with (
        served(application(renderer, store, {}, settings, timeout_s=5.0)) as port,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client,
    ):
        yield client


def _http(content: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%b" % (len(content), content)


def _good(engine: ScriptedEngine, renderer: ChatRenderer) -> dict[str, Any]:
    return engine.reply({"input_ids": renderer.render(CHAT["messages"]).tolist()}, "fine")


@pytest.mark.parametrize("value", VALUES)
async def test_a_value_that_json_cannot_carry(
    api: httpx.AsyncClient,
    raw: tuple[RawEngine, str],
    engine: ScriptedEngine,
    store: MemoryStore,
    renderer: ChatRenderer,
    value: str,
) -> None:
    """Wherever it stands: 502, nothing is recorded, and a good answer is recorded afterwards."""
    session_id = (await api.post("/sessions")).json()["session_id"]
    url = f"/sessions/{session_id}/v1/chat/completions"
    for place, put in PLACES.items():
        answer = _good(engine, renderer)
        good = json.dumps(answer).encode()
        put(answer)
        raw[0].says = _http(_with(answer, VALUES[value]))
        for stream in (False, True):
            reply = await api.post(url, json={**CHAT, "stream": stream})
            if reply.status_code == 200 and (place, value) in HARMLESS:
                continue
            said = (reply.status_code, reply.json()["error"]["code"])
            assert said == (502, "engine_reply_invalid"), f"{place}: {reply.text}"
        before = await _turns(store, session_id)
        raw[0].says = _http(good)
        assert (await api.post(url, json=CHAT)).status_code == 200
        assert (await api.get(f"/sessions/{session_id}")).status_code == 200
        assert await _turns(store, session_id) == before + 1


def _with(answer: Any, value: bytes) -> bytes:
    """The JSON of an answer, with this value where `HERE` stands."""
    return json.dumps(answer, ensure_ascii=False).encode().replace(f'"{HERE}"'.encode(), value)


def _vllm_answer(prompt: list[int]) -> dict[str, Any]:
    message = {"role": "assistant", "content": "fine", "tool_calls": []}
    logprobs = {"content": [{"token": "x", "logprob": -0.5, "top_logprobs": []}] * 2}
    choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": logprobs}
    usage = {
        "prompt_tokens": len(prompt),
        "completion_tokens": 2,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    return {
        "id": "chatcmpl-1",
        "prompt_token_ids": prompt,
        "choices": [{**choice, "token_ids": [7, 8], "weight_version": "1"}],
        "usage": usage,
    }


def _fields(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where each value of an answer stands; the answer itself stands at ()."""
    yield at
    for key, inner in value.items() if isinstance(value, dict) else ():
        yield from _fields(inner, (*at, key))
    for index, inner in enumerate(value[:2]) if isinstance(value, list) else ():
        yield from _fields(inner, (*at, index))


def _replaced(value: Any, at: tuple[Any, ...]) -> Any:
    """The answer with `HERE` there."""
    if not at:
        return HERE
    changed = dict(value) if isinstance(value, dict) else list(value)
    changed[at[0]] = _replaced(value[at[0]], at[1:])
    return changed


@pytest.mark.parametrize("adapter", [SGLangEngine, VLLMEngine])
@pytest.mark.parametrize("value", VALUES)
async def test_any_field_of_any_engine(
    engine: ScriptedEngine, adapter: type[SGLangEngine | VLLMEngine], value: str
) -> None:
    """Whichever field it takes the place of, the error of a turn and the checks of the probe can be told."""
    at: tuple[Any, ...] = ()

    def handle(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        return httpx.Response(200, content=_with(_replaced(answer(body), at), VALUES[value]))

    def answer(body: dict[str, Any]) -> dict[str, Any]:
        if adapter is SGLangEngine:
            return engine.reply(body, "fine")
        return _vllm_answer(body["kv_transfer_params"]["prompt_token_ids"])

    prompt = np.arange(10, 30, dtype=np.int32)
    upstream = adapter("http://engine", timeout_s=5.0, **network(handle))
    for at in _fields(answer({"input_ids": [1], "kv_transfer_params": {"prompt_token_ids": [1]}})):
        try:
            generated = await upstream.generate("s", prompt, CHAT, {})
        except EngineReplyInvalid as error:
            said = orjson.dumps(error_body(error))
        else:
            assert orjson.loads(generated.written) == generated.completion, at
            said = b""
        assert len(said) < 1_000, at
        checks = await upstream.probe(5.0)
        assert checks is not None
        assert all(len(orjson.dumps(check)) < 1_000 for check in checks), at
    await upstream.close()


async def _turns(store: MemoryStore, session_id: str) -> int:
    state = fold(await store.read(session_id))
    assert state is not None
    return len(state.turns)


@pytest.mark.parametrize("place", PLACES)
async def test_the_deepest_answer_comes_back(
    api: httpx.AsyncClient,
    raw: tuple[RawEngine, str],
    engine: ScriptedEngine,
    renderer: ChatRenderer,
    place: str,
) -> None:
    """What is recorded can be shown, and sent back by the client."""
    for levels in range(limits.JSON_DEPTH, limits.JSON_DEPTH - 12, -1):
        answer = _good(engine, renderer)
        PLACES[place](answer)
        raw[0].says = _http(json.dumps(answer).replace(json.dumps(HERE), _deep(levels).decode()).encode())
        session_id = (await api.post("/sessions")).json()["session_id"]
        url = f"/sessions/{session_id}/v1/chat/completions"
        reply = await api.post(url, json=CHAT)
        assert reply.status_code in (200, 502)
        if reply.status_code == 200:
            assert (await api.get(f"/sessions/{session_id}")).status_code == 200
            assert (await api.get(f"/sessions/{session_id}?view=events")).status_code == 200
            answered = reply.json()["choices"][0]["message"]
            history = [*CHAT["messages"], answered, {"role": "user", "content": "and?"}]
            again = await api.post(url, json={"messages": history})
            assert "nests" not in again.text


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("path", ["v1/chat/completions", "v1/models"])
async def test_an_answer_that_http_cannot_carry(
    api: httpx.AsyncClient, raw: tuple[RawEngine, str], head: str, path: str
) -> None:
    """In a chat and on the catch-all: 502, once, with the connection whole."""
    raw[0].says = HEADS[head]
    session_id = (await api.post("/sessions")).json()["session_id"]
    reply = await api.post(f"/sessions/{session_id}/{path}", json=CHAT)
    assert (reply.status_code, reply.json()["error"]["code"]) == (502, "engine_reply_invalid"), reply.text
    assert raw[0].asked == 1
    assert (await api.get("/health")).status_code == 200


@pytest.mark.parametrize("rest", [b"xyz\r\n{}\r\n", b"2\r\n{}\r\n", b"-2\r\n{}\r\n0\r\n\r\n"])
async def test_a_body_that_http_cannot_carry(
    api: httpx.AsyncClient, raw: tuple[RawEngine, str], rest: bytes
) -> None:
    """A chat is refused, and so is any other request; what was begun to be passed on visibly breaks off."""
    raw[0].says = b"HTTP/1.1 400 No\r\nTransfer-Encoding: chunked\r\n\r\n" + rest
    session_id = (await api.post("/sessions")).json()["session_id"]
    reply = await api.post(f"/sessions/{session_id}/v1/chat/completions", json=CHAT)
    assert reply.status_code in (502, 503), reply.text
    try:
        passed = await api.post(f"/sessions/{session_id}/v1/models")
    except httpx.RemoteProtocolError:
        return
    assert (passed.status_code, passed.json()["error"]["code"]) == (502, "engine_reply_invalid")


@pytest.mark.parametrize("head", HEADS)
async def test_an_engine_that_speaks_no_http_is_not_ready(
    api: httpx.AsyncClient, raw: tuple[RawEngine, str], head: str
) -> None:
    """Readiness says what came."""
    raw[0].says = HEADS[head]
    reply = await api.get("/ready")
    assert (reply.status_code, reply.json()["ready"]) == (503, False)
    assert "engine" in reply.json()["checks"]["engine"]


@pytest.mark.parametrize("status", [201, 202, 204, 205, 206, 226])
async def test_a_success_that_is_no_answer(
    api: httpx.AsyncClient, raw: tuple[RawEngine, str], status: int
) -> None:
    """An agent must not take for a recorded answer what was not recorded."""
    raw[0].says = b"HTTP/1.1 %d ?\r\nContent-Length: 0\r\n\r\n" % status
    session_id = (await api.post("/sessions")).json()["session_id"]
    reply = await api.post(f"/sessions/{session_id}/v1/chat/completions", json=CHAT)
    assert (reply.status_code, reply.json()["error"]["code"]) == (502, "engine_reply_invalid")


@pytest.mark.parametrize("head", ODD)
@pytest.mark.parametrize("path", ["v1/chat/completions", "v1/models"])
async def test_an_odd_answer(
    api: httpx.AsyncClient, raw: tuple[RawEngine, str], head: str, path: str
) -> None:
    """What HTTP has goes through as it is, byte for byte."""
    raw[0].says, status = ODD[head]
    session_id = (await api.post("/sessions")).json()["session_id"]
    async with api.stream("POST", f"/sessions/{session_id}/{path}", json=CHAT) as reply:
        content = b"".join([piece async for piece in reply.aiter_raw()])
    assert (reply.status_code, content) == (status, b"" if status == 304 else b"{}")
    if path == "v1/models" and b"X-A: " in raw[0].says:
        sent = raw[0].says.partition(b"X-A: ")[2].partition(b"\r\n")[0]
        assert dict(reply.headers.raw)[b"x-a"] == sent


@pytest.mark.parametrize("head", DOUBTFUL)
@pytest.mark.parametrize("path", ["v1/chat/completions", "v1/models"])
async def test_a_doubtful_answer(
    api: httpx.AsyncClient, raw: tuple[RawEngine, str], head: str, path: str
) -> None:
    """It is passed on whole, or refused: there is an answer, and the next request gets its own."""
    raw[0].says = DOUBTFUL[head]
    session_id = (await api.post("/sessions")).json()["session_id"]
    reply = await api.post(f"/sessions/{session_id}/{path}", json=CHAT)
    codes = {502: "engine_reply_invalid", 503: "engine_unavailable"}
    assert (reply.status_code, reply.content) == (400, b"{}") or (
        reply.json()["error"]["code"] == codes[reply.status_code]
    )
    assert (await api.get("/health")).json() == {"status": "ok"}


@pytest.mark.parametrize("content_type", [b"t\xe9xt", b"\xe2\x82\xac", b"\xff"])
async def test_the_content_type_of_a_refusal(
    api: httpx.AsyncClient, raw: tuple[RawEngine, str], content_type: bytes
) -> None:
    """A refusal's content type is passed on, and must be ASCII."""
    raw[0].says = b"HTTP/1.1 400 No\r\nContent-Type: %b\r\nContent-Length: 2\r\n\r\n{}" % content_type
    session_id = (await api.post("/sessions")).json()["session_id"]
    reply = await api.post(f"/sessions/{session_id}/v1/chat/completions", json=CHAT)
    assert (reply.status_code, reply.json()["error"]["code"]) == (502, "engine_reply_invalid")


@pytest.mark.parametrize("calls", [5, "x", {}, [1], [None], [[]], True])
async def test_tool_calls_that_are_none(
    api: httpx.AsyncClient,
    raw: tuple[RawEngine, str],
    engine: ScriptedEngine,
    renderer: ChatRenderer,
    calls: Any,
) -> None:
    """They are refused before they are recorded, with and without a stream."""
    answer = _good(engine, renderer)
    answer["choices"][0]["message"]["tool_calls"] = calls
    raw[0].says = _http(json.dumps(answer).encode())
    session_id = (await api.post("/sessions")).json()["session_id"]
    for stream in (False, True):
        reply = await api.post(f"/sessions/{session_id}/v1/chat/completions", json={**CHAT, "stream": stream})
        assert (reply.status_code, reply.json()["error"]["code"]) == (502, "engine_reply_invalid")
