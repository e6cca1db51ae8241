"""Short ways to write events and states; every field has a plain default."""

import itertools
from dataclasses import fields
from typing import Any

import numpy as np

from tokentape_contracts.events import OPENED_ID, SEALED_ID, SessionOpened, SessionSealed, TurnRecorded
from tokentape_core.domain.state import SessionState, apply, turn_id

_numbers = itertools.count(1)


def new_id() -> str:
    """An event id that no other event of this run has."""
    return f"{next(_numbers):032x}"


def opened(**given: Any) -> SessionOpened:
    """A `session.opened` whose family may trim two tokens."""
    defaults: dict[str, Any] = {
        "id": new_id(),
        "mode": "linear",
        "matcher": "strict",
        "altered_answer": "refuse",
        "family": "default",
        "max_trim_tokens": 2,
        "template": "fingerprint",
        "labels": {},
        "pins": {},
        "replay": {},
        "tenant": "",
        "opened_at": 100.0,
    }
    return SessionOpened(**{**defaults, **given})


def turn(**given: Any) -> TurnRecorded:
    """A `turn.recorded`: prompt [1, 2], output [3, 4], log-probs -0.5, unless told otherwise."""
    output = np.asarray(given.pop("output", [3, 4]), np.int32)
    defaults: dict[str, Any] = {
        "id": new_id(),
        "parent": 0,
        "keep": 0,
        "suffix": np.asarray(given.pop("suffix", [1, 2]), np.int32),
        "output": output,
        "logprobs": np.asarray(given.pop("logprobs", np.full(len(output), -0.5)), np.float64),
        "finish": "stop",
        "response_id": "resp",
        "messages": [],
        "tools": None,
        "altered": [],
        "request": {},
        "reply": {"choices": [{"index": 0}]},
        "meta": {},
        "replay": {},
        "requested_at": 101.0,
        "committed_at": 102.0,
    }
    return TurnRecorded(**{**defaults, **given})


def sealed(**given: Any) -> SessionSealed:
    """A `session.sealed`."""
    return SessionSealed(**{"id": new_id(), "reason": "deleted", "sealed_at": 103.0, **given})


def entries(
    *turns: TurnRecorded, first: SessionOpened | None = None, last: SessionSealed | None = None
) -> Any:
    """A whole stream: ids and events."""
    stream: list[Any] = [(OPENED_ID, first or opened())]
    stream += [(turn_id(seq), event) for seq, event in enumerate(turns, 1)]
    return [*stream, (SEALED_ID, last)] if last else stream


def state_of(*turns: TurnRecorded, **kwargs: Any) -> SessionState:
    """The folded state of such a stream."""
    state = None
    for entry_id, event in entries(*turns, **kwargs):
        state = apply(state, entry_id, event)
    assert state is not None
    return state


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields}


def plain(event: Any) -> dict[str, Any]:
    """An event as comparable values; arrays as lists with their dtype."""
    content = {field.name: getattr(event, field.name) for field in fields(event)}
    arrays = {k: (str(v.dtype), v.tolist()) for k, v in content.items() if isinstance(v, np.ndarray)}
    return {"type": event.TYPE, **content, **arrays}
