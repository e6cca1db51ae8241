"""A finish hook that does to its child process what the agent's metadata says."""

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tokentape_core.domain.tree import LeafSample, train_once

FAULT = "fault"
"""The metadata's key."""


def harm(samples: Sequence[LeafSample], metadata: Mapping[str, Any]) -> None:
    """`exit` ends the child, `hang` never returns, `eat` takes memory for ever, a number waits so long."""
    match metadata.get(FAULT):
        case "exit":
            os._exit(3)
        case "hang":
            time.sleep(1_000)
        case "eat":
            eaten = []
            while True:
                eaten.append(bytearray(64 * 1024 * 1024))
        case int() | float() as seconds:
            time.sleep(seconds)
    train_once(samples, metadata)
