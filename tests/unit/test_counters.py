"""What the engine counted, gathered over turns, whatever it leaves out or spells otherwise."""

from typing import Any

import pytest

from tests.support.hooks import everything
from tests.support.sessions import opened, state_of, turn
from tokentape_contracts.events import TurnRecorded
from tokentape_contracts.samples import Sample, encode_samples
from tokentape_core.domain.assemble import assemble
from tokentape_core.domain.counters import (
    prefix_cache_info,
    spec_info,
    weight_version_spans,
    weight_versions,
)
from tokentape_core.domain.state import Turn
from tokentape_core.domain.tree import DEFAULT_HOOKS, Hooks

OLD = {"spec_accept_token_num": 3, "spec_draft_token_num": 5, "spec_verify_ct": 2}
NEW = {"spec_num_correct_drafts": 30, "spec_num_proposed_drafts": 50, "spec_verify_ct": 20}
NO_NUMBERS = [None, "3", "", [3], {"n": 3}, float("nan"), float("inf"), float("-inf")]


def _turns(*metas: dict[str, Any], output: tuple[int, ...] = (3, 4)) -> tuple[Turn, ...]:
    return state_of(*(turn(meta=meta, output=output) for meta in metas)).turns


# Prefix cache


def test_cache_counters_add_up() -> None:
    """Both sums are over all turns; a turn without one of them adds nothing to it."""
    turns = _turns({"cached_tokens": 1, "prompt_tokens": 2}, {"prompt_tokens": 30}, {"cached_tokens": 400})
    assert prefix_cache_info(turns) == {"cached_tokens": 401, "total_prompt_tokens": 32}


def test_cache_counters_are_always_there() -> None:
    """Both keys are there without turns and without counters."""
    nothing = {"cached_tokens": 0, "total_prompt_tokens": 0}
    assert prefix_cache_info([]) == prefix_cache_info(_turns({})) == nothing


@pytest.mark.parametrize("value", NO_NUMBERS, ids=repr)
def test_a_cache_counter_that_is_no_number_is_left_out(value: Any) -> None:
    """It takes no other turn's number with it."""
    turns = _turns({"cached_tokens": value, "prompt_tokens": value}, {"cached_tokens": 1, "prompt_tokens": 2})
    assert prefix_cache_info(turns) == {"cached_tokens": 1, "total_prompt_tokens": 2}


# Speculative decoding


@pytest.mark.parametrize(
    ("metas", "expected"),
    [
        ([], {}),
        ([{}], {}),
        ([{"spec_accept_rate": 0.5}], {}),
        ([{"prompt_tokens": 2, "completion_tokens": 2}], {}),
        ([{"spec_verify_ct": 2}], {"spec_verify_ct": 2}),
        ([{"spec_accept_token_num": 3}], {"spec_num_correct_drafts": 3}),
        ([{"spec_num_proposed_drafts": 5}], {"spec_num_proposed_drafts": 5}),
        (
            [{"spec_verify_ct": 2}, {"spec_draft_token_num": 5}],
            {"spec_verify_ct": 2, "spec_num_proposed_drafts": 5},
        ),
    ],
    ids=repr,
)
def test_a_counter_that_was_not_sent_has_no_key(
    metas: list[dict[str, Any]], expected: dict[str, int]
) -> None:
    """Only what some turn counted is there; the sampled tokens are there if anything is."""
    info = spec_info(_turns(*metas))
    assert info == (expected and {**expected, "completion_tokens": 2 * len(metas)})


def test_old_and_new_names_add_up_over_turns() -> None:
    """An engine that is upgraded within a session gives one sum under our name."""
    assert spec_info(_turns(OLD, NEW, {}, OLD)) == {
        "spec_num_correct_drafts": 36,
        "spec_num_proposed_drafts": 60,
        "spec_verify_ct": 24,
        "completion_tokens": 8,
    }


def test_two_names_in_one_turn_count_once() -> None:
    """The newer name wins, unless what it holds is no number."""
    assert spec_info(_turns({**OLD, **NEW}))["spec_num_correct_drafts"] == 30
    mixed = {**OLD, "spec_num_correct_drafts": None, "spec_num_proposed_drafts": "many"}
    assert spec_info(_turns(mixed)) == {
        "spec_num_correct_drafts": 3,
        "spec_num_proposed_drafts": 5,
        "spec_verify_ct": 2,
        "completion_tokens": 2,
    }


@pytest.mark.parametrize("value", NO_NUMBERS, ids=repr)
def test_a_spec_counter_that_is_no_number_is_left_out(value: Any) -> None:
    """Alone it gives no key and no info; beside another turn's number it changes nothing."""
    assert spec_info(_turns({"spec_verify_ct": value})) == {}
    info = spec_info(_turns({"spec_verify_ct": value}, {"spec_verify_ct": 7}))
    assert info == {"spec_verify_ct": 7, "completion_tokens": 4}


def test_a_counter_of_zero_was_counted() -> None:
    """Zero is a number: its key is there."""
    assert spec_info(_turns({"spec_verify_ct": 0})) == {"spec_verify_ct": 0, "completion_tokens": 2}


# Weight versions


def _span(version: Any, start: Any, end: Any) -> dict[str, Any]:
    return {"version": version, "start": start, "end": end}


TWO_VERSIONS = [_span("7", 0, 1), _span("8", 1, 2)]


@pytest.mark.parametrize(
    ("meta", "expected"),
    [
        ({}, []),
        ({"weight_version": None}, []),
        ({"weight_version": "v"}, ["v"]),
        ({"weight_version": 0}, ["0"]),
        ({"weight_versions": TWO_VERSIONS}, ["8"]),
        ({"weight_version": None, "weight_versions": TWO_VERSIONS}, ["8"]),
        ({"weight_version": "said", "weight_versions": TWO_VERSIONS}, ["said"]),
        ({"weight_versions": [_span(0, 0, 2)]}, ["0"]),
        ({"weight_versions": [_span("7", 0, 2), _span(None, 1, 2)]}, ["7"]),
        ({"weight_versions": [_span("7", 0, 2), "8", None]}, ["7"]),
        ({"weight_versions": []}, []),
        ({"weight_versions": {"version": "7", "start": 0, "end": 2}}, []),
        ({"weight_versions": "78"}, []),
    ],
    ids=repr,
)
def test_a_turn_has_the_version_of_its_last_token(meta: dict[str, Any], expected: list[str]) -> None:
    """`weight_version` says it, else the last span that is one; a turn that says nothing adds nothing."""
    assert weight_versions(_turns(meta)) == expected


def test_versions_are_those_of_the_turns_in_order() -> None:
    """One for each turn that has one, also twice the same."""
    metas = [{"weight_version": "1"}, {}, {"weight_versions": TWO_VERSIONS}, {"weight_version": "1"}]
    assert weight_versions(_turns(*metas)) == ["1", "8", "1"]


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (5, [("a", 0, 2), ("b", 2, 5)]),
        (4, [("a", 0, 2), ("b", 2, 4)]),
        (3, [("a", 0, 2), ("b", 2, 3)]),
        (2, [("a", 0, 2)]),
        (1, [("a", 0, 1)]),
        (0, []),
    ],
)
def test_spans_end_with_the_tokens_that_are_left(size: int, expected: list[tuple[str, int, int]]) -> None:
    """Of a turn that lost output the spans are cut, and those of lost tokens only are gone."""
    [one] = _turns({"weight_versions": [_span("a", 0, 2), _span("b", 2, 5)]}, output=(1, 2, 3, 4, 5))
    for offset in (0, 100):
        spans = weight_version_spans(one, size, offset)
        found = [(span["version"], span["start"] - offset, span["end"] - offset) for span in spans]
        assert found == expected


MALFORMED: dict[str, Any] = {
    "no list": _span("a", 0, 2),
    "null": None,
    "a number": [1],
    "a list": [["a", 0, 2]],
    "no version": [{"start": 0, "end": 2}],
    "a null version": [_span(None, 0, 2)],
    "no start": [{"version": "a", "end": 2}],
    "no end": [{"version": "a", "start": 0}],
    "a null end": [_span("a", 0, None)],
    "positions as text": [_span("a", "0", "2")],
    "positions as floats": [_span("a", 0.0, 2.0)],
    "positions as booleans": [_span("a", False, True)],
    "empty": [_span("a", 1, 1)],
    "backwards": [_span("a", 2, 1)],
    "behind the output": [_span("a", 2, 9)],
    "before the output": [_span("a", -5, 0)],
}


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_span_is_left_out(case: str) -> None:
    """It is no error and no span, and good ones beside it stay."""
    given = MALFORMED[case]
    assert weight_version_spans(_turns({"weight_versions": given})[0], 2, 0) == []
    if isinstance(given, list):
        [one] = _turns({"weight_versions": [*given, _span("b", 0, 2)]})
        assert weight_version_spans(one, 2, 0) == [{"version": "b", "start": 0, "end": 2}]


def test_a_span_beyond_the_output_is_clipped() -> None:
    """A span never names a token that the turn has not."""
    [one] = _turns({"weight_versions": [_span(7, -3, 99)]})
    assert weight_version_spans(one, 2, 10) == [{"version": "7", "start": 10, "end": 12}]


# In samples


def _sample(*turns: TurnRecorded, max_seq_len: int | None = None) -> Sample:
    [sample] = assemble(state_of(*turns), lambda ids: "", max_seq_len=max_seq_len).samples
    return sample


FIRST = turn(output=[3, 4, 5], meta={"weight_versions": [_span("7", 0, 1), _span("8", 1, 3)]})


def _later(keep: int) -> TurnRecorded:
    meta = {"weight_versions": [_span("8", 0, 1), _span("9", 1, 2)]}
    return turn(parent=1, keep=keep, suffix=[60, 70], output=[8, 9], meta=meta)


def test_spans_are_positions_of_the_response() -> None:
    """The second turn's spans stand behind the first's output and the environment's tokens."""
    sample = _sample(FIRST, _later(keep=5))
    assert sample.metadata["weight_version_spans"] == [
        {"version": "7", "start": 0, "end": 1},
        {"version": "8", "start": 1, "end": 3},
        {"version": "8", "start": 5, "end": 6},
        {"version": "9", "start": 6, "end": 7},
    ]
    assert sample.weight_versions == ["8", "9"]
    trained = [p for s in sample.metadata["weight_version_spans"] for p in range(s["start"], s["end"])]
    assert trained == [p for p, flag in enumerate(sample.loss_mask.tolist()) if flag]


@pytest.mark.parametrize(
    ("keep", "expected"),
    [
        (4, [("7", 0, 1), ("8", 1, 2), ("8", 4, 5), ("9", 5, 6)]),
        (3, [("7", 0, 1), ("8", 3, 4), ("9", 4, 5)]),
    ],
)
def test_spans_of_trimmed_tokens_are_cut(keep: int, expected: list[tuple[str, int, int]]) -> None:
    """Tokens that the next prompt rendered anew were sampled by no version; the spans behind move up."""
    sample = _sample(FIRST, _later(keep))
    spans = sample.metadata["weight_version_spans"]
    assert [(span["version"], span["start"], span["end"]) for span in spans] == expected
    trained = [p for span in spans for p in range(span["start"], span["end"])]
    assert trained == [p for p, flag in enumerate(sample.loss_mask.tolist()) if flag]


@pytest.mark.parametrize(
    ("max_seq_len", "expected"),
    [(8, [("7", 0, 1), ("8", 1, 3), ("8", 5, 6)]), (7, [("7", 0, 1), ("8", 1, 3)]), (3, [("7", 0, 1)])],
)
def test_spans_end_with_a_truncated_sample(max_seq_len: int, expected: list[tuple[str, int, int]]) -> None:
    """Of output that `max_seq_len` took away there is no span."""
    spans = _sample(FIRST, _later(5), max_seq_len=max_seq_len).metadata["weight_version_spans"]
    assert [(span["version"], span["start"], span["end"]) for span in spans] == expected


def test_without_spans_there_is_no_key() -> None:
    """An engine that does not say them, or none that holds, leaves the metadata as it was."""
    assert "weight_version_spans" not in _sample(turn()).metadata
    assert "weight_version_spans" not in _sample(turn(meta={"weight_versions": [1]})).metadata


# In the session's metadata


def test_siblings_count_their_shared_turn_once() -> None:
    """Over the whole tree each generation is counted once, though every leaf's sample counts its own path."""
    meta = {"cached_tokens": 1, "prompt_tokens": 10, **NEW}
    root = turn(meta=meta)
    siblings = [turn(parent=1, keep=4, suffix=[n], output=[n], meta=meta) for n in (5, 6, 7)]
    dropped = turn(parent=4, keep=6, suffix=[8], output=[9], finish="length", meta={"prompt_tokens": 100})
    state = state_of(root, *siblings, dropped, first=opened(mode="tree"))
    assembly = assemble(state, lambda ids: "", hooks=Hooks(everything, DEFAULT_HOOKS.finish))
    assert assembly.session_metadata["counters"] == {
        "generations": 5,
        "prefix_cache_info": {"cached_tokens": 4, "total_prompt_tokens": 140},
        "spec_info": {
            "spec_num_correct_drafts": 120,
            "spec_num_proposed_drafts": 200,
            "spec_verify_ct": 80,
            "completion_tokens": 6,
        },
    }
    of_paths = [sample.prefix_cache_info["total_prompt_tokens"] for sample in assembly.samples]
    assert of_paths == [20, 20, 120]


def test_turns_of_no_sample_count_too() -> None:
    """What was retried, cut off or not picked was generated all the same."""
    meta = {"prompt_tokens": 10}
    state = state_of(turn(meta=meta), turn(meta=meta), turn(parent=2, keep=4, suffix=[5], meta=meta))
    for max_seq_len in (None, 4, 1):
        assembly = assemble(state, lambda ids: "", max_seq_len=max_seq_len)
        counters = assembly.session_metadata["counters"]
        assert (counters["generations"], counters["prefix_cache_info"]["total_prompt_tokens"]) == (3, 30)
    tree = state_of(
        turn(meta=meta), turn(meta=meta), turn(parent=2, keep=4, meta=meta), first=opened(mode="tree")
    )
    picked = assemble(tree, lambda ids: "", hooks=Hooks(lambda leaves: (), DEFAULT_HOOKS.finish))
    assert picked.samples == []
    assert picked.session_metadata["counters"]["generations"] == 3


@pytest.mark.parametrize("value", [1e30, 2.0**64, -(2.0**64), True])
def test_a_number_that_counts_nothing_is_left_out(value: Any) -> None:
    """An absurd counter neither counts nor makes the samples unwritable."""
    assembly = assemble(state_of(turn(meta={"prompt_tokens": value})), lambda ids: "")
    assert assembly.samples[0].prefix_cache_info["total_prompt_tokens"] == 0
    assert encode_samples(assembly.samples, assembly.session_metadata)


def test_weights_that_sampled_nothing_are_no_version() -> None:
    """Of spans that are empty or out of order, the one of the last token counts."""
    spans = [
        {"version": "2", "start": 1, "end": 2},
        {"version": "1", "start": 0, "end": 1},
        {"version": "3", "start": 2, "end": 2},
    ]
    assert weight_versions(state_of(turn(meta={"weight_versions": spans})).turns) == ["2"]
