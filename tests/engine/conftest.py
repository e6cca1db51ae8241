"""One trained model and one real server process for all tests of the reference engine."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.processes import MODEL_DIR
from tokentape_engine.model import TinyModel


@pytest.fixture(scope="session")
def engine_url(model_dir: Path) -> Iterator[str]:
    """The base URL of a server process, which trains its model if nobody has."""
    command = [sys.executable, "-m", "tokentape_engine", "--port", "0", "--model-dir", str(model_dir)]
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
