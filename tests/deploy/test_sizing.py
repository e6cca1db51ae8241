"""The page about sizes follows from what was measured."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import redis.asyncio

from deploy.sizing import (
    API_CONNECTIONS,
    DEFAULT_MAXCLIENTS,
    RESULTS,
    ROOT,
    Costs,
    connections,
    read_costs,
    size,
)
from tests.deploy.rendered import TOKENTAPE, workloads
from tokentape_api import run
from tokentape_api.settings import ApiSettings
from tokentape_contracts import limits
from tokentape_core.store import connect

COSTS = Costs(
    tokens=500,
    turn_cpu_s=0.006,
    collect_cpu_s=0.06,
    turn_bytes=8_000,
    replay_token_bytes=384,
    reply_token_bytes=17,
    cached_turn_bytes=24_000,
)


def test_the_page_is_current() -> None:
    """`python -m deploy.sizing --check` finds nothing to write."""
    command = [sys.executable, "-m", "deploy.sizing", "--check"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT, check=False)
    assert result.returncode == 0, result.stderr


def test_the_arithmetic() -> None:
    """1,500 sessions of 100 turns, a turn each 15 s, worked out by hand."""
    found = size(1_500, COSTS)
    assert found.turns_per_s == 100
    assert found.collects_per_s == 1
    assert found.api_cpus == pytest.approx(0.6)
    assert found.api_pods == 2  # 1 would do for the CPU
    assert found.cache_pods == 7  # 1,500 half-done sessions of 1.2 MB, 256 MiB a pod
    assert found.burst_cpus == pytest.approx(1.5)
    assert found.worker_pods == 2
    assert found.live_bytes == 1_500 * 50 * 8_000
    assert found.result_bytes == limits.RESULT_TTL_S * 50_000 * 17
    assert found.retained_bytes == limits.RETENTION_S * 800_000
    assert size(1_500, COSTS, 7_200).retained_bytes == 7_200 * 800_000
    assert found.replay_factor == 25


def test_ten_times_as_many_take_ten_times_as_much() -> None:
    """What is not rounded up to pods is linear."""
    one, ten = size(1_000, COSTS), size(10_000, COSTS)
    for name in ("turns_per_s", "api_cpus", "burst_cpus", "live_bytes", "result_bytes", "retained_bytes"):
        assert getattr(ten, name) == pytest.approx(10 * getattr(one, name)), name


def test_connections() -> None:
    """Two API pods and two worker pods of two children, by hand. `dev` needs no setting, in a rollout too."""
    assert connections(2, 2) == 2 * (1_024 + 1_024 + 1) + 2 * (4 + 2 * 3)
    pods = {
        workload.name: workload.manifest["spec"]["replicas"]
        for workload in workloads(*TOKENTAPE)
        if workload.overlay == "dev"
    }
    assert connections(pods["tokentape-api"] + 1, pods["tokentape-assembler"] + 1) < DEFAULT_MAXCLIENTS


def test_an_api_process_has_no_other_connections(
    tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One pool for sessions, one for the queue, and one of which a single reader uses a single connection."""
    clients: list[redis.asyncio.Redis] = []

    def connecting(url: str) -> redis.asyncio.Redis:
        clients.append(connect(url))
        return clients[-1]

    monkeypatch.setattr(run, "connect", connecting)
    run.build(ApiSettings(engine_url="http://e", tokenizer=str(tokenizer_dir), redis_url="redis://r"))
    sessions, queue, _ = (client.connection_pool.max_connections for client in clients)
    assert sessions + queue + 1 == API_CONNECTIONS


def test_the_costs_are_the_measured_ones(tmp_path: Path) -> None:
    """Another result gives other costs; one that is missing is no silent 0."""
    names = ("chat_cpu", "collect_cpu", "store_bytes", "replay_bytes", "reply_bytes", "live_sessions")
    results = {name: json.loads((RESULTS / f"{name}.json").read_text()) for name in names}
    results["store_bytes"]["measurements"][0]["value"] = 10.0
    for name, content in results.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    assert read_costs(tmp_path).turn_bytes == 10_240
    results["chat_cpu"]["measurements"] = []
    (tmp_path / "chat_cpu.json").write_text(json.dumps(results["chat_cpu"]))
    with pytest.raises(LookupError, match=r"chat_cpu\.json has 0 measurements"):
        read_costs(tmp_path)
