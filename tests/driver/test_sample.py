"""From computed fields to the trainer's own class."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
import pytest

from tests.driver.fake import TOKENS, TrainerSample, payload
from tokentape_contracts.samples import Status, decode_samples
from tokentape_driver import CannotOverlay, LeftoverState, RolloutSample, overlay


def computed(**changes: Any) -> dict[str, Any]:
    return decode_samples(payload(**changes), contract=2).samples[0]


def test_a_trainers_class() -> None:
    """A trainer's class keeps its own fields and gets the computed ones in its own types."""
    given = TrainerSample(
        index=4, group_index=2, prompt=[{"role": "user"}], label="l", metadata={"task": "t"}
    )
    sample = overlay(computed(), given)
    assert type(sample) is TrainerSample
    assert (sample.index, sample.group_index, sample.prompt, sample.label) == (4, 2, [{"role": "user"}], "l")
    assert (sample.tokens, sample.response, sample.response_length) == (TOKENS, "abc", 3)
    assert sample.loss_mask == [1, 0, 1]
    assert sample.status is TrainerSample.Status.TRUNCATED
    assert sample.prefix_cache_info == TrainerSample.PrefixCacheInfo(2, 6)
    assert sample.weight_versions == ["3", "4"]
    assert sample.rollout_routed_experts.dtype == np.int32
    assert sample.rollout_indexer_topk is None
    assert sample.metadata == {"task": "t", "lifecycle": [{"turn": 1}, {"turn": 2}]}


def test_speculative_counters_under_the_trainers_names() -> None:
    """Counters that the trainer's class knows under their older names are not lost."""
    sample = overlay(computed(), TrainerSample())
    assert sample.spec_info == TrainerSample.SpecInfo(3, 9, 0, 4)


def test_the_input_is_not_changed() -> None:
    """The overlay is a deep copy: the input keeps its values, and shares nothing mutable with the copy."""
    given = TrainerSample(metadata={"nested": {"a": 1}})
    sample = overlay(computed(), given)
    sample.metadata["nested"]["a"] = 2
    assert given == TrainerSample(metadata={"nested": {"a": 1}})


def test_our_own_class() -> None:
    """`RolloutSample` gets every computed field, counters as dicts and our own status."""
    sample = overlay(computed(), RolloutSample(index=1, metadata={"task": "t"}))
    assert sample.index == 1
    assert sample.status is Status.TRUNCATED
    assert sample.prefix_cache_info == {"cached_tokens": 2, "total_prompt_tokens": 6}
    assert sample.spec_info["spec_num_correct_drafts"] == 3
    assert sample.metadata["task"] == "t"


@pytest.mark.parametrize(("sent", "kept"), [(None, 0.5), (0.0, 0.0), ({"a": 1}, {"a": 1})])
def test_reward(sent: Any, kept: Any) -> None:
    """A null reward leaves the input's; any other replaces it, zero too."""
    assert overlay(computed(reward=sent), TrainerSample(reward=0.5)).reward == kept


def test_optional_fields_that_were_not_sent() -> None:
    """What another server of contract 1 leaves out stays as the input has it."""
    fields = computed()
    del fields["spec_info"], fields["reward"]
    sample = overlay(fields, TrainerSample(reward=0.5))
    assert (sample.reward, sample.spec_info) == (0.5, TrainerSample.SpecInfo())


def test_metadata_of_the_server_wins() -> None:
    """Metadata is merged, the server's keys win, and an input without metadata is fine."""
    fields = computed(metadata={"a": "server"})
    assert overlay(fields, RolloutSample(metadata={"a": "mine", "b": 1})).metadata == {"a": "server", "b": 1}
    assert overlay(fields, RolloutSample(metadata=None)).metadata == {"a": "server"}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("weight_versions", ["1"]),
        ("prefix_cache_info", TrainerSample.PrefixCacheInfo(1, 0)),
        ("spec_info", TrainerSample.SpecInfo(spec_verify_ct=1)),
        ("teacher_log_probs", [-0.1]),
        ("opd_reverse_kl", np.array([0.1])),
        ("prefix_cache_info", {"cached_tokens": 1}),
    ],
)
def test_leftover_state(name: str, value: object) -> None:
    """Each field of an earlier rollout's computed state is refused by name."""
    given = TrainerSample()
    setattr(given, name, value)
    with pytest.raises(LeftoverState, match=name) as caught:
        overlay(computed(), given)
    assert caught.value.field == name


def test_leftover_metadata() -> None:
    """Per-token metadata of an earlier rollout is refused, even if empty."""
    with pytest.raises(LeftoverState) as caught:
        overlay(computed(), TrainerSample(metadata={"opd_student_top_logprobs": []}))
    assert caught.value.field == "metadata.opd_student_top_logprobs"


def test_blank_state_is_no_leftover() -> None:
    """Defaults in any form are fine: None, empty containers, counters of zero."""
    overlay(computed(), RolloutSample(prefix_cache_info={"cached_tokens": 0}, spec_info=None))  # type: ignore[arg-type]


@dataclass
class Small:
    """A class with the fields that every sample needs, and no more."""

    tokens: list[int] = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    loss_mask: list[int] | None = None
    rollout_log_probs: list[float] | None = None
    status: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)


EMPTY: dict[str, Any] = {
    "rollout_routed_experts": None,
    "weight_versions": [],
    "prefix_cache_info": {"cached_tokens": 0, "total_prompt_tokens": 0},
    "spec_info": {},
}


def test_missing_fields_with_nothing_to_say() -> None:
    """A field that the class lacks may be null, empty or zero."""
    sample = overlay(computed(**EMPTY), Small())
    assert sample.tokens == TOKENS
    assert not hasattr(sample, "rollout_routed_experts")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rollout_routed_experts", np.zeros((4, 1, 1), np.int32)),
        ("weight_versions", ["1"]),
        ("prefix_cache_info", {"cached_tokens": 1}),
        ("spec_info", {"spec_verify_ct": 1}),
        ("reward", 0.0),
    ],
)
def test_nothing_is_dropped_silently(name: str, value: object) -> None:
    """A value for which the class has no field is an error that names both."""
    with pytest.raises(CannotOverlay, match=f"Small has no field '{name}'") as caught:
        overlay(computed(**{**EMPTY, name: value}), Small())
    assert caught.value.field == name


def test_a_class_that_can_take_no_sample() -> None:
    """A class without a needed field is refused whatever was sent."""
    with pytest.raises(CannotOverlay, match="object has no field 'tokens'"):
        overlay(computed(), object())


def test_status_of_a_module_level_enum() -> None:
    """Without a nested `Status` the enum of the current value is used."""

    class Outcome(Enum):
        NEW = "new"
        CUT = "truncated"

    assert overlay(computed(**EMPTY), Small(status=Outcome.NEW)).status is Outcome.CUT
    with pytest.raises(CannotOverlay, match="Outcome has no value 'failed'"):
        overlay(computed(**EMPTY, status=Status.FAILED), Small(status=Outcome.NEW))
