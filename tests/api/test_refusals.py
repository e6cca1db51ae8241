"""Bad input and a bad engine: each refusal has its status and code, and nothing was recorded."""

import asyncio
import json
import math
from collections.abc import Callable
from typing import Any

import aiohttp
import httpx
import pytest

from tests.api.conftest import OpenSession
from tests.support.scripted import ScriptedEngine, unreachable
from tokentape_contracts import limits
from tokentape_contracts.errors import BY_CODE, TABLE
from tokentape_core.text.render import ChatRenderer

USER = {"role": "user", "content": "Hello"}
Answer = Callable[[ScriptedEngine, dict[str, Any]], httpx.Response]


async def check(reply: httpx.Response, status: int, code: str, *mentions: str) -> None:
    """The error has this status and code, mentions these words, and tells SDKs whether to retry."""
    body = reply.json()["error"]
    assert (reply.status_code, body["code"]) == (status, code)
    for word in mentions:
        assert word in body["message"]
    retryable = TABLE[BY_CODE[code]].retryable
    assert body["retryable"] is retryable
    assert reply.headers["x-should-retry"] == str(retryable).lower()


BAD_CHATS: dict[str, tuple[bytes, int, str, str]] = {
    "empty": (b"", 400, "invalid_request", "empty"),
    "not JSON": (b"{", 400, "invalid_request", "not JSON"),
    "not UTF-8": (b'{"a": "\xff"}', 400, "invalid_request", "not JSON"),
    "NaN": (b'{"temperature": NaN}', 400, "invalid_request", "not JSON"),
    "not an object": (b"[1]", 400, "invalid_request", "must be a JSON object, not array"),
    "no messages": (b"{}", 400, "invalid_request", "messages"),
    "messages null": (b'{"messages": null}', 400, "invalid_request", "messages"),
    "messages empty": (b'{"messages": []}', 400, "invalid_request", "messages"),
    "messages text": (b'{"messages": "hi"}', 400, "invalid_request", "messages"),
    "message text": (b'{"messages": ["hi"]}', 400, "invalid_request", "messages[0]"),
    "no role": (b'{"messages": [{"content": "hi"}]}', 400, "invalid_request", "role"),
    "role a number": (b'{"messages": [{"role": 1}]}', 400, "invalid_request", "role"),
    "n = 2": (b'{"messages": [{"role": "user", "content": "x"}], "n": 2}', 400, "invalid_request", "n must"),
    "n = 0": (b'{"messages": [{"role": "user", "content": "x"}], "n": 0}', 400, "invalid_request", "n must"),
    "tools an object": (
        b'{"messages": [{"role": "user", "content": "x"}], "tools": {}}',
        400,
        "invalid_request",
        "tools must be a list",
    ),
    "template arguments": (
        b'{"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": []}',
        400,
        "invalid_request",
        "chat_template_kwargs must be an object",
    ),
    "stream a text": (
        b'{"messages": [{"role": "user", "content": "x"}], "stream": "yes"}',
        400,
        "invalid_request",
        "stream",
    ),
    "content a number": (
        b'{"messages": [{"role": "user", "content": 5}]}',
        400,
        "invalid_request",
        "content",
    ),
}


@pytest.mark.parametrize("name", BAD_CHATS)
async def test_bad_chat_body(session: OpenSession, engine: ScriptedEngine, name: str) -> None:
    """A bad chat body is 400 with the reason; the engine was not asked, nothing was recorded."""
    body, status, code, mention = BAD_CHATS[name]
    reply = await session.api.post(f"{session.url}/v1/chat/completions", content=body)
    await check(reply, status, code, mention)
    assert engine.bodies == []
    assert await session.records() == []


async def test_oversized_body(session: OpenSession, engine: ScriptedEngine) -> None:
    """A body above the limit is 413, with and without a Content-Length; at the limit it is read."""

    async def endless() -> Any:
        for _ in range(limits.CHAT_BODY_BYTES // limits.MiB + 1):
            yield b" " * limits.MiB

    url = f"{session.url}/v1/chat/completions"
    for content in (b" " * (limits.CHAT_BODY_BYTES + 1), endless()):
        await check(await session.api.post(url, content=content), 413, "request_too_large")
    await check(
        await session.api.post(url, content=b" " * limits.CHAT_BODY_BYTES), 400, "invalid_request", "empty"
    )
    for path in ("/sessions", f"{session.url}/samples"):
        reply = await session.api.post(path, content=b" " * (limits.SMALL_BODY_BYTES + 1))
        await check(reply, 413, "request_too_large")
    assert engine.bodies == []


async def test_unknown_and_deleted_sessions(session: OpenSession) -> None:
    """Unknown and deleted sessions have codes of their own, on every route."""
    assert (await session.api.delete(session.url)).status_code == 204
    chat = {"messages": [USER]}
    for sid, code in (
        ("nope", "session_not_found"),
        ("x" * 300, "session_not_found"),
        (session.url.split("/")[-1], "session_deleted"),
    ):
        url = f"/sessions/{sid}"
        await check(await session.api.post(f"{url}/v1/chat/completions", json=chat), 404, code)
        await check(await session.api.post(f"{url}/samples"), 404, code)
        await check(await session.api.get(url), 404, code)
        await check(await session.api.get(f"{url}/v1/models"), 404, code)


async def test_delete_any_number_of_times(session: OpenSession) -> None:
    """DELETE is 204 however often it is sent, and 404 for an unknown id."""
    assert [(await session.api.delete(session.url)).status_code for _ in range(3)] == [204] * 3
    await check(await session.api.delete("/sessions/nope"), 404, "session_not_found")


async def test_delete_during_a_chat(session: OpenSession, engine: ScriptedEngine) -> None:
    """A session that is deleted while the engine generates gives no 200 that nobody recorded."""

    async def answer(body: dict[str, Any]) -> httpx.Response:
        await session.api.delete(session.url)
        return httpx.Response(200, json=engine.reply(body, "late"))

    engine.answer = answer
    await check(await session.chat(USER), 404, "session_deleted")


async def test_append_role(session: OpenSession) -> None:
    """A role that the template cannot append is 400 and named."""
    answer = (await session.chat(USER)).json()["choices"][0]["message"]
    reply = await session.chat(USER, answer, {"role": "narrator", "content": "Meanwhile"})
    await check(reply, 400, "cannot_extend", "narrator")
    assert len(await session.records()) == 1


@pytest.mark.parametrize("status", [400, 404, 422, 429, 500, 503])
async def test_engine_refusal_passes_through(
    session: OpenSession, engine: ScriptedEngine, status: int
) -> None:
    """What the engine refuses reaches the agent as the engine said it, unrecorded."""
    engine.answer = lambda _: httpx.Response(status, json={"object": "error", "message": "too long"})
    reply = await session.chat(USER)
    assert (reply.status_code, reply.json()) == (status, {"object": "error", "message": "too long"})
    assert reply.headers["x-should-retry"] == ("true" if status >= 429 else "false")
    assert await session.records() == []


def _raises(error: Exception) -> Answer:
    def answer(_: ScriptedEngine, __: dict[str, Any]) -> httpx.Response:
        raise error

    return answer


def _says(**changes: Any) -> Answer:
    return lambda engine, body: httpx.Response(
        200,
        content=json.dumps(engine.reply(body, "hi", **changes)),
        headers={"content-type": "application/json"},
    )


def _text(content: bytes) -> Answer:
    return lambda _engine, _body: httpx.Response(200, content=content)


BAD_ANSWERS: dict[str, tuple[Answer, int, str, str]] = {
    "down": (_raises(unreachable()), 503, "engine_unavailable", "cannot be reached"),
    "broke off": (_raises(aiohttp.ServerDisconnectedError()), 503, "engine_unavailable", "broke off"),
    "timeout": (_raises(aiohttp.ServerTimeoutError()), 504, "engine_timeout", "in time"),
    "no JSON": (_text(b"<html>"), 502, "engine_reply_invalid", "not JSON"),
    "no object": (_text(b"[]"), 502, "engine_reply_invalid", "not an object"),
    "no choices": (_says(answer={"choices": []}), 502, "engine_reply_invalid", "one choice"),
    "choices missing": (_says(answer={"choices": None}), 502, "engine_reply_invalid", "one choice"),
    "two choices": (_says(answer={"choices": [{}, {}]}), 502, "engine_reply_invalid", "one choice"),
    "no meta_info": (_says(choice={"meta_info": None}), 502, "engine_reply_invalid", "meta_info is missing"),
    "no log-probs": (
        _says(meta={"output_token_logprobs": None}),
        502,
        "engine_reply_invalid",
        "output_token_logprobs is missing",
    ),
    "wrong count": (_says(meta={"completion_tokens": 1}), 502, "engine_reply_invalid", "completion_tokens"),
    "no count": (_says(meta={"completion_tokens": None}), 502, "engine_reply_invalid", "completion_tokens"),
    "NaN": (
        _says(meta={"output_token_logprobs": [[math.nan, 1, None]], "completion_tokens": 1}),
        502,
        "engine_reply_invalid",
        "log-prob of output token 0 is nan",
    ),
    "infinite": (
        _says(meta={"output_token_logprobs": [[-0.1, 1], [-math.inf, 1]], "completion_tokens": 2}),
        502,
        "engine_reply_invalid",
        "log-prob of output token 1 is -inf",
    ),
    "null log-prob": (
        _says(meta={"output_token_logprobs": [[None, 1, None]], "completion_tokens": 1}),
        502,
        "engine_reply_invalid",
        "log-prob of output token 0",
    ),
    "text for an id": (
        _says(meta={"output_token_logprobs": [[-0.1, "x", None]], "completion_tokens": 1}),
        502,
        "engine_reply_invalid",
        "token id",
    ),
    "fraction for an id": (
        _says(meta={"output_token_logprobs": [[-0.1, 1.5, None]], "completion_tokens": 1}),
        502,
        "engine_reply_invalid",
        "token id",
    ),
    "negative id": (
        _says(meta={"output_token_logprobs": [[-0.1, -1, None]], "completion_tokens": 1}),
        502,
        "engine_reply_invalid",
        "token id",
    ),
    "short triple": (
        _says(meta={"output_token_logprobs": [[-0.1]], "completion_tokens": 1}),
        502,
        "engine_reply_invalid",
        "[log-prob, id, text]",
    ),
    "null content": (_says(message={"content": None}), 502, "engine_reply_invalid", "content"),
    "no message": (_says(choice={"message": None}), 502, "engine_reply_invalid", "content"),
    "no finish": (_says(choice={"finish_reason": None}), 502, "engine_reply_invalid", "finish_reason"),
    "abort": (_says(choice={"finish_reason": "abort"}), 503, "generation_aborted", "interrupted"),
    "input_ids ignored": (_says(meta={"prompt_tokens": 3}), 502, "engine_reply_invalid", "ignores input_ids"),
}


@pytest.mark.parametrize("name", BAD_ANSWERS)
async def test_bad_engine_answer(session: OpenSession, engine: ScriptedEngine, name: str) -> None:
    """An answer that cannot be recorded exactly is refused, says what is wrong, and leaves no trace."""
    answer, status, code, mention = BAD_ANSWERS[name]
    engine.answer = lambda body: answer(engine, body)
    await check(await session.chat(USER), status, code, mention)
    assert await session.records() == []
    engine.answer = None
    assert (await session.chat(USER)).status_code == 200


BAD_SAMPLES: dict[str, tuple[bytes, str]] = {
    "not JSON": (b"{", "not JSON"),
    "not an object": (b"[]", "must be a JSON object"),
    "length a text": (b'{"max_seq_len": "8"}', "max_seq_len"),
    "length a fraction": (b'{"max_seq_len": 1.5}', "max_seq_len"),
    "length a boolean": (b'{"max_seq_len": true}', "max_seq_len"),
    "length zero": (b'{"max_seq_len": 0}', "max_seq_len"),
    "length negative": (b'{"max_seq_len": -1}', "max_seq_len"),
    "metadata a list": (b'{"metadata": []}', "metadata"),
    "deadline zero": (b'{"deadline_s": 0}', "deadline_s"),
    "deadline too long": (b'{"deadline_s": 1e9}', "deadline_s"),
    "deadline a text": (b'{"deadline_s": "1"}', "deadline_s"),
    "unknown field": (b'{"max_seq_length": 8}', "max_seq_length"),
}


@pytest.mark.parametrize("name", BAD_SAMPLES)
async def test_bad_samples_body(session: OpenSession, name: str) -> None:
    """A samples body with a wrong type or an unknown field is 400 and names the field."""
    body, mention = BAD_SAMPLES[name]
    await check(
        await session.api.post(f"{session.url}/samples", content=body), 400, "invalid_request", mention
    )


BAD_OPENS: dict[str, tuple[bytes, str]] = {
    "unknown field": (b'{"modus": "linear"}', "modus"),
    "unknown mode": (b'{"mode": "circle"}', "mode"),
    "unknown matcher": (b'{"matcher": "none"}', "matcher"),
    "matcher a list": (b'{"matcher": ["strict"]}', "matcher"),
    "labels a list": (b'{"labels": []}', "labels"),
    "unknown pin": (b'{"pins": {"messages": []}}', "messages"),
}


@pytest.mark.parametrize("name", BAD_OPENS)
async def test_bad_open_body(api: httpx.AsyncClient, name: str) -> None:
    """A bad body of POST /sessions is 400 and names the field."""
    body, mention = BAD_OPENS[name]
    await check(await api.post("/sessions", content=body), 400, "invalid_request", mention)


async def test_unsupported_contract(session: OpenSession) -> None:
    """A client that reads no version that the server writes is told so."""
    for accept in ("3", "", "one"):
        reply = await session.api.post(f"{session.url}/samples", headers={"Accept-Contract": accept})
        await check(reply, 406, "contract_unsupported", "1, 2")


async def test_unknown_routes_and_methods(api: httpx.AsyncClient, session: OpenSession) -> None:
    """Wrong paths and methods have our error shape, and never reach the engine."""
    await check(await api.get("/nope"), 404, "route_not_found")
    await check(await api.put("/sessions"), 405, "method_not_allowed")
    await check(await api.put(session.url), 405, "method_not_allowed")
    await check(await api.get(f"{session.url}/samples"), 405, "method_not_allowed")
    await check(await api.get(f"{session.url}/v1/chat/completions"), 405, "method_not_allowed")


async def test_deadline(session: OpenSession) -> None:
    """Without a worker, a collect ends at its deadline with 504."""
    reply = await session.api.post(f"{session.url}/samples", json={"deadline_s": 0.2})
    await check(reply, 504, "deadline_exceeded", "0.2 s")


async def test_session_full(
    session: OpenSession, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session that holds as many turns as it may is refused before the engine is asked."""
    monkeypatch.setattr(limits, "TURNS_PER_SESSION", 2)
    for _ in range(2):
        assert (await session.chat(USER)).status_code == 200
    await check(await session.chat(USER), 409, "session_full", "2 turns")
    assert len(engine.bodies) == 2


async def test_other_template(session: OpenSession, engine: ScriptedEngine, renderer: ChatRenderer) -> None:
    """A process with another tokenizer or template refuses the session before the engine is asked."""
    renderer._fingerprint = "another"
    await check(await session.chat(USER), 500, "template_mismatch", "another", "--tokenizer")
    assert engine.bodies == []
    assert await session.records() == []


async def test_the_engine_timeout_is_a_total(session: OpenSession, engine: ScriptedEngine) -> None:
    """An engine that takes longer than the timeout in all is given up on, whatever it does meanwhile."""

    async def answer(_: dict[str, Any]) -> httpx.Response:
        await asyncio.sleep(5)
        raise AssertionError("not cancelled")

    engine.answer = answer
    await check(await session.chat(USER), 504, "engine_timeout")


async def test_defect_is_500_without_details(
    session: OpenSession, engine: ScriptedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """A defect of ours is 500 in our shape; its traceback is in the log and not in the reply."""
    engine.answer = lambda _: 1 / 0  # type: ignore[assignment, return-value]
    await check(await session.chat(USER), 500, "internal_error")
    assert "ZeroDivisionError" in caplog.text
