"""What the processes show: short lines on a terminal, JSON elsewhere."""

import json
import re
import signal
from pathlib import Path

import httpx
import pytest

from tests.support.processes import Fleet, free_port, wait_until
from tests.support.terminal import Terminal, terminal

COLOR = re.compile(r"\x1b\[\d*m")
TIME = r"\d\d:\d\d:\d\d"


def play(url: str, shown: Terminal) -> str:
    """Records and collects a session; returns its id when both processes have said so."""
    with httpx.Client(base_url=url, trust_env=False, timeout=30) as client:
        sid: str = client.post("/sessions").json()["session_id"]
        chat = {"messages": [{"role": "user", "content": "Hello"}]}
        assert client.post(f"/sessions/{sid}/v1/chat/completions", json=chat).status_code == 200
        assert client.post(f"/sessions/{sid}/samples", json={}).status_code == 200
        assert client.post(f"/sessions/{sid}/v1/chat/completions", json={}).status_code == 400
    wait_until(lambda: "job" in shown.output() and " 400" in shown.output(), timeout_s=20)
    return sid


@pytest.mark.parametrize("no_color", ["", "1"])
def test_up_on_a_terminal(system: Fleet, no_color: str) -> None:
    """API and worker write short lines: time, level, session's first digits, what; in colours if wanted."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    arguments = ("--engine-url", system.engine_url, "--tokenizer", str(system.tokenizer), "--family", "qwen3")
    with terminal("up", "--port", str(port), *arguments, NO_COLOR=no_color) as shown:
        wait_until(lambda: "ready at" in shown.output(), timeout_s=60)
        sid = play(url, shown)
        shown.process.send_signal(signal.SIGTERM)
        assert shown.wait(40) == 0
    output = shown.output()
    assert bool(COLOR.search(output)) == (not no_color)
    lines = COLOR.sub("", output).splitlines()
    logged = [line for line in lines if re.match(TIME, line)]
    chat = "request POST /sessions/{sid}/v1/chat/completions"
    for pattern in (
        rf"{TIME} info             the API listens at {url}",
        rf"{TIME} info    {sid[:8]} request POST /sessions 200 \d+ ms",
        rf"{TIME} info    {sid[:8]} {re.escape(chat)} 200 \d+ ms",
        rf"{TIME} info    {sid[:8]} {re.escape(chat)} 400 invalid_request \d+ ms",
        rf"{TIME} info    {sid[:8]} job stored \d+ ms",
    ):
        assert [line for line in logged if re.fullmatch(pattern, line)], (pattern, logged)
    assert sid not in output
    assert max(len(line) for line in logged if sid[:8] in line) <= 100
    assert [line for line in lines if line.startswith("{")] == []


def test_json_on_a_terminal(system: Fleet) -> None:
    """With `--log-format json` a terminal gets one JSON object a line too."""
    port = free_port()
    arguments = ("--engine-url", system.engine_url, "--tokenizer", str(system.tokenizer), "--family", "qwen3")
    given = ("--redis-url", system.redis_url, "--log-format", "json")
    with terminal("api", "--port", str(port), *arguments, *given) as shown:
        wait_until(lambda: "the API listens" in shown.output(), timeout_s=60)
        httpx.delete(f"http://127.0.0.1:{port}/sessions/none", trust_env=False)
        wait_until(lambda: "DELETE" in shown.output(), timeout_s=20)
    for line in shown.output().splitlines():
        assert json.loads(line).keys() >= {"timestamp", "level", "logger", "event"}


def test_the_demo_shows_its_agents(tmp_path: Path) -> None:
    """On a terminal the demo shows samples, trees and the verdict; its processes' logs go to a file."""
    with terminal("demo", "--agents", "1", "--model-dir", str(tmp_path / "model")) as shown:
        assert shown.wait(110) == 0, shown.output()
    output = COLOR.sub("", shown.output())
    assert re.search(r"agent 0: .*\n +prompt │ ", output)
    assert "The tree of agent 1: retries a turn" in output
    assert re.search(r"(\d+) of \1 samples verified", output)
    assert not re.search(rf"^{TIME}|^\{{|WARNING|warning|reference engine ready", output, re.MULTILINE)
    assert f"all logs: {tmp_path / 'demo.log'}" in output
    logged = (tmp_path / "demo.log").read_text()
    assert "reference engine ready" in logged
    assert re.search(rf"^{TIME} info    \w{{8}} job stored \d+ ms$", logged, re.MULTILINE)
    assert "Redis is away" not in logged


def test_a_demo_that_fails_shows_the_log(tmp_path: Path) -> None:
    """If one of its processes ends, the demo shows the last lines of the log, and says which it was."""
    (tmp_path / "model").write_text("no directory")
    with terminal("demo", "--model-dir", str(tmp_path / "model")) as shown:
        assert shown.wait(60) == 1
    assert "tokentape demo: the engine process ended with exit code" in shown.output()
    assert str(tmp_path / "model") in shown.output()
