"""Which samples are of one rollout.

A rollout in tree mode gives several samples, its siblings. They share a `rollout_id`, by which a trainer
knows them when the nesting is gone. A sample without an id is a rollout of its own.

Depths: a batch is a list (depth 0) of prompt groups (depth 1), each a list of rollouts. A rollout is one
sample, or the list of its siblings (depth 2).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from tokentape_driver.errors import InvalidBatch, MissingRolloutId
from tokentape_driver.sample import require_field

RolloutId = int | str
GROUP_DEPTH = 1
SIBLINGS_DEPTH = 2


@dataclass(frozen=True, slots=True)
class Rollout:
    """The samples of one rollout, as they stand in a batch or group.

    Attributes:
        position: where, e.g. `output[3][1]`.
        samples: with their positions; at least one.
        listed: they are a list of siblings; a sample that stands alone is not.
        id: what they share; None only if there is one sample.
    """

    position: str
    samples: list[tuple[str, Any]]
    listed: bool
    id: RolloutId | None


def shared_id(sample: object) -> Any:
    """The `rollout_id` for the siblings of an input sample: its own, else its `index`.

    Raises:
        CannotOverlay: its class has no `rollout_id`.
        MissingRolloutId: both are None.
    """
    require_field(sample, "rollout_id")
    own = getattr(sample, "rollout_id", None)
    shared = getattr(sample, "index", None) if own is None else own
    if shared is None:
        raise MissingRolloutId(
            "rollout_id and index of the input sample are both None; set one: the samples of a rollout in "
            "tree mode share it"
        )
    return shared


def validate_rollout_ids(output: Sequence[Any]) -> None:
    """Checks that a batch says which of its samples are siblings; run it on what a trainer gets.

    - A list of more than one sample at depth 2 or below is a list of siblings: they need one `rollout_id`,
      the same and not None.
    - That id, also of a list of one, occurs nowhere else in the batch. Flattened, two rollouts of one id are
      one. Samples that stand alone are not compared with each other: outside of tree mode the field is the
      trainer's.
    - A batch may be a flat list of samples. A group may mix samples and lists of siblings.

    Args:
        output: a list or tuple, as nested as the head of this module says.

    Raises:
        InvalidBatch: one of these does not hold; something is neither list nor sample; a list is empty, or
            mixes samples and lists elsewhere than in a group. The text names the position.
    """
    check_distinct(rollouts_in(output, "output", 0))


def check_distinct(rollouts: Iterator[Rollout]) -> list[Rollout]:
    """The rollouts, once it is sure that no id of a list of siblings occurs twice."""
    found = list(rollouts)
    listed: dict[RolloutId, str] = {}
    for rollout in sorted(found, key=lambda r: not r.listed):  # lists first
        if rollout.id is None:
            continue
        if (other := listed.get(rollout.id)) is not None:
            raise InvalidBatch(
                f"{rollout.position} has the rollout_id {rollout.id!r} of another rollout, {other}",
                position=rollout.position,
            )
        if rollout.listed:
            listed[rollout.id] = rollout.position
    return found


def rollouts_in(items: Any, position: str, depth: int, deepest: int | None = None) -> Iterator[Rollout]:
    """The rollouts of a nested list, in order.

    Args:
        depth: of `items` itself.
        deepest: refuses lists below this depth.

    Raises:
        InvalidBatch: see `validate_rollout_ids`.
    """
    if not isinstance(items, list | tuple):
        raise InvalidBatch(f"{position} is of type {type(items).__qualname__}, not a list", position=position)
    if not items:
        raise InvalidBatch(f"{position} is an empty list", position=position)
    inner = [f"{position}[{i}]" for i, item in enumerate(items) if isinstance(item, list | tuple)]
    if inner and depth != GROUP_DEPTH and len(inner) < len(items):
        raise InvalidBatch(
            f"{position} mixes samples and lists ({inner[0]}), which only a prompt group may",
            position=position,
        )
    if inner and depth == deepest:
        raise InvalidBatch(f"{inner[0]} is a list where a sample must be", position=inner[0])
    samples = [(f"{position}[{i}]", item) for i, item in enumerate(items)]
    if depth >= SIBLINGS_DEPTH and not inner:
        yield Rollout(position, samples, True, _common_id(samples, position))
        return
    for where, item in samples:
        if isinstance(item, list | tuple):
            yield from rollouts_in(item, where, depth + 1, deepest)
        else:
            yield Rollout(where, [(where, item)], False, id_of(item, where))


def id_of(sample: object, position: str) -> RolloutId | None:
    """A sample's own `rollout_id`; None also if its class has no such field.

    Raises:
        InvalidBatch: this is no sample, or the id is neither an integer nor a string.
    """
    value = getattr(sample, "rollout_id", None)
    if value is None:
        if not hasattr(sample, "tokens") and not hasattr(sample, "rollout_id"):
            raise InvalidBatch(
                f"{position} is of type {type(sample).__qualname__}, no sample", position=position
            )
        return None
    if isinstance(value, bool) or not isinstance(value, Integral | str):
        raise InvalidBatch(
            f"{position} has the rollout_id {value!r}; it must be an integer or a string", position=position
        )
    return value if isinstance(value, str) else int(value)


def _common_id(samples: list[tuple[str, Any]], position: str) -> RolloutId | None:
    ids = [id_of(sample, where) for where, sample in samples]
    if len(samples) == 1:
        return ids[0]
    for (where, _), rollout_id in zip(samples, ids, strict=True):
        if rollout_id is None:
            raise InvalidBatch(
                f"{where} has no rollout_id, which the {len(samples)} siblings of {position} must share",
                position=where,
            )
        if rollout_id != ids[0]:
            raise InvalidBatch(
                f"{where} has the rollout_id {rollout_id!r}, its sibling {samples[0][0]} has {ids[0]!r}",
                position=where,
            )
    return ids[0]
