"""One chat turn: position, prompt, generation, commit."""

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from tokentape_api.engine import Engine, Generated, Wanted
from tokentape_api.recording.cache import Sessions
from tokentape_api.recording.prompts import build_prompt
from tokentape_api.telemetry import Telemetry
from tokentape_api.work import Sender, Workers
from tokentape_contracts import limits
from tokentape_contracts.errors import CannotExtend, MatcherFailed, SessionNotFound, TemplateMismatch
from tokentape_contracts.events import Blob, TurnRecorded
from tokentape_core.domain.decide import draft_turn, ensure_open, record_turn
from tokentape_core.domain.match import Matcher
from tokentape_core.domain.position import Position, new_root, position
from tokentape_core.domain.replay import Rows, deduplicate, first_row, sources
from tokentape_core.domain.request import ChatRequest
from tokentape_core.domain.state import SessionState, Turn
from tokentape_core.store import SeqTaken, Store
from tokentape_core.text.render import ChatRenderer, Prompt


class Recorder:
    """Sends a session's chat turns to the engine and records them.

    Args:
        matchers: those that a session may have been opened with, by name.
        telemetry: counts the turns and measures their stages.
        workers: do what would hold up the event loop.
        clock: Unix seconds.
    """

    def __init__(
        self,
        sessions: Sessions,
        store: Store,
        engine: Engine,
        renderer: ChatRenderer,
        matchers: Mapping[str, Matcher],
        telemetry: Telemetry,
        workers: Workers,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._sessions = sessions
        self._store = store
        self._engine = engine
        self._renderer = renderer
        self._matchers = matchers
        self._telemetry = telemetry
        self._workers = workers
        self._clock = clock

    async def chat(
        self, session_id: str, asked: ChatRequest, headers: Mapping[str, str], cost: int
    ) -> Generated:
        """Generates and records one turn, and only then returns what the engine answered (INV-1).

        A request that is refused or fails changes nothing. Concurrent requests from one parent become
        siblings: none is thrown away.

        Args:
            cost: of comparing the request with what was recorded, as `Workers.run` has it.

        Raises:
            EngineRefusal: the engine's own refusal, to be passed on.
            TokentapeError: see `tokentape_contracts.errors`.
        """
        requested_at = self._clock()
        with self._telemetry.stage("position"):
            state = await self._sessions.load(session_id)
            ensure_open(state)
            self._ensure_same_template(state)
            sender = Sender(state.opened.tenant, session_id)
            find = partial(position, state, asked.messages, self._matcher(state), asked.head)
            at = await self._workers.run(cost, sender, find)
        with self._telemetry.stage("render"):
            at, prompt = await self._prompt(state, sender, at, asked)
        draft = draft_turn(state, asked, at, prompt.keep, prompt.suffix, requested_at)
        wanted = {
            kind: Wanted(first_row(spec, at.parent, prompt.keep), spec.layers)
            for kind, spec in state.opened.replay.items()
        }
        with self._telemetry.stage("engine"):
            headers = self._telemetry.tracing.continued(headers)
            generated = await self._engine.generate(session_id, draft.prompt, draft.request, headers, wanted)
        blobs = await self._blobs(session_id, at.parent, generated.replay)
        event = record_turn(
            draft,
            generated.generation,
            event_id=uuid.uuid4().hex,
            vocabulary=self._renderer.tokenizer.size,
            replay={kind: blob for kind, (blob, _) in blobs.items()},
            committed_at=self._clock(),
        )
        with self._telemetry.stage("append"):
            await self._commit(session_id, state, event, {kind: data for kind, (_, data) in blobs.items()})
        self._telemetry.recorded(event, at)
        for kind in wanted:
            self._telemetry.replayed(kind, blobs.get(kind))
        return generated

    async def _prompt(
        self, state: SessionState, sender: Sender, at: Position, asked: ChatRequest
    ) -> tuple[Position, Prompt]:
        """Where the request belongs after all, and its prompt."""
        try:
            return await self._prompt_at(state, sender, at)
        except CannotExtend:
            if state.opened.mode != "tree" or at.parent is None:
                raise
        # The template cannot append these messages: the whole conversation begins a new root.
        return await self._prompt_at(state, sender, new_root(asked.messages, at.head, "not_appendable"))

    async def _prompt_at(self, state: SessionState, sender: Sender, at: Position) -> tuple[Position, Prompt]:
        at = self._with_defaults(at)
        opened_at = state.opened.opened_at
        return at, await build_prompt(self._renderer, self._workers, sender, at, opened_at)

    def _with_defaults(self, at: Position) -> Position:
        """A conversation begins with the server's template arguments, where the request names no others."""
        if at.parent is not None or not self._renderer.template_kwargs:
            return at
        template_kwargs = {**self._renderer.template_kwargs, **at.head.template_kwargs}
        return replace(at, head=replace(at.head, template_kwargs=template_kwargs))

    def _matcher(self, state: SessionState) -> Matcher:
        try:
            return self._matchers[state.opened.matcher]
        except KeyError:
            raise MatcherFailed(
                f"the session was opened with matcher {state.opened.matcher!r}, which this process does not "
                "have. Start all API processes with the same --matcher"
            ) from None

    def _ensure_same_template(self, state: SessionState) -> None:
        """A suffix from another vocabulary or template would not fit the stored tokens (INV-2)."""
        if state.opened.template != self._renderer.fingerprint:
            raise TemplateMismatch(
                f"the session was opened with family {state.opened.family!r}, tokenizer and template "
                f"{state.opened.template}; this process has {self._renderer.fingerprint}. Start all API "
                "processes with the same --tokenizer, --chat-template and --family"
            )

    async def _blobs(
        self, session_id: str, parent: Turn | None, replay: Mapping[str, Rows]
    ) -> dict[str, tuple[Blob, bytes]]:
        """What is stored of each kind of routing replay rows: those that are not the parent's again."""
        blobs = {}
        for kind, rows in replay.items():
            wanted = [(turn.event, kind) for turn in sources(rows, parent, kind)]
            stored = await self._store.read_blobs(session_id, wanted)
            blobs[kind] = await asyncio.to_thread(
                deduplicate, rows, parent, kind, stored, limits.STORE_VALUE_BYTES
            )
        return blobs

    async def _commit(
        self, session_id: str, state: SessionState, event: TurnRecorded, blobs: Mapping[str, bytes]
    ) -> None:
        """Appends the turn; if another took its seq, under the next one and with its own parent."""
        while True:
            seq = len(state.turns) + 1
            try:
                await self._store.append(session_id, seq, event, blobs)
            except SeqTaken:
                self._telemetry.conflicts.inc()
                state = await self._sessions.load(session_id)
                continue
            except SessionNotFound:
                self._sessions.forget(session_id)
                raise
            self._sessions.appended(session_id, state, seq, event)
            return
