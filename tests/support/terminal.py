"""A terminal for a child process: what a person would see on the screen."""

import os
import pty
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Terminal:
    """A `tokentape` process whose standard streams are a terminal."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        ours, theirs = pty.openpty()
        kept = {name: text for name, text in os.environ.items() if name != "NO_COLOR"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tokentape_cli", *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**kept, **environment},
        )
        os.close(theirs)
        self._ours = ours
        self._shown = bytearray()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def output(self) -> str:
        """All that stands on the screen by now, with the terminal's line ends as ours."""
        return bytes(self._shown).decode(errors="replace").replace("\r\n", "\n")

    def wait(self, timeout_s: float) -> int:
        """Waits for the end of the process and of what it shows; returns the exit code."""
        code = self.process.wait(timeout_s)
        self._reader.join(timeout_s)
        return code

    def close(self) -> None:
        self.process.kill()
        self.wait(20)
        os.close(self._ours)

    def _read(self) -> None:
        try:
            while read := os.read(self._ours, 65_536):
                self._shown += read
        except OSError:  # Linux says EIO when the last process has closed its side
            pass


@contextmanager
def terminal(*arguments: str, **environment: str) -> Iterator[Terminal]:
    """Runs `tokentape ARGUMENTS` on a terminal; kills it at the end of the block if it still runs."""
    shown = Terminal(*arguments, **environment)
    try:
        yield shown
    finally:
        shown.close()
