"""What an agent asks for, whatever protocol it speaks."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokentape_core.domain.position import Head


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One chat turn that is asked for.

    Attributes:
        messages: the whole conversation as chat messages, at least one.
        head: its tools, and arguments for the chat template.
        stream: whether the answer is wanted as server-sent events.
        settings: how to sample, in the names of OpenAI's chat completions; for the engine.
        size: bytes of memory that it takes.
    """

    messages: list[dict[str, Any]]
    head: Head
    stream: bool
    settings: Mapping[str, Any]
    size: int
