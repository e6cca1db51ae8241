"""A cluster, and what the whole service needs beside it."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.topologies import Cluster, cluster
from tokentape_engine.tokenizer import chat_template, small_tokenizer


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster of three nodes."""
    with cluster(tmp_path_factory.mktemp("cluster")) as made:
        yield made


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A tokenizer, for processes that find our test modules."""
    directory = tmp_path_factory.mktemp("tokenizer")
    tokenizer = small_tokenizer()
    tokenizer.chat_template = chat_template("qwen3_training")
    tokenizer.save_pretrained(directory)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=os.pathsep)
        yield directory
