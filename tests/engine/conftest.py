"""One trained model and one real server process for all tests of the reference engine."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tokentape_engine.model import TinyModel

TRAIN_STEPS = 150
"""Enough for whole tool calls in most replies; the default trains longer."""


@pytest.fixture(scope="session")
def engine_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The base URL of a server process, which has trained its model."""
    model_dir = tmp_path_factory.mktemp("engine") / "model"
    command = [sys.executable, "-m", "tokentape_engine", "--port", "0", "--model-dir", str(model_dir)]
    command += ["--train-steps", str(TRAIN_STEPS)]
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
def model_dir(engine_url: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the server has saved its model."""
    return next(tmp_path_factory.getbasetemp().glob("engine*/model"))


@pytest.fixture(scope="session")
def model(model_dir: Path) -> TinyModel:
    """The server's model, loaded a second time: the judge of what the server says."""
    return TinyModel.load(model_dir)


@pytest.fixture(scope="session")
def client(engine_url: str) -> Iterator[httpx.Client]:
    """An HTTP client of the server."""
    with httpx.Client(base_url=engine_url, timeout=60) as client:
        yield client
