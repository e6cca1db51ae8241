"""A finish hook that does to its child process what the agent's metadata says."""

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokentape_core.domain.tree import LeafSample, train_once

FAULT, MEETING = "fault", "meeting"
"""The metadata's keys."""


def harm(samples: Sequence[LeafSample], metadata: Mapping[str, Any]) -> None:
    """After a meeting, if there is one, the fault.

    `exit` ends the child, `hang` never returns, `eat` takes memory for ever, a number waits so long.
    """
    if MEETING in metadata:
        _meet(**metadata[MEETING])
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


def _meet(folder: str, children: int) -> None:
    """Waits until so many children have come; each leaves its process id in the folder."""
    (Path(folder) / str(os.getpid())).touch()
    while len(came_to(Path(folder))) < children:
        time.sleep(0.01)


def came_to(folder: Path) -> set[int]:
    """The process ids of the children that have come."""
    return {int(file.name) for file in folder.iterdir()}
