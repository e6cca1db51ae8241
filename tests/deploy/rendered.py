"""What kustomize makes of the folder deploy/, as the tests read it."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
KUSTOMIZE = ROOT / "deploy" / "kustomize"
KUBECTL = Path(sys.executable).parent / "kubectl"
OVERLAYS = ("dev", "prod")

Manifest = dict[str, Any]


def kustomize(directory: Path) -> list[Manifest]:
    """The objects of a kustomization."""
    result = subprocess.run(
        [KUBECTL, "kustomize", directory], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr
    assert not result.stderr, result.stderr  # kustomize warns of what it will no longer understand
    return list(yaml.safe_load_all(result.stdout))


@cache
def overlay(name: str) -> list[Manifest]:
    """The objects of an overlay; not to be changed."""
    return kustomize(KUSTOMIZE / "overlays" / name)


def changed(name: str, directory: Path, change: Callable[[str], str]) -> list[Manifest]:
    """The objects of an overlay that was copied to `directory`, and whose kustomization was changed there."""
    where = os.path.relpath(KUSTOMIZE, directory.resolve())
    for path in (KUSTOMIZE / "overlays" / name).iterdir():
        text = change(path.read_text()) if path.stem == "kustomization" else path.read_text()
        (directory / path.name).write_text(text.replace("../..", where))
    return kustomize(directory)


def extended(name: str, directory: Path, *additions: Manifest) -> list[Manifest]:
    """The objects of an overlay to whose kustomization these fields, which are lists, were added."""

    def extend(text: str) -> str:
        kustomization = yaml.safe_load(text)
        for addition in additions:
            for field, items in addition.items():
                kustomization[field] += items
        return yaml.safe_dump(kustomization)

    return changed(name, directory, extend)


def name_of(manifest: Manifest) -> str:
    return f"{manifest['kind']}/{manifest['metadata']['name']}"


def of_kind(name: str, *kinds: str) -> list[Manifest]:
    """The objects of these kinds in an overlay."""
    return [manifest for manifest in overlay(name) if manifest["kind"] in kinds]


def find(name: str, kind: str, of: str) -> Manifest:
    """One object of an overlay, by kind and name."""
    (found,) = (m for m in of_kind(name, kind) if m["metadata"]["name"] == of)
    return found


@dataclass(frozen=True)
class Workload:
    """A Deployment or StatefulSet of an overlay; each has one container."""

    overlay: str
    manifest: Manifest

    def __str__(self) -> str:
        return f"{self.overlay}/{self.name}"

    @property
    def name(self) -> str:
        return str(self.manifest["metadata"]["name"])

    @property
    def labels(self) -> dict[str, str]:
        """Of its pods."""
        return dict(self.manifest["spec"]["template"]["metadata"]["labels"])

    @property
    def pod(self) -> Manifest:
        return dict(self.manifest["spec"]["template"]["spec"])

    @property
    def container(self) -> Manifest:
        (container,) = self.pod["containers"]
        return dict(container)

    @property
    def command(self) -> str:
        """`api`, `assembler`, or what else the container is told to run."""
        return str(self.container["args"][0])

    def environment(self, secret: str = "secret") -> dict[str, str]:  # noqa: S107
        """Its variables; a Secret's that is not in the overlay has this value."""
        found: dict[str, str] = {}
        for source in self.container.get("envFrom", []):
            if "configMapRef" in source:
                found |= find(self.overlay, "ConfigMap", source["configMapRef"]["name"])["data"]
        for variable in self.container.get("env", []):
            found[variable["name"]] = variable.get("value", secret)
        return found


def workloads(*names: str) -> Iterator[Workload]:
    """Every workload of all overlays, or those of these names."""
    for where in OVERLAYS:
        for manifest in of_kind(where, "Deployment", "StatefulSet"):
            workload = Workload(where, manifest)
            if not names or workload.name in names:
                yield workload


TOKENTAPE = ("tokentape-api", "tokentape-assembler")
