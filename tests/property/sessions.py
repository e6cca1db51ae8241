"""Random linear sessions, written twice: as events, and naively as full prompts."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st

from tests.support.sessions import entries, opened, turn
from tokentape_contracts.events import TurnRecorded
from tokentape_core.domain.state import SessionState, fold

MAX_TRIM = 3
tokens = st.lists(st.integers(0, 6), max_size=5)
"""Few different tokens, so that chance repetitions are common."""


@dataclass
class Attempt:
    """What an engine would have seen: the whole prompt, and what it sampled."""

    parent: int
    prompt: list[int]
    output: list[int]
    logprobs: list[float]
    finish: str


@dataclass
class Session:
    """A session with its attempts; `path` are the numbers (from 1) of those that lead to the head."""

    events: list[TurnRecorded] = field(default_factory=list)
    attempts: list[Attempt] = field(default_factory=list)
    path: list[int] = field(default_factory=list)

    @property
    def stream(self) -> Any:
        return entries(*self.events, first=opened(id="first", max_trim_tokens=MAX_TRIM))

    @property
    def state(self) -> SessionState:
        state = fold(self.stream)
        assert state is not None
        return state

    @property
    def path_attempts(self) -> list[Attempt]:
        return [self.attempts[number - 1] for number in self.path]


@st.composite
def sessions(
    draw: st.DrawFn, max_turns: int = 6, finishes: tuple[str, ...] = ("stop", "tool_calls")
) -> Session:
    """A linear session: every turn extends the head, or retries it from its parent.

    A prompt keeps the parent's tokens but for at most `MAX_TRIM` of its output, and may repeat what it did
    not keep in its suffix.
    """
    session = Session()
    for _ in range(draw(st.integers(1, max_turns))):
        if session.path and draw(st.integers(0, 3)) == 0:
            session.path.pop()
        parent = session.path[-1] if session.path else 0
        before = session.attempts[parent - 1] if parent else Attempt(0, [], [], [], "stop")
        whole = before.prompt + before.output
        keep = len(whole) - draw(st.integers(0, min(MAX_TRIM, len(before.output))))
        repeated = whole[keep : keep + draw(st.integers(0, len(whole) - keep))]
        suffix = repeated + draw(tokens)
        output = draw(tokens)
        logprobs = [-draw(st.integers(1, 1000)) / 8 for _ in output]
        attempt = Attempt(parent, whole[:keep] + suffix, output, logprobs, draw(st.sampled_from(finishes)))
        session.attempts.append(attempt)
        session.path.append(len(session.attempts))
        session.events.append(
            turn(
                id=f"event{len(session.attempts)}",
                parent=parent,
                keep=keep,
                suffix=np.array(suffix, np.int32),
                output=output,
                logprobs=logprobs,
                finish=attempt.finish,
            )
        )
    return session
