"""`python -m benchmarks.deploy`: does the dev overlay, run as written, lose anything while it is operated?

Runs the rendered manifests in a small cluster of network namespaces (`tests.deploy.kubelet`), with agents and
the driver in a pod of their own. While they work, pods are rolled, scaled, killed and drained, and Valkey is
restarted. At the end the fault suite's checker reads every session again. What each step cost the clients
goes to `benchmarks/results/deploy.json`. Needs root.
"""

import argparse
import asyncio
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measure import Measurement
from benchmarks.report import table, write
from tests.deploy.kubelet import Cluster
from tests.deploy.kubelet_host import IMAGE_ROOT, NAMESPACES, differences, memory, missing
from tests.deploy.kubelet_pod import Pod
from tests.deploy.rendered import ROOT, Manifest, extended, overlay
from tests.faults.checker import Recorded, Report, check, read_all
from tests.faults.history import Call, History
from tokentape_contracts.events import TurnRecorded, decode
from tokentape_core.store import connect
from tokentape_core.text.families import get_family
from tokentape_core.text.render import ChatRenderer
from tokentape_core.text.tokenizer import Tokenizer
from tokentape_engine.tokenizer import END_OF_TURN, small_tokenizer

RUN_TIMEOUT_S = 900
SETTLE_S = 180
PLAYERS = 5
"""Episodes at a time, of each kind of client."""
AT_ONCE_S = 1.0
"""A request on a kept connection that a pod is just closing breaks off within this."""
ENGINE, AGENTS, NODES = "sglang", "agents", ("node-a", "node-b")
API, WORKER, VALKEY = "tokentape-api", "tokentape-assembler", "tokentape-valkey"
RECOVERY_S = 6.0
"""So long a step goes on when everything is as written again."""
ALLOWED = frozenset({"store_unavailable", "deadline_exceeded"})
"""What a request may be told while Valkey, or the only worker, starts anew."""
GRACEFUL = frozenset({"undisturbed", "roll api", "roll workers", "scale workers to 3", "scale workers to 1"})
"""Steps in which no request is refused, and none that a pod has taken, or that comes anew, breaks off."""


@dataclass(frozen=True, slots=True)
class Step:
    """What was done, from when to when on the monotonic clock."""

    name: str
    began: float
    ended: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        return inside(options.seed)
    if lacks := missing():
        print("this machine cannot run the small cluster; it needs", file=sys.stderr)
        print("\n".join(f"  - {line}" for line in lacks), file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    command = [sys.executable, "-m", "benchmarks.deploy", "--inside", "--seed", str(options.seed)]
    with memory() as environment:
        return subprocess.run(
            ["unshare", *NAMESPACES, *command],
            env={**os.environ, **environment},
            timeout=RUN_TIMEOUT_S,
            check=False,
        ).returncode


def inside(seed: int) -> int:
    """The run itself, in namespaces of its own."""
    print(
        f"seed {seed}; not as in a cluster:", *(f"  - {line}" for line in differences()), sep="\n", flush=True
    )
    cluster = Cluster([*overlay("dev"), *_engine(seed)], NODES)
    try:
        measurements = list(asyncio.run(operate(cluster, seed)))
    except BaseException:
        kept = Path(tempfile.mkdtemp(prefix="tokentape-deploy-"))
        for log in filter(Path.exists, cluster.logs):
            shutil.copy(log, kept / f"{log.parent.name}.log")
        print(f"the pods' logs are in {kept}", file=sys.stderr)
        raise
    print(table(measurements))
    write("deploy", measurements)
    return int(any(measurement.met is False for measurement in measurements))


async def operate(cluster: Cluster, seed: int) -> Sequence[Measurement]:
    """Everything that is done to the cluster under load, and what it cost."""
    steps: list[Step] = []

    @asynccontextmanager
    async def step(name: str) -> AsyncIterator[None]:
        """Ends when everything is as written again."""
        began = time.monotonic()
        yield
        await cluster.settled(SETTLE_S)
        await asyncio.sleep(RECOVERY_S if agents else 0)
        if agents is not None and agents.ended.is_set():
            raise RuntimeError(f"the agents have ended:\n{agents.log.read_text()}")
        steps.append(Step(name, began, time.monotonic()))
        print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)

    def pick(name: str) -> Pod:
        return cluster.workloads[name].living[0]

    agents: Pod | None = None
    async with cluster.running():
        async with step("start"):
            pass
        agents = cluster.pod(AGENTS, _agents(seed), "outside")
        async with step("undisturbed"):
            await asyncio.sleep(20)
        async with step("roll api"):
            cluster.restart(API)
        async with step("roll workers"):
            cluster.restart(WORKER)
        async with step("scale workers to 3"):
            cluster.scale(WORKER, 3)
        node = pick(VALKEY).node
        async with step("drain a node"):
            await cluster.drain(node)
        cluster.uncordon(node)
        async with step("scale workers to 1"):
            cluster.scale(WORKER, 1)
        async with step("kill containers"):
            pick(API).kill()
            pick(WORKER).kill()
            await asyncio.sleep(5)
        async with step("force-delete pods"):
            pick(API).terminate(0)
            pick(WORKER).terminate(0)
        async with step("restart valkey"):
            pick(VALKEY).terminate()
            await asyncio.sleep(1)
        async with step("kill valkey"):
            pick(VALKEY).kill()
            await asyncio.sleep(2)
        agents.terminate()
        await agents.ended.wait()
        written = (agents.volumes["out"] / "history").read_bytes()
        kept, fresh, gave_up = pickle.loads(written)  # noqa: S301
        history = History()
        history.calls = [*kept.calls, *fresh.calls]
        history.started = kept.started + fresh.started
        delivered = next(call.session for call in history.calls if call.kind == "collect" and call.ok)
        not_replayed = [problem async for problem in replay(cluster, delivered)]
        (address,) = (service.address for service in cluster.services if service.name == VALKEY)
        client = connect(f"redis://{address}:6379/0")
        recorded = await read_all(client, history.sessions)
        await client.aclose()
        tokenizer = Tokenizer.load(str(IMAGE_ROOT / "tokenizer"))
        renderer = ChatRenderer(tokenizer, get_family("qwen3"))
        report = await check(history, recorded, tokenizer.decode, renderer, allowed=ALLOWED)
        report.problems += gave_up + not_replayed
    for problem in report.problems:
        print(f"WRONG: {problem}", file=sys.stderr)
    return list(measurements_of(seed, cluster, steps[1:], history, fresh, recorded, report))


async def replay(cluster: Cluster, session: str) -> AsyncIterator[str]:
    """What is wrong when a session is replayed as the guide says: in a worker's pod, and by a Job."""
    (worker,) = cluster.workloads[WORKER].living
    if not await worker.execute(["tokentape", "replay", session, "--verify"]):
        yield f"tokentape replay {session} --verify fails in {worker}"
    with tempfile.TemporaryDirectory() as directory:
        found = extended("dev", Path(directory), {"components": ["../../components/replay"]})
    (template,) = (
        each["spec"]["jobTemplate"]["spec"]["template"] for each in found if each["kind"] == "CronJob"
    )
    variables = template["spec"]["containers"][0]["env"]
    next(each for each in variables if each["name"] == "SESSION")["value"] = session
    job = cluster.pod("replay", template, "outside")
    await asyncio.wait_for(job.ended.wait(), SETTLE_S)
    lines = job.log.read_text().splitlines()
    if not lines or not all(line.startswith("ok ") for line in lines):
        yield f"the Job that replays {session} says: {' | '.join(lines)}"


def measurements_of(
    seed: int,
    cluster: Cluster,
    steps: Sequence[Step],
    history: History,
    fresh: History,
    recorded: Mapping[str, Recorded],
    report: Report,
) -> Iterator[Measurement]:
    """Of each step, and of all together; `fresh` are the calls with a connection of their own."""
    times: Counter[str] = Counter()
    for session in recorded.values():
        events = (decode(fields) for _, fields in session.entries)
        times.update(str(event.request.get("user")) for event in events if isinstance(event, TurnRecorded))
    for step in steps:
        calls, anew = (
            [call for call in each.calls if step.began <= call.ended < step.ended]
            for each in (history, fresh)
        )
        yield from _of_step(step, calls, anew, history, times)
    whole: dict[str, Any] = {"seed": seed, "players": PLAYERS}
    yield Measurement("deploy_acknowledged", report.acknowledged, "turns", whole, at_least=1)
    yield Measurement("deploy_unclear", report.unclear, "turns")
    yield Measurement("deploy_collects", report.collects, "collects", at_least=1)
    yield Measurement("deploy_lost", report.lost, "turns", at_most=0.0)
    yield Measurement("deploy_doubled", report.doubled, "turns", at_most=0.0)
    yield Measurement("deploy_violations", len(report.problems), "violations", at_most=0.0)
    for workload in cluster.workloads.values():
        of = {"pods": workload.name}
        yield Measurement("deploy_restarts", workload.restarts, "containers", of)
        if workload.peak_bytes:
            yield Measurement("deploy_peak_memory", workload.peak_bytes / 2**20, "MiB", of)
    yield Measurement("deploy_seconds", steps[-1].ended - steps[0].began, "s")


def _of_step(
    step: Step, calls: Collection[Call], anew: Collection[Call], history: History, times: Counter[str]
) -> Iterator[Measurement]:
    params = {"step": step.name}
    refused = [call for call in calls if not call.ok and call.code != "session_deleted"]
    for call in refused if step.name in GRACEFUL else []:
        print(f"{step.name} was felt: {call}")
    again = Counter(
        f"{call.kind}: {f'{call.status} {call.code}' if call.status else 'no answer'}"
        for call in refused
        if call.status is None or (call.retry == "true" and step.name not in GRACEFUL)
    )
    acknowledged = [call.attempt for call in calls if call.kind == "chat" and call.ok]
    aborted = [call for call in refused if call.kind == "collect" and not _was_collected(call, history)]
    yield Measurement("deploy_step_seconds", step.ended - step.began, "s", params)
    yield Measurement("deploy_step_requests", len(calls), "requests", params)
    yield Measurement("deploy_step_retried", again.total(), "requests", {**params, **again})
    yield Measurement("deploy_step_failed", len(refused) - again.total(), "requests", params, at_most=0.0)
    broken = [
        call
        for call in refused
        if call.status is None and (call in anew or call.ended - call.began > AT_ONCE_S)
    ]
    none = 0.0 if step.name in GRACEFUL else None
    yield Measurement("deploy_step_broken", len(broken), "requests", params, at_most=none)
    yield Measurement("deploy_step_aborted", len(aborted), "samples", params)
    yield Measurement("deploy_step_acknowledged", len(acknowledged), "turns", params)
    lost = sum(times[attempt] == 0 for attempt in acknowledged)
    doubled = sum(max(0, times[attempt] - 1) for attempt in acknowledged)
    yield Measurement("deploy_step_lost", lost, "turns", params, at_most=0.0)
    yield Measurement("deploy_step_doubled", doubled, "turns", params, at_most=0.0)


def _was_collected(call: Call, history: History) -> bool:
    """A later collect of the session was answered. Only the driver, which sends one, lets it be."""
    return any(later.ok and later.ended > call.ended for later in history.of("collect", call.session))


def _engine(seed: int) -> list[Manifest]:
    """A Deployment and a Service of the name and port that the overlay expects."""
    end = small_tokenizer().convert_tokens_to_ids(END_OF_TURN)
    labels = {"app": ENGINE}
    command = ["python", "-m", "tests.deploy.kubelet_engine", "30000", str(end), str(seed)]
    template = _pod(labels, command, ports=[{"name": "http", "containerPort": 30000}])
    template["spec"]["containers"][0]["readinessProbe"] = {
        "httpGet": {"path": "/health", "port": "http"},
        "periodSeconds": 1,
        "timeoutSeconds": 1,
        "failureThreshold": 60,
    }
    metadata = {"name": ENGINE, "namespace": "tokentape"}
    deployment = {"replicas": 1, "selector": {"matchLabels": labels}, "template": template}
    service = {"selector": labels, "ports": [{"port": 30000, "targetPort": "http"}]}
    return [
        {"kind": "Deployment", "metadata": metadata, "spec": deployment},
        {"kind": "Service", "metadata": metadata, "spec": service},
    ]


def _agents(seed: int) -> Manifest:
    """The clients' pod; it writes the history to its volume."""
    url = f"http://{API}:8080"
    command = ["python", "-m", "tests.deploy.kubelet_agents", url, str(seed), str(PLAYERS), "/out/history"]
    template = _pod({"app": AGENTS}, command, volumeMounts=[{"name": "out", "mountPath": "/out"}])
    template["spec"] |= {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 120,
        "volumes": [{"name": "out", "emptyDir": {}}],
    }
    return template


def _pod(labels: Mapping[str, str], command: Sequence[str], **more: Any) -> Manifest:
    env = [{"name": "PYTHONPATH", "value": str(ROOT)}]
    container = {"name": "it", "image": f"{API}:0", "command": command, "env": env, **more}
    user = {"runAsUser": 10002, "runAsGroup": 10002}
    spec = {"nodeName": "outside", "securityContext": user, "containers": [container]}
    return {"metadata": {"labels": labels}, "spec": spec}


if __name__ == "__main__":
    sys.exit(main())
