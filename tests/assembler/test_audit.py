"""The audit entry that a child writes with each result."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
import redis.asyncio
from redis.exceptions import ConnectionError as RedisConnectionError

from tests.assembler.support import SID, Api, job, record, turn
from tests.support.hooks import everything, rank
from tokentape_assembler.child import Child
from tokentape_assembler.outcome import outcome_of
from tokentape_assembler.toolchain import assembled_by, load_toolchain
from tokentape_contracts import audit, keys, limits
from tokentape_contracts.audit import SamplesAssembled
from tokentape_contracts.jobs import AssembleJob
from tokentape_core.domain.state import turn_id
from tokentape_core.domain.tree import DEFAULT_HOOKS, Hooks
from tokentape_core.loading import LoadError
from tokentape_core.store import MemoryStore
from tokentape_core.text.errors import TokenizerError
from tokentape_core.text.settings import TextSettings


def _text(ids: object) -> str:
    return "text"


async def _run(client: redis.asyncio.Redis, asked: AssembleJob, **given: Any) -> list[SamplesAssembled]:
    """Runs a job; the session's audit then."""
    await Child(client, _text, **given).answer(orjson.dumps(asked.to_json()))
    return [audit.decode(fields) for _, fields in await client.xrange(keys.audit(asked.session_id))]


async def test_a_result_has_an_entry(fake: redis.asyncio.Redis) -> None:
    """The entry says what was asked for and what came of it, and stays for the retention."""
    api = Api(fake)
    asked = job(await record(api.store, turns=2), max_seq_len=9, metadata={"reward": 1.0})
    [entry] = await _run(fake, asked)
    result = await api.result(asked)
    assert result is not None
    assert (entry.tail, entry.request, entry.contract) == (asked.tail, asked.request, asked.contract)
    assert (entry.max_seq_len, entry.metadata) == (9, {"reward": 1.0})
    assert (entry.digest, entry.error, entry.samples) == (result.digest, None, 1)
    assert entry.by == assembled_by(DEFAULT_HOOKS, None)
    assert limits.RETENTION_S - 5 <= await fake.ttl(keys.audit(SID)) <= limits.RETENTION_S


@pytest.mark.parametrize(
    ("before_s", "after_s"),
    [(10, limits.RETENTION_S), (limits.RETENTION_MAX_S, limits.RETENTION_MAX_S)],
)
async def test_an_entry_never_shortens_the_audit(
    fake: redis.asyncio.Redis, before_s: int, after_s: int
) -> None:
    """A DELETE may have come meanwhile, from an API process that keeps deleted sessions for longer."""
    tail = await record(Api(fake).store, turns=2)
    await _run(fake, job(tail))
    await fake.expire(keys.audit(SID), before_s)
    await _run(fake, job(tail, max_seq_len=9))
    assert after_s - 5 <= await fake.ttl(keys.audit(SID)) <= after_s


async def test_a_refusal_has_an_entry(fake: redis.asyncio.Redis) -> None:
    """A stored refusal is in the audit with its code and detail."""
    api = Api(fake)
    await record(api.store, turns=1)
    await api.store.append(SID, 2, turn(2, 4, [1, 2, 3], [4]))
    asked = job(turn_id(2))
    [entry] = await _run(fake, asked)
    result = await api.result(asked)
    assert result is not None
    assert result.error is not None
    assert (entry.digest, entry.samples) == (None, 0)
    assert entry.error == ("prefix_broken", result.error.detail)


async def test_equal_results_have_equal_digests(fake: redis.asyncio.Redis) -> None:
    """A result that expired and is assembled again has another entry with the same digest (INV-9)."""
    asked = job(await record(Api(fake).store, turns=2))
    await _run(fake, asked)
    await fake.delete(keys.samples(SID, asked.request))
    first, second = await _run(fake, asked)
    assert first.digest == second.digest
    assert first.id != second.id


async def test_a_session_that_is_gone_has_no_audit(fake: redis.asyncio.Redis) -> None:
    """A job of an expired session leaves no audit behind."""
    assert await _run(fake, job(turn_id(1))) == []
    assert not await fake.exists(keys.audit(SID))


async def test_the_audit_is_bounded(fake: redis.asyncio.Redis) -> None:
    """Of very many entries the oldest are dropped."""
    asked = job(await record(Api(fake).store, turns=1))
    for _ in range(2 * limits.AUDIT_ENTRIES):
        await fake.xadd(keys.audit(SID), {"old": "entry"})
    await Child(fake, _text).answer(orjson.dumps(asked.to_json()))
    assert await fake.xlen(keys.audit(SID)) < limits.AUDIT_ENTRIES + 101


async def test_result_and_entry_are_one(
    fake: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """If the transaction fails, there is neither a result nor an entry."""
    asked = job(await record(Api(fake).store, turns=1))

    async def fail(*_: object, **__: object) -> None:
        raise RedisConnectionError("away")

    with monkeypatch.context() as patch:
        patch.setattr("redis.asyncio.client.Pipeline.execute", fail)
        assert await _run(fake, asked) == []
    assert await Api(fake).result(asked) is None
    assert "away" in capfd.readouterr().err


async def test_hooks_are_named(fake: redis.asyncio.Redis) -> None:
    """The entry names hooks by their import paths."""
    [entry] = await _run(fake, job(await record(Api(fake).store, turns=1)), hooks=Hooks(everything, rank))
    assert entry.by.pick == "tests.support.hooks.everything"
    assert entry.by.finish == "tests.support.hooks.rank"


@pytest.mark.parametrize(("turns", "samples"), [(0, 0), (2, 1)])
async def test_samples_are_counted(turns: int, samples: int) -> None:
    """An outcome says how many samples it holds."""
    store = MemoryStore()
    assert (await outcome_of(job(await record(store, turns)), store, _text)).samples == samples


def test_a_toolchain_has_the_names_of_its_parts(tokenizer: Path, tmp_path: Path) -> None:
    """Tokenizer, template and family have fingerprints, so that another one is noticed."""
    text = TextSettings(tokenizer=str(tokenizer))
    plain = load_toolchain(text)
    assert plain.renderer is None
    assert plain.by.template is None
    template = tmp_path / "template.jinja"
    template.write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    )
    text = replace(text, chat_template=template)
    one = load_toolchain(text, finish_hook="tests.support.hooks.rank")
    two = load_toolchain(replace(text, family="qwen3"))
    assert load_toolchain(text, pick_hook="superseded").by.pick == "tokentape_core.domain.tree.superseded"
    assert one.by.tokenizer == two.by.tokenizer != plain.by.tokenizer
    assert len({plain.by.template, one.by.template, two.by.template}) == 3
    assert (one.by.pick, one.by.finish) == (plain.by.pick, "tests.support.hooks.rank")


def test_a_toolchain_that_cannot_be_loaded(tokenizer: Path) -> None:
    """A missing tokenizer or hook is an error that names it."""
    with pytest.raises(TokenizerError, match="nowhere"):
        load_toolchain(TextSettings(tokenizer="/nowhere"))
    with pytest.raises(LoadError, match="missing"):
        load_toolchain(TextSettings(tokenizer=str(tokenizer)), pick_hook="tests.support.hooks.missing")
