"""How much memory an event is said to take, against what the interpreter says that it takes."""

import gc
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.support.sessions import assistant, opened, sealed, turn, user
from tokentape_contracts.events import OPENED_ID, SEALED_ID, Event, decode, encode
from tokentape_core.domain.state import SessionState, fold, turn_id

TURNS = 40

FIELDS: dict[str, Callable[[int], dict[str, Any]]] = {
    "nothing large": lambda _: {},
    "tokens": lambda _: {
        "suffix": np.arange(2000, dtype=np.int32),
        "output": np.arange(500, dtype=np.int32),
        "logprobs": np.full(500, -0.5),
    },
    "messages": lambda i: {"messages": [user(f"{i}" * 20_000), assistant("fine")]},
    "other characters": lambda i: {"messages": [user(f"{i}\U0001f600" * 9_000), assistant("é" * 5_000)]},
    "request": lambda i: {"request": {"temperature": 1.0, "metadata": {"text": f"{i}" * 30_000}}},
    "numbers": lambda i: {"request": {"logit_bias": {str(1000 * i + j): j / 7 for j in range(3_000)}}},
    "reply": lambda i: {"reply": {"choices": [{"index": 0}], "more": [f"{i} {j}" for j in range(3_000)]}},
    "meta": lambda i: {"meta": {"latencies": [i + j / 3 for j in range(3_000)]}},
    "tiny values": lambda _: {"request": {"x": [[] for _ in range(3_000)], "y": [{} for _ in range(3_000)]}},
    "keys": lambda i: {"meta": {f"key {i} {j}": None for j in range(5_000)}},
    "tools": lambda i: {
        "tools": [
            {"type": "function", "function": {"name": f"f{i}", "description": "d" * 300, "parameters": {}}}
        ]
        * 60
    },
}


def _held(*streams: list[tuple[str, Any]]) -> tuple[list[SessionState], int]:
    """The states of streams as Redis gives them, and the bytes that these have added to the heap."""
    gc.collect()
    tracemalloc.start()
    try:
        # As a client's reader does, every read makes bytes of its own.
        states = [
            fold(
                (at, decode({key: bytes(bytearray(value)) for key, value in entry.items()}))
                for at, entry in stream
            )
            for stream in streams
        ]
        gc.collect()
        return [state for state in states if state], tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def _stream(*events: Event) -> list[tuple[str, Any]]:
    _, *others = events
    ids = [
        SEALED_ID if event.TYPE == "session.sealed" else turn_id(seq) for seq, event in enumerate(others, 1)
    ]
    return [(at, encode(event)) for at, event in zip([OPENED_ID, *ids], events, strict=True)]


@pytest.mark.parametrize("name", FIELDS)
def test_a_session_takes_what_it_says(name: str) -> None:
    """Within 20 %, whatever its turns are full of."""
    turns = [turn(id=f"{i:032x}", **FIELDS[name](i)) for i in range(TURNS)]
    [state], taken = _held(_stream(opened(), *turns))
    assert 0.8 < state.size / taken < 1.2, (state.size, taken)


@pytest.mark.parametrize("end", [(), (sealed(),)])
def test_a_session_without_turns_takes_something(end: tuple[Event, ...]) -> None:
    """Its labels and pins count, and so does a sealed one's."""
    streams = [
        _stream(opened(labels={"run": f"{i}" * 10_000}, pins={"stop": ["x" * 5_000]}), *end)
        for i in range(50)
    ]
    states, taken = _held(*streams)
    assert 0.8 < sum(state.size for state in states) / taken < 1.2
