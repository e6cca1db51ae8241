"""The probe: tiny generations that show whether the engine sends what the recording needs.

A router that strips ids or log-probs is found so before the first rollout, and not by an epoch of lost turns.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Protocol

import numpy as np

from tokentape_api.engine import stop
from tokentape_api.engine.answer import Answer, Problem, Sent, quoted
from tokentape_api.engine.port import NOTHING, Check, EngineRefusal, Wanted
from tokentape_contracts import limits
from tokentape_contracts.errors import TokentapeError

SESSION_ID: Final = "tokentape-probe"
"""The probe's routing key."""
PROMPT: Final = np.arange(1, 9, dtype=np.int32)
"""Ids that every vocabulary has."""
START: Final = 4
"""The first row of the generation that asks for later rows only."""
REQUEST: Final[Mapping[str, Any]] = {
    "messages": [
        {
            "role": "user",
            "content": "An engine that renders this message instead of taking the ids that came with it "
            "counts more tokens than were sent, and so gives itself away.",
        }
    ],
    "max_tokens": 4,
    "temperature": 0,
}
_ENABLE: Final = (
    "{kind} was asked for and did not come: start the engine with {flag}, or point --engine-url at the "
    "engine itself to see whether a router strips it"
)
_FLAGS: Final[Mapping[str, str]] = {
    "routed_experts": "--enable-return-routed-experts",
    "indexer_topk": "its option that returns the indexer's top-k",
}


class Ask(Protocol):
    """Gets an answer whose rules have not been checked."""

    async def __call__(self, session_id: str, sent: Sent, request: Mapping[str, Any]) -> Answer: ...


def has_passed(checks: Sequence[Check]) -> bool:
    """Whether nothing is missing or wrong."""
    return all(check.state == "ok" for check in checks)


class Probe:
    """Probes one engine: once at a time, whoever asks, and not again after it has passed.

    Args:
        ask: sends a request to the engine.
        replay: the payloads that turns will ask for.
        incremental: whether turns will ask for routed experts from a later position on.
    """

    def __init__(self, ask: Ask, replay: Mapping[str, Wanted], incremental: bool) -> None:
        self._ask = ask
        self._replay = replay
        self._incremental = incremental
        self._run: asyncio.Task[Sequence[Check]] | None = None
        self._abandoned: set[asyncio.Task[Sequence[Check]]] = set()

    async def checks(self, wait_s: float) -> Sequence[Check] | None:
        """The result; None if it is not there after `wait_s`, and the probe goes on."""
        if self._run is None:
            self._run = asyncio.create_task(self._probe())
        run = self._run
        await asyncio.wait({run}, timeout=wait_s)
        if not run.done() or run.cancelled():
            return None
        if (run.exception() is not None or not has_passed(run.result())) and self._run is run:
            self._run = None
        return run.result()

    def forget(self) -> None:
        """The next call probes anew."""
        if self._run is not None and not self._run.done():
            self._abandoned.add(self._run)
            self._run.add_done_callback(self._abandoned.discard)
            self._run.cancel()
        self._run = None

    async def close(self) -> None:
        """Ends a running probe."""
        self.forget()
        await asyncio.gather(*self._abandoned, return_exceptions=True)

    async def _probe(self) -> Sequence[Check]:
        checks: list[Check] = []
        try:
            async with asyncio.timeout(limits.PROBE_TIMEOUT_S):
                await self._fill(checks)
        except TimeoutError:
            text = f"the generation did not end within {limits.PROBE_TIMEOUT_S:g} s"
            checks.append(Check("reachable", "wrong", text))
        return checks

    async def _fill(self, checks: list[Check]) -> None:
        refused: str | None = None
        try:
            try:
                answer = await self._generate(self._replay)
            except EngineRefusal as refusal:
                if not self._replay:
                    raise
                # Perhaps it only refuses to send routing replay payloads: all else can still be looked at.
                refused = _said(refusal)
                answer = await self._generate(NOTHING)
        except (EngineRefusal, TokentapeError) as error:
            checks.append(Check("reachable", "wrong", _said(error)))
            return
        checks.append(Check("reachable", "ok", "one generation, one choice"))
        rules = list(_checks(answer))
        checks += rules
        if has_passed(rules):
            checks.append(await self._stop_token(answer))
        for kind in self._replay:
            checks.append(
                Check(kind, "wrong", f"the engine refuses a request that asks for it: {refused}")
                if refused is not None
                else _check(kind, _rows(answer, kind))
            )
        has_experts = any(check.name == "routed_experts" and check.state == "ok" for check in checks)
        if self._incremental and has_experts:
            checks.append(await self._later_rows())

    async def _stop_token(self, first: Answer) -> Check:
        """An engine on which it cannot be seen may be right all the same."""
        name = "stop token"
        try:
            expected = stop.beginning(first)
            if expected is None:
                return Check(name, "ok", "not seen: the generation has too few tokens to stop a second one")
            second = await self._generate(NOTHING, stop_token_ids=expected[-1:].tolist())
            return Check(name, "ok", stop.compare(second, expected))
        except EngineRefusal as refusal:
            return Check(name, "ok", f"not seen: {_said(refusal)}")
        except Problem as problem:
            return Check(name, "wrong", problem.detail)
        except TokentapeError as error:
            return Check(name, "wrong", _said(error))

    async def _later_rows(self) -> Check:
        name = f"routed_experts from row {START} on"
        wanted = replace(self._replay["routed_experts"], start=START)
        try:
            answer = await self._generate({"routed_experts": wanted})
        except (EngineRefusal, TokentapeError) as error:
            return Check(name, "wrong", _said(error))
        return _check(name, _rows(answer, "routed_experts"))

    async def _generate(self, wanted: Mapping[str, Wanted], **more: Any) -> Answer:
        return await self._ask(SESSION_ID, Sent(PROMPT, wanted), {**REQUEST, **more})


Look = Callable[[], str]


def _checks(answer: Answer) -> Iterator[Check]:
    """The rules of an answer, each looked at for itself."""

    def ids() -> str:
        answer.check_prompt()
        return f"{len(PROMPT)} tokens in, as sent; {len(answer.output())} sampled tokens out"

    def logprobs() -> str:
        return f"{len(answer.logprobs())}, one for each sampled token, all finite"

    yield _check("finish", lambda: f"finish_reason is {quoted(answer.finish())}")
    yield _check("ids", ids)
    yield _check("log-probs", logprobs)
    yield _check("counts", lambda: _counts(answer))
    yield _check("weight version", lambda: _weight_version(answer))


def _counts(answer: Answer) -> str:
    meta = answer.meta()
    for name in ("prompt_tokens", "completion_tokens"):
        if not isinstance(meta.get(name), int):
            raise Problem(f"{name} is missing: a router may strip it", is_missing=True)
    cached = meta.get("cached_tokens")
    noted = "cached_tokens does not come: it will not be counted"
    if cached is not None:
        noted = f"{quoted(cached)} cached"
    return f"{meta['prompt_tokens']} in, {meta['completion_tokens']} out, {noted}"


def _weight_version(answer: Answer) -> str:
    """An engine need not have one; a note then says what that means."""
    meta = answer.meta()
    version = meta.get("weight_versions") or meta.get("weight_version")
    if version is None:
        return "does not come: samples will not say what weights sampled them"
    return quoted(version)


def _rows(answer: Answer, kind: str) -> Look:
    def look() -> str:
        rows = answer.rows(kind)
        if rows is None:
            raise Problem(_ENABLE.format(kind=kind, flag=_FLAGS[kind]), is_missing=True)
        count, layers, choices = rows.values.shape
        return f"{count} rows of {layers} layers, {choices} choices each, from position {rows.start} on"

    return look


def _check(name: str, look: Look) -> Check:
    try:
        return Check(name, "ok", look())
    except Problem as problem:
        return Check(name, "missing" if problem.is_missing else "wrong", problem.detail)
    except TokentapeError as error:
        return Check(name, "wrong", _said(error))


def _said(error: EngineRefusal | TokentapeError) -> str:
    if isinstance(error, TokentapeError):
        return error.detail
    quoted = error.body[: limits.DRIVER_QUOTED_BODY_CHARS].decode(errors="replace")
    return f"the engine answered {error.status}: {quoted}"
