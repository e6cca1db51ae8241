"""Random sessions, as agents make them: every sampled token is trained once, or named with its reason."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.support.sessions import assistant, opened, state_of, user
from tokentape_contracts.accounting import Accounting, Reason
from tokentape_contracts.errors import RequestError
from tokentape_contracts.events import Blob, ReplaySpec
from tokentape_core.domain.assemble import assemble, expected_accounting
from tokentape_core.domain.decide import Generation, draft_turn, record_turn
from tokentape_core.domain.match import equivalent
from tokentape_core.domain.position import Head, Position, position
from tokentape_core.domain.request import ChatRequest
from tokentape_core.domain.state import SessionState, Turn, apply, turn_id
from tokentape_core.domain.tree import PICKS, Hooks, LeafSample, train_once

MAX_TRIM = 2
VOCABULARY = 100_000
FINISHES = ("stop", "stop", "tool_calls", "length", "abort", "content_filter")
REPLAY = {"routed_experts": ReplaySpec(rows="full", layers=1, prefix="latest")}


def _decode(ids: Any) -> str:
    return "".join(f"[{token}]" for token in ids)


class Episode:
    """A session that requests are sent to; no sampled id comes twice, and equal messages have equal ids."""

    def __init__(self, **given: Any) -> None:
        self.state = state_of(first=opened(matcher="equivalent", max_trim_tokens=MAX_TRIM, **given))
        self._tokens = iter(range(1000, VOCABULARY))
        self._ids: dict[tuple[int, str], list[int]] = {}

    def send(self, draw: st.DrawFn, messages: list[dict[str, Any]], tools: list[Any] | None) -> None:
        """One request, which is recorded unless it is refused."""
        try:
            at = position(self.state, messages, equivalent, Head(tools, {}))
        except RequestError:
            return
        keep = at.parent.length - self._trim(at.parent) if at.parent else 0
        output = [next(self._tokens) for _ in range(draw(st.integers(0, 4)))]
        asked = ChatRequest(messages, Head(tools, {}), stream=False, settings={}, size=0)
        suffix = np.array(self._suffix(at), np.int32)
        event = record_turn(
            draft_turn(self.state, asked, at, keep, suffix, requested_at=1.0),
            Generation(
                np.array(output, np.int32),
                np.full(len(output), -0.5),
                draw(st.sampled_from(FINISHES)),
                "r",
                assistant(f"answer {len(self.state.turns)}"),
                {"choices": [{}]},
                {},
            ),
            event_id=f"{len(self.state.turns):032x}",
            vocabulary=VOCABULARY,
            replay=_rows() if self.state.opened.replay and draw(st.booleans()) else {},
            committed_at=2.0,
        )
        self.state = apply(self.state, turn_id(len(self.state.turns) + 1), event)

    def _trim(self, parent: Turn) -> int:
        return min(MAX_TRIM, len(parent.event.output), parent.seq % 3)

    def _suffix(self, at: Position) -> list[int]:
        text = repr((at.new_messages, at.head.tools if at.parent is None else None))
        parent = at.parent.seq if at.parent else 0
        return self._ids.setdefault((parent, text), [len(self._ids), *range(len(at.new_messages))])


def _rows() -> dict[str, Blob]:
    """Says that rows came; no test here reads them."""
    return {"routed_experts": Blob(start=0, rows=0, layers=1, topk=1, dtype="u1", stored=(), parts=0)}


@st.composite
def episodes(draw: st.DrawFn, replay: bool = False) -> SessionState:
    """Up to 9 requests: each goes on from a turn, or retries, revises or alters it, or begins anew."""
    episode = Episode(
        mode=draw(st.sampled_from(["linear", "tree"])),
        altered_answer=draw(st.sampled_from(["refuse", "keep"])),
        replay=REPLAY if replay else {},
    )
    tools = [None, [{"function": {"name": "a"}}], [{"function": {"name": "b"}}]]
    for number in range(draw(st.integers(1, 9))):
        turns = episode.state.turns
        # Of a line mostly the newest turn, as else nothing happens.
        turn = draw(st.sampled_from([*turns, turns[-1], turns[-1]])) if turns else None
        said = [message for t in turn.path for message in t.event.messages] if turn else []
        own = len(turn.event.messages) if turn else 0
        action = draw(st.sampled_from(["go on", "go on", "retry", "revise", "alter", "inject", "begin"]))
        new = [user(f"message {number}")]
        messages = {
            "go on": [*said, *new],
            "retry": said[:-1] or new,
            "revise": [*said[: len(said) - own], *new],
            "alter": [*said[:-1], assistant("altered"), *new],
            "inject": [*said, assistant("mine"), *new],
            "begin": new,
        }[action]
        episode.send(draw, messages, draw(st.sampled_from(tools)))
    return episode.state


def _masking(seed: int) -> Any:
    """A finish hook that trains once, and then masks some turns."""

    def finish(samples: Sequence[LeafSample], metadata: Mapping[str, Any]) -> None:
        train_once(samples, metadata)
        for item in samples:
            for seq, span in item.spans.items():
                if (seq + seed) % 3 == 0:
                    item.sample.loss_mask[span][seed % 2 :] = 0

    return finish


def _some(seed: int) -> Any:
    """A pick hook that drops some leaves, whatever they are."""
    return lambda leaves: [leaf for leaf in leaves if (leaf.turn.seq + seed) % 2]


def _ensure_complete(state: SessionState, accounting: Accounting, trained: Counter[int]) -> None:
    """Each turn's sampled tokens are those that are trained and those that are named, one by one."""
    assert accounting.generations == len(state.turns)
    assert not trained or max(trained.values()) == 1, "a token is trained twice"
    named: Counter[int] = Counter()
    for entry in accounting.left_out:
        named[entry.turn] += entry.tokens
    for turn in state.turns:
        here = sum(trained[token] for token in turn.event.output.tolist())
        assert here + named[turn.seq] == len(turn.event.output), f"turn {turn.seq}"
    assert accounting.trained_tokens == sum(trained.values())
    assert accounting.sampled_tokens == accounting.trained_tokens + sum(named.values())


def _ensure_true(state: SessionState, accounting: Accounting) -> None:
    """What stands in for a turn is what the reason says."""
    line = {turn.seq for turn in state.head.path} if state.head else set()
    for entry in accounting.left_out:
        turn = state.turns[entry.turn - 1]
        other = state.turns[entry.by - 1] if entry.by else None
        if entry.reason is Reason.RETRIED:
            assert other is not None
            assert other.seq > turn.seq or other.seq in line
            assert other.tokens[: other.prompt_length].tolist() == turn.tokens[: turn.prompt_length].tolist()
        elif entry.reason is Reason.REVISED:
            assert other is not None
            assert state.opened.mode == "linear"
            assert other.seq in line
            assert turn.seq not in line
        else:
            assert other is None


def _trained(samples: Sequence[Any]) -> Counter[int]:
    trained: Counter[int] = Counter()
    for sample in samples:
        response = sample.tokens[len(sample.tokens) - sample.response_length :]
        trained.update(response[np.asarray(sample.loss_mask) != 0].tolist())
    return trained


picks = st.sampled_from([*PICKS.values(), _some(0), _some(1)])
finishes = st.sampled_from([train_once, _masking(0), _masking(1)])


@given(episodes(), st.none() | st.integers(1, 30), picks, finishes)
def test_every_sampled_token_is_accounted_for(
    state: SessionState, max_seq_len: int | None, pick: Any, finish: Any
) -> None:
    """In both modes, whatever agents do, limits cut and hooks choose: nothing is lost and nothing doubled."""
    assembly = assemble(state, _decode, max_seq_len=max_seq_len, hooks=Hooks(pick, finish))
    _ensure_complete(state, assembly.accounting, _trained(assembly.samples))
    _ensure_true(state, assembly.accounting)
    assert assembly.session_metadata["accounting"] == assembly.accounting.to_json()
    assert Accounting.from_json(assembly.accounting.to_json()) == assembly.accounting


@given(episodes())
def test_what_get_shows_is_what_a_collect_gives(state: SessionState) -> None:
    """Without `max_seq_len` and with the default hooks both account alike."""
    assert expected_accounting(state) == assemble(state, _decode).accounting


@given(episodes())
def test_by_default_only_retries_and_cuts_leave_a_tree(state: SessionState) -> None:
    """The default hooks drop only retried turns of a tree, and those behind one that did not complete."""
    reasons = {entry.reason for entry in assemble(state, _decode).accounting.left_out}
    allowed = {Reason.RETRIED, Reason.AFTER_CUT, Reason.TRIMMED}
    assert reasons <= (allowed if state.opened.mode == "tree" else allowed | {Reason.REVISED})


@given(episodes(replay=True))
def test_missing_replay_rows_are_named(state: SessionState) -> None:
    """Turns behind one that lost its rows are left out under that reason."""
    said = expected_accounting(state)
    assert said is not None
    named: Counter[int] = Counter()
    for entry in said.left_out:
        named[entry.turn] += entry.tokens
        if entry.reason is Reason.REPLAY_ROWS_MISSING:
            path = state.turns[entry.turn - 1].path
            assert any(a.event.replay and not b.event.replay for a, b in pairwise(path))
    assert said.sampled_tokens == said.trained_tokens + sum(named.values())
