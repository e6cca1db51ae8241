"""Releases of Tokentape, each run by its own code, on one Redis."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import httpx

from tests.faults import engine
from tests.faults.workload import unbounded
from tests.support.processes import Fleet, Running, wait_for
from tokentape_cli.processes import free_port
from tokentape_core.text.tokenizer import Tokenizer

PREVIOUS = "ce64d5b41f3dd5ade749bed04b20657fd0ef52d3"
"""The release before this one with the same versions of events, or a candidate of this one; whoever releases
moves it."""
OLDER = "312cded57f3824a55cb8c337c8302237fbad9cb3"
"""The last release that wrote older events."""

ROOT = Path(__file__).parents[2]
FOLDERS = (
    *("contracts", "services/core", "services/api", "services/assembler", "services/cli", "services/engine"),
    "driver",
)
"""Where a checkout has its packages."""
NEXT = Path(__file__).parent / "next"
"""In its PYTHONPATH, the code of this release writes events of newer versions."""


def unpack(commit: str, directory: Path) -> str:
    """Puts the code of a commit into a directory; gives the PYTHONPATH with which Python runs it."""
    archive = subprocess.run(["git", "-C", str(ROOT), "archive", commit], capture_output=True)
    if archive.returncode:
        why = archive.stderr.decode(errors="replace").strip()
        raise AssertionError(f"commit {commit} is not here; `git fetch --unshallow` brings it: {why}")
    subprocess.run(["tar", "-x", "-C", str(directory)], input=archive.stdout, check=True)
    path = os.pathsep.join(str(directory / folder) for folder in FOLDERS)
    show = "import tokentape_api as a, tokentape_assembler as b, tokentape_core as c; print(a, b, c)"
    told = subprocess.run(
        [sys.executable, "-c", show], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert told.stdout.count(str(directory)) == 3, f"other code would run: {told.stdout}{told.stderr}"
    return path


@dataclass
class Release(Fleet):
    """Processes of one release; they record routed experts too."""

    pythonpath: str = ""

    def start(self, name: str, module: str, *arguments: str) -> Running:
        with patch.dict(os.environ, PYTHONPATH=self.pythonpath):
            return super().start(name, module, *arguments)

    def serve(self) -> tuple[Running, str]:
        """An API process that answers, and its URL."""
        return self.api("--replay", "incremental", "--replay-layers", str(engine.LAYERS))


@contextmanager
def recorded_engine(directory: Path, tokenizer: Path) -> Iterator[str]:
    """The fault suite's engine, whose every answer can be known again; gives its URL."""
    (end,) = Tokenizer.load(str(tokenizer)).encode("<|im_end|>")
    port = free_port()
    fleet = Fleet("", "", tokenizer, directory)
    try:
        running = fleet.start(
            *("engine", "tests.faults.engine", "--port", str(port), "--end", str(end)),
            *("--seed", "1", "--first", "0"),
        )
        url = f"http://127.0.0.1:{port}"
        wait_for(f"{url}/health", running)
        yield url
    finally:
        fleet.stop()


class Balanced(httpx.AsyncBaseTransport):
    """Connections to a load balancer: each request goes to the next of the API processes in service.

    Args:
        urls: of the processes; whoever holds the list may change it at any time.
    """

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = urls
        self._sent = 0
        self._network = unbounded()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self._sent += 1
        target = httpx.URL(self._urls[self._sent % len(self._urls)])
        request.url = request.url.copy_with(host=target.host, port=target.port)
        return await self._network.handle_async_request(request)

    async def aclose(self) -> None:
        await self._network.aclose()
