"""The small cluster of `make test-deploy`, as far as it needs no root: what it reads, and what it decides."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from tests.deploy import kubelet_host
from tests.deploy.kubelet import Workload, plan, share
from tests.deploy.kubelet_host import images, quantity
from tests.deploy.kubelet_pod import Objects, Unsupported, environment
from tests.deploy.rendered import find, overlay
from tokentape_cli.options import PREFIX

OBJECTS: Objects = {(manifest["kind"], manifest["metadata"]["name"]): manifest for manifest in overlay("dev")}
API: dict[str, Any] = find("dev", "Deployment", "tokentape-api")["spec"]["template"]["spec"]["containers"][0]


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
