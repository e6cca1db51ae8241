"""From the server's computed fields to the trainer's own sample class.

The driver works on whatever class the trainer has: any object with the attributes that `WIRE` names can be
rolled out. `RolloutSample` is for those who have none.

Shapes: `T` tokens of a sample, `R` tokens of its response, `L` layers, `K` experts per token.
"""

import dataclasses
from collections.abc import Mapping
from copy import deepcopy
from enum import Enum
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from tokentape_contracts.samples import WIRE, Status
from tokentape_driver.errors import CannotOverlay, LeftoverState

S = TypeVar("S")
"""The trainer's sample class."""

STALE_FIELDS: Final = (
    "weight_versions",
    "prefix_cache_info",
    "spec_info",
    "teacher_log_probs",
    "opd_reverse_kl",
)
STALE_METADATA: Final = ("opd_student_top_logprobs",)
ALWAYS_SET: Final = (
    "tokens",
    "response",
    "response_length",
    "loss_mask",
    "rollout_log_probs",
    "status",
    "metadata",
)
"""What every delivered sample has a value for, so that a class without them can be refused beforehand."""

_OTHER_NAMES: Final = {
    "spec_num_correct_drafts": "spec_accept_token_num",
    "spec_num_proposed_drafts": "spec_draft_token_num",
    "completion_tokens": "completion_token_num",
}
"""Speculative-decoding counters → the names under which the counter classes of Miles and slime know them."""


@dataclasses.dataclass(kw_only=True, eq=False)
class RolloutSample:
    """A sample for trainers that have no class of their own.

    Attributes:
        index: the trainer's name for the episode.
        rollout_id: set in tree mode, where the samples of one episode share it.
        tokens: ids [T], prompt and response.
        response: the response's text.
        response_length: R.
        loss_mask: [R], 1 on sampled tokens, 0 on those that the environment inserted.
        rollout_log_probs: [R], 0.0 where the mask is 0.
        rollout_routed_experts: int32[T - 1, L, K], or None.
        rollout_indexer_topk: int32[T - 1, L, K], or None.
        status: None until it was rolled out.
        weight_versions: of each merged turn that had one.
        prefix_cache_info: `cached_tokens` and `total_prompt_tokens` over all turns.
        spec_info: speculative-decoding counters over all turns.
        metadata: the task going in; coming out also what the agent and the server said.
        reward: set by the trainer, or by the server.
        non_generation_time: seconds that the agent spent in tools over the whole episode, as it says itself.
    """

    index: int | None = None
    rollout_id: int | None = None
    tokens: list[int] = dataclasses.field(default_factory=list)
    response: str = ""
    response_length: int = 0
    loss_mask: list[int] | None = None
    rollout_log_probs: list[float] | None = None
    rollout_routed_experts: NDArray[np.int32] | None = None
    rollout_indexer_topk: NDArray[np.int32] | None = None
    status: Status | None = None
    weight_versions: list[str] = dataclasses.field(default_factory=list)
    prefix_cache_info: dict[str, int] = dataclasses.field(default_factory=dict)
    spec_info: dict[str, int] = dataclasses.field(default_factory=dict)
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict)
    reward: float | dict[str, Any] | None = None
    non_generation_time: float = 0.0


if missing := WIRE.keys() - {f.name for f in dataclasses.fields(RolloutSample)}:
    raise RuntimeError(f"RolloutSample lacks {missing}")


def check_input(sample: object) -> None:
    """Refuses a sample that no rollout can be overlaid on; call it before anything costs time.

    Raises:
        LeftoverState: it still carries computed state. The server counts a session from zero, so an old value
            would be replaced, or kept beside new tokens that it does not describe.
        CannotOverlay: its class lacks a field that every delivered sample needs (`ALWAYS_SET`).
    """
    for name in ALWAYS_SET:
        require_field(sample, name)
    for name in STALE_FIELDS:
        if not _is_blank(value := getattr(sample, name, None)):
            raise LeftoverState(
                f"{name} of the input sample is not blank: {_short(value)}; reset it before the rollout",
                field=name,
            )
    for key in STALE_METADATA:
        if key in (getattr(sample, "metadata", None) or {}):
            raise LeftoverState(
                f"metadata of the input sample still has {key!r}; remove it before the rollout",
                field=f"metadata.{key}",
            )


def overlay(reply_fields: Mapping[str, Any], input_sample: S) -> S:
    """A deep copy of the input sample with the computed fields set; the input is not changed.

    `metadata` is merged into the input's, the server's keys win. `status` becomes the user's own enum: the
    class attribute `Status` if it is one, else the enum of the current value, else ours. Counters are built
    by the `from_dict` of the current value if it has one, and are a dict otherwise. A null `reward`, and an
    optional field that the server left out, leave the input's value.

    Args:
        reply_fields: one element of `decode_samples(…).samples`.

    Raises:
        LeftoverState, CannotOverlay: as `check_input`; also if the class lacks a field whose value is not
            null, empty or counters of zero: nothing is dropped silently.
    """
    check_input(input_sample)
    sample = deepcopy(input_sample)
    for name, value in reply_fields.items():
        if not hasattr(sample, name) and _is_blank(value):
            continue
        require_field(sample, name, value)
        current = getattr(sample, name)
        if name == "status":
            set_status(sample, value)
        elif name == "metadata":
            setattr(sample, name, {**(current or {}), **value})
        elif name in ("prefix_cache_info", "spec_info"):
            setattr(sample, name, _counters(value, current))
        elif name != "reward" or value is not None:
            setattr(sample, name, value)
    return sample


def set_status(sample: object, status: Status) -> None:
    """Sets `sample.status` in the user's own enum.

    Raises:
        CannotOverlay: that enum has no such value.
    """
    setattr(sample, "status", own_status(sample, status))  # noqa: B010  (mypy knows no such attribute)


def has_status(sample: object, status: Status) -> bool:
    """Whether `sample.status` is this one, in the user's own enum."""
    current = getattr(sample, "status", None)
    return (current.value if isinstance(current, Enum) else current) == status.value


def own_status(sample: object, status: Status) -> Enum:
    """The status in the user's own enum.

    Raises:
        CannotOverlay: that enum has no such value.
    """
    kind = getattr(type(sample), "Status", None)
    if not (isinstance(kind, type) and issubclass(kind, Enum)):
        current = getattr(sample, "status", None)
        kind = type(current) if isinstance(current, Enum) else Status
    try:
        return kind(status.value)
    except ValueError as error:
        raise CannotOverlay(f"{kind.__qualname__} has no value {status.value!r}", field="status") from error


def require_reward(sample: object, metadata: Mapping[str, Any] | None) -> None:
    """Raises `CannotOverlay` if the agent's metadata has a reward for which the sample has no attribute."""
    if metadata is not None and (reward := metadata.get("reward")) is not None:
        require_field(sample, "reward", reward)


def require_field(sample: object, name: str, value: object = None) -> None:
    """Raises `CannotOverlay` if the sample has no attribute of that name."""
    if not hasattr(sample, name):
        what = "" if value is None else f" for {_short(value)}"
        raise CannotOverlay(f"{type(sample).__qualname__} has no field {name!r}{what}; add it", field=name)


def _counters(value: Mapping[str, int], current: object) -> Any:
    from_dict = getattr(current, "from_dict", None)
    if from_dict is None:
        return dict(value)
    renamed = {_OTHER_NAMES[name]: count for name, count in value.items() if name in _OTHER_NAMES}
    return from_dict({**renamed, **value})


def _is_blank(value: object) -> bool:
    """None, an empty container, or counters that are all zero."""
    if value is None:
        return True
    if hasattr(value, "to_dict"):
        value = value.to_dict()
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    if isinstance(value, Mapping):
        return all(item == 0 if isinstance(item, int | float) else _is_blank(item) for item in value.values())
    try:
        return len(value) == 0  # type: ignore[arg-type]
    except TypeError:
        return False


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + "…"
