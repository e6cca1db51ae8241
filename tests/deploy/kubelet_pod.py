"""A pod: one container, a process in namespaces of its own; started, probed, restarted, ended as written."""

import asyncio
import base64
import contextlib
import os
import re
import shlex
import time
from collections.abc import Coroutine, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import httpx
import psutil

from tests.deploy import kubelet_host as host
from tests.deploy.kubelet_host import IMAGE_ROOT, RUN, Image, call, quantity
from tests.deploy.rendered import Manifest

Objects = Mapping[tuple[str, str], Manifest]
"""ConfigMaps and Secrets by kind and name."""

GATEWAY: Final = "10.88.0.1"
BACKOFF_S: Final = 10.0
"""Before the second restart; twice as long before each further one. The first is at once."""
LAST_LINES: Final = 15
"""Of the log of a pod that is not ready, which are shown."""
_POD = {
    *(
        "containers",
        "volumes",
        "securityContext",
        "terminationGracePeriodSeconds",
        "restartPolicy",
        "nodeName",
    ),
    *(
        "topologySpreadConstraints",
        "serviceAccountName",
        "automountServiceAccountToken",
        "enableServiceLinks",
    ),
}
_CONTAINER = {
    *("name", "image", "args", "command", "env", "envFrom", "ports", "lifecycle", "resources"),
    *("securityContext", "volumeMounts", "startupProbe", "livenessProbe", "readinessProbe"),
}
_PROBE = {"httpGet", "exec", "tcpSocket", "periodSeconds", "timeoutSeconds", "failureThreshold"}


class Unsupported(ValueError):
    """A manifest says something that would be ignored here."""


def only(given: Mapping[str, Any], known: set[str], where: str) -> None:
    if unknown := given.keys() - known:
        raise Unsupported(f"{where}: {', '.join(sorted(unknown))}")


def environment(container: Manifest, objects: Objects) -> dict[str, str]:
    """A container's variables, as the kubelet makes them of ConfigMaps and Secrets.

    Raises:
        KeyError: one that is not optional is not there.
    """
    found: dict[str, str] = {}
    for source in container.get("envFrom", []):
        ((kind, reference),) = source.items()
        found |= _data({"configMapRef": "ConfigMap", "secretRef": "Secret"}[kind], reference, objects)
    for variable in container.get("env", []):
        if "valueFrom" not in variable:
            found[variable["name"]] = variable.get("value", "")
            continue
        ((kind, reference),) = variable["valueFrom"].items()
        data = _data({"configMapKeyRef": "ConfigMap", "secretKeyRef": "Secret"}[kind], reference, objects)
        if reference["key"] in data or not reference.get("optional"):
            found[variable["name"]] = data[reference["key"]]
    return found


def expanded(words: Iterable[str], variables: Mapping[str, str]) -> list[str]:
    """A container's command or arguments, with the variables that they name as `$(NAME)`."""
    return [re.sub(r"\$\((\w+)\)", lambda match: variables.get(match[1], match[0]), word) for word in words]


def _data(kind: str, reference: Manifest, objects: Objects) -> dict[str, str]:
    if (kind, reference["name"]) not in objects and reference.get("optional"):
        return {}
    manifest = objects[kind, reference["name"]]
    plain = dict(manifest.get("stringData", {}) if kind == "Secret" else manifest.get("data", {}))
    if kind == "Secret":
        plain |= {key: base64.b64decode(value).decode() for key, value in manifest.get("data", {}).items()}
    return plain


class Pod:
    """Runs from `start` until `ended` is set.

    Args:
        address: of the pod, in GATEWAY's network.
        claims: directories of a StatefulSet's volume claims, by volume.

    Attributes:
        ready: the readiness probe says so, and nobody wants the pod to end.
        ready_since: on the clock of `time.monotonic`.
        restarts: of the container.
        peak_bytes: the most memory that it had, where that is measured.
    """

    def __init__(
        self,
        name: str,
        node: str,
        template: Manifest,
        revision: str,
        address: str,
        objects: Objects,
        images: Mapping[str, Image],
        claims: Mapping[str, Path],
    ) -> None:
        self.name, self.node, self.revision, self.address = name, node, revision, address
        self.labels: Mapping[str, str] = template["metadata"]["labels"]
        self.spec: Manifest = template["spec"]
        (self.container,) = self.spec["containers"]
        only(self.spec, _POD, f"pod {name}")
        only(self.container, _CONTAINER, f"container of {name}")
        self.image = images[self.container["image"].rpartition("/")[2].partition(":")[0]]
        self.environment = {**self.image.environment, **environment(self.container, objects)}
        self.directory = RUN / "pods" / f"{name}-{address}"
        self.volumes = dict(self._volumes(objects, claims))
        self.terminating = False
        self.ended = asyncio.Event()
        self.ready_since: float | None = None
        self.restarts = -1
        self.peak_bytes = 0
        self._wake = asyncio.Event()
        self._process: asyncio.subprocess.Process | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._netns = f"/run/netns/{self.directory.name}"

    def __str__(self) -> str:
        return self.name

    @property
    def ready(self) -> bool:
        return self.ready_since is not None and not self.terminating

    @property
    def log(self) -> Path:
        return self.directory / "log"

    def state(self) -> str:
        """A line, and if it is not ready the last lines of its log."""
        if self.ready:
            return f"{self}: ready"
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        head = f"{self}: not ready, restarted {max(0, self.restarts)} times; its log ends with"
        return "\n    ".join([head, *(lines[-LAST_LINES:] or ["(nothing)"])])

    def start(self) -> None:
        self._spawn(self._run())

    def port(self, name: str | int) -> int:
        """The number of a port of the container."""
        named = {port["name"]: port["containerPort"] for port in self.container["ports"]}
        return name if isinstance(name, int) else int(named[name])

    def kill(self) -> None:
        """SIGKILL to the container, as when it has too much memory: the pod stays, and starts it anew."""
        self._signal("KILL")

    def terminate(self, grace_s: float | None = None) -> None:
        """`kubectl delete pod`; with `grace_s=0` by force. Returns at once."""
        if not self.terminating:
            self.terminating = True
            self._wake.set()
            self._spawn(self._stop(self.spec.get("terminationGracePeriodSeconds", 30), grace_s))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.create_task(work))

    def check(self) -> None:
        """Raises what one of its tasks raised."""
        for task in self._tasks:
            if task.done() and not task.cancelled() and (error := task.exception()):
                raise error

    # --- What it runs on

    def _volumes(self, objects: Objects, claims: Mapping[str, Path]) -> Iterator[tuple[str, Path]]:
        """The directories of its volumes, filled."""
        yield from claims.items()
        for volume in self.spec.get("volumes", []):
            directory = self.directory / "volumes" / volume["name"]
            directory.mkdir(parents=True)
            match volume:
                case {"emptyDir": _}:
                    directory.chmod(0o777)
                case {"configMap": source}:
                    _fill(directory, _data("ConfigMap", source, objects))
                case {"secret": source}:
                    _fill(directory, _data("Secret", {**source, "name": source["secretName"]}, objects))
                case _:
                    raise Unsupported(f"volume {volume}")
            yield volume["name"], directory

    def _connect(self) -> None:
        """A network namespace with the pod's address."""
        namespace, outside = self.directory.name, f"v{self.address.rpartition('.')[2]}"
        call("ip", "netns", "add", namespace)
        call("ip", "link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", namespace)
        call("ip", "link", "set", outside, "master", "pods", "up")
        call("ip", "-n", namespace, "address", "add", f"{self.address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            call("ip", "-n", namespace, "link", "set", device, "up")
        call("ip", "-n", namespace, "route", "add", "default", "via", GATEWAY)

    def _as_user(self, command: list[str]) -> list[str]:
        """A command in the container, as its user and with its environment and nothing else."""
        security = self.spec.get("securityContext", {})
        user, group = security.get("runAsUser", 0), security.get("runAsGroup", 0)
        pairs = [f"{name}={value}" for name, value in self.environment.items()]
        return [
            *("setpriv", f"--reuid={user}", f"--regid={group}", f"--groups={security.get('fsGroup', group)}"),
            *("--no-new-privs", "--bounding-set=-all", "--inh-caps=-all"),
            *("env", "--ignore-environment", "--chdir=/tmp", *pairs, *command),
        ]

    def _script(self) -> str:
        """What makes the container's file system and becomes its command."""
        commands = [["mount", "-t", "proc", "proc", f"{IMAGE_ROOT}/proc"]]
        for mount in self.container.get("volumeMounts", []):
            target = f"{IMAGE_ROOT}{mount['mountPath']}"
            Path(target).mkdir(parents=True, exist_ok=True)
            volume = self.volumes[mount["name"]]
            for inside in host.hidden_by(mount["mountPath"]):
                (volume / inside).mkdir(parents=True, exist_ok=True)
                commands.append(["mount", "--rbind", f"{target}/{inside}", str(volume / inside)])
            commands.append(["mount", "--rbind", str(volume), target])
            if mount.get("readOnly"):
                commands.append(["mount", "-o", "remount,bind,ro", target])
        if self.container.get("securityContext", {}).get("readOnlyRootFilesystem"):
            commands.append(["mount", "-o", "remount,bind,ro", str(IMAGE_ROOT)])
        entrypoint = self.container.get("command", self.image.entrypoint)
        words = [*entrypoint, *self.container.get("args", [])]
        command = self._as_user(expanded(words, self.environment))
        commands.append(["exec", "chroot", str(IMAGE_ROOT), *command])
        return "\n".join(["set -e", "read -r _", *map(shlex.join, commands)])

    # --- Its life

    async def _run(self) -> None:
        await asyncio.to_thread(self._connect)
        group = self.spec.get("securityContext", {}).get("fsGroup", 0)
        for directory in self.volumes.values():
            os.chown(directory, -1, group)
            directory.chmod(directory.stat().st_mode | 0o2070)
        limit = self.container.get("resources", {}).get("limits", {}).get("memory")
        memory = host.limit_memory(self.directory.name, quantity(limit)) if limit else None
        async with httpx.AsyncClient(
            verify=False,  # noqa: S501
            limits=httpx.Limits(max_keepalive_connections=0),
            trust_env=False,
        ) as client:
            while not self.terminating:
                self.restarts += 1
                await self._run_container(client, memory)
                if self.spec.get("restartPolicy") == "Never":
                    break
                if self.restarts:
                    await self._pause(BACKOFF_S * 2.0 ** (self.restarts - 1))
        if memory is not None:
            self.peak_bytes = host.peak(memory)
            await asyncio.to_thread(host.remove, memory)
        await asyncio.to_thread(call, "ip", "netns", "delete", self.directory.name)
        self.ended.set()

    async def _run_container(self, client: httpx.AsyncClient, memory: Path | None) -> None:
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *("nsenter", f"--net={self._netns}", "unshare", "--mount", "--pid", "--fork", "--kill-child"),
                *("sh", "-c", self._script()),
                stdin=asyncio.subprocess.PIPE,
                stdout=log,
                stderr=log,
            )
        while (pid := self._pid()) is None:
            await asyncio.sleep(0.005)
        if memory is not None:
            (memory / "cgroup.procs").write_text(str(pid))
        assert self._process.stdin is not None
        self._process.stdin.write(b"start\n")
        self._process.stdin.close()
        probing = asyncio.create_task(self._probe_all(client))
        await self._process.wait()
        probing.cancel()
        self.ready_since = None
        self._process = None
        with contextlib.suppress(asyncio.CancelledError):
            await probing

    def _pid(self) -> int | None:
        """Of the container's process 1."""
        if self._process is None or self._process.returncode is not None:
            return None
        try:
            children = psutil.Process(self._process.pid).children()
        except psutil.NoSuchProcess:
            return None
        return children[0].pid if children else None

    def _signal(self, name: str) -> None:
        if (pid := self._pid()) is not None:
            os.kill(pid, {"TERM": 15, "KILL": 9}[name])

    async def _stop(self, grace_s: float, given_s: float | None = None) -> None:
        """The preStop hook, SIGTERM, and at the end of the grace period SIGKILL."""
        process = self._process
        if process is None:
            return
        end = time.monotonic() + (grace_s if given_s is None else given_s)
        hook = self.container.get("lifecycle", {})
        only(hook, {"preStop"}, f"lifecycle of {self}")
        only(hook.get("preStop", {}), {"sleep"}, f"preStop of {self}")
        before = hook["preStop"]["sleep"]["seconds"] if hook else 0
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), max(0, min(before, end - time.monotonic())))
        self._signal("TERM")
        try:
            await asyncio.wait_for(process.wait(), max(0, end - time.monotonic()))
        except TimeoutError:
            self._signal("KILL")

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), seconds)

    # --- Its probes

    async def _probe_all(self, client: httpx.AsyncClient) -> None:
        """The startup probe until it passes, then the others next to each other until cancelled."""
        if "startupProbe" in self.container:
            await self._until_failed(client, "startupProbe", until_passed=True)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._readiness(client))
            if "livenessProbe" in self.container:
                group.create_task(self._until_failed(client, "livenessProbe"))

    async def _until_failed(self, client: httpx.AsyncClient, kind: str, until_passed: bool = False) -> None:
        """Stops the container when the probe has failed so often in a row."""
        probe = self.container[kind]
        failures = 0
        while failures < probe["failureThreshold"]:
            passed = await self._probe(client, probe)
            if passed and until_passed:
                return
            failures = 0 if passed else failures + 1
            await asyncio.sleep(probe["periodSeconds"])
        await self._stop(self.spec.get("terminationGracePeriodSeconds", 30))

    async def _readiness(self, client: httpx.AsyncClient) -> None:
        probe = self.container.get("readinessProbe")
        if probe is None:
            self.ready_since = time.monotonic()
            return
        failures = 0
        while True:
            if await self._probe(client, probe):
                failures = 0
                self.ready_since = self.ready_since or time.monotonic()
            else:
                failures += 1
                if failures >= probe["failureThreshold"]:
                    self.ready_since = None
            await asyncio.sleep(probe["periodSeconds"])

    async def _probe(self, client: httpx.AsyncClient, probe: Manifest) -> bool:
        only(probe, _PROBE, f"a probe of {self}")
        try:
            async with asyncio.timeout(probe["timeoutSeconds"]):
                match probe:
                    case {"httpGet": get}:
                        only(get, {"path", "port"}, "httpGet")
                        reply = await client.get(
                            f"http://{self.address}:{self.port(get['port'])}{get['path']}"
                        )
                        return 200 <= reply.status_code < 400
                    case {"tcpSocket": socket}:
                        _, writer = await asyncio.open_connection(self.address, self.port(socket["port"]))
                        writer.close()
                        return True
                    case {"exec": execute}:
                        return await self.execute(execute["command"])
                    case _:
                        raise Unsupported(f"probe {probe}")
        except (TimeoutError, OSError, httpx.TransportError):
            return False

    async def execute(self, command: list[str]) -> bool:
        """Runs a command in the container, as `kubectl exec` does; whether it succeeds."""
        process = await asyncio.create_subprocess_exec(
            *("nsenter", "--target", str(self._pid()), "--mount", "--net", "--pid", "--root"),
            *self._as_user(command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            return await process.wait() == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


def _fill(directory: Path, data: Mapping[str, str]) -> None:
    for name, content in data.items():
        (directory / name).write_text(content)
