"""Tokentape's processes, as a deployment runs them: separate, over a real server."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tokentape_cli.processes import free_port

MODEL_DIR = Path(__file__).parents[2] / ".tokentape" / "reference-model"
"""The reference engine's model, trained once for all tests and for `make demo`."""


@dataclass
class Running:
    """A child process and its output."""

    process: "subprocess.Popen[bytes]"
    log: Path

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def stop(self) -> int:
        """SIGTERM, and the exit code."""
        self.process.terminate()
        return self.process.wait(30)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)


@dataclass
class Fleet:
    """API and worker processes on one Redis; whatever still runs at the end is stopped."""

    redis_url: str
    engine_url: str
    tokenizer: Path
    directory: Path
    family: str = "qwen3"
    started: list[Running] = field(default_factory=list)

    def tokentape(self, *arguments: str) -> Running:
        """Starts `tokentape ARGUMENTS`."""
        return self.start(arguments[0], "tokentape_cli", *arguments)

    def start(self, name: str, module: str, *arguments: str) -> Running:
        """Starts `python -m MODULE ARGUMENTS`; its log has this name."""
        log = self.directory / f"{name}-{len(self.started)}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        running = Running(process, log)
        self.started.append(running)
        return running

    def api(self, *more: str) -> tuple[Running, str]:
        """An API process that answers, and its URL."""
        port = free_port()
        running = self.tokentape(
            *("api", "--port", str(port), "--engine-url", self.engine_url, "--family", self.family),
            *("--tokenizer", str(self.tokenizer), "--redis-url", self.redis_url),
            *more,
        )
        url = f"http://127.0.0.1:{port}"
        wait_for(f"{url}/health", running)
        return running, url

    def assembler(self, *more: str) -> Running:
        """A worker process that has said that it is ready."""
        running = self.tokentape(
            *("assembler", "--tokenizer", str(self.tokenizer), "--redis-url", self.redis_url),
            *("--family", self.family),
            *more,
        )
        wait_until(lambda: "ready" in running.output(), running)
        return running

    def stop(self) -> None:
        for running in reversed(self.started):
            if running.process.poll() is None:
                running.process.terminate()
        for running in self.started:
            try:
                running.process.wait(20)
            except subprocess.TimeoutExpired:
                running.kill()


def wait_for(url: str, running: Running, timeout_s: float = 60.0) -> None:
    """Waits until a GET of this URL is 200."""

    def answers() -> bool:
        try:
            return httpx.get(url, trust_env=False).status_code == 200
        except httpx.TransportError:
            return False

    wait_until(answers, running, timeout_s)


def wait_until(
    condition: Callable[[], bool], running: Running | None = None, timeout_s: float = 60.0
) -> None:
    """Waits for a condition; fails at once if the process ends."""
    end = time.monotonic() + timeout_s
    while not condition():
        if running is not None and running.process.poll() is not None:
            raise AssertionError(f"ended with {running.process.returncode}:\n{running.output()}")
        if time.monotonic() > end:
            raise AssertionError(f"not within {timeout_s:g} s:\n{running.output() if running else ''}")
        time.sleep(0.02)


@contextmanager
def fleet(redis_url: str, engine_url: str, tokenizer: Path, directory: Path) -> Iterator[Fleet]:
    """A fleet that is stopped at the end."""
    running = Fleet(redis_url, engine_url, tokenizer, directory)
    try:
        yield running
    finally:
        running.stop()
