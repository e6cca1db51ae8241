"""`rollout`: one episode, whatever the agent and the server do."""

import asyncio
import logging
from enum import Enum
from typing import Any

import httpx
import orjson
import pytest

from tests.driver.fake import BASE_URL, TOKENS, FakeServer, TrainerSample, hang, payload, reply_of
from tokentape_contracts.errors import (
    DeadlineExceeded,
    InvalidRequest,
    PrefixBroken,
    QueueFull,
    StoreUnavailable,
    TokentapeError,
    error_body,
)
from tokentape_contracts.samples import Status
from tokentape_driver import (
    CannotOverlay,
    ContractMismatch,
    LeftoverState,
    RolloutSample,
    TokentapeClient,
    UnexpectedReply,
    rollout,
)

ONE_OF_EACH = ["POST /sessions", "POST /sessions/s1/samples", "DELETE /sessions/s1"]


async def idle(base_url: str, sample: Any) -> None:
    """An agent that does nothing."""


def returning(metadata: Any) -> Any:
    async def agent(base_url: str, sample: Any) -> Any:
        return metadata

    return agent


async def play(server: FakeServer, agent: Any = idle, sample: Any = None, **options: Any) -> Any:
    async with TokentapeClient(BASE_URL, transport=server.transport) as client:
        return await rollout(
            agent, RolloutSample(tokens=[1]) if sample is None else sample, client=client, **options
        )


async def test_an_episode() -> None:
    """The agent gets the OpenAI base URL and the sample; the result is a copy with the computed fields."""
    server = FakeServer()
    given = TrainerSample(index=3, metadata={"task": "t"})
    seen: list[Any] = []

    async def agent(base_url: str, sample: TrainerSample) -> dict[str, Any]:
        seen.extend([base_url, sample])
        return {"answer": "4"}

    opening = {
        "labels": {"run": 1},
        "pins": {"temperature": 1},
        "matcher": "strict",
        "altered_answer": "keep",
    }
    result = await play(server, agent, given, max_seq_len=7, **opening)
    assert seen == [f"{BASE_URL}/sessions/s1/v1", given]
    assert seen[1] is given
    assert (result.index, result.tokens, result.status) == (3, TOKENS, TrainerSample.Status.TRUNCATED)
    assert (result.metadata["task"], result.metadata["answer"]) == ("t", "4")
    assert given.metadata == {"task": "t"}
    assert server.calls == ONE_OF_EACH
    assert orjson.loads(server.requests[0].content) == {"mode": "linear", **opening}
    assert b'"max_seq_len":7' in server.posted.content


async def test_an_agent_that_raises(caplog: pytest.LogCaptureFixture) -> None:
    """What an agent recorded before it raised is collected; the exception is logged and in the metadata."""

    async def agent(base_url: str, sample: Any) -> None:
        raise ZeroDivisionError("in the tool")

    server = FakeServer(samples=reply_of(payload(status=Status.COMPLETED)))
    result = await play(server, agent)
    assert (result.tokens, result.status) == (TOKENS, Status.FAILED)
    assert result.metadata["agent_error"] == "ZeroDivisionError: in the tool"
    [record] = [r for r in caplog.records if r.name == "tokentape.driver"]
    assert record.levelno == logging.ERROR
    assert record.exc_info is not None
    assert server.calls == ONE_OF_EACH


async def failing(base_url: str, sample: Any) -> None:
    """An agent whose tool breaks after some turns."""
    raise ZeroDivisionError("in the tool")


@pytest.mark.parametrize("status", [Status.COMPLETED, Status.TRUNCATED, Status.FAILED])
async def test_what_an_agent_error_does_to_the_status(status: Status) -> None:
    """An episode that broke off is not `completed`, in the trainer's own enum; `keep` leaves the server's."""
    server = FakeServer(samples=reply_of(payload(status=status)))
    for options, expected in (
        ({}, "failed"),
        ({"on_agent_error": "failed"}, "failed"),
        ({"on_agent_error": "keep"}, status.value),
    ):
        result = await play(server, failing, TrainerSample(), **options)
        assert result.status is TrainerSample.Status(expected)
        assert result.metadata["agent_error"] == "ZeroDivisionError: in the tool"
    assert (await play(server, idle, TrainerSample())).status is TrainerSample.Status(status.value)


@pytest.mark.parametrize(
    "reply",
    [
        reply_of(payload(status=Status.ABORTED)),
        reply_of(payload(empty_reason="no_records")),
        httpx.ReadError("cut"),
    ],
    ids=["by the engine", "no turns", "no reply"],
)
async def test_what_is_aborted_stays_so(reply: Any) -> None:
    """A sample that trainers send again is not made one that they count as failed."""
    result = await play(FakeServer(samples=reply), failing, TrainerSample())
    assert result.status is TrainerSample.Status.ABORTED


async def test_an_agent_error_that_is_raised(caplog: pytest.LogCaptureFixture) -> None:
    """With `raise` the agent's own exception comes through, and the session is deleted without a collect."""
    server = FakeServer()
    with pytest.raises(ZeroDivisionError, match="in the tool"):
        await play(server, failing, on_agent_error="raise")
    assert server.calls == ["POST /sessions", "DELETE /sessions/s1"]
    assert caplog.records == []


async def test_an_enum_without_failed() -> None:
    """A class that cannot say `failed` is refused before a session opens, unless the status is to be kept."""

    class Status(Enum):
        COMPLETED = "completed"
        TRUNCATED = "truncated"

    given = RolloutSample()
    given.status = Status.COMPLETED  # type: ignore[assignment]
    server = FakeServer()
    with pytest.raises(CannotOverlay, match=r"Status has no value 'failed'"):
        await play(server, idle, given)
    assert server.calls == []
    assert (await play(server, failing, given, on_agent_error="keep")).status is Status.TRUNCATED


async def test_an_unknown_choice_for_agent_errors() -> None:
    """Another choice is refused before a session is opened."""
    server = FakeServer()
    with pytest.raises(
        InvalidRequest, match="on_agent_error must be one of failed, keep, raise, not 'abort'"
    ):
        await play(server, on_agent_error="abort")
    assert server.calls == []


async def test_the_agents_reward() -> None:
    """The `reward` that an agent returns is the sample's, in the metadata too, and wins over the input's."""
    for reward in (0.5, 0, {"score": 1.0}):
        given = TrainerSample(reward=7.0)
        result = await play(FakeServer(), returning({"reward": reward}), given)
        assert (result.reward, result.metadata["reward"]) == (reward, reward)
        assert given.reward == 7.0


@pytest.mark.parametrize("said", [None, {}, {"reward": None}, {"rewards": 1}])
async def test_without_a_reward_of_the_agents(said: Any) -> None:
    """Where the agent returns none, the input's reward stays."""
    assert (await play(FakeServer(), returning(said), RolloutSample(reward=7.0))).reward == 7.0


async def test_the_servers_reward_wins() -> None:
    """A reward that the server computed is not replaced by the agent's."""
    server = FakeServer(samples=reply_of(payload(reward=0.25)))
    assert (await play(server, returning({"reward": 1.0}))).reward == 0.25


async def test_an_aborted_sample_gets_no_reward() -> None:
    """What the agent says belongs to tokens; where there are none the input's reward stays."""
    server = FakeServer(samples=reply_of(payload(empty_reason="no_records")))
    assert (await play(server, returning({"reward": 1.0}), RolloutSample(reward=7.0))).reward == 7.0


async def test_a_class_without_a_reward() -> None:
    """A reward for which the class has no field is an error before the collect; `rollout` then deletes."""

    class Bare:
        def __init__(self) -> None:
            given = vars(RolloutSample())
            self.__dict__.update({name: value for name, value in given.items() if name != "reward"})

    server = FakeServer()
    with pytest.raises(CannotOverlay, match=r"Bare has no field 'reward' for 1\.0"):
        await play(server, returning({"reward": 1.0}), Bare())
    assert server.calls == ["POST /sessions", "DELETE /sessions/s1"]
    server = FakeServer()
    async with TokentapeClient(BASE_URL, transport=server.transport) as client:
        session = await client.open_session()
        with pytest.raises(CannotOverlay):
            await session.collect_samples(Bare(), metadata={"reward": 1.0})
    assert server.calls == ["POST /sessions"]
    assert (await play(FakeServer(), returning({"answer": 1}), Bare())).tokens == TOKENS


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (reply_of(payload(empty_reason="no_records")), "no_records"),
        (reply_of(payload(empty_reason="all_truncated")), "all_truncated"),
        (httpx.ConnectError("refused"), "TransportError: collect: tape.test:8080: ConnectError: refused"),
        (hang, "CollectTimeout: collect: tape.test:8080: the driver's total deadline of 0.05 s passed"),
        (httpx.Response(504, json=error_body(DeadlineExceeded("late"))), "DeadlineExceeded: late"),
    ],
    ids=["no_records", "all_truncated", "transport", "timeout", "deadline"],
)
async def test_aborted(reply: Any, reason: str) -> None:
    """An empty reply, a timeout on either side and a lost connection cost one sample, which says why."""
    server = FakeServer(samples=reply)
    given = TrainerSample(tokens=[1, 2], metadata={"task": "t"})
    result = await play(server, idle, given, deadline_s=0.05 if reply is hang else 60)
    assert result is not given
    assert (result.status, result.tokens) == (TrainerSample.Status.ABORTED, [1, 2])
    assert result.metadata.pop("abort_reason").startswith(reason)
    assert result.metadata == {"task": "t"}
    assert given.status is TrainerSample.Status.PENDING
    assert server.calls == ONE_OF_EACH


async def test_aborted_without_an_enum_of_ones_own() -> None:
    """`RolloutSample` is aborted with our own status, and keeps the agent's error."""

    async def agent(base_url: str, sample: Any) -> None:
        raise OSError("no tools")

    result = await play(FakeServer(samples=reply_of(payload(empty_reason="no_records"))), agent)
    assert result.status is Status.ABORTED
    assert result.metadata == {"abort_reason": "no_records", "agent_error": "OSError: no tools"}


@pytest.mark.parametrize(
    "error", [PrefixBroken("turn 2"), QueueFull("2000 wait"), StoreUnavailable("no Redis")]
)
async def test_other_errors_propagate(error: TokentapeError) -> None:
    """Any other error of the collect is raised, not turned into an aborted sample."""
    server = FakeServer(samples=httpx.Response(422, json=error_body(error)))
    with pytest.raises(type(error)):
        await play(server)
    assert server.calls == ONE_OF_EACH


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (httpx.Response(502, text="<html>"), UnexpectedReply),
        (reply_of(payload(), Tokentape_Digest="sha-256=0"), ContractMismatch),
    ],
)
async def test_unusable_replies_propagate(reply: httpx.Response, kind: type[Exception]) -> None:
    """A foreign or damaged reply is raised: it would hit every sample alike."""
    with pytest.raises(kind):
        await play(FakeServer(samples=reply))


async def test_a_retried_sample_forgets_its_failures() -> None:
    """An aborted sample that is rolled out again loses the marks of the earlier try."""
    first = await play(FakeServer(samples=httpx.ReadError("x")))
    first.metadata["agent_error"] = "old"
    assert {"agent_error", "abort_reason"} <= first.metadata.keys()
    second = await play(FakeServer(), idle, first)
    assert not {"agent_error", "abort_reason"} & second.metadata.keys()
    third = await play(FakeServer(), returning({"agent_error": "my own"}), first)
    assert third.metadata["agent_error"] == "my own"


async def test_open_failure_propagates() -> None:
    """If no session can be opened the agent does not run and the error is raised."""
    ran: list[int] = []

    async def agent(base_url: str, sample: Any) -> None:
        ran.append(1)

    server = FakeServer(open=httpx.Response(503, json=error_body(StoreUnavailable("no Redis"))))
    with pytest.raises(StoreUnavailable):
        await play(server, agent)
    assert (ran, server.calls) == ([], ["POST /sessions"])


@pytest.mark.parametrize("value", [0, 2.5, None])
async def test_tool_time(value: Any) -> None:
    """`agent_metrics.total_tool_time` becomes `non_generation_time`, in seconds."""
    result = await play(FakeServer(), returning({"agent_metrics": {"total_tool_time": value}}))
    assert result.non_generation_time == (value or 0.0)
    assert result.metadata["agent_metrics"] == {"total_tool_time": value}


@pytest.mark.parametrize(
    "metadata",
    [
        {"agent_metrics": {"total_tool_time": -1}},
        {"agent_metrics": {"total_tool_time": float("nan")}},
        {"agent_metrics": {"total_tool_time": True}},
        {"agent_metrics": {"total_tool_time": "3"}},
        {"agent_metrics": [3]},
        ["metadata"],
    ],
)
async def test_what_an_agent_may_not_return(metadata: Any) -> None:
    """A wrong return value is the agent author's to mend: it is raised, and the session is deleted."""
    server = FakeServer()
    with pytest.raises((TypeError, ValueError), match=r"agent"):
        await play(server, returning(metadata))
    assert server.calls == ["POST /sessions", "DELETE /sessions/s1"]


@pytest.mark.parametrize(
    ("sample", "options", "kind"),
    [
        (RolloutSample(weight_versions=["1"]), {}, LeftoverState),
        (object(), {}, CannotOverlay),
        (RolloutSample(), {"max_seq_len": 0}, InvalidRequest),
        (RolloutSample(), {"deadline_s": -1}, InvalidRequest),
    ],
)
async def test_wrong_arguments_cost_nothing(sample: Any, options: Any, kind: type[Exception]) -> None:
    """Wrong arguments are found before a session is opened or the agent runs."""
    server = FakeServer()
    with pytest.raises(kind):
        await play(server, idle, sample, **options)
    assert server.calls == []


async def test_an_agent_that_spoils_the_sample() -> None:
    """Computed state that the agent puts into the sample is refused, and the session is deleted."""

    async def agent(base_url: str, sample: RolloutSample) -> None:
        sample.weight_versions.append("1")

    server = FakeServer()
    with pytest.raises(LeftoverState):
        await play(server, agent)
    assert server.calls == ["POST /sessions", "DELETE /sessions/s1"]


async def test_cancelled_agent() -> None:
    """A cancelled episode stays cancelled: nothing is collected, the session is deleted."""
    server = FakeServer()
    running = asyncio.Event()

    async def agent(base_url: str, sample: Any) -> None:
        running.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(play(server, agent))
    await running.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert server.calls == ["POST /sessions", "DELETE /sessions/s1"]


async def test_cancelled_collect() -> None:
    """An episode that is cancelled in its collect stays cancelled, with its one DELETE sent."""
    server = FakeServer(samples=hang)
    task = asyncio.create_task(play(server))
    await server.collecting.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert server.calls == ONE_OF_EACH


async def test_an_agent_that_is_cancelled_from_within() -> None:
    """An agent's own CancelledError is a cancellation, not an agent error."""

    async def agent(base_url: str, sample: Any) -> None:
        raise asyncio.CancelledError

    server = FakeServer()
    with pytest.raises(asyncio.CancelledError):
        await play(server, agent)
    assert server.calls == ["POST /sessions", "DELETE /sessions/s1"]
