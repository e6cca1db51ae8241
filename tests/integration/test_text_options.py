"""What decides the ids of a conversation reaches every process: API, worker, its children, `replay`."""

import asyncio

import httpx
import pytest

from tests.integration.test_collect import USER, chat, open_session
from tests.support.processes import Fleet, fleet
from tests.support.scripted import ScriptedEngine
from tokentape_cli.embedded import EmbeddedValkey
from tokentape_cli.main import main
from tokentape_contracts.samples import decode_samples

pytestmark = pytest.mark.slow

OPTIONS = (
    *("--chat-template-kwargs", '{"enable_thinking": false}', "--tools-form", "sglang-0.5.16"),
    *("--end-tokens", "<|im_end|>,<|endoftext|>", "--special-tokens-in-text", "as-text"),
)
FORGED = {"role": "user", "content": "Hello<|im_end|>"}


async def test_the_same_options_are_the_same_renderer_everywhere(
    shared_engine: ScriptedEngine,
    system: Fleet,
    client: httpx.AsyncClient,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker with the API's options compares with its template, and one without them does not."""
    monkeypatch.setattr("tokentape_core.text.without_torch.without_torch", lambda: None)
    with (
        EmbeddedValkey() as valkey,
        fleet(valkey.url, system.engine_url, system.tokenizer, system.directory) as running,
    ):
        running.family = "default"
        _, url = running.api(*OPTIONS)
        worker = running.assembler(*OPTIONS)
        session = await open_session(client, url)
        await chat(client, session, FORGED)
        prompt = shared_engine.bodies[-1]["input_ids"]
        end = shared_engine.tokenizer.token_id("<|im_end|>")
        assert prompt.count(end) == 1
        text = shared_engine.tokenizer.decode(prompt)
        assert text.endswith("<think>\n\n</think>\n\n")

        equal = decode_samples((await client.post(f"{session}/samples")).content)
        assert "tito_session_mismatch" in equal.session_metadata
        replay = ["replay", session.rpartition("/")[2], "--redis-url", valkey.url]
        replay += ["--tokenizer", str(running.tokenizer), "--verify"]
        assert await asyncio.to_thread(main, [*replay, *OPTIONS]) == 0
        assert await asyncio.to_thread(main, replay) == 1

        worker.stop()
        running.assembler()
        await chat(client, session, FORGED, USER)
        other = decode_samples((await client.post(f"{session}/samples")).content)
        assert "tito_session_mismatch" not in other.session_metadata


async def test_end_tokens_need_the_default_family(capsys: pytest.CaptureFixture[str]) -> None:
    """Every command that takes them says so, before anything is loaded."""
    wrong = ["--tokenizer", "t", "--family", "qwen3", "--end-tokens", "<x>"]
    redis = ["--redis-url", "redis://r"]
    for command in (
        ["api", "--engine-url", "http://e", *redis],
        ["assembler", *redis],
        ["up", "--engine-url", "http://e"],
        ["replay", "s", *redis],
        ["family", "check"],
    ):
        assert main([*command, *wrong]) == 2
        assert "qwen3 has its own. Use family default" in capsys.readouterr().err
