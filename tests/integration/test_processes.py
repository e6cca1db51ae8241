"""The command's processes: how they start, fail and stop."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import openai
import psutil
import pytest
import redis

from tests.support.processes import Fleet, fleet, free_port, wait_for, wait_until
from tokentape_cli.embedded import EmbeddedValkey
from tokentape_contracts import keys
from tokentape_driver import RolloutSample, TokentapeClient


def run(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "tokentape_cli", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environment},
    )


@pytest.mark.parametrize(
    ("arguments", "mention"),
    [
        (("api",), "--engine-url is needed (or TOKENTAPE_ENGINE_URL)"),
        (("up", "--engine-url", "http://e"), "--tokenizer is needed (or TOKENTAPE_TOKENIZER)"),
        (("api", "--engine-url", "e:1", "--tokenizer", "t", "--redis-url", "redis://r"), "must be a URL"),
        (("config", "--family", "none"), "--family must be one of"),
        (("config", "--port", "x"), "--port 'x'"),
        (("config", "--workers", "0"), "at least 1"),
        (("config", "--chat-template", "/no/such.jinja"), "there is no such file"),
        (
            ("config", "--retention-s", "21599"),
            "--retention-s '21599': must be a whole number from 21600 to 2592000",
        ),
    ],
)
def test_wrong_usage(arguments: tuple[str, ...], mention: str) -> None:
    """Wrong usage is exit code 2 and one sentence that names the option."""
    result = run(*arguments)
    assert result.returncode == 2
    assert mention in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("url", ["rediss+tls://:hunter2@r", "redis://:hunter2/x@r:1/0", "r?password=hunter2"])
def test_a_refused_url_is_not_shown(url: str) -> None:
    """The message about a wrong URL holds no part of its password."""
    result = run("config", TOKENTAPE_REDIS_URL=url)
    assert (result.returncode, "TOKENTAPE_REDIS_URL" in result.stderr) == (2, True)
    assert "hunter2" not in result.stdout + result.stderr


def test_unknown_environment_variable() -> None:
    """A misspelt TOKENTAPE_… variable is refused."""
    result = run("config", TOKENTAPE_ENGINES="http://e")
    assert result.returncode == 2
    assert "TOKENTAPE_ENGINES is unknown" in result.stderr


def test_config_masks_secrets() -> None:
    """`config` shows where each value came from, and no password."""
    result = run(
        "config", "--workers", "3", TOKENTAPE_REDIS_URL="redis://me:hunter2@host:1/0", TOKENTAPE_PORT="81"
    )
    assert result.returncode == 0
    rows = {line.split()[0]: line.split()[1:] for line in result.stdout.splitlines()}
    assert rows["TOKENTAPE_REDIS_URL"] == ["redis://me:***@host:1/0", "environment"]
    assert rows["TOKENTAPE_PORT"] == ["81", "environment"]
    assert rows["TOKENTAPE_WORKERS"] == ["3", "flag"]
    assert rows["TOKENTAPE_FAMILY"] == ["default", "default"]
    assert rows["TOKENTAPE_TOKENIZER"] == ["-", "not", "set"]
    assert "hunter2" not in result.stdout + result.stderr
    in_query = run("config", "--redis-url", "rediss://host/0?password=hunter2&ssl_password=hunter2&db=1")
    assert "rediss://host/0?password=***&ssl_password=***&db=1" in in_query.stdout
    assert "hunter2" not in in_query.stdout


@pytest.mark.slow
def test_missing_tokenizer(tmp_path: Path) -> None:
    """A tokenizer that is not there ends either process at once, with a message and no traceback."""
    missing = str(tmp_path / "none")
    api = run(
        *("api", "--engine-url", "http://e", "--tokenizer", missing, "--redis-url", "redis://127.0.0.1:1/0")
    )
    assembler = run("assembler", "--tokenizer", missing, "--redis-url", "redis://127.0.0.1:1/0")
    for result in (api, assembler):
        assert result.returncode != 0
        assert "none" in result.stderr
        assert "Traceback" not in result.stderr


@pytest.mark.slow
def test_broken_tokens_file(tokenizer_dir: Path, tmp_path: Path) -> None:
    """A tokens file that cannot be used ends the API with exit code 2 and one sentence."""
    path = tmp_path / "tokens.toml"
    path.write_text("[[token]]\n")
    result = run(
        *("api", "--engine-url", "http://e", "--redis-url", "redis://127.0.0.1:1/0"),
        *("--tokenizer", str(tokenizer_dir), "--tokens-file", str(path)),
    )
    assert result.returncode == 2
    assert "token 1 must have exactly name, tenant, scopes, sha256" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.slow
async def test_a_token_is_asked_for(system: Fleet, client: httpx.AsyncClient, tmp_path: Path) -> None:
    """An OpenAI SDK with a token as its API key and a driver with another record and collect an episode."""
    path = tmp_path / "tokens.toml"
    tokens = {}
    for scope in ("agent", "driver"):
        made = run("token", "create", "--name", scope, "--tenant", "t", "--scope", scope)
        tokens[scope] = made.stderr.split()[-1]
        with path.open("a") as file:
            file.write(made.stdout)
    api, url = system.api("--tokens-file", str(path))
    system.assembler()
    assert (await client.post(f"{url}/sessions")).status_code == 401
    async with TokentapeClient(url, token=tokens["driver"]) as driver:
        session = await driver.open_session()
        async with openai.AsyncOpenAI(base_url=session.openai_base_url, api_key=tokens["agent"]) as agent:
            await agent.chat.completions.create(model="m", messages=[{"role": "user", "content": "Hello"}])
            with pytest.raises(openai.NotFoundError, match="v1/chat/completions"):
                await agent.responses.create(model="m", input="Hello")
        collected = await session.collect_samples(RolloutSample())
    assert len(collected.samples) == 1
    assert not any(token in api.output() for token in tokens.values())


@pytest.mark.slow
async def test_the_retention_is_a_setting(system: Fleet, client: httpx.AsyncClient, tmp_path: Path) -> None:
    """An audit stays for a day; from the DELETE on the API's setting holds for all of the session."""
    with (
        EmbeddedValkey() as valkey,
        fleet(valkey.url, system.engine_url, system.tokenizer, tmp_path) as own,
        redis.Redis.from_url(valkey.url) as server,
    ):
        _, url = own.api("--retention-s", "30000")
        own.assembler()
        sid = (await client.post(f"{url}/sessions")).json()["session_id"]
        chat = {"messages": [{"role": "user", "content": "Hello"}]}
        session = f"{url}/sessions/{sid}"
        assert (await client.post(f"{session}/v1/chat/completions", json=chat)).status_code == 200
        assert (await client.post(f"{session}/samples")).status_code == 200
        assert 86_300 < server.ttl(keys.audit(sid)) <= 86_400
        assert (await client.delete(session)).status_code == 204
        for key in (keys.events(sid), keys.audit(sid)):
            assert 29_900 < server.ttl(key) <= 30_000


@pytest.mark.slow
def test_sigterm_ends_cleanly(system: Fleet) -> None:
    """Both processes end with exit code 0 on SIGTERM."""
    api, _ = system.api()
    assembler = system.assembler()
    assert (api.stop(), assembler.stop()) == (0, 0)


def test_up_runs_everything_and_one_interrupt_stops_it(system: Fleet) -> None:
    """`tokentape up` brings its own server; one SIGINT stops all of its processes."""
    port = free_port()
    up = system.tokentape(
        *("up", "--engine-url", system.engine_url, "--tokenizer", str(system.tokenizer)),
        *("--family", "qwen3", "--port", str(port)),
    )
    url = f"http://127.0.0.1:{port}"
    wait_until(lambda: "tokentape up: ready at" in up.output(), up)
    wait_for(f"{url}/ready", up)
    opened = httpx.post(f"{url}/sessions", trust_env=False).json()["session_id"]
    chat = {"messages": [{"role": "user", "content": "Hello"}]}
    session = f"{url}/sessions/{opened}"
    assert httpx.post(f"{session}/v1/chat/completions", json=chat, trust_env=False).status_code == 200
    assert httpx.post(f"{session}/samples", trust_env=False, timeout=20.0).status_code == 200
    children = _children(up.process.pid)
    assert len(children) >= 3
    up.process.send_signal(signal.SIGINT)
    assert up.process.wait(30) == 0
    assert [pid for pid in children if _is_running(pid)] == []


@pytest.mark.slow
def test_up_says_which_process_failed(system: Fleet, tmp_path: Path) -> None:
    """If a part cannot start, `up` names it, and ends with its exit code; the part says why in a sentence."""
    up = system.tokentape(
        *("up", "--engine-url", system.engine_url, "--tokenizer", str(tmp_path)),
        *("--port", str(free_port())),
    )
    assert up.process.wait(60) == 2
    assert "process ended with exit code 2; its message is above" in up.output()
    assert f"cannot load a tokenizer from {tmp_path}: " in up.output()
    assert "Traceback" not in up.output()


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (
            ("--archive-url", "nosuch://x"),
            "tokentape assembler: the assembler cannot start: archive-url cannot",
        ),
        (("--pick-hook", "no.such.hook"), "tokentape assembler: the assembler cannot start: "),
        (("--tokenizer", "/nowhere"), "no tokenizer at /nowhere: there is no such directory"),
        (("--metrics-port", "1", "--host", "203.0.113.7"), "tokentape assembler: --host 203.0.113.7"),
    ],
)
def test_a_worker_that_cannot_start(system: Fleet, more: tuple[str, ...], told: str) -> None:
    """It says so in a sentence and ends with 2, like the API."""
    worker = system.tokentape(
        *("assembler", "--tokenizer", str(system.tokenizer), "--redis-url", system.redis_url), *more
    )
    assert worker.process.wait(60) == 2
    said = worker.output()
    assert told in said
    assert "Traceback" not in said


@pytest.mark.slow
def test_up_waits_for_the_engine_and_says_so(system: Fleet) -> None:
    """Ready are API, worker and engine; until then it says what it waits for, and Ctrl-C ends that too."""
    engine_port = free_port()
    up = system.tokentape(
        *("up", "--engine-url", f"http://127.0.0.1:{engine_port}", "--tokenizer", str(system.tokenizer)),
        *("--family", system.family, "--port", str(free_port())),
    )
    wait_until(lambda: f"waiting for the engine at http://127.0.0.1:{engine_port}, whose" in up.output(), up)
    assert "tokentape up: ready" not in up.output()
    assert re.search(r"a bundled Valkey server, until it stops: redis://:\S+@127\.0\.0\.1:\d+/0", up.output())
    up.process.send_signal(signal.SIGINT)
    assert up.process.wait(30) == 0
    assert "tokentape up: ready" not in up.output()


def _children(pid: int) -> list[int]:
    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


def _is_running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
