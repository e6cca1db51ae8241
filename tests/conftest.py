"""Fixtures for every folder."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from tokentape_cli.embedded import DATABASES, EmbeddedValkey

# pytest rewrites the asserts of test modules alone: those of helpers would not hold under `python -O`.
pytest.register_assert_rewrite(*(f"tests.{folder.name}" for folder in Path(__file__).parent.glob("[a-z]*/")))

_databases = itertools.count(1)


@pytest.fixture(scope="session")
def valkey() -> Iterator[EmbeddedValkey]:
    """One real server for the whole run; tests share it and never flush it."""
    with EmbeddedValkey() as server:
        yield server


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedValkey]:
    """A server of one's own, to ill-treat; it keeps its data over a restart."""
    with EmbeddedValkey(tmp_path / "data") as own:
        yield own


@pytest.fixture
def redis_url(valkey: EmbeddedValkey) -> str:
    """A database of the real server that no other test uses, for what has fixed names: queues, streams."""
    return f"{valkey.url.removesuffix('/0')}/{next(_databases) % DATABASES}"


@pytest.fixture
def session_id() -> str:
    """A session id that was never used."""
    return uuid4().hex


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small Qwen tokenizer with an append-only template, as a model directory holds it."""
    # Importing transformers takes seconds, which most tests can do without.
    from tokentape_engine.tokenizer import chat_template, small_tokenizer

    directory = tmp_path_factory.mktemp("tokenizer")
    tokenizer = small_tokenizer()
    tokenizer.chat_template = chat_template("qwen3_training")
    tokenizer.save_pretrained(directory)
    return directory
