"""What the parent of a worker's child might send: every line gets one answer, and the child goes on."""

import asyncio
from collections.abc import Iterator
from typing import Any

import fakeredis
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.assembler.support import Api, job, record
from tests.fuzz.conftest import FUZZ
from tests.fuzz.mutate import damaged_bytes, damaged_json, json_values
from tokentape_assembler.child import Child

JOB = job("2-0", max_seq_len=100, metadata={"reward": 1.0}).to_json()


class Children:
    """A child over a server with one session of two turns."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._runner.run(self._start())

    async def _start(self) -> None:
        self._client = fakeredis.FakeAsyncRedis()
        await record(Api(self._client).store, turns=2)
        self._child = Child(self._client, lambda ids: "text")

    def answer(self, line: bytes) -> tuple[dict[str, Any], int]:
        """The answer, and how many keys there are afterwards."""

        async def ask() -> tuple[dict[str, Any], int]:
            async with asyncio.timeout(5):
                return await self._child.answer(line), await self._client.dbsize()

        return self._runner.run(ask())

    def close(self) -> None:
        self._runner.run(self._client.aclose())
        self._runner.close()


@pytest.fixture
def children() -> Iterator[Children]:
    made = Children()
    yield made
    made.close()


LINES = st.one_of(
    damaged_json(JOB).map(orjson.dumps),
    damaged_bytes(orjson.dumps(JOB)),
    json_values.map(orjson.dumps),
    st.binary(max_size=20),
)


def test_damaged_lines(children: Children, capfd: pytest.CaptureFixture[str]) -> None:
    """The answer says stored or failed, with a bounded reason; a failed one has stored nothing."""
    _, keys = children.answer(b"{}")

    @given(LINES)
    @settings(FUZZ)
    def check(line: bytes) -> None:
        nonlocal keys
        answer, now = children.answer(line)
        assert answer["outcome"] in ("stored", "failed")
        assert len(answer["detail"]) <= 2_000
        assert answer["outcome"] == "stored" or now == keys
        assert orjson.dumps(answer)
        keys = now

    check()
    assert children.answer(orjson.dumps(JOB))[0]["outcome"] == "stored"
