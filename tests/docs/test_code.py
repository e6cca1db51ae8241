"""The Python code of README, tutorial and guides: it compiles, and what a newcomer types also runs."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.docs.markdown import DOCS, ROOT, Block, blocks
from tests.support.processes import Fleet, fleet
from tests.support.scripted import ScriptedEngine
from tokentape_cli.embedded import EmbeddedValkey
from tokentape_core.text.tokenizer import Tokenizer

README = ROOT / "README.md"
TUTORIAL = DOCS / "tutorial" / "first-rollout.md"
PAGES = [README, *sorted((DOCS / "tutorial").glob("*.md")), *sorted((DOCS / "guides").glob("*.md"))]
BLOCKS = [block for page in PAGES for block in blocks(page, "python")]
URL = "http://127.0.0.1:8080"
"""Where the pages say that the API is."""


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_code_compiles(block: Block) -> None:
    """Every Python block is a program."""
    compile(block.code, str(block), "exec")


@pytest.fixture(scope="module")
def engine(tokenizer_dir: Path) -> ScriptedEngine:
    """Calls the tool `add`, and answers once it has the tool's result."""
    engine = ScriptedEngine(Tokenizer.load(str(tokenizer_dir)))

    def answer(body: dict[str, Any]) -> httpx.Response:
        last = body["messages"][-1]
        if last["role"] == "tool":
            return httpx.Response(200, json=engine.reply(body, f"The sum is {last['content']}."))
        function = {"name": "add", "arguments": json.dumps({"a": 3, "b": 4})}
        text = f'<tool_call>\n{{"name": "add", "arguments": {function["arguments"]}}}\n</tool_call>'
        call = {"id": "call_1", "index": 0, "type": "function", "function": function}
        reply = engine.reply(
            body,
            text,
            message={"content": "", "tool_calls": [call]},
            choice={"finish_reason": "tool_calls"},
        )
        return httpx.Response(200, json=reply)

    engine.answer = answer
    return engine


@pytest.fixture(scope="module")
def url(
    engine: ScriptedEngine, tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """The API of a running system: Valkey, API, worker, engine."""
    directory = tmp_path_factory.mktemp("logs")
    system: Fleet
    with (
        EmbeddedValkey() as valkey,
        engine.serve() as engine_url,
        fleet(valkey.url, engine_url, tokenizer_dir, directory) as system,
    ):
        system.assembler()
        yield system.api()[1]


def _run(page: Path, url: str, longest: str = "2048", **names: Any) -> dict[str, Any]:
    """Runs a page's blocks as one program, with this URL and this longest sample."""
    found = blocks(page, "python")
    assert sum(URL in block.code for block in found) == 1
    for block in found:
        code = block.code.replace(URL, url).replace("max_seq_len=2048", f"max_seq_len={longest}")
        exec(compile(code, str(block), "exec"), names)  # noqa: S102
    return names


def test_readme_runs(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The README's program collects a sample from an agent of the reader's own."""

    async def my_agent(base_url: str, sample: Any) -> None:
        async with httpx.AsyncClient(base_url=base_url, trust_env=False) as client:
            chat = {"messages": [{"role": "user", "content": "What is 3 plus 4?"}]}
            assert (await client.post("/chat/completions", json=chat)).status_code == 200

    sample = _run(README, url, my_agent=my_agent)["sample"]
    assert capsys.readouterr().out == f"completed {len(sample.tokens)} {sum(sample.loss_mask)}\n"
    assert len(sample.tokens) > sum(sample.loss_mask) > 0


def test_tutorial_runs(url: str, engine: ScriptedEngine, capsys: pytest.CaptureFixture[str]) -> None:
    """The tutorial's program plays an episode with a tool call through OpenAI's SDK, and makes a batch."""
    names = _run(TUTORIAL, url)
    sample, batch = names["sample"], names["batch"]
    assert sample.metadata["answer"] == "The sum is 7."
    assert [turn["turn"] for turn in sample.metadata["lifecycle"]] == [1, 2]
    last = engine.bodies[-1]["input_ids"]
    assert sample.tokens == last + engine.tokenizer.encode("The sum is 7.<|im_end|>")
    assert 0 < sum(sample.loss_mask) < sample.response_length
    assert batch["tokens"].tolist() == [sample.tokens]
    printed = capsys.readouterr().out
    assert printed.startswith("completed - The sum is 7.\n")
    assert f"tokens torch.int64 [1, {len(sample.tokens)}]" in printed


@pytest.mark.parametrize(
    ("status", "longest", "reason"),
    [(400, "2048", "BadRequestError: .*too hot"), (200, "8", "all_truncated")],
    ids=["agent_error", "abort_reason"],
)
def test_tutorial_says_why_an_episode_is_aborted(
    url: str,
    engine: ScriptedEngine,
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    longest: str,
    reason: str,
) -> None:
    """The tutorial's program ends in one sentence where the engine refuses, or nothing can be trained."""
    if status != 200:
        refusal = httpx.Response(status, json={"error": {"message": "too hot"}})
        monkeypatch.setattr(engine, "answer", lambda _: refusal)
    with pytest.raises(SystemExit, match=f"^aborted: {reason}"):
        _run(TUTORIAL, url, longest=longest)
