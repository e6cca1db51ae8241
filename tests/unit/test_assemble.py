"""Assembly: edges of the cut, the truncation and the merge (whole cases stand in `tests/golden`)."""

from typing import Any

import numpy as np
import pytest

from tests.support.sessions import opened, state_of, turn
from tokentape_contracts.errors import PrefixBroken
from tokentape_contracts.events import TurnRecorded
from tokentape_contracts.samples import Sample, Status, encode_samples
from tokentape_core.domain.assemble import Assembly, assemble


def _decode(ids: Any) -> str:
    return "".join(f"[{token}]" for token in ids)


def _assemble(*turns: TurnRecorded, max_seq_len: int | None = None, trim: int = 2) -> Assembly:
    return assemble(state_of(*turns, first=opened(max_trim_tokens=trim)), _decode, max_seq_len=max_seq_len)


def _sample(*turns: TurnRecorded, **kwargs: Any) -> Sample:
    [sample] = _assemble(*turns, **kwargs).samples
    return sample


def _short(sample: Sample) -> tuple[list[int], list[int], str]:
    """Tokens, mask and status, after checks that hold for every sample."""
    response = len(sample.loss_mask)
    assert sample.response_length == response == len(sample.rollout_log_probs)
    assert not sample.rollout_log_probs[sample.loss_mask == 0].any()
    assert sample.response == _decode(sample.tokens[len(sample.tokens) - response :])
    encode_samples([sample], {"accumulated_token_ids": sample.tokens})
    return sample.tokens.tolist(), sample.loss_mask.tolist(), sample.status.value


# prompt 1 2, output 3 4; then the environment's 5 6, output 7 8; then 9, output 10
ONE = turn(output=[3, 4], logprobs=[-0.3, -0.4])
TWO = turn(parent=1, keep=4, suffix=[5, 6], output=[7, 8], logprobs=[-0.7, -0.8])
THREE = turn(parent=2, keep=8, suffix=[9], output=[10], logprobs=[-1.0])


def test_turns_become_one_sample() -> None:
    """Outputs are trained on, what lies between them is not, and each log-prob stands at its token."""
    sample = _sample(ONE, TWO, THREE)
    assert _short(sample) == ([*range(1, 11)], [1, 1, 0, 0, 1, 1, 0, 1], "completed")
    assert sample.rollout_log_probs.tolist() == [-0.3, -0.4, 0.0, 0.0, -0.7, -0.8, 0.0, -1.0]
    assert sample.response == "[3][4][5][6][7][8][9][10]"


def test_the_response_is_decoded_piece_by_piece() -> None:
    """Each output and each text between is decoded on its own; an absent one is not decoded at all."""
    pieces: list[list[int]] = []

    def decode(ids: Any) -> str:
        pieces.append(list(ids))
        return "x"

    [sample] = assemble(state_of(ONE, TWO, turn(parent=2, keep=8, suffix=[], output=[10])), decode).samples
    assert pieces == [[3, 4], [5, 6], [7, 8], [10]]
    assert sample.response == "xxxx"


def test_a_session_without_turns_says_so() -> None:
    """No turn: no sample, `no_records`, and the session's metadata."""
    assembly = _assemble()
    assert (assembly.samples, assembly.empty_reason) == ([], "no_records")
    assert assembly.session_metadata["accumulated_token_ids"].tolist() == []


# max_seq_len → tokens, mask, status
TRUNCATIONS: dict[int, tuple[int, list[int], str] | None] = {
    100: (10, [1, 1, 0, 0, 1, 1, 0, 1], "completed"),
    10: (10, [1, 1, 0, 0, 1, 1, 0, 1], "completed"),
    9: (8, [1, 1, 0, 0, 1, 1], "truncated"),
    8: (8, [1, 1, 0, 0, 1, 1], "truncated"),
    7: (7, [1, 1, 0, 0, 1], "truncated"),
    6: (4, [1, 1], "truncated"),
    5: (4, [1, 1], "truncated"),
    4: (4, [1, 1], "truncated"),
    3: (3, [1], "truncated"),
    2: None,
    1: None,
}


@pytest.mark.parametrize("max_seq_len", TRUNCATIONS)
def test_truncation_is_a_decision_about_turns(max_seq_len: int) -> None:
    """The first turn above the limit loses output, or is dropped if its prompt fills it; later ones too."""
    expected = TRUNCATIONS[max_seq_len]
    assembly = _assemble(ONE, TWO, THREE, max_seq_len=max_seq_len)
    if expected is None:
        assert (assembly.samples, assembly.empty_reason) == ([], "all_truncated")
    else:
        [sample] = assembly.samples
        length, mask, status = expected
        assert _short(sample) == ([*range(1, length + 1)], mask, status)
        assert assembly.empty_reason is None
    assert assembly.session_metadata["accumulated_token_ids"].tolist() == [*range(1, 11)]


def test_a_truncated_sample_speaks_of_its_turns_only() -> None:
    """Counters, versions and the lifecycle are those of the merged turns."""
    turns = [
        turn(meta={"weight_version": "1", "cached_tokens": 1, "prompt_tokens": 2}),
        turn(parent=1, keep=4, suffix=[5], output=[6], meta={"weight_version": "2", "cached_tokens": 50}),
    ]
    sample = _sample(*turns, max_seq_len=5)
    assert sample.weight_versions == ["1"]
    assert sample.prefix_cache_info == {"cached_tokens": 1, "total_prompt_tokens": 2}
    assert sample.metadata["lifecycle"]["turn"] == 1


@pytest.mark.parametrize(
    ("finish", "status"),
    [
        ("stop", "completed"),
        ("tool_calls", "completed"),
        ("length", "truncated"),
        ("abort", "aborted"),
        ("content_filter", "failed"),
        ("STOP", "failed"),
        ("", "failed"),
    ],
)
def test_the_finish_reason_gives_the_status(finish: str, status: str) -> None:
    """Known reasons have their status, anything else is failed."""
    assert _sample(turn(finish=finish)).status.value == status


@pytest.mark.parametrize("finish", ["length", "abort", "content_filter"])
def test_merging_stops_after_a_turn_that_did_not_complete(finish: str) -> None:
    """The sample ends with the first turn that is not completed, though later ones were recorded."""
    cut = turn(output=[3, 4], finish=finish)
    tokens, mask, status = _short(_sample(cut, TWO, THREE))
    assert (tokens, mask) == ([1, 2, 3, 4], [1, 1])
    assert status == _sample(cut).status.value


def test_max_seq_len_wins_over_the_finish_reason() -> None:
    """A turn that lost output to `max_seq_len` is truncated, however the engine ended it."""
    assert _sample(turn(finish="abort"), max_seq_len=3).status is Status.TRUNCATED
    assert _sample(turn(finish="abort"), max_seq_len=4).status is Status.ABORTED


TRIMS: dict[str, tuple[int, list[TurnRecorded], list[int], list[int]]] = {
    "a stop token that the template renders again": (
        1,
        [turn(output=[3, 4]), turn(parent=1, keep=3, suffix=[40, 5], output=[6])],
        [1, 2, 3, 40, 5, 6],
        [1, 0, 0, 1],
    ),
    "rendered again as the same token": (
        1,
        [turn(output=[3, 4]), turn(parent=1, keep=3, suffix=[4, 5], output=[6])],
        [1, 2, 3, 4, 5, 6],
        [1, 1, 0, 1],
    ),
    "kept less than it repeats": (
        2,
        [turn(output=[3, 4]), turn(parent=1, keep=2, suffix=[3, 4, 5], output=[6])],
        [1, 2, 3, 4, 5, 6],
        [1, 1, 0, 1],
    ),
    "repeats into the prompt": (
        2,
        [turn(output=[3, 4]), turn(parent=1, keep=0, suffix=[1, 2, 3, 4, 5], output=[6])],
        [1, 2, 3, 4, 5, 6],
        [1, 1, 0, 1],
    ),
    "the whole output": (
        2,
        [turn(output=[3, 4]), turn(parent=1, keep=2, suffix=[30, 5], output=[6])],
        [1, 2, 30, 5, 6],
        [0, 0, 1],
    ),
    "the same output sampled by the next turn": (
        2,
        [turn(output=[3, 4]), turn(parent=1, keep=3, suffix=[], output=[4, 5])],
        [1, 2, 3, 4, 5],
        [1, 1, 1],
    ),
    "in the middle of three": (
        1,
        [
            turn(output=[3, 4]),
            turn(parent=1, keep=3, suffix=[5], output=[6, 7]),
            turn(parent=2, keep=5, suffix=[8], output=[9]),
        ],
        [1, 2, 3, 5, 6, 8, 9],
        [1, 0, 1, 0, 1],
    ),
}


@pytest.mark.parametrize("case", TRIMS)
def test_a_token_that_the_next_prompt_dropped_counts_once(case: str) -> None:
    """Output that the next prompt did not keep is cut; the tokens are the last turn's prompt and output."""
    trim, turns, tokens, mask = TRIMS[case]
    sample = _sample(*turns, trim=trim)
    assert _short(sample)[:2] == (tokens, mask)
    assert tokens == state_of(*turns).head.tokens.tolist()


BROKEN: dict[str, tuple[int, list[TurnRecorded]]] = {
    "more output dropped than the family allows": (
        1,
        [turn(output=[3, 4]), turn(parent=1, keep=2, suffix=[30, 5], output=[6])],
    ),
    "one token dropped where none may be": (
        0,
        [turn(output=[3, 4]), turn(parent=1, keep=3, suffix=[40], output=[6])],
    ),
    "another prompt": (2, [turn(), turn(parent=1, keep=1, suffix=[20, 3, 4], output=[6])]),
    "a prompt that is too short": (
        2,
        [turn(output=[3, 4, 5]), turn(parent=1, keep=1, suffix=[], output=[6])],
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_prompt_that_does_not_begin_with_its_parent_is_refused(case: str) -> None:
    """A difference beyond the allowed trim is `prefix_broken` and names the turn, never a bent sample."""
    trim, turns = BROKEN[case]
    with pytest.raises(PrefixBroken, match=r"turn \d"):
        _assemble(*turns, trim=trim)


def test_empty_outputs_are_merged() -> None:
    """A turn that produced nothing adds nothing, first, between or last."""
    nothing = turn(output=[])
    assert _short(_sample(nothing)) == ([1, 2], [], "completed")
    two = turn(parent=1, keep=2, suffix=[3], output=[4])
    assert _short(_sample(nothing, two)) == ([1, 2, 3, 4], [0, 1], "completed")
    assert _short(_sample(turn(), turn(parent=1, keep=4, suffix=[5], output=[]))) == (
        [1, 2, 3, 4, 5],
        [1, 1, 0],
        "completed",
    )


@pytest.mark.parametrize(("max_seq_len", "samples"), [(3, 1), (2, 1), (1, 0)])
def test_an_empty_output_fits_where_its_prompt_fits(max_seq_len: int, samples: int) -> None:
    """Without output a prompt of exactly the limit fits; a longer one is dropped."""
    assert len(_assemble(turn(output=[]), max_seq_len=max_seq_len).samples) == samples


def test_a_retried_turn_is_in_no_sample() -> None:
    """The sample is the path to the newest turn: the attempt before it left no token."""
    retry = turn(parent=1, keep=4, suffix=[50], output=[70])
    assert _short(_sample(ONE, TWO, retry))[0] == [1, 2, 3, 4, 50, 70]
    assert _short(_sample(ONE, turn(suffix=[8], output=[9])))[0] == [8, 9]


def test_weight_versions_are_those_that_were_sent() -> None:
    """Each merged turn's version as text; absent and null are no version, 0 is one."""
    metas: list[dict[str, Any]] = [
        {"weight_version": 0},
        {},
        {"weight_version": None},
        {"weight_version": "b"},
    ]
    turns = [
        turn(parent=i, keep=2 * i and 2 * i + 2, suffix=[1, 2] if i == 0 else [], output=[3, 4], meta=meta)
        for i, meta in enumerate(metas)
    ]
    assert _sample(*turns).weight_versions == ["0", "b"]


@pytest.mark.parametrize("value", [None, 0, ...], ids=["null", "0", "absent"])
def test_cache_counters_that_are_missing_count_as_nothing(value: Any) -> None:
    """An engine without prefix cache gives sums of 0."""
    meta = {} if value is ... else {"cached_tokens": value, "prompt_tokens": value}
    assert _sample(turn(meta=meta)).prefix_cache_info == {"cached_tokens": 0, "total_prompt_tokens": 0}


OLD = {"spec_accept_token_num": 3, "spec_draft_token_num": 5, "spec_verify_ct": 2}
NEW = {"spec_num_correct_drafts": 30, "spec_num_proposed_drafts": 50, "spec_verify_ct": 20}


@pytest.mark.parametrize(
    ("metas", "expected"),
    [
        ([{}, {}], {}),
        ([{"spec_verify_ct": None}, {}], {}),
        ([OLD, {}], {"correct": 3, "proposed": 5, "verify": 2}),
        ([NEW, {}], {"correct": 30, "proposed": 50, "verify": 20}),
        ([OLD, NEW], {"correct": 33, "proposed": 55, "verify": 22}),
        ([{**OLD, **NEW}, {}], {"correct": 30, "proposed": 50, "verify": 20}),
        ([{"spec_verify_ct": 0}, {}], {"verify": 0}),
    ],
    ids=["none", "null", "old names", "new names", "both in turn", "both at once", "zero"],
)
def test_speculative_counters_add_up_under_either_name(metas: list[Any], expected: dict[str, int]) -> None:
    """Old and new spellings of a counter are one; a turn that sends both is counted once."""
    one = turn(meta=metas[0])
    two = turn(parent=1, keep=4, suffix=[5], output=[6], meta=metas[1])
    names = {
        "correct": "spec_num_correct_drafts",
        "proposed": "spec_num_proposed_drafts",
        "verify": "spec_verify_ct",
    }
    info = {names[name]: value for name, value in expected.items()}
    assert _sample(one, two).spec_info == (info and {**info, "completion_tokens": 3})


def test_the_lifecycle_of_one_turn_is_an_object() -> None:
    """`t0` is the end less the latency, or null without one; there is no turn before."""
    assert _sample(turn(meta={"e2e_latency": 0.25})).metadata["lifecycle"] == {
        "t0": 101.75,
        "t1": 102.0,
        "turn": 1,
        "req_ts": 101.0,
    }
    assert _sample(turn()).metadata["lifecycle"]["t0"] is None
    assert _sample(turn(meta={"e2e_latency": 0})).metadata["lifecycle"]["t0"] == 102.0


def test_the_lifecycle_of_several_turns_is_a_list() -> None:
    """One entry a merged turn, counted from 1, each after the first with the end of the one before."""
    later = turn(parent=1, keep=4, suffix=[5], output=[6], requested_at=103.0, committed_at=104.0)
    assert _sample(turn(), later).metadata["lifecycle"] == [
        {"t0": None, "t1": 102.0, "turn": 1, "req_ts": 101.0},
        {"t0": None, "t1": 104.0, "turn": 2, "req_ts": 103.0, "prev_t1": 102.0},
    ]


def test_assembling_changes_no_state() -> None:
    """The same state gives the same bytes again (INV-9)."""
    state = state_of(ONE, TWO, THREE)
    payloads = []
    for _ in range(2):
        assembly = assemble(state, _decode, max_seq_len=9)
        payloads.append(encode_samples(assembly.samples, assembly.session_metadata))
        assembly.samples[0].tokens[:] = 0
        assembly.samples[0].rollout_log_probs[:] = np.nan
    assert payloads[0] == payloads[1]
