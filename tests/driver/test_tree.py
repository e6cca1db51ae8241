"""Tree mode: an episode gives siblings, one sample for each leaf that the server kept."""

from typing import Any

import httpx
import numpy as np
import orjson
import pytest

from tests.driver.fake import BASE_URL, FakeServer, TrainerSample, reply_of
from tokentape_contracts import limits
from tokentape_contracts.errors import InvalidRequest, PrefixBroken, RequestTooLarge, error_body
from tokentape_contracts.http import SamplesRequest
from tokentape_contracts.samples import Sample, Status, encode_samples
from tokentape_driver import (
    CannotOverlay,
    MissingRolloutId,
    RolloutSample,
    SyncClient,
    TokentapeClient,
    rollout,
    validate_rollout_ids,
)

ONE_OF_EACH = ["POST /sessions", "POST /sessions/s1/samples", "DELETE /sessions/s1"]
TABLE = {"nodes": [{"seq": 1}, {"seq": 2}, {"seq": 3}], "leaves": [2, 3]}


def leaf(seq: int, *, reward: float | None = None, **metadata: Any) -> Sample:
    return Sample(
        tokens=np.array([1, 2, 10 + seq]),
        response="r",
        response_length=1,
        loss_mask=np.array([1]),
        rollout_log_probs=np.array([-0.5]),
        status=Status.COMPLETED,
        metadata={"leaf": seq, "accumulated_token_ids": [1, 2, 10 + seq], **metadata},
        reward=reward,
    )


def siblings(*leaves: Sample, empty_reason: str | None = None) -> httpx.Response:
    """A tree session's reply; without leaves it has two."""
    samples = [] if empty_reason else list(leaves or (leaf(3), leaf(2)))
    session = {"accumulated_token_ids": np.array([1, 2, 13]), "max_trim_tokens": 1, "tree": TABLE}
    return reply_of(encode_samples(samples, session, empty_reason, contract=2))


async def idle(base_url: str, sample: Any) -> None:
    """An agent that does nothing."""


def returning(metadata: Any) -> Any:
    async def agent(base_url: str, sample: Any) -> Any:
        return metadata

    return agent


async def play(server: FakeServer, agent: Any = idle, sample: Any = None, **options: Any) -> Any:
    async with TokentapeClient(BASE_URL, transport=server.transport) as client:
        given = RolloutSample(index=7) if sample is None else sample
        return await rollout(agent, given, client=client, mode="tree", **options)


async def collect(server: FakeServer, mode: str | None, sample: Any = None, **options: Any) -> Any:
    async with TokentapeClient(BASE_URL, transport=server.transport) as client:
        session = await client.open_session(mode)
        return await session.collect_samples(sample or RolloutSample(index=7), **options)


async def test_an_episode_gives_siblings() -> None:
    """A tree session is opened, and its samples are a list in the server's order."""
    server = FakeServer(samples=siblings())
    given = RolloutSample(index=7, metadata={"task": "t"})
    results = await play(server, idle, given)
    assert [sample.tokens for sample in results] == [[1, 2, 13], [1, 2, 12]]
    assert [sample.metadata["task"] for sample in results] == ["t", "t"]
    assert (given.rollout_id, given.metadata) == (None, {"task": "t"})
    assert server.requests[0].content == b'{"mode":"tree"}'
    assert server.calls == ONE_OF_EACH


async def test_one_leaf_is_a_list_too() -> None:
    """An episode with one leaf gives a list of one."""
    [sample] = await play(FakeServer(samples=siblings(leaf(1))))
    assert sample.metadata["leaf"] == 1


@pytest.mark.parametrize(
    ("index", "given", "shared"), [(7, None, 7), (7, 11, 11), (None, 11, 11), (0, None, 0), (7, 0, 0)]
)
async def test_siblings_share_a_rollout_id(index: int | None, given: int | None, shared: int) -> None:
    """The siblings' `rollout_id` is the input's, else its `index`; 0 is an id."""
    results = await play(FakeServer(samples=siblings()), idle, RolloutSample(index=index, rollout_id=given))
    assert [sample.rollout_id for sample in results] == [shared, shared]
    validate_rollout_ids([[results]])


async def test_without_an_id_nothing_starts() -> None:
    """If `rollout_id` and `index` are both None it fails, naming both, before a session is opened."""
    server = FakeServer()
    with pytest.raises(MissingRolloutId, match="rollout_id and index of the input sample are both None"):
        await play(server, idle, RolloutSample())
    assert server.calls == []


async def test_a_class_without_rollout_id() -> None:
    """A class that cannot hold a `rollout_id` is refused before a session is opened; linear takes it."""
    server = FakeServer()
    with pytest.raises(CannotOverlay, match="TrainerSample has no field 'rollout_id'"):
        await play(server, idle, TrainerSample(index=7))
    assert server.calls == []
    async with TokentapeClient(BASE_URL, transport=server.transport) as client:
        await rollout(idle, TrainerSample(index=7), client=client)


async def test_an_agent_that_takes_the_id_away() -> None:
    """The id is looked at again after the agent had the sample; without one the session is deleted."""

    async def agent(base_url: str, sample: RolloutSample) -> None:
        sample.index = None

    server = FakeServer()
    with pytest.raises(MissingRolloutId):
        await play(server, agent)
    assert server.calls == ["POST /sessions", "DELETE /sessions/s1"]


async def test_linear_leaves_the_rollout_id() -> None:
    """In linear mode `rollout_id` stays as the input has it."""
    async with TokentapeClient(BASE_URL, transport=FakeServer().transport) as client:
        plain = await rollout(idle, RolloutSample(index=7), client=client)
        named = await rollout(idle, RolloutSample(index=7, rollout_id=5), client=client, mode="linear")
    assert (plain.rollout_id, named.rollout_id) == (None, 5)


async def test_an_unknown_mode() -> None:
    """Another mode is refused before a session is opened."""
    server = FakeServer()
    async with TokentapeClient(BASE_URL, transport=server.transport) as client:
        with pytest.raises(InvalidRequest, match="mode must be one of linear, tree, not 'forest'"):
            await rollout(idle, RolloutSample(), client=client, mode="forest")  # type: ignore[call-overload]
    assert server.calls == []


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (siblings(empty_reason="no_records"), "no_records"),
        (siblings(empty_reason="all_truncated"), "all_truncated"),
        (httpx.ReadError("cut"), "TransportError: collect: tape.test:8080: ReadError: cut"),
    ],
    ids=["no_records", "all_truncated", "transport"],
)
async def test_aborted(reply: Any, reason: str) -> None:
    """An empty reply and a lost connection give a list of one aborted sample, with the id and the reason."""
    given = RolloutSample(index=7, tokens=[1])
    [sample] = await play(FakeServer(samples=reply), returning({"reward": 1.0}), given)
    assert (sample.status, sample.tokens, sample.rollout_id) == (Status.ABORTED, [1], 7)
    assert sample.metadata == {"abort_reason": reason}
    assert given.status is None


async def test_other_errors_propagate() -> None:
    """Any other error of the collect is raised, as in linear mode."""
    server = FakeServer(samples=httpx.Response(422, json=error_body(PrefixBroken("turn 2"))))
    with pytest.raises(PrefixBroken):
        await play(server)
    assert server.calls == ONE_OF_EACH


async def test_an_agent_that_raises() -> None:
    """Every sibling has the text of the agent's exception, and is failed unless that is to be kept."""

    async def agent(base_url: str, sample: Any) -> None:
        raise ZeroDivisionError("in the tool")

    results = await play(FakeServer(samples=siblings()), agent)
    assert [s.metadata["agent_error"] for s in results] == ["ZeroDivisionError: in the tool"] * 2
    assert [s.status for s in results] == [Status.FAILED] * 2
    kept = await play(FakeServer(samples=siblings()), agent, on_agent_error="keep")
    assert [s.status for s in kept] == [Status.COMPLETED] * 2


async def test_an_aborted_sibling_of_an_agent_that_raises() -> None:
    """Of the siblings those that the engine broke off stay aborted, the others are failed."""

    async def agent(base_url: str, sample: Any) -> None:
        raise OSError

    broken_off = leaf(2)
    broken_off.status = Status.ABORTED
    results = await play(FakeServer(samples=siblings(leaf(3), broken_off)), agent)
    assert [s.status for s in results] == [Status.FAILED, Status.ABORTED]


async def test_tool_time_of_the_episode() -> None:
    """Every sibling has the whole episode's `non_generation_time`."""
    results = await play(
        FakeServer(samples=siblings()), returning({"agent_metrics": {"total_tool_time": 2.5}})
    )
    assert [sample.non_generation_time for sample in results] == [2.5, 2.5]


async def test_the_server_applies_the_agents_metadata() -> None:
    """The agent's metadata is sent as the server accepts it; only what comes back is in the samples."""
    server = FakeServer(samples=siblings(leaf(3, reward=0.5, answer="server's"), leaf(2, reward=0.5)))
    said = {"reward": np.float32(0.5), "answer": "4", "steps": (1, np.arange(2)), "none": None}
    results = await play(server, returning(said), max_seq_len=9)
    request = SamplesRequest.parse(server.posted.content)
    assert request.metadata == {"reward": 0.5, "answer": "4", "steps": [1, [0, 1]], "none": None}
    assert request.max_seq_len == 9
    assert [sample.reward for sample in results] == [0.5, 0.5]
    assert [sample.metadata.get("answer") for sample in results] == ["server's", None]


async def test_linear_metadata_stays_here() -> None:
    """In linear mode, and with the server's default mode, metadata is not sent and may be any objects."""
    for mode in ("linear", None):
        server = FakeServer()
        thing = object()
        collected = await collect(server, mode, metadata={"thing": thing})
        assert collected.samples[0].metadata["thing"] is thing
        assert orjson.loads(server.posted.content).keys() == {"max_seq_len", "deadline_s"}


CYCLE: list[Any] = []
CYCLE.append(CYCLE)


@pytest.mark.parametrize(
    ("metadata", "match"),
    [
        ({"a": {"b": [0, object()]}}, r"metadata\.a\.b\[1\] is of type object"),
        ({"reward": float("nan")}, r"metadata\.reward is nan"),
        ({"reward": np.float64("inf")}, r"metadata\.reward is inf"),
        ({"steps": np.array([0.0, np.nan])}, r"metadata\.steps\[1\] is nan"),
        ({"a": {1: 2}}, r"metadata\.a has the key 1"),
        ({"raw": b"bytes"}, r"metadata\.raw is of type bytes"),
        ({"seen": {1, 2}}, r"metadata\.seen is of type set"),
        ({"when": np.datetime64("2020-01-01")}, r"metadata\.when is of type date"),
        ({"big": 2**64}, "Integer exceeds 64-bit"),
        ({"text": "\ud800"}, "surrogates"),
        ({"cycle": CYCLE}, r"nests deeper than 100 levels"),
        ({"deep": orjson.loads("[" * 99 + "]" * 99)}, "deeper than 100 levels"),
    ],
)
async def test_metadata_that_json_cannot_hold(metadata: Any, match: str) -> None:
    """What JSON cannot hold is refused with its place before the collect is sent; `rollout` then deletes."""
    server = FakeServer(samples=siblings())
    with pytest.raises(InvalidRequest, match=match):
        await collect(server, "tree", metadata=metadata)
    assert server.calls == ["POST /sessions"]
    server = FakeServer(samples=siblings())
    with pytest.raises(InvalidRequest, match=match):
        await play(server, returning(metadata))
    assert server.calls == ["POST /sessions", "DELETE /sessions/s1"]


async def test_metadata_that_is_too_large() -> None:
    """Metadata above the server's limit for a body is refused before it is sent."""
    server = FakeServer()
    with pytest.raises(RequestTooLarge, match=f"the limit is {limits.SMALL_BODY_BYTES:,}"):
        await collect(server, "tree", metadata={"log": "x" * limits.SMALL_BODY_BYTES})
    assert server.calls == ["POST /sessions"]


@pytest.mark.parametrize("mode", ["tree", None])
async def test_a_leafs_own_keys_survive(mode: str | None) -> None:
    """A sibling has its own leaf and tokens, the session's table, and nothing of another leaf's."""
    both = FakeServer(samples=siblings(leaf(3), leaf(2, max_trim_tokens="the leaf's")))
    given = RolloutSample(index=7, metadata={"tree": "old", "leaf": "old", "task": "t"})
    collected = await collect(both, mode, given)
    first, second = (sample.metadata for sample in collected.samples)
    assert (first["leaf"], first["accumulated_token_ids"], first["tree"]) == (3, [1, 2, 13], TABLE)
    assert (second["leaf"], second["accumulated_token_ids"], second["tree"]) == (2, [1, 2, 12], TABLE)
    assert (first["max_trim_tokens"], second["max_trim_tokens"]) == (1, "the leaf's")
    assert first["task"] == "t"
    assert collected.session_metadata["accumulated_token_ids"] == [1, 2, 13]
    assert [sample.rollout_id for sample in collected.samples] == [7, 7]


async def test_the_sessions_tokens_are_nobodys() -> None:
    """A sample without `accumulated_token_ids` of its own does not get those of the newest path."""
    bare = leaf(2)
    del bare.metadata["accumulated_token_ids"]
    collected = await collect(FakeServer(samples=siblings(bare)), "tree")
    assert "accumulated_token_ids" not in collected.samples[0].metadata


async def test_a_tree_by_the_servers_default() -> None:
    """Without a mode, a reply with a tree gives siblings; the agent's metadata is below the server's."""
    server = FakeServer(samples=siblings())
    collected = await collect(server, None, metadata={"leaf": "agent's", "answer": "4"})
    assert [(s.metadata["leaf"], s.metadata["answer"]) for s in collected.samples] == [(3, "4"), (2, "4")]


async def test_a_reward_that_the_server_has_not_seen() -> None:
    """Without a mode the agent's reward is that of every sibling for which the server has none."""
    server = FakeServer(samples=siblings(leaf(3), leaf(2, reward=0.25)))
    collected = await collect(server, None, RolloutSample(index=7, reward=9.0), metadata={"reward": 0.5})
    assert [sample.reward for sample in collected.samples] == [0.5, 0.25]


async def test_the_server_decides_about_the_reward() -> None:
    """In mode tree the server, whose hook may want otherwise, has the last word on a reward."""
    server = FakeServer(samples=siblings())
    collected = await collect(server, "tree", RolloutSample(index=7, reward=9.0), metadata={"reward": 0.5})
    assert [sample.reward for sample in collected.samples] == [9.0, 9.0]


async def test_a_session_knows_its_mode() -> None:
    """A session has the mode that it was opened with, None for the server's default."""
    async with TokentapeClient(BASE_URL, transport=FakeServer().transport) as client:
        assert [(await client.open_session(mode)).mode for mode in ("tree", "linear", None)] == [
            "tree",
            "linear",
            None,
        ]


async def test_collect_needs_an_id_too() -> None:
    """A collect of a tree session without an id sends nothing and leaves the session open."""
    server = FakeServer(samples=siblings())
    with pytest.raises(MissingRolloutId):
        await collect(server, "tree", RolloutSample())
    assert server.calls == ["POST /sessions"]


def test_without_an_event_loop() -> None:
    """The sync client plays a tree episode with the same result."""
    server = FakeServer(samples=siblings())
    with SyncClient(BASE_URL, transport=server.transport) as client:
        results: list[RolloutSample] = client.rollout(idle, RolloutSample(index=7), mode="tree")
        server.samples = FakeServer().samples
        single: RolloutSample = client.rollout(idle, RolloutSample(index=7))
    assert [sample.rollout_id for sample in results] == [7, 7]
    assert single.rollout_id is None
