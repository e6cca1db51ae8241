"""A cluster in one process: Deployments, a StatefulSet and Services over pods that are processes.

It does what the manifests rely on, by the rules of Kubernetes: rolling updates within `maxSurge` and
`maxUnavailable`, endpoints that follow readiness a moment late, evictions that respect disruption budgets.
Whatever a manifest says that would be ignored, and is not known to be, is `Unsupported`.
"""

import asyncio
import contextlib
import copy
import hashlib
import json
import math
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

from tests.deploy.kubelet_host import IMAGE_ROOT, RUN, build_root, call, images
from tests.deploy.kubelet_pod import GATEWAY, Pod, only
from tests.deploy.rendered import Manifest

TICK_S: Final = 0.1
LAG_S: Final = 1.0
"""A Service knows so much later whether a pod is ready: kube-proxies hear of it late."""
EVICT_AGAIN_S: Final = 5.0
"""kubectl's pause after an eviction that a budget forbids."""
_CONNECT_S: Final = 3.0
_STOP_S: Final = 20.0
_SPEC = {
    *("replicas", "selector", "template", "minReadySeconds", "strategy"),
    *("serviceName", "volumeClaimTemplates"),
}


class Running(Protocol):
    """What a decision about pods needs to know of each."""

    revision: str
    ready_since: float | None


P = TypeVar("P", bound=Running)


def plan(
    pods: Sequence[P],
    *,
    revision: str,
    replicas: int,
    surge: int,
    unavailable: int,
    min_ready_s: float,
    now: float,
) -> tuple[int, list[P]]:
    """What a Deployment does next: how many pods of its revision to start, and which pods to end.

    Args:
        pods: those that nobody ends, the oldest first.
    """
    new = [pod for pod in pods if pod.revision == revision]
    old = [pod for pod in pods if pod.revision != revision]

    def is_available(pod: P) -> bool:
        return pod.ready_since is not None and pod.ready_since + min_ready_s <= now

    if len(new) > replicas:  # those that are not ready first, then the youngest
        worst = sorted(new, key=lambda pod: (pod.ready_since is not None, -(pod.ready_since or 0)))
        return 0, worst[: len(new) - replicas]
    start = max(0, min(replicas - len(new), replicas + surge - len(pods)))
    broken = [pod for pod in old if not is_available(pod)]
    spare = sum(map(is_available, pods)) - (replicas - unavailable)
    return start, broken + [pod for pod in old if is_available(pod)][: max(0, spare)]


def share(value: int | str, replicas: int, up: bool) -> int:
    """`maxSurge` or `maxUnavailable`, a number or a percentage, in pods."""
    if isinstance(value, int):
        return value
    exact = int(value.removesuffix("%")) * replicas / 100
    return math.ceil(exact) if up else math.floor(exact)


class Workload:
    """A Deployment or a StatefulSet of one pod, and its pods, the oldest first."""

    def __init__(self, manifest: Manifest) -> None:
        only(manifest["spec"], _SPEC, str(manifest["metadata"]["name"]))
        self.name: str = manifest["metadata"]["name"]
        self.stateful: bool = manifest["kind"] == "StatefulSet"
        self.spec: Manifest = copy.deepcopy(manifest["spec"])
        self.pods: list[Pod] = []
        self.restarts = 0
        self.peak_bytes = 0

    @property
    def revision(self) -> str:
        return hashlib.sha256(json.dumps(self.spec["template"], sort_keys=True).encode()).hexdigest()[:10]

    @property
    def living(self) -> list[Pod]:
        return [pod for pod in self.pods if not pod.terminating]

    def next(self, now: float) -> tuple[int, list[Pod]]:
        """Pods to start, and pods to end."""
        if self.stateful:  # its one pod has a name, which must be free
            return int(not self.pods), []
        replicas = self.spec["replicas"]
        rolling = self.spec.get("strategy", {}).get("rollingUpdate", {})
        return plan(
            self.living,
            revision=self.revision,
            replicas=replicas,
            surge=share(rolling.get("maxSurge", "25%"), replicas, up=True),
            unavailable=share(rolling.get("maxUnavailable", "25%"), replicas, up=False),
            min_ready_s=self.spec.get("minReadySeconds", 0),
            now=now,
        )

    def is_settled(self, now: float) -> bool:
        """As `kubectl rollout status` means it, and nothing ends any more."""
        least = now - self.spec.get("minReadySeconds", 0)
        return len(self.pods) == self.spec["replicas"] and all(
            pod.ready and pod.revision == self.revision and pod.ready_since and pod.ready_since <= least
            for pod in self.pods
        )


class Service:
    """A cluster address behind which a ready pod is picked for every connection. Connections live on."""

    def __init__(self, manifest: Manifest, address: str, pods: Callable[[], Iterable[Pod]]) -> None:
        spec = manifest["spec"]
        only(spec, {"ports", "selector"}, str(manifest["metadata"]["name"]))
        (port,) = spec["ports"]
        self.name: str = manifest["metadata"]["name"]
        self.address = address
        self.port: int = port["port"]
        self._target: int | str = port.get("targetPort", self.port)
        self._selector = spec["selector"].items()
        self._pods = pods
        self._connections: set[asyncio.Task[None] | None] = set()
        self._ready: deque[list[Pod]] = deque([[]], maxlen=round(LAG_S / TICK_S))

    def look(self) -> None:
        """Notes who is ready; called every TICK_S."""
        self._ready.append(
            [pod for pod in self._pods() if pod.ready and self._selector <= pod.labels.items()]
        )

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        call("ip", "address", "add", f"{self.address}/32", "dev", "pods")
        async with await asyncio.start_server(self._serve, self.address, self.port):
            yield

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        endpoints = self._ready[0]
        try:
            pod = random.choice(
                endpoints
            )  # IndexError if there is none: refused, as well as can be done here
            async with asyncio.timeout(_CONNECT_S):
                inner_reader, inner_writer = await asyncio.open_connection(
                    pod.address, pod.port(self._target)
                )
        except (IndexError, OSError, TimeoutError):
            writer.transport.abort()
            return
        task = asyncio.current_task()
        self._connections.add(task)  # asyncio itself forgets it when one side is closed
        try:
            await asyncio.gather(_pump(reader, inner_writer), _pump(inner_reader, writer))
        except asyncio.CancelledError:  # at the end of everything; asyncio's callback would complain of it
            pass
        finally:
            self._connections.discard(task)
            for each in (writer, inner_writer):
                each.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Hands on bytes and their end. A connection that breaks on one side breaks on the other."""
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        writer.write_eof()
    except OSError:
        writer.transport.abort()


class Cluster:
    """Everything together. Runs in the namespaces of `kubelet_host`.

    Args:
        nodes: names; a pod whose `nodeName` is another one is nobody's to drain.
    """

    def __init__(self, manifests: Sequence[Manifest], nodes: Sequence[str]) -> None:
        def of_kind(*kinds: str) -> list[Manifest]:
            return [manifest for manifest in manifests if manifest["kind"] in kinds]

        self._objects = {(m["kind"], m["metadata"]["name"]): m for m in of_kind("ConfigMap", "Secret")}
        self.workloads = {m["metadata"]["name"]: Workload(m) for m in of_kind("Deployment", "StatefulSet")}
        self._budgets = of_kind("PodDisruptionBudget")
        self.services = [
            Service(manifest, f"10.96.0.{number}", lambda: self.pods)
            for number, manifest in enumerate(of_kind("Service"), 1)
        ]
        self._nodes = list(nodes)
        self._cordoned: set[str] = set()
        self._images = images()
        self._addresses = iter(range(2, 250))
        self.logs: list[Path] = []

    @property
    def pods(self) -> list[Pod]:
        return [pod for workload in self.workloads.values() for pod in workload.pods]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Starts everything, and at the end kills it."""
        call("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", "/run")
        call("ip", "link", "set", "lo", "up")
        call("ip", "link", "add", "pods", "type", "bridge")
        call("ip", "address", "add", f"{GATEWAY}/24", "dev", "pods")
        call("ip", "link", "set", "pods", "up")
        await asyncio.to_thread(build_root)
        hosts = ["127.0.0.1 localhost"]
        async with contextlib.AsyncExitStack() as stack:
            for service in self.services:
                await stack.enter_async_context(service.serving())
                name = f"{service.name}.tokentape"
                hosts.append(f"{service.address} {service.name} {name} {name}.svc {name}.svc.cluster.local")
            (IMAGE_ROOT / "etc/hosts").write_text("\n".join([*hosts, ""]))
            controlling = asyncio.create_task(self._control())
            try:
                yield
            finally:
                controlling.cancel()
                for pod in self.pods:
                    pod.terminate(0)
                with contextlib.suppress(TimeoutError):  # the namespaces end what is left
                    async with asyncio.timeout(_STOP_S):
                        await asyncio.gather(*(pod.ended.wait() for pod in self.pods))
                self._forget()

    def _forget(self) -> None:
        """Removes pods that have ended, and keeps their figures."""
        for workload in self.workloads.values():
            for pod in [pod for pod in workload.pods if pod.ended.is_set()]:
                workload.pods.remove(pod)
                workload.restarts += pod.restarts
                workload.peak_bytes = max(workload.peak_bytes, pod.peak_bytes)

    async def _control(self) -> None:
        """Brings what is nearer to what is written."""
        while True:
            self._forget()
            for workload in self.workloads.values():
                start, end = workload.next(time.monotonic())
                for pod in end:
                    pod.terminate()
                for _ in range(start):
                    self._start(workload)
            for service in self.services:
                service.look()
            await asyncio.sleep(TICK_S)

    def _start(self, workload: Workload) -> None:
        number = next(self._addresses)
        name = f"{workload.name}-{0 if workload.stateful else f'{workload.revision[:5]}-{number}'}"
        claims = {}
        for claim in workload.spec.get("volumeClaimTemplates", []):
            claims[claim["metadata"]["name"]] = directory = (
                RUN / "claims" / f"{name}-{claim['metadata']['name']}"
            )
            directory.mkdir(parents=True, exist_ok=True)
        template = workload.spec["template"]
        node = template["spec"].get("nodeName") or self._place(workload)
        pod = self.pod(name, template, node, number, workload.revision, claims)
        workload.pods.append(pod)

    def pod(
        self,
        name: str,
        template: Manifest,
        node: str,
        number: int | None = None,
        revision: str = "",
        claims: dict[str, Path] | None = None,
    ) -> Pod:
        """A pod that has been started; nobody's, unless it is put into a workload."""
        address = f"10.88.0.{number or next(self._addresses)}"
        pod = Pod(name, node, template, revision, address, self._objects, self._images, claims or {})
        pod.directory.mkdir(parents=True, exist_ok=True)
        self.logs.append(pod.log)
        pod.start()
        return pod

    def _place(self, workload: Workload) -> str:
        """The node with the fewest pods of the workload, and of all: as the spread constraints ask."""

        def load(node: str) -> tuple[int, int]:
            mine = [pod for pod in workload.living if pod.node == node]
            return len(mine), len([pod for pod in self.pods if pod.node == node and not pod.terminating])

        return min((node for node in self._nodes if node not in self._cordoned), key=load)

    # --- What an operator does

    async def settled(self, timeout_s: float) -> None:
        """Waits until everything is as written."""
        end = time.monotonic() + timeout_s
        while not all(workload.is_settled(time.monotonic()) for workload in self.workloads.values()):
            for pod in self.pods:
                pod.check()
            if time.monotonic() > end:
                states = "\n".join(pod.state() for pod in self.pods)
                raise TimeoutError(f"not settled within {timeout_s:g} s:\n{states}")
            await asyncio.sleep(TICK_S)
        await asyncio.sleep(LAG_S)

    def restart(self, name: str) -> None:
        """`kubectl rollout restart`."""
        annotations = self.workloads[name].spec["template"]["metadata"].setdefault("annotations", {})
        annotations["kubectl.kubernetes.io/restartedAt"] = str(time.time())

    def scale(self, name: str, replicas: int) -> None:
        """`kubectl scale`."""
        self.workloads[name].spec["replicas"] = replicas

    def may_evict(self, pod: Pod) -> bool:
        """What the eviction API answers; pods that are not ready go at any time (`AlwaysAllow`)."""
        for budget in self._budgets:
            spec: Any = budget["spec"]
            only(spec, {"maxUnavailable", "selector", "unhealthyPodEvictionPolicy"}, "PodDisruptionBudget")
            selector = spec["selector"]["matchLabels"].items()
            if not selector <= pod.labels.items() or not pod.ready:
                continue
            mine = [w for w in self.workloads.values() if any(selector <= p.labels.items() for p in w.pods)]
            expected = sum(workload.spec["replicas"] for workload in mine)
            healthy = sum(each.ready for workload in mine for each in workload.pods)
            if healthy - 1 < expected - share(spec["maxUnavailable"], expected, up=True):
                return False
        return True

    async def drain(self, node: str) -> int:
        """`kubectl drain`: all pods of a node go, as fast as the budgets allow. Returns how many."""
        self._cordoned.add(node)

        async def evict(pod: Pod) -> None:
            while not self.may_evict(pod):
                await asyncio.sleep(EVICT_AGAIN_S)
            pod.terminate()
            await pod.ended.wait()

        there = [pod for pod in self.pods if pod.node == node]
        await asyncio.gather(*map(evict, there))
        return len(there)

    def uncordon(self, node: str) -> None:
        """`kubectl uncordon`."""
        self._cordoned.remove(node)
