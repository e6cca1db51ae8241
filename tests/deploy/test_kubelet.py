"""The small cluster of `make test-deploy`, as far as it needs no root: what it reads, and what it decides."""

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.deploy import kubelet_host, kubelet_pod
from tests.deploy.kubelet import Cluster, Workload, plan, share
from tests.deploy.kubelet_host import images, quantity
from tests.deploy.kubelet_pod import LAST_LINES, Objects, Unsupported, environment
from tests.deploy.rendered import find, overlay
from tokentape_cli.options import PREFIX

OBJECTS: Objects = {(manifest["kind"], manifest["metadata"]["name"]): manifest for manifest in overlay("dev")}
TEMPLATE: dict[str, Any] = find("dev", "Deployment", "tokentape-api")["spec"]["template"]
API: dict[str, Any] = TEMPLATE["spec"]["containers"][0]


@dataclass
class Pod:
    """As much of a pod as `plan` looks at."""

    revision: str
    ready_since: float | None = None


def next_step(pods: Sequence[Pod], replicas: int = 2) -> tuple[int, list[Pod]]:
    """Of a Deployment with maxSurge 1 and maxUnavailable 0, at the time 100, towards the revision "new"."""
    return plan(pods, revision="new", replicas=replicas, surge=1, unavailable=0, min_ready_s=5, now=100)


def test_a_containers_environment() -> None:
    """ConfigMaps, Secrets in clear, and nothing for what is optional and not there."""
    found = environment(API, OBJECTS)
    assert found[f"{PREFIX}REDIS_URL"] == "redis://tokentape-valkey:6379/0"
    assert found[f"{PREFIX}ENGINE_URL"] == "http://sglang:30000"
    assert f"{PREFIX}QUEUE_REDIS_URL" not in found


def test_a_secret_that_is_missing_is_an_error() -> None:
    """As for the kubelet, unless it is optional."""
    without = {key: manifest for key, manifest in OBJECTS.items() if key != ("Secret", "tokentape-redis")}
    with pytest.raises(KeyError, match="tokentape-redis"):
        environment(API, without)


def test_what_would_be_ignored_is_refused() -> None:
    """A field that the small cluster does not know is not passed over."""
    manifest = find("dev", "Deployment", "tokentape-api")
    with pytest.raises(Unsupported, match="progressDeadlineSeconds"):
        Workload({**manifest, "spec": {**manifest["spec"], "progressDeadlineSeconds": 1}})


def test_images_are_the_dockerfiles() -> None:
    """Their command and variables are read from it."""
    image = images()["tokentape-api"]
    assert image.entrypoint[-1] == "tokentape"
    assert image.environment[f"{PREFIX}TOKENIZER"] == "/tokenizer"
    assert image.environment["PATH"] == "/opt/tokentape/bin:/usr/bin:/bin"


def test_a_rolling_update() -> None:
    """One more than wanted is started; an old one ends only when a new one has been ready for long enough."""
    a, b = Pod("old", 0.0), Pod("old", 0.0)
    assert next_step([a, b]) == (1, [])
    assert next_step([a, b, Pod("new")]) == (0, [])
    assert next_step([a, b, Pod("new", 98.0)]) == (0, [])
    assert next_step([a, b, Pod("new", 95.0)]) == (0, [a])
    assert next_step([b, Pod("new", 95.0)]) == (1, [])
    assert next_step([Pod("new", 95.0), Pod("new", 95.0)]) == (0, [])


def test_scaling() -> None:
    """Down, the one that is not ready goes first, then the youngest."""
    old, young, starting = Pod("new", 10.0), Pod("new", 20.0), Pod("new")
    assert next_step([old], replicas=3) == (2, [])
    assert next_step([old, young, starting], replicas=2) == (0, [starting])
    assert next_step([old, young, starting], replicas=1) == (0, [starting, young])


def test_quantities() -> None:
    """Sizes and shares as Kubernetes reads them: a surge is rounded up, what may be away is rounded down."""
    assert [quantity(text) for text in ("2Gi", "256Mi", "17")] == [2**31, 2**28, 17]
    assert (share("25%", 3, up=True), share("25%", 3, up=False), share(1, 3, up=True)) == (1, 0, 1)


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without root or a command the test does not pass in silence."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setitem(kubelet_host.PACKAGES, "no-such-command", "no-such-package")
    lacks = kubelet_host.missing()
    assert any("root" in line for line in lacks)
    assert any("apt-get install no-such-package" in line for line in lacks)


@pytest.fixture
def pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> kubelet_pod.Pod:
    """An API pod that nobody has started; its root is `tmp_path/image`."""
    monkeypatch.setattr(kubelet_pod, "RUN", tmp_path)
    monkeypatch.setattr(kubelet_pod, "IMAGE_ROOT", tmp_path / "image")
    return kubelet_pod.Pod("api-1", "node-a", TEMPLATE, "new", "10.88.0.2", OBJECTS, images(), {})


async def test_a_pod_that_does_not_get_ready_shows_its_log(pod: kubelet_pod.Pod) -> None:
    """The last lines, of each such pod."""
    cluster = Cluster(overlay("dev"), ["node-a"])
    cluster.workloads["tokentape-api"].pods.append(pod)
    with pytest.raises(TimeoutError, match=r"api-1: not ready.*\n    \(nothing\)"):
        await cluster.settled(0)
    pod.log.write_text("\n".join(f"line {number}" for number in range(100)))
    with pytest.raises(TimeoutError) as caught:
        await cluster.settled(0)
    assert str(caught.value).splitlines()[2:] == [f"    line {number}" for number in range(100)[-LAST_LINES:]]
    pod.ready_since = 0.0
    with pytest.raises(TimeoutError, match=r"api-1: ready$"):
        await cluster.settled(0)


@pytest.mark.skipif(bool(kubelet_host.missing()), reason="needs root and the right to make namespaces")
def test_a_checkout_where_pods_mount_a_volume(
    pod: kubelet_pod.Pod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clone below /tmp is there in a container whose /tmp is a volume, which can be written beside it."""
    monkeypatch.setattr(kubelet_host, "ROOT", Path("/tmp/its/clone"))  # noqa: S108
    image, seen = tmp_path / "image", "/tmp/its/clone/.venv/hello"  # noqa: S108
    for name in ("proc", "usr", "tmp/its/clone/.venv"):
        (image / name).mkdir(parents=True)
    (image / seen.removeprefix("/")).write_text("hello")
    for path in (path for path in map(Path, ("/bin", "/lib", "/lib64")) if path.is_symlink()):
        (image / path.relative_to("/")).symlink_to(path.readlink())
    monkeypatch.setitem(pod.container, "args", [])
    monkeypatch.setitem(pod.container, "command", ["sh", "-c", f"cat {seen} && touch /tmp/mine"])
    mounts = f"mount --bind {image} {image} && mount --bind /usr {image}/usr"
    command = ["unshare", "--mount", "--pid", "--fork", "sh", "-c", f"{mounts} && {pod._script()}"]
    result = subprocess.run(command, input="start\n", capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, "hello", "")
    assert (pod.volumes["tmp"] / "mine").exists()


def test_a_checkout_that_cannot_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Below /run, which is replaced, the test says at once that it cannot run."""
    monkeypatch.setattr(kubelet_host, "ROOT", Path("/run/clone"))
    assert any("below /run" in line for line in kubelet_host.missing())
