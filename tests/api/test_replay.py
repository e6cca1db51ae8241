"""Recording routing replay rows: what is asked for, what is stored, and what the agent sees."""

from typing import Any

import httpx
import numpy as np
import pytest

from tests.api.conftest import OpenSession
from tests.support.scripted import ScriptedEngine, replay_rows
from tokentape_api.settings import ApiSettings
from tokentape_contracts import limits
from tokentape_core.domain.assemble import assemble
from tokentape_core.domain.replay import KINDS, restore
from tokentape_core.domain.state import SessionState, fold
from tokentape_core.store import MemoryStore

LAYERS, CHOICES = 3, 2
USER = {"role": "user", "content": "Hello"}


@pytest.fixture(params=["full", "incremental"])
def settings(request: pytest.FixtureRequest) -> ApiSettings:
    """An API that asks for both kinds of rows."""
    return ApiSettings(
        engine_url="http://engine",
        tokenizer="-",
        redis_url="-",
        family="qwen3",
        replay=request.param,
        replay_layers=LAYERS,
        indexer_topk="on",
    )


@pytest.fixture
def engine(engine: ScriptedEngine) -> ScriptedEngine:
    engine.experts, engine.indexer = (LAYERS, CHOICES), (1, 4)
    return engine


async def _state(store: MemoryStore, session: OpenSession) -> SessionState:
    state = fold(await store.read(session.url.rpartition("/")[2]))
    assert state is not None
    return state


async def _stored(store: MemoryStore, session: OpenSession) -> dict[tuple[str, str], bytes]:
    state = await _state(store, session)
    wanted = [(turn.event, kind) for turn in state.turns for kind in turn.event.replay]
    return await store.read_blobs(session.url.rpartition("/")[2], wanted)


async def _dialogue(session: OpenSession, turns: int) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for _ in range(turns):
        messages.append(USER)
        reply = await session.chat(*messages)
        assert reply.status_code == 200, reply.text
        assert not any(f'"{kind}"' in reply.text for kind in KINDS)
        messages.append(reply.json()["choices"][0]["message"])
    return messages


async def test_rows_are_stored_once(
    session: OpenSession, store: MemoryStore, engine: ScriptedEngine, settings: ApiSettings
) -> None:
    """However the engine sends them, each row is stored once and the sample has them all."""
    await _dialogue(session, 4)
    state, stored = await _state(store, session), await _stored(store, session)
    (sample,) = assemble(state, lambda ids: "", stored=stored).samples
    rows = len(sample.tokens) - 1
    assert np.array_equal(sample.rollout_routed_experts, replay_rows(0, rows, LAYERS, CHOICES))
    assert np.array_equal(sample.rollout_indexer_topk, replay_rows(0, rows, 1, 4))
    for kind, numbers in (("routed_experts", LAYERS * CHOICES), ("indexer_topk", 4)):
        assert sum(len(data) for (_, of), data in stored.items() if of == kind) == rows * numbers
    parents = [0, *(turn.length - 1 for turn in state.turns)]
    asked = [body.get("routed_experts_start_len", 0) for body in engine.bodies]
    assert asked == (parents[:-1] if settings.replay == "incremental" else [0, 0, 0, 0])
    assert all(body["return_indexer_topk"] for body in engine.bodies)


async def test_a_retry_keeps_both_turns_rows(
    session: OpenSession, store: MemoryStore, engine: ScriptedEngine
) -> None:
    """Siblings have rows of their own, each complete."""
    messages = await _dialogue(session, 2)
    engine.texts.append("another answer, a longer one")
    assert (await session.chat(*messages[:-1])).status_code == 200
    state, stored = await _state(store, session), await _stored(store, session)
    for turn in state.turns:
        rows = restore(turn, "routed_experts", stored)
        assert rows is not None
        assert np.array_equal(rows.values, replay_rows(rows.start, turn.length - 1, LAYERS, CHOICES))


async def test_the_sessions_own_settings_count(
    session: OpenSession, store: MemoryStore, engine: ScriptedEngine, settings: ApiSettings
) -> None:
    """The event says how rows are asked for, so that all processes ask alike, whatever their own settings."""
    opened = (await _state(store, session)).opened
    assert opened.replay["routed_experts"].rows == settings.replay
    assert opened.replay["indexer_topk"].rows == "full"
    object.__setattr__(settings, "replay", "off")
    await _dialogue(session, 1)
    assert engine.bodies[0]["return_routed_experts"] is True


async def test_a_payload_that_does_not_come(
    session: OpenSession, store: MemoryStore, engine: ScriptedEngine
) -> None:
    """The turn is recorded all the same: its tokens are right."""
    engine.experts = None
    await _dialogue(session, 1)
    (turn,) = (await _state(store, session)).turns
    assert set(turn.event.replay) == {"indexer_topk"}


async def test_a_payload_above_the_limit(
    session: OpenSession, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused with what to do, and neither the turn nor a part of its rows is stored."""
    monkeypatch.setattr(limits, "REPLAY_BYTES", 100)
    reply = await session.chat(USER)
    assert (reply.status_code, reply.json()["error"]["code"]) == (502, "engine_reply_invalid")
    assert "above 100 bytes" in reply.json()["error"]["message"]
    assert (await _state(store, session)).turns == ()
    assert store._blobs == {}


async def test_wrong_rows_are_refused_before_anything_is_stored(
    session: OpenSession, store: MemoryStore, engine: ScriptedEngine
) -> None:
    """A payload that has not the rows that were asked for is 502 and names them; the session goes on."""
    engine.experts = (LAYERS + 1, CHOICES)
    reply = await session.chat(USER)
    assert reply.status_code == 502
    assert "routed_experts" in reply.json()["error"]["message"]
    assert (await _state(store, session)).turns == ()
    engine.experts = (LAYERS, CHOICES)
    await _dialogue(session, 1)


async def test_the_view_has_no_bulk(session: OpenSession, api: httpx.AsyncClient) -> None:
    """GET shows where the rows lie, not the rows."""
    await _dialogue(session, 1)
    assert '"routed_experts"' not in (await api.get(session.url)).text
    events = (await api.get(f"{session.url}?view=events")).json()["events"]
    assert events[1]["replay"]["routed_experts"]["start"] == 0
