"""The lines by which the guide points Miles at Tokentape, run against a stand-in for Miles.

Miles is no package. The stand-in holds what an adapter meets of its commit 31f1ca9: the names of modules,
functions and arguments, and the requests of a rollout.
"""

import importlib
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from urllib.parse import urlsplit

import pytest

from tests.docs.markdown import DOCS, blocks
from tests.sdks.scene import Model, outputs
from tests.support.processes import Fleet, fleet
from tests.support.scripted import ScriptedEngine
from tokentape_cli.embedded import EmbeddedValkey
from tokentape_contracts.samples import decode_samples
from tokentape_core.text.render import ChatRenderer

GUIDE = DOCS / "guides" / "from-miles.md"
STAND_IN = Path(__file__).parent / "stand_in"


@pytest.fixture
def tokentape_miles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ModuleType]:
    """The guide's module `tokentape_miles`, imported as Miles imports it."""
    (code,) = (block.code for block in blocks(GUIDE, "python") if "start_session_server" in block.code)
    (tmp_path / "tokentape_miles.py").write_text(code)
    for folder in (tmp_path, STAND_IN):
        monkeypatch.syspath_prepend(str(folder))
    yield importlib.import_module("tokentape_miles")
    for name in [name for name in sys.modules if name.partition(".")[0] in ("miles", "tokentape_miles")]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def engine(renderer: ChatRenderer) -> ScriptedEngine:
    engine = ScriptedEngine(renderer.tokenizer)
    engine.answer = Model(engine, renderer)
    return engine


@pytest.fixture(scope="module")
def system(
    engine: ScriptedEngine, tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    """A running system with one worker."""
    with (
        EmbeddedValkey() as valkey,
        engine.serve() as engine_url,
        fleet(valkey.url, engine_url, tokenizer_dir, tmp_path_factory.mktemp("logs")) as running,
    ):
        running.assembler()
        yield running


@pytest.mark.parametrize(("version", "mode"), [(True, "linear"), ("v2", "tree")])
async def test_the_guide_points_miles_here(
    tokentape_miles: ModuleType,
    system: Fleet,
    engine: ScriptedEngine,
    renderer: ChatRenderer,
    version: object,
    mode: str,
) -> None:
    """With the guide's module Miles starts no server, and in both versions collects whole samples here."""
    engine.bodies.clear()
    api = urlsplit(system.api("--mode", mode)[1])
    args = Namespace(
        session_server_ip=api.hostname,
        session_server_port=[api.port],
        use_session_server=version,
        custom_agent_function_path="tests.sdks.programs.miles_agent.run",
        max_seq_len=4096,
    )
    importlib.import_module("miles.ray.rollout.rollout_manager").RolloutManager(args)
    sample = SimpleNamespace(prompt=[], metadata={})
    settings = {"temperature": 0.7}
    payload = await tokentape_miles.generate(
        SimpleNamespace(args=args, sample=sample, sampling_params=settings)
    )
    (fields,) = decode_samples(payload).samples
    sampled = outputs(renderer)
    assert fields["tokens"] == engine.bodies[-1]["input_ids"] + sampled[-1]
    assert sum(fields["loss_mask"]) == sum(map(len, sampled))
    assert fields["reward"] == (0.5 if version == "v2" else None)
    assert [body["temperature"] for body in engine.bodies] == [0.7] * len(sampled)
