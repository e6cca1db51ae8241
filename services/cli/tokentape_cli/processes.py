"""Child processes of the command: started together, stopped together."""

import errno
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Self

import httpx

from tokentape_cli.options import Setting, UsageError

_STOP_S = 40.0
_POLL_S = 0.05
_PROGRESS_S = 3.0


class ProcessEnded(Exception):
    """A child process ended although it should run; names it and its exit code.

    Attributes:
        code: for whoever ends with it: the child's, or 1 if that was none of an error.
    """

    def __init__(self, name: str, code: int) -> None:
        super().__init__(f"the {name} process ended with exit code {code}; its message is above")
        self.code = code if code > 0 else 1


class Processes:
    """A group of `tokentape` child processes; leaving the block stops them, the newest first.

    Each runs in a session of its own: a Ctrl-C at the terminal reaches the parent only, which then stops the
    children in order.
    """

    def __init__(self, log: Path | None = None, stop: threading.Event | None = None) -> None:
        """Makes an empty group.

        Args:
            log: a new file for all that the children print, not mixed with ours.
            stop: ends every wait once it is set.
        """
        self._stop = stop or threading.Event()
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._stack = ExitStack()
        self._output = None if log is None else self._stack.enter_context(log.open("wb"))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def start(
        self, name: str, arguments: Sequence[str], environment: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """Starts `tokentape ARGUMENTS`, with some variables of its own, under a name for messages."""
        command = [sys.executable, "-m", "tokentape_cli", *arguments]
        child = subprocess.Popen(  # noqa: S603
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            start_new_session=True,
            env={**os.environ, **environment},
        )
        self._children[name] = child
        self._stack.callback(end, child, _STOP_S)

    def check(self) -> None:
        """Raises `ProcessEnded` if a child has ended."""
        for name, child in self._children.items():
            if (code := child.poll()) is not None:
                raise ProcessEnded(name, code)

    def wait_until(
        self, missing: Callable[[], str], timeout_s: float = float("inf"), poll_s: float = _POLL_S
    ) -> None:
        """Waits until nothing is missing, while all children live, and says now and then what is.

        Args:
            missing: names what is, "" for nothing.

        Raises:
            ProcessEnded: a child ended.
            TimeoutError: it took too long.
        """
        began = shown = time.monotonic()
        while (what := missing()) and not self._stop.wait(poll_s):
            self.check()
            now = time.monotonic()
            if now - began > timeout_s:
                raise TimeoutError(f"{what}: not ready within {timeout_s:g} s")
            if now - shown > _PROGRESS_S:
                print(f"  waiting for {what} … {now - began:.0f} s", file=sys.stderr, flush=True)
                shown = now


def end(child: "subprocess.Popen[bytes]", timeout_s: float) -> None:
    """Ends a child in order, or by force if that takes longer than `timeout_s`."""
    child.terminate()
    try:
        child.wait(timeout_s)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def free_port() -> int:
    """A TCP port of loopback that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def ensure_free(settings: Mapping[str, Setting], name: str) -> None:
    """Raises `UsageError` if nobody can listen at `host` on the port that this option gives.

    What would listen finds it out much later, and says it less well.
    """
    host, port = settings["host"].value, settings[name].value
    if port is None:
        return
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError):
        raise UsageError(f"--host {host}: there is no such host") from None
    for family, kind, protocol, _, address in found:
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(address)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    raise UsageError(
                        f"--{name} {port}: something listens there already; end it, or choose another port"
                    ) from None
                raise UsageError(f"--host {host} --{name} {port}: {error.strerror}") from None


def answers(url: str) -> bool:
    """Whether a GET of this URL is answered with 200."""
    try:
        return httpx.get(url, timeout=2.0, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False
