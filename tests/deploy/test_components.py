"""The components that no overlay has: what a reader adds for callers outside, or to replay a session."""

import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.deploy.kubelet_pod import environment, expanded
from tests.deploy.rendered import KUBECTL, OVERLAYS, ROOT, Manifest, extended, find, name_of
from tests.deploy.test_manifests import KUBERNETES
from tests.docs.markdown import blocks, sections
from tokentape_cli import options
from tokentape_cli.arguments import REPLAY_OPTIONS
from tokentape_cli.embedded import EmbeddedValkey
from tokentape_cli.main import build_parser
from tokentape_contracts import limits

NGINX = "nginx.ingress.kubernetes.io/"
SESSION = "07d4cbcf6a3549faa89a663361282c8f"
Objects = dict[str, Manifest]


def _guide(name: str) -> Path:
    return ROOT / "docs" / "guides" / f"{name}.md"


def _addition(guide: str) -> Manifest:
    """What a guide adds to an overlay's kustomization."""
    (found,) = (block.code for block in blocks(_guide(guide), "yaml") if block.code.startswith("components:"))
    return dict(yaml.safe_load(found))


@pytest.fixture(scope="module", params=OVERLAYS)
def objects(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Objects:
    """An overlay with both, as the guides add them, by kind and name."""
    directory = tmp_path_factory.mktemp("overlay")
    found = extended(request.param, directory, _addition("deploy-on-kubernetes"), _addition("audits"))
    return {name_of(manifest): manifest for manifest in found}


@pytest.fixture
def pod(objects: Objects) -> Manifest:
    """What a Job of the CronJob runs."""
    return dict(objects["CronJob/tokentape-replay"]["spec"]["jobTemplate"]["spec"]["template"]["spec"])


def variables(
    container: Manifest, objects: Objects, redis_url: str = "redis://redis:6379/0"
) -> dict[str, str]:
    """The container's environment; Redis is there."""
    secret = {"kind": "Secret", "metadata": {"name": "tokentape-redis"}, "stringData": {"url": redis_url}}
    by_kind = {(m["kind"], m["metadata"]["name"]): m for m in [*objects.values(), secret]}
    return environment(container, by_kind)


@pytest.mark.parametrize(
    "name", ["Ingress/tokentape-api", "CronJob/tokentape-replay", "NetworkPolicy/tokentape-replay"]
)
def test_schema(objects: Objects, name: str) -> None:
    """Each is valid in all versions that the guide names, and in the namespace."""
    assert objects[name]["metadata"]["namespace"] == "tokentape"
    for version in KUBERNETES:
        kubernetes_validate.validate(objects[name], version, strict=True)


# --- Ingress


def test_an_ingress_waits_and_passes_on(objects: Objects) -> None:
    """It waits longer than a generation and the longest collect, holds nothing back, and refuses no size."""
    annotations = objects["Ingress/tokentape-api"]["metadata"]["annotations"]
    found = {key.removeprefix(NGINX): value for key, value in annotations.items()}
    longest = max(limits.ENGINE_TIMEOUT_S, limits.COLLECT_DEADLINE_MAX_S)
    assert int(found.pop("proxy-read-timeout")) > longest
    assert found == {"proxy-body-size": "0", "proxy-buffering": "off", "proxy-request-buffering": "off"}


def test_the_guide_names_what_an_ingress_sets(objects: Objects) -> None:
    """Whoever has another proxy finds each setting there, with its reason."""
    guide = sections(_guide("deploy-on-kubernetes"))["An ingress"]
    for key, value in objects["Ingress/tokentape-api"]["metadata"]["annotations"].items():
        assert f'`{key.removeprefix(NGINX)}: "{value}"`' in guide


def test_an_ingress_publishes_sessions_only(objects: Objects) -> None:
    """Over TLS, to a port that the Service has; /metrics and /ready stay inside."""
    spec = objects["Ingress/tokentape-api"]["spec"]
    (rule,) = spec["rules"]
    assert rule["host"] == "tokentape.mine.example"  # as the guide's patch says
    assert [tls["hosts"] for tls in spec["tls"]] == [[rule["host"]]]
    (path,) = rule["http"]["paths"]
    assert (path["path"], path["pathType"]) == ("/sessions", "Prefix")
    backend = path["backend"]["service"]
    ports = objects[f"Service/{backend['name']}"]["spec"]["ports"]
    assert backend["port"]["name"] in {port["name"] for port in ports}


# --- Replay


def test_replay_has_the_workers_settings(objects: Objects, pod: Manifest) -> None:
    """Image, tokenizer, family, hooks and Redis are the workers'; the command takes each variable."""
    worker = objects["Deployment/tokentape-assembler"]["spec"]["template"]["spec"]["containers"][0]
    (container,) = pod["containers"]
    assert container["image"] == worker["image"]
    theirs, ours = ({**variables(each, objects), "SESSION": ""} for each in (worker, container))
    assert ours == theirs
    settings = options.resolve(Namespace(), REPLAY_OPTIONS, ours)
    options.required(settings, "tokenizer", "redis-url")


def test_replay_is_restricted(objects: Objects, pod: Manifest) -> None:
    """As the workers' pods, which another test looks at; its volumes too are none of the node's."""
    worker = objects["Deployment/tokentape-assembler"]["spec"]["template"]["spec"]
    (ours,), (theirs,) = pod["containers"], worker["containers"]
    assert pod["securityContext"] == worker["securityContext"]
    assert ours["securityContext"] == theirs["securityContext"]
    assert ours["resources"].keys() == theirs["resources"].keys()
    for field in ("automountServiceAccountToken", "enableServiceLinks"):
        assert pod[field] is worker[field] is False
    assert all(set(volume) <= {"name", "emptyDir", "secret"} for volume in pod["volumes"])


def test_replay_reaches_redis_and_nothing_else(objects: Objects) -> None:
    """Its policy lets it out to Redis, by the ports of the workers'; Valkey's lets it in."""
    policy = objects["NetworkPolicy/tokentape-replay"]["spec"]
    template = objects["CronJob/tokentape-replay"]["spec"]["jobTemplate"]["spec"]["template"]
    assert policy["podSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert "ingress" not in policy
    assert policy["egress"] == objects["NetworkPolicy/tokentape-assembler"]["spec"]["egress"][:2]
    valkey = find("dev", "NetworkPolicy", "tokentape-valkey")["spec"]["ingress"][0]["from"][0]
    (expression,) = valkey["podSelector"]["matchExpressions"]
    assert template["metadata"]["labels"]["app.kubernetes.io/name"] in expression["values"]


def test_replay_never_runs_by_itself(objects: Objects) -> None:
    """The CronJob is suspended; a Job of it is not tried again, as what it finds is an answer."""
    spec = objects["CronJob/tokentape-replay"]["spec"]
    assert spec["suspend"] is True
    assert spec["jobTemplate"]["spec"]["backoffLimit"] == 0
    assert spec["jobTemplate"]["spec"]["template"]["spec"]["restartPolicy"] == "Never"


def _command(begin: str) -> list[str]:
    """The words of the line of the guide's commands that begins so."""
    lines = [line.strip() for block in blocks(_guide("audits"), "sh") for line in block.code.splitlines()]
    (line,) = (line for line in lines if line.startswith(begin))
    return line.rstrip("| ").split()


def test_a_job_replays_the_session_that_the_guide_gives_it(objects: Objects) -> None:
    """What the guide's `kubectl set env` makes of a Job, run as it says, asks Redis for that session."""
    template: dict[str, Any] = objects["CronJob/tokentape-replay"]["spec"]["jobTemplate"]
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "replay"}, **template}
    edited = subprocess.run(
        [KUBECTL, *_command("kubectl set env")[1:]],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        check=True,
    )
    (container,) = yaml.safe_load(edited.stdout)["spec"]["template"]["spec"]["containers"]
    with EmbeddedValkey() as valkey:
        environment = variables(container, objects, valkey.url)
        arguments = expanded(container["args"], environment)
        result = subprocess.run(
            [sys.executable, "-m", "tokentape_cli", *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert arguments == ["replay", SESSION, "--verify"]
    assert (result.returncode, result.stdout) == (2, "")
    assert f"there is no session {SESSION}" in result.stderr


def test_the_guides_command_in_a_workers_pod(objects: Objects) -> None:
    """`kubectl exec` names a Deployment that there is, and runs a command line that the command takes."""
    words = _command("kubectl exec")
    kind, _, name = words[2].partition("/")
    assert f"{kind.title()}/{name}" in objects
    assert words[3:5] == ["--", "tokentape"]
    assert build_parser().parse_args(words[5:]).command == "replay"
