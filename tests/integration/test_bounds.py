"""An API process under the memory limit of its container, with the heaviest requests that are allowed."""

import asyncio
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import orjson
import pytest
import yaml

from tests.support.processes import Fleet, Running, fleet
from tokentape_cli.embedded import EmbeddedValkey
from tokentape_contracts import limits
from tokentape_contracts.limits import MiB
from tokentape_core.text.tokenizer import Tokenizer
from tokentape_engine.tokenizer import chat_template, full_qwen3_tokenizer

ROOT = Path(__file__).parents[2]
LARGEST = limits.PROMPT_TEXT_BYTES - 200
"""Text of one message; what the template writes around it fits too."""
TEXTS = {
    "a token for each byte": "0123456789" * (LARGEST // 10),
    "four bytes a character": "".join(chr(0x20000 + i % 40_000) for i in range(LARGEST // 4)),
    "characters that are written as others": chr(0x1D15E) * (LARGEST // 4),
}
PROSE = "The quick brown fox jumps over 13 lazy dogs.\n" * (2 * MiB // 46)


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A fleet with the full vocabulary and an engine that costs nothing."""
    directory = tmp_path_factory.mktemp("bounds")
    hf = full_qwen3_tokenizer()
    hf.chat_template = chat_template("qwen3_training")
    hf.save_pretrained(directory / "tokenizer")
    tokens = [str(token) for token in Tokenizer(hf).encode("fine<|im_end|>")]
    command = [sys.executable, "-m", "tests.support.plain_engine", *tokens]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as engine,
        EmbeddedValkey() as valkey,
        fleet(valkey.url, _url(engine), directory / "tokenizer", directory) as running,
    ):
        yield running
        engine.kill()


def _url(engine: "subprocess.Popen[bytes]") -> str:
    assert engine.stdout is not None
    return engine.stdout.readline().decode().strip()


@pytest.fixture(scope="module")
def api(system: Fleet) -> tuple[Running, str]:
    """An API process that may take as much memory as its container."""
    pod = list(yaml.safe_load_all((ROOT / "deploy/kustomize/base/api.yaml").read_text()))
    [limit] = [
        container["resources"]["limits"]["memory"]
        for document in pod
        if document["kind"] == "Deployment"
        for container in document["spec"]["template"]["spec"]["containers"]
    ]
    assert limit == "2Gi"
    running, url = system.api()
    resource.prlimit(running.process.pid, resource.RLIMIT_DATA, (2048 * MiB, 2048 * MiB))
    return running, url


async def _chat(client: httpx.AsyncClient, url: str, body: bytes) -> tuple[httpx.Response, float]:
    """One chat in a session of its own, and its seconds."""
    session = (await client.post(f"{url}/sessions")).json()["session_id"]
    began = time.perf_counter()
    reply = await client.post(f"{url}/sessions/{session}/v1/chat/completions", content=body)
    return reply, time.perf_counter() - began


def _body(text: str, **more: Any) -> bytes:
    return orjson.dumps({"messages": [{"role": "user", "content": text}], **more})


POLL = """
import http.client, select, sys, time
connection = http.client.HTTPConnection(sys.argv[1], timeout=30)
longest, count = 0.0, 0
while not select.select([sys.stdin], [], [], 0.005)[0]:
    began = time.perf_counter()
    connection.request("GET", "/health")
    connection.getresponse().read()
    longest, count = max(longest, time.perf_counter() - began), count + 1
print(longest, count)
"""


@contextmanager
def _watched(url: str) -> Iterator[list[float]]:
    """The longest GET /health within the block, in seconds: of a process that does nothing else."""
    command = [sys.executable, "-c", POLL, url.removeprefix("http://")]
    found: list[float] = []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as poll:
        time.sleep(0.2)
        yield found
        said, _ = poll.communicate(b"\n")
    longest_s, count = said.split()
    assert int(count) > 3
    found.append(float(longest_s))


@pytest.mark.parametrize("name", TEXTS)
async def test_the_longest_texts_at_once(
    client: httpx.AsyncClient, api: tuple[Running, str], name: str
) -> None:
    """Three of the longest texts that a prompt may have are answered, and the process goes on."""
    running, url = api
    client.timeout = 60
    replies = await asyncio.gather(*(_chat(client, url, _body(TEXTS[name])) for _ in range(3)))
    assert [reply.status_code for reply, _ in replies] == [200] * 3
    assert running.process.poll() is None


@pytest.mark.parametrize("first", ["x", "\U0001f600"])
async def test_the_largest_bodies_at_once(
    client: httpx.AsyncClient, api: tuple[Running, str], first: str
) -> None:
    """Twenty bodies of 16 MiB, also with one character that makes four bytes of each: answered or refused."""
    running, url = api
    client.timeout = 60
    text = TEXTS["four bytes a character"]
    rest = limits.CHAT_BODY_BYTES - len(_body(text, x=first))
    bodies = [_body(text, x=first + "x" * rest)] * 20
    assert len(bodies[0]) == limits.CHAT_BODY_BYTES
    replies = [reply for reply, _ in await asyncio.gather(*(_chat(client, url, body) for body in bodies))]
    assert {reply.status_code for reply in replies} <= {200, 503}
    assert any(reply.status_code == 200 for reply in replies)
    assert {r.json()["error"]["code"] for r in replies if r.status_code == 503} <= {"overloaded"}
    assert running.process.poll() is None


async def test_a_short_chat_beside_long_ones(client: httpx.AsyncClient, api: tuple[Running, str]) -> None:
    """A chat of 3 KB beside twelve of 2 MiB is answered as if they were not there, but for 250 ms."""
    _, url = api
    client.timeout = 120
    text = "Say nothing. " * 230
    _, alone_s = await _chat(client, url, _body(text))
    long = [asyncio.create_task(_chat(client, url, _body(PROSE))) for _ in range(12)]
    await asyncio.sleep(0.5)
    beside_s = [(await _chat(client, url, _body(text)))[1] for _ in range(5)]
    assert not all(task.done() for task in long)
    assert [reply.status_code for reply, _ in await asyncio.gather(*long)] == [200] * 12
    assert median(beside_s) < alone_s + 0.25, (alone_s, beside_s)


@pytest.mark.parametrize(
    ("item", "status"),
    [(b"[],", 400), (b"{},", 400), (b'"",', 400), (b"1,", 400), (b"[", 400), (b'"{[,",', 400)],
)
async def test_bodies_of_tiny_values(
    client: httpx.AsyncClient, api: tuple[Running, str], item: bytes, status: int
) -> None:
    """16 MiB of them are refused, and nobody waits for that."""
    _, url = api
    body = b'{"messages":[' + item * ((limits.CHAT_BODY_BYTES - 30) // len(item)) + b"0]}"
    longest_s: list[float] = []
    while len(longest_s) < 10 and min(longest_s, default=1.0) >= 0.1:  # a busy machine delays polls too
        with _watched(url) as found:
            reply, _ = await _chat(client, url, body)
        assert reply.status_code == status
        longest_s += found
    assert min(longest_s) < 0.1, longest_s
