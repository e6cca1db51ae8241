"""A cluster, and what the whole service needs beside it."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.topologies import Cluster, cluster


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster of three nodes."""
    with cluster(tmp_path_factory.mktemp("cluster")) as made:
        yield made


@pytest.fixture(scope="module")
def tokenizer_dir(tokenizer_dir: Path) -> Iterator[Path]:
    """The tokenizer, for processes that find our test modules."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=os.pathsep)
        yield tokenizer_dir
