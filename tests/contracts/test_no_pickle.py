"""Whoever can write to Redis, or answer a request, must not be able to run code."""

import ast
import pickle
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest

from tests.contracts.test_limits import ROOT
from tokentape_contracts import jobs

FILES = [path for folder in ("contracts", "services", "driver") for path in (ROOT / folder).rglob("*.py")]
MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "jsonpickle", "yaml", "_pickle"}
CALLS = {"eval", "exec", "np.load", "numpy.load", "np.fromfile", "torch.load", "pandas.read_pickle"}


def _names(tree: ast.AST) -> Iterator[str]:
    """The modules that are imported and the functions that are called."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").partition(".")[0]
        elif isinstance(node, ast.Call):
            yield ast.unparse(node.func)


def test_the_packages_are_found() -> None:
    """The search below covers all of our code."""
    assert len(FILES) > 100


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_that_runs_what_it_reads(path: Path) -> None:
    """No module imports a serialiser that runs code, or calls a loader that does."""
    assert set(_names(ast.parse(path.read_text()))) & (MODULES | CALLS) == set()


def test_arq_gets_our_serialisers() -> None:
    """arq pickles by default: every client and worker of its, and every job, is made with JSON instead."""
    made = 0
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            if ast.unparse(node.func) == "serialize_job":
                made += 1
                assert keywords["serializer"] == "jobs.serialize", path
            if ast.unparse(node.func) in ("ArqRedis", "Worker", "create_pool") or "queue_name" in keywords:
                made += 1
                assert keywords["job_serializer"] == "jobs.serialize", path
                assert keywords["job_deserializer"] == "jobs.deserialize", path
    assert made >= 3


def test_a_pickle_in_the_queue_is_not_read() -> None:
    """What arq by default would run is no JSON, and is refused as such."""
    with pytest.raises(orjson.JSONDecodeError):
        jobs.deserialize(pickle.dumps({"f": "assemble_samples"}))
