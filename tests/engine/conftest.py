"""Real server processes for the tests of the reference engine: a trained dense model, a random MoE one."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.support.processes import MODEL_DIR
from tokentape_engine.model import TinyModel


@pytest.fixture(scope="session")
def engine_url(model_dir: Path) -> Iterator[str]:
    """The base URL of a server process, which trains its model if nobody has."""
    with _engine("--model-dir", str(model_dir)) as url:
        yield url


@contextmanager
def _engine(*options: str) -> Iterator[str]:
    """A server process that is ready, by its base URL; it must stop in order."""
    command = [sys.executable, "-m", "tokentape_engine", "--port", "0", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        output = []
        assert process.stderr is not None
        for line in process.stderr:
            output.append(line)
            if ready := re.search(r"ready on (http\S+)", line):
                break
        else:
            pytest.fail("the engine ended before it was ready:\n" + "".join(output))
        try:
            yield ready[1]
        finally:
            process.terminate()
            process.communicate(timeout=20)
    # uvicorn stops in order and then raises the signal again.
    assert process.returncode in (0, -15), process.returncode


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """Where the server keeps its model: trained once for all tests and for `make demo`."""
    return MODEL_DIR


@pytest.fixture(scope="session")
def model(engine_url: str, model_dir: Path) -> TinyModel:
    """The server's model, loaded a second time: the judge of what the server says."""
    return TinyModel.load(model_dir)


@pytest.fixture(scope="session")
def client(engine_url: str) -> Iterator[httpx.Client]:
    """An HTTP client of the server."""
    with httpx.Client(base_url=engine_url, timeout=60) as client:
        yield client


@pytest.fixture(scope="session")
def moe_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the MoE server keeps its model, with random weights."""
    return tmp_path_factory.mktemp("moe") / "model"


@pytest.fixture(scope="session")
def moe_client(moe_dir: Path) -> Iterator[httpx.Client]:
    """An HTTP client of a server process with a random MoE model, whose weights nobody updates."""
    with (
        _engine("--model", "moe", "--train-steps", "0", "--model-dir", str(moe_dir)) as url,
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        yield client


@pytest.fixture(scope="session")
def moe_model(moe_client: httpx.Client, moe_dir: Path) -> TinyModel:
    """The MoE server's model, loaded a second time."""
    return TinyModel.load(moe_dir)
