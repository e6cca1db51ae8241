"""Answers come back as clients re-serialise them: one conversation or a loud refusal, never a silent loss.

The cases and their form: README.md. `ECHO_CASES=FILE pytest tests/echo` runs another file.
"""

import json
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.application import application, client_of, small_qwen, small_renderer
from tests.support.scripted import ScriptedEngine, network
from tokentape_contracts.accounting import Reason
from tokentape_core.domain.assemble import Assembly, assemble
from tokentape_core.domain.state import SessionState, fold
from tokentape_core.store import MemoryStore
from tokentape_core.text.errors import RenderError

FILE = Path(os.environ.get("ECHO_CASES", Path(__file__).parent / "echo.jsonl"))
CASES = [json.loads(line) for line in FILE.read_text().splitlines() if line.strip()]
REFUSALS = {"altered_answer": "answer_altered", "head_changed": "head_changed"}


@dataclass
class Episode:
    """The two requests of a case, played against the application."""

    replies: list[httpx.Response]
    state: SessionState
    assembly: Assembly
    asked: int
    """How often the engine was."""


@pytest.fixture(scope="module")
def renderer() -> Any:
    return small_renderer(small_qwen())


def _sampled(renderer: Any, case: dict[str, Any]) -> str:
    """The text that a model samples as the answer; any, of one that no template writes (broken JSON)."""
    try:
        ids = renderer.sample(case["first"], case["answer"], tools=case.get("tools"))
    except RenderError:
        return "what the engine's parser made the answer of"
    return str(renderer.tokenizer.decode(ids[:-1]))


@pytest.fixture
async def play(renderer: Any) -> AsyncIterator[Any]:
    engine, store = ScriptedEngine(renderer.tokenizer), MemoryStore()
    async with client_of(application(renderer, store, network(engine.handle))) as client:

        async def play(case: dict[str, Any]) -> Episode:
            opened = await client.post("/sessions", json={"mode": case["mode"], **case.get("open", {})})
            assert opened.status_code == 200, opened.text
            session_id = opened.json()["session_id"]
            text = _sampled(renderer, case)
            engine.answer = lambda body: httpx.Response(
                200, json=engine.reply(body, text, message=case["answer"])
            )
            replies = []
            for messages, tools in ((case["first"], "tools"), (case["second"], "second_tools")):
                body = {"model": "m", "messages": messages}
                if tools in case:
                    body["tools"] = case[tools]
                url = f"/sessions/{session_id}/v1/chat/completions"
                replies.append(await client.post(url, json=body))
            assert replies[0].status_code == 200, replies[0].text
            state = fold(await store.read(session_id))
            assert state is not None
            assembly = assemble(state, renderer.tokenizer.decode)
            return Episode(replies, state, assembly, len(engine.bodies))

        yield play


def test_there_are_cases() -> None:
    """The file holds cases to run, so that an empty run cannot pass for a good one."""
    assert len(CASES) >= 1


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
async def test_case(case: dict[str, Any], play: Any) -> None:
    """The second request ends as the case says, and no sampled token is lost without a name and a reason."""
    episode = await play(case)
    status, expect = episode.replies[1].status_code, case["expect"]
    said = episode.assembly.accounting
    masks = sum(int(sample.loss_mask.sum()) for sample in episode.assembly.samples)
    assert said.sampled_tokens == masks + sum(entry.tokens for entry in said.left_out)
    if expect in REFUSALS or (expect == "refused_or_root" and status != 200):
        assert status == 400
        assert expect not in REFUSALS or episode.replies[1].json()["error"]["code"] == REFUSALS[expect]
        assert episode.asked == 1
        assert (said.generations, said.left_out) == (1, [])
        return
    assert (status, episode.asked, said.generations) == (200, 2, 2)
    if expect == "continues":
        _continues(case, episode)
    elif expect == "retry":
        [left_out] = said.left_out
        assert (left_out.turn, left_out.reason, left_out.by) == (1, Reason.RETRIED, 2)
    elif expect == "new_root":
        assert (len(episode.assembly.samples), said.left_out) == (2, [])
    else:
        assert expect == "refused_or_root"


def _continues(case: dict[str, Any], episode: Episode) -> None:
    [sample] = episode.assembly.samples
    first, second = episode.state.turns
    assert int(sample.loss_mask.sum()) == len(first.event.output) + len(second.event.output)
    assert second.tokens[: first.length].tolist() == first.tokens.tolist()
    assert second.prompt_length > first.length
    if "stored_ids" in case:
        answers = [message for message in second.event.messages if message["role"] == "tool"]
        assert [message["tool_call_id"] for message in answers] == case["stored_ids"]
