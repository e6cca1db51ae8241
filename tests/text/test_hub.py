"""A model by its name, where the hub is away: asked once, for seconds, with one message; then the cache."""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.text.models import small_hf
from tokentape_core.text import hub

MODEL = "someone/model"
COMMIT = "0" * 40
AWAY = b"HTTP/1.1 503 Away\r\ncontent-length: 0\r\n\r\n"


@contextmanager
def listening(reply: bytes) -> Iterator[tuple[str, list[bytes]]]:
    """A hub on loopback that sends `reply`, or nothing; its URL, and the requests that it got."""
    requests: list[bytes] = []
    kept: list[socket.socket] = []

    def serve() -> None:
        while True:
            try:
                client, _ = server.accept()
            except OSError:
                return
            kept.append(client)
            requests.append(client.recv(65_536))
            if reply:
                client.sendall(reply)
                client.close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.getsockname()[1]}", requests
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()
            for client in kept:
                client.close()


CHECK = ("family", "check")
"""Loads the tokenizer and does no more."""
API = ("--engine-url", "http://127.0.0.1:9")
REDIS = ("--redis-url", "redis://127.0.0.1:9/0")


def check(
    home: Path, endpoint: str, command: Sequence[str] = CHECK, **environment: str
) -> "subprocess.CompletedProcess[str]":
    """A `tokentape` command with the model's tokenizer."""
    return subprocess.run(
        [sys.executable, "-m", "tokentape_cli", *command, "--tokenizer", MODEL, "--family", "qwen3"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "HF_HOME": str(home), "HF_ENDPOINT": endpoint, "NO_PROXY": "*", **environment},
    )


def fails_once(result: "subprocess.CompletedProcess[str]", reason: str) -> None:
    assert result.returncode == 2
    [message] = result.stderr.splitlines()
    assert f": cannot load a tokenizer from {MODEL}: {reason}" in message
    assert "and it is not in the local cache. Give a directory" in message


@pytest.mark.parametrize(
    "command",
    [
        ("up", "--port", "18080", *API),
        ("api", "--port", "18080", *API, *REDIS),
        ("assembler", "--workers", "3", *REDIS),
    ],
    ids=["up", "api", "assembler"],
)
def test_processes_ask_once_for_all(tmp_path: Path, command: Sequence[str]) -> None:
    """However many processes a command starts: one request, one sentence, and nothing was started."""
    with listening(AWAY) as (endpoint, requests):
        result = check(tmp_path, endpoint, command)
    fails_once(result, f"the model hub {endpoint} answers with status 503")
    assert result.stdout == ""
    assert len(requests) == 1


@pytest.fixture
def cached(tmp_path: Path) -> Path:
    """A home of the hub's client in whose cache the model is."""
    cache = tmp_path / "hub" / f"models--{MODEL.replace('/', '--')}"
    small_hf("qwen3_training", "qwen3").save_pretrained(str(cache / "snapshots" / COMMIT))
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text(COMMIT)
    return tmp_path


def test_nobody_listens(tmp_path: Path) -> None:
    """A refused connection, like a name that is not known, ends the command with one sentence."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        closed = f"http://127.0.0.1:{server.getsockname()[1]}"
    began = time.monotonic()
    fails_once(check(tmp_path, closed), f"the model hub {closed} does not answer (")
    assert time.monotonic() - began < hub.PROBE_S + 20
    unknown = "http://hub.invalid"
    fails_once(check(tmp_path, unknown), f"the model hub {unknown} does not answer (")


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (b"", "does not answer (timed out)"),
        (AWAY, "answers with status 503"),
    ],
    ids=["silent", "503"],
)
def test_the_hub_is_asked_once(tmp_path: Path, reply: bytes, reason: str) -> None:
    """A hub that is silent or broken gets one request, and is not waited for any longer."""
    began = time.monotonic()
    with listening(reply) as (endpoint, requests):
        fails_once(check(tmp_path, endpoint), f"the model hub {endpoint} {reason}")
    assert len(requests) == 1
    assert time.monotonic() - began < hub.PROBE_S + 20


def test_what_is_cached_is_used(cached: Path) -> None:
    """Without the hub a cached tokenizer is loaded from the cache, and one line says so."""
    with listening(b"") as (endpoint, requests):
        result = check(cached, endpoint)
    assert result.returncode == 0, result.stderr
    [line] = result.stderr.splitlines()
    assert f"the tokenizer of {MODEL} is taken from the local cache" in line
    assert len(requests) == 1


def test_offline_mode_asks_nobody(tmp_path: Path) -> None:
    """With HF_HUB_OFFLINE the hub gets no request."""
    with listening(b"") as (endpoint, requests):
        fails_once(check(tmp_path, endpoint, HF_HUB_OFFLINE="1"), "HF_HUB_OFFLINE is set")
    assert requests == []


def test_a_hub_that_answers_is_asked_for_the_model(tmp_path: Path) -> None:
    """What it says of the model is the reason."""
    with listening(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n") as (endpoint, requests):
        result = check(tmp_path, endpoint)
    assert result.returncode == 2
    [message] = result.stderr.splitlines()
    assert "does not answer" not in message
    assert len(requests) > 1
