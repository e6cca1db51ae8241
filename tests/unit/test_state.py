"""Folding events into a state, and what a turn knows of its path."""

from typing import Any

import pytest

from tests.support.sessions import entries, opened, sealed, state_of, turn
from tokentape_contracts.errors import StreamCorrupt
from tokentape_contracts.events import OPENED_ID, SEALED_ID
from tokentape_core.domain.state import apply, fold, turn_id


def test_no_entries_are_no_state() -> None:
    """Folding nothing gives None, or the state that was given."""
    state = state_of(turn())
    assert fold([]) is None
    assert fold([], state) is state


def test_a_state_says_what_was_folded() -> None:
    """Opening, turns and seal are kept, and `last_id` names the last entry at each step."""
    first, one, two, last = opened(), turn(), turn(), sealed()
    states = []
    state = None
    for entry_id, event in entries(one, two, first=first, last=last):
        state = apply(state, entry_id, event)
        states.append(state)
    assert [s.last_id for s in states] == [OPENED_ID, "1-0", "2-0", SEALED_ID]
    assert [len(s.turns) for s in states] == [0, 1, 2, 2]
    assert states[-1].opened is first
    assert [t.event for t in states[-1].turns] == [one, two]
    assert states[-1].sealed is last
    assert states[-2].sealed is None


def test_applying_changes_no_earlier_state() -> None:
    """A state is immutable: the one before an entry still says what it said."""
    before = state_of(turn())
    apply(before, "2-0", turn(parent=1, keep=4))
    assert len(before.turns) == 1
    assert before.head.seq == 1


CORRUPT: dict[str, list[tuple[str, Any]]] = {
    "a turn first": [("1-0", turn())],
    "a seal first": [(SEALED_ID, sealed())],
    "opened at another id": [("0-2", opened())],
    "opened twice": [(OPENED_ID, opened()), (OPENED_ID, opened())],
    "opened in the place of a turn": [(OPENED_ID, opened()), ("1-0", opened())],
    "a gap": [(OPENED_ID, opened()), ("2-0", turn())],
    "a gap later": [*entries(turn(), turn()), ("4-0", turn())],
    "a turn twice": [*entries(turn(), turn()), ("2-0", turn())],
    "a turn at an earlier id": [*entries(turn(), turn()), ("1-0", turn())],
    "a turn between two ids": [*entries(turn()), ("1-1", turn())],
    "a turn in the place of the seal": [*entries(turn()), (SEALED_ID, turn())],
    "a seal in the place of a turn": [*entries(turn()), ("2-0", sealed())],
    "a seal below the greatest id": [*entries(turn()), ("18446744073709551615-0", sealed())],
    "a turn after the seal": [*entries(turn(), last=sealed()), ("2-0", turn())],
    "a seal after the seal": [*entries(turn(), last=sealed()), (SEALED_ID, sealed())],
    "an unknown parent": entries(turn(parent=2)),
    "its own parent": entries(turn(), turn(parent=2)),
    "a negative parent": entries(turn(parent=-1)),
    "tokens kept of no parent": entries(turn(keep=1)),
    "more tokens kept than the parent has": entries(turn(), turn(parent=1, keep=5)),
    "a negative number kept": entries(turn(), turn(parent=1, keep=-1)),
}


@pytest.mark.parametrize("case", CORRUPT)
def test_a_stream_that_breaks_an_invariant_is_refused(case: str) -> None:
    """An entry that does not follow is `stream_corrupt`, never skipped or guessed at (INV-3)."""
    with pytest.raises(StreamCorrupt):
        fold(CORRUPT[case])


def test_all_of_a_parents_tokens_may_be_kept() -> None:
    """The greatest possible `keep` is the parent's length."""
    state = state_of(turn(), turn(parent=1, keep=4, suffix=[5], output=[6]))
    assert state.turns[1].tokens.tolist() == [1, 2, 3, 4, 5, 6]


TOKENS: dict[str, tuple[list[Any], list[list[int]]]] = {
    "extending": (
        [turn(), turn(parent=1, keep=4, suffix=[5], output=[6])],
        [[1, 2, 3, 4], [1, 2, 3, 4, 5, 6]],
    ),
    "a boundary token rendered anew": (
        [turn(), turn(parent=1, keep=3, suffix=[7, 8], output=[9])],
        [[1, 2, 3, 4], [1, 2, 3, 7, 8, 9]],
    ),
    "a suffix that repeats what it did not keep": (
        [turn(), turn(parent=1, keep=2, suffix=[3, 4, 5], output=[6])],
        [[1, 2, 3, 4], [1, 2, 3, 4, 5, 6]],
    ),
    "a child shorter than its parent": (
        [turn(output=[3, 4, 5, 6]), turn(parent=1, keep=2, suffix=[], output=[9])],
        [[1, 2, 3, 4, 5, 6], [1, 2, 9]],
    ),
    "each generation keeps less": (
        [
            turn(),
            turn(parent=1, keep=4, suffix=[5], output=[6]),
            turn(parent=2, keep=1, suffix=[7], output=[8]),
            turn(parent=3, keep=3, suffix=[9], output=[]),
        ],
        [[1, 2, 3, 4], [1, 2, 3, 4, 5, 6], [1, 7, 8], [1, 7, 8, 9]],
    ),
    "siblings": (
        [
            turn(),
            turn(parent=1, keep=4, suffix=[5], output=[6]),
            turn(parent=1, keep=4, suffix=[5], output=[7]),
        ],
        [[1, 2, 3, 4], [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 7]],
    ),
    "a second root": ([turn(), turn(suffix=[8], output=[9])], [[1, 2, 3, 4], [8, 9]]),
    "nothing at all": ([turn(suffix=[], output=[])], [[]]),
}


@pytest.mark.parametrize("case", TOKENS)
def test_a_turns_tokens_are_its_prompt_and_its_output(case: str) -> None:
    """The parent's kept tokens, the suffix, the output; lengths agree with them."""
    events, expected = TOKENS[case]
    turns = state_of(*events).turns
    assert [t.tokens.tolist() for t in turns] == expected
    assert [t.length for t in turns] == [len(tokens) for tokens in expected]
    assert [t.prompt_length for t in turns] == [t.length - len(t.event.output) for t in turns]


def test_tokens_are_built_anew() -> None:
    """Who changes the returned array changes nothing that is stored."""
    [first] = state_of(turn()).turns
    first.tokens[:] = 0
    assert first.tokens.tolist() == [1, 2, 3, 4]


def test_a_path_leads_from_the_root() -> None:
    """The path names the ancestors in order and leaves siblings out."""
    state = state_of(turn(), turn(parent=1), turn(parent=1), turn(parent=3))
    assert [t.seq for t in state.head.path] == [1, 3, 4]
    assert [t.seq for t in state.turns[1].path] == [1, 2]


def test_messages_are_counted_along_the_path() -> None:
    """`messages` is the number on the path up to and with the turn's answer."""
    state = state_of(turn(messages=[{}] * 3), turn(parent=1, messages=[{}] * 2), turn(messages=[{}] * 4))
    assert [t.messages for t in state.turns] == [3, 5, 4]


def test_tools_are_those_of_the_nearest_turn_that_names_some() -> None:
    """A turn without tools of its own has its parent's; an empty list is a choice, not an absence."""
    state = state_of(
        turn(tools=None),
        turn(parent=1, tools=["a"]),
        turn(parent=2, tools=None),
        turn(parent=3, tools=[]),
        turn(parent=4, tools=None),
        turn(tools=None),
    )
    assert [t.tools for t in state.turns] == [None, ["a"], ["a"], [], [], None]


def test_turn_ids_are_the_streams() -> None:
    """Turn number n stands at `n-0`."""
    assert [turn_id(seq) for seq in (1, 1024)] == ["1-0", "1024-0"]
