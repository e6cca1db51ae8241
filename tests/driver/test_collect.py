"""`Session.collect_samples`: what is sent, what is checked, and what is raised."""

import asyncio
import logging
import pickle
from typing import Any

import httpx
import numpy as np
import orjson
import pytest

from tests.driver.fake import BASE_URL, TOKENS, FakeServer, hang, listening, payload, reply_of
from tests.support.samples import pack, unpack
from tokentape_contracts import limits
from tokentape_contracts.errors import TABLE, InvalidRequest, SessionDeleted, TokentapeError, error_body
from tokentape_contracts.http import SamplesRequest
from tokentape_driver import (
    CannotOverlay,
    Collected,
    CollectTimeout,
    ContractMismatch,
    LeftoverState,
    RolloutSample,
    TokentapeClient,
    TransportError,
    UnexpectedReply,
)

ONE_OF_EACH = ["POST /sessions", "POST /sessions/s1/samples", "DELETE /sessions/s1"]


async def collect(server: FakeServer, **options: object) -> Collected[RolloutSample]:
    async with TokentapeClient(BASE_URL, transport=server.transport) as client:
        session = await client.open_session()
        return await session.collect_samples(RolloutSample(), **options)  # type: ignore[arg-type]


async def test_collect_delivers_the_sample() -> None:
    """A collect is one POST and one DELETE, and gives the exact values that the server sent."""
    server = FakeServer()
    collected = await collect(server)
    [sample] = collected.samples
    assert server.calls == ONE_OF_EACH
    assert sample.tokens == TOKENS
    assert sample.rollout_log_probs == [-0.5, 0.0, -0.1234567891234567]
    assert sample.rollout_routed_experts is not None
    assert np.array_equal(sample.rollout_routed_experts, np.arange(16).reshape(4, 2, 2))
    assert collected.session_metadata["accumulated_token_ids"] == TOKENS
    assert collected.empty_reason is None


@pytest.mark.parametrize("contract", [1, 2])
async def test_both_contracts_are_asked_for_and_read(contract: int) -> None:
    """The POST accepts contracts 1 and 2, and a reply in either gives the same sample."""
    server = FakeServer(samples=reply_of(payload(contract=contract), contract=contract))
    collected = await collect(server)
    assert server.posted.headers["Accept-Contract"] == "1,2"
    assert collected.samples[0].tokens == TOKENS
    assert collected.session_metadata["accumulated_token_ids"] == TOKENS


async def test_the_server_gives_up_first() -> None:
    """The server gets a deadline a little below the driver's, and the body is one that it accepts."""
    server = FakeServer()
    await collect(server, max_seq_len=100, metadata={"a": object()}, deadline_s=60)
    request = SamplesRequest.parse(server.posted.content)
    assert (request.max_seq_len, request.metadata, request.deadline_s) == (100, None, 54.0)


async def test_metadata_order() -> None:
    """A sample's metadata is the input's, the agent's, the server's, the session's; the last one wins."""
    from_server = {"server": 1, "shared": "server", "agent": "server"}
    server = FakeServer(samples=reply_of(payload(metadata=from_server)))
    async with TokentapeClient(BASE_URL, transport=server.transport) as client:
        session = await client.open_session()
        given = RolloutSample(metadata={"input": 1, "mine": "input", "shared": "input"})
        agent = {"mine": "agent", "agent": "agent", "shared": "agent"}
        collected = await session.collect_samples(given, metadata=agent)
    metadata = collected.samples[0].metadata
    assert metadata.pop("accumulated_token_ids") == TOKENS
    assert metadata == {
        "input": 1,
        "mine": "agent",
        "agent": "server",
        "server": 1,
        "shared": "session",
        "max_trim_tokens": 1,
    }
    assert given.metadata == {"input": 1, "mine": "input", "shared": "input"}


@pytest.mark.parametrize("kind", TABLE, ids=lambda kind: kind.code)
async def test_every_server_error_is_raised_as_it_is(kind: type[TokentapeError]) -> None:
    """Every class of the server's table arrives as itself, with its detail and where it happened."""
    body = error_body(kind("what was wrong"))
    server = FakeServer(samples=httpx.Response(TABLE[kind].status, json=body))
    with pytest.raises(TokentapeError) as caught:
        await collect(server)
    assert type(caught.value) is kind
    assert caught.value.detail == "what was wrong"
    assert f"HTTP {TABLE[kind].status}" in caught.value.__notes__[0]
    assert server.calls == ONE_OF_EACH


@pytest.mark.parametrize(
    ("reply", "status"),
    [
        (httpx.Response(502, text="<html>" + "x" * 1000), 502),
        (httpx.Response(500, json={"error": {"message": "m", "code": "of another service"}}), 500),
        (httpx.Response(404, json={"detail": "Not Found"}), 404),
        (httpx.Response(307, headers={"Location": "http://elsewhere.test"}), 307),
    ],
)
async def test_foreign_replies(reply: httpx.Response, status: int) -> None:
    """A proxy's page, another service's error and a redirect are `UnexpectedReply` with status and text."""
    server = FakeServer(samples=reply)
    with pytest.raises(UnexpectedReply, match=f"HTTP {status}") as caught:
        await collect(server)
    assert caught.value.status == status
    assert caught.value.text == reply.text[:500]
    assert server.calls == ONE_OF_EACH


async def test_malformed_payload() -> None:
    """A payload that breaks the contract is `UnexpectedReply`, which says how."""
    server = FakeServer(samples=reply_of(b"not safetensors"))
    with pytest.raises(UnexpectedReply, match="malformed samples: not a safetensors container") as caught:
        await collect(server)
    assert caught.value.status == 200
    assert server.calls == ONE_OF_EACH


@pytest.mark.parametrize("contract", [1, 2])
@pytest.mark.parametrize(
    ("field", "value", "match"),
    [
        ("rollout_log_probs", np.array([-0.5, 0.0, np.nan]), "rollout_log_probs of sample 0 holds nan at 2"),
        ("rollout_log_probs", np.array([0.9, 0.0, 0.1]), "rollout_log_probs of sample 0 holds 0.9 at 0"),
        ("rollout_log_probs", np.array([-0.5]), "rollout_log_probs of sample 0 must have length 3"),
        ("tokens", np.array([5, 6, 7, -8, 9]), "tokens of sample 0 holds the negative id -8"),
        ("response_length", "3", "response_length of sample 0 must be an integer"),
        ("response_length", 9, "response_length of sample 0 must be an integer from 0 to 5"),
    ],
)
async def test_impossible_samples(contract: int, field: str, value: Any, match: str) -> None:
    """A sample that no rollout can have given is not delivered to the trainer, whoever sent it."""
    content, tensors = unpack(payload(contract=contract))
    if field == "response_length":
        content["samples"][0][field] = value
    else:
        tensors[f"{field}.0"] = value
    server = FakeServer(samples=reply_of(pack(content, tensors), contract=contract))
    with pytest.raises(UnexpectedReply, match=f"malformed samples: {match}"):
        await collect(server)
    assert server.calls == ONE_OF_EACH


async def test_the_agents_reward() -> None:
    """The `reward` in the metadata of a collect is the sample's, unless the server has one."""
    collected = await collect(FakeServer(), metadata={"reward": 0.5, "answer": "4"})
    assert collected.samples[0].reward == collected.samples[0].metadata["reward"] == 0.5
    collected = await collect(FakeServer(samples=reply_of(payload(reward=0.25))), metadata={"reward": 0.5})
    assert collected.samples[0].reward == 0.25


@pytest.mark.parametrize(
    ("headers", "match"),
    [
        ({"Tokentape_Contract": "3"}, "asked for contract 1 or 2, .* is '3'"),
        ({"Tokentape_Digest": "sha-256=00"}, "Tokentape-Digest is 'sha-256=00'"),
    ],
)
async def test_headers_that_do_not_fit(headers: dict[str, Any], match: str) -> None:
    """A version that was not asked for and a digest of other bytes are refused, not decoded."""
    server = FakeServer(samples=reply_of(payload(), **headers))
    with pytest.raises(ContractMismatch, match=match):
        await collect(server)
    assert server.calls == ONE_OF_EACH


async def test_headers_that_are_missing() -> None:
    """A 200 without the contract's headers is not taken for a Tokentape reply."""
    server = FakeServer(samples=httpx.Response(200, content=payload()))
    with pytest.raises(ContractMismatch, match="Tokentape-Contract is None"):
        await collect(server)


@pytest.mark.parametrize(
    "error", [httpx.ConnectError("refused"), httpx.ReadError(""), httpx.DecodingError("z")]
)
async def test_transport_failures(error: httpx.RequestError) -> None:
    """A failure of the connection names stage, host and cause, and is not retried."""
    server = FakeServer(samples=error)
    with pytest.raises(TransportError, match=rf"collect: tape.test:8080: {type(error).__name__}: ") as caught:
        await collect(server)
    assert (caught.value.stage, caught.value.host) == ("collect", "tape.test:8080")
    assert server.calls == ONE_OF_EACH


async def test_timeout_without_headers() -> None:
    """The total deadline ends a collect that gets no answer, and the session is deleted."""
    server = FakeServer(samples=hang)
    with pytest.raises(CollectTimeout, match=r"total deadline of 0\.05 s .*no reply headers yet") as caught:
        await collect(server, deadline_s=0.05)
    assert caught.value.deadline_s == 0.05
    assert server.calls == ONE_OF_EACH


async def test_deadline_bounds_a_trickling_reply() -> None:
    """The deadline is total: a reply that trickles for ever is cut, and what was known of it is told."""

    async def trickle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nServer-Timing: queue;dur=7\r\nContent-Length: 100000\r\n\r\n")
        while True:
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.02)

    async with listening(trickle) as (url, lines), TokentapeClient(url) as client:
        session = await client.open_session()
        clock = asyncio.get_running_loop().time
        begin = clock()
        with pytest.raises(CollectTimeout, match=r"bytes of the body had come, Server-Timing: queue;dur=7"):
            await session.collect_samples(RolloutSample(), deadline_s=2.0)
        assert clock() - begin < 2.0 + limits.DRIVER_DELETE_S
    assert lines == ONE_OF_EACH


async def test_reset_connection() -> None:
    """A server that hangs up in the middle of a request costs a `TransportError` and no second POST."""

    async def reset(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()

    async with listening(reset) as (url, lines), TokentapeClient(url) as client:
        session = await client.open_session()
        with pytest.raises(TransportError, match=r"collect: 127\.0\.0\.1"):
            await session.collect_samples(RolloutSample())
    assert lines == ONE_OF_EACH


async def test_cancelled_collect_still_deletes() -> None:
    """A cancelled collect sends its DELETE and stays cancelled."""
    server = FakeServer(samples=hang)
    task = asyncio.create_task(collect(server))
    await server.collecting.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert server.calls == ONE_OF_EACH


@pytest.mark.parametrize(
    "delete",
    [
        httpx.ConnectError("refused"),
        httpx.Response(500, text="a page"),
        httpx.Response(404, json=error_body(SessionDeleted("gone"))),
        RuntimeError("not even an HTTP error"),
        hang,
    ],
)
async def test_delete_failure_does_not_hide(
    delete: object, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed or endless DELETE is a warning: the samples are delivered, and an error of the POST stays."""
    monkeypatch.setattr(limits, "DRIVER_DELETE_S", 0.05)
    server = FakeServer(delete=delete)  # type: ignore[arg-type]
    assert len((await collect(server)).samples) == 1
    [record] = [r for r in caplog.records if r.name == "tokentape.driver"]
    assert record.levelno == logging.WARNING
    assert "DELETE http://tape.test:8080/sessions/s1" in record.getMessage()
    server.samples = httpx.ReadError("the outcome")
    with pytest.raises(TransportError, match="the outcome"):
        await collect(server)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"max_seq_len": 0}, "max_seq_len must be an integer of at least 1"),
        ({"max_seq_len": 1.5}, "max_seq_len must be an integer"),
        ({"deadline_s": 0}, "deadline_s must be a number of seconds above 0"),
        ({"deadline_s": float("nan")}, "deadline_s must be a number of seconds above 0"),
        ({"deadline_s": 10_000}, "deadline_s must be a number of seconds above 0 and at most 3600"),
    ],
)
async def test_wrong_arguments_send_nothing(options: dict[str, object], match: str) -> None:
    """Arguments that the server would refuse are refused before anything is sent; the session stays open."""
    server = FakeServer()
    with pytest.raises(InvalidRequest, match=match):
        await collect(server, **options)
    assert server.calls == ["POST /sessions"]


async def test_empty_reply() -> None:
    """A collect without turns gives no sample and the server's reason."""
    collected = await collect(FakeServer(samples=reply_of(payload(empty_reason="no_records"))))
    assert (collected.samples, collected.empty_reason) == ([], "no_records")


@pytest.mark.parametrize(
    "error",
    [
        TransportError("d", stage="open", host="h"),
        CollectTimeout("d", deadline_s=1.0, server_timing="t"),
        UnexpectedReply("d", status=502, text="t"),
        ContractMismatch("d"),
        LeftoverState("d", field="f"),
        CannotOverlay("d", field="f"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_can_be_pickled(error: Exception) -> None:
    """Errors cross process borders whole, attributes included."""
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301
    assert type(copy) is type(error)
    assert (str(copy), vars(copy)) == (str(error), vars(error))


def test_default_deadlines_fit() -> None:
    """The driver's default deadline leaves the server exactly the server's own default."""
    from tokentape_driver.session import samples_body

    body = orjson.loads(samples_body(None, limits.DRIVER_COLLECT_S))
    assert body["deadline_s"] == SamplesRequest().deadline_s
