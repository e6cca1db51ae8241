"""The images: what their Dockerfile says, installed and started as far as that goes without Docker."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.deploy.rendered import ROOT, TOKENTAPE, workloads
from tests.support.processes import wait_until
from tests.support.scripted import ScriptedEngine
from tokentape_cli import options
from tokentape_cli.embedded import EmbeddedValkey
from tokentape_cli.processes import end, free_port
from tokentape_contracts import limits
from tokentape_core.text.tokenizer import Tokenizer
from tokentape_engine.tokenizer import chat_template, small_tokenizer

DOCKER = ROOT / "deploy" / "docker"
DOCKERFILE = DOCKER / "Dockerfile"
TEXT = DOCKERFILE.read_text()
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
STAGES = dict(re.findall(r"^FROM \S+ AS (\S+)\n(.*?)(?=^FROM |\Z)", TEXT, re.MULTILINE | re.DOTALL))
TARGETS = ("api", "assembler")

_WRITES = """
import os, sys

def note(event, arguments):
    if event == "open" and isinstance(arguments[0], str | bytes):
        mode, flags = arguments[1], arguments[2]
        written = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) if isinstance(flags, int) else 0
        if not written and not (isinstance(mode, str) and set(mode) & set("wax+")):
            return
        path = os.fsdecode(arguments[0])
    elif event in ("os.mkdir", "os.rename", "os.remove", "os.symlink", "os.link", "os.truncate", "os.chmod"):
        path = os.fsdecode(arguments[0])
    else:
        return
    path = os.path.abspath(path)
    if not path.startswith(("/dev/", "/proc/", os.environ["HOME"])):
        os.write(2, f"WRITES {event} {path}\\n".encode())

sys.addaudithook(note)
"""
"""Run by every Python process of the environment: tells what is written outside of HOME."""


def test_lint() -> None:
    """hadolint finds nothing."""
    hadolint = Path(sys.executable).parent / "hadolint"
    result = subprocess.run([hadolint, DOCKERFILE], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_runs_its_command_as_nobody(target: str) -> None:
    """A numeric user, an init, a health check on a path that is no readiness, labels."""
    runtime, stage = STAGES["runtime"], STAGES[target]
    assert re.search(r"^USER (\d+):(\d+)$", runtime, re.MULTILINE)
    assert 'ENTRYPOINT ["/usr/bin/tini", "--", "tokentape"]' in runtime
    assert f'CMD ["{target}"]' in stage
    port = re.search(r"^EXPOSE (\d+)$", stage, re.MULTILINE)
    assert port
    assert f"http://127.0.0.1:{port[1]}/health" in stage
    assert f'image.title="tokentape-{target}"' in stage
    assert f"COPY --from=install-{target} /opt/tokentape /opt/tokentape" in stage
    (user,) = {w.pod["securityContext"]["runAsUser"] for w in workloads(f"tokentape-{target}")}
    assert f"USER {user}:" in runtime


def test_names_and_versions() -> None:
    """Manifests and compose name the images that the Dockerfile makes, in the version of the distribution."""
    version = PROJECT["version"]
    assert f"ARG VERSION={version}\n" in TEXT
    for workload in workloads(*TOKENTAPE):
        image = workload.container["image"].rpartition("/")[2]
        assert image == f"tokentape-{workload.command}:{version}"
        assert workload.command in TARGETS
    for target in TARGETS:
        service = COMPOSE["services"][target]
        assert service["image"] == f"tokentape-{target}:{version}"
        assert service["build"]["target"] == target
        assert (ROOT / "deploy" / service["build"]["context"] / service["build"]["dockerfile"]).samefile(
            DOCKERFILE
        )


def test_what_is_copied_is_there() -> None:
    """The build's context lets through what the Dockerfile copies, and little else."""
    copied = {
        source
        for line in re.findall(r"^COPY (?!--from)(.+) \S+$", TEXT, re.MULTILINE)
        for source in line.split()
    }
    assert all((ROOT / source).exists() for source in copied)
    let_through = re.findall(r"^!(.+)$", (DOCKER / "Dockerfile.dockerignore").read_text(), re.MULTILINE)
    assert sorted(let_through) == sorted(copied)


def test_variables_of_the_images() -> None:
    """Those of ours are settings."""
    known = {options.variable(name) for name in options.ALL}
    found = re.findall(r"\b(TOKENTAPE_\w+)=", TEXT)
    assert found
    assert set(found) <= known


@pytest.mark.parametrize("target", TARGETS)
def test_compose(target: str) -> None:
    """Settings exist, and what is needed is there; nothing is killed while it finishes its work."""
    service = COMPOSE["services"][target]
    names = {"api": options.API, "assembler": options.ASSEMBLER}[target]
    known = {options.variable(name) for name in (*names, *options.LOGS)}
    assert set(service["environment"]) <= known
    assert "TOKENTAPE_REDIS_URL" in service["environment"]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    longest = {
        "api": limits.ENGINE_TIMEOUT_S + limits.DRAIN_S,
        "assembler": limits.ASSEMBLY_TIMEOUT_S,
    }[target]
    assert int(service["stop_grace_period"].removesuffix("s")) > longest
    command = COMPOSE["services"]["valkey"]["command"]
    assert command[command.index("--appendfsync") + 1] == "always"


def extras(target: str) -> str:
    """What the Dockerfile installs for a target, as pip understands it."""
    found = re.search(
        r'^RUN pip install --constraint constraints.txt "(\.\[[\w,]+\])"',
        STAGES[f"install-{target}"],
        re.MULTILINE,
    )
    assert found
    return found[1]


@pytest.mark.parametrize("target", TARGETS)
def test_extras_exist(target: str) -> None:
    """The Dockerfile installs extras that the distribution has, and none that brings torch or a server."""
    names = set(re.findall(r"[\w-]+", extras(target)))
    assert names <= set(PROJECT["optional-dependencies"])
    assert target in names
    assert not names & {"all", "dev", "embedded", "engine", "torch"}


@pytest.fixture(scope="module", params=TARGETS)
def installed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A target's environment, installed as its stage does."""
    target: str = request.param
    directory = tmp_path_factory.mktemp(target) / "venv"
    subprocess.run([sys.executable, "-m", "venv", directory], check=True, timeout=60)
    pip = [directory / "bin" / "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
    command = [*pip, "--constraint", DOCKER / "constraints.txt", extras(target)]
    subprocess.run(command, check=True, timeout=280, cwd=ROOT)
    (site,) = directory.glob("lib/python3*/site-packages")
    (site / "sitecustomize.py").write_text(_WRITES)
    return target, directory / "bin"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_an_image_has_all_it_needs(installed: tuple[str, Path], tmp_path: Path) -> None:
    """With what is installed, without torch, the process starts on a real server, is ready, ends in order.

    It writes nothing outside of HOME, which is on a volume: the root file system may be read-only.
    """
    target, programs = installed
    missing = subprocess.run([programs / "python", "-c", "import torch"], capture_output=True, check=False)
    assert missing.returncode == 1
    hf = small_tokenizer()
    hf.chat_template = chat_template("qwen3_training")
    hf.save_pretrained(tmp_path / "tokenizer")
    home = tmp_path / "home"
    home.mkdir()
    port = free_port()
    engine = ScriptedEngine(Tokenizer(hf))
    log = tmp_path / "log"
    with EmbeddedValkey() as valkey, engine.serve() as engine_url, log.open("wb") as output:
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            "PYTHONDONTWRITEBYTECODE": "1",
            "HF_HUB_OFFLINE": "1",
            "TOKENTAPE_TOKENIZER": str(tmp_path / "tokenizer"),
            "TOKENTAPE_FAMILY": "qwen3",
            "TOKENTAPE_REDIS_URL": valkey.url,
            **(
                {"TOKENTAPE_ENGINE_URL": engine_url, "TOKENTAPE_PORT": str(port)}
                if target == "api"
                else {"TOKENTAPE_METRICS_PORT": str(port), "TOKENTAPE_ARCHIVE_URL": f"file://{home}/archive"}
            ),
        }
        process = subprocess.Popen(
            [programs / "tokentape", target],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=home,
        )
        try:
            wait_until(lambda: _is_ready(port) or process.poll() is not None, timeout_s=90)
        finally:
            end(process, 30)
    written = log.read_text()
    assert process.returncode == 0, written
    assert "WRITES" not in written, written


def _is_ready(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/ready", trust_env=False).status_code == 200
    except httpx.TransportError:
        return False
