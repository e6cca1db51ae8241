"""One chat turn: position, prompt, generation, commit."""

import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from tokentape_api.bodies import ChatRequest
from tokentape_api.cache import Sessions
from tokentape_api.engine import Engine
from tokentape_api.prompts import build_prompt
from tokentape_contracts.errors import SessionNotFound
from tokentape_contracts.events import TurnRecorded
from tokentape_core.domain.decide import ensure_open, position, record_turn
from tokentape_core.domain.match import MATCHERS
from tokentape_core.domain.state import SessionState
from tokentape_core.store import SeqTaken, Store
from tokentape_core.text.render import ChatRenderer


class Recorder:
    """Sends a session's chat turns to the engine and records them.

    Args:
        clock: Unix seconds.
    """

    def __init__(
        self,
        sessions: Sessions,
        store: Store,
        engine: Engine,
        renderer: ChatRenderer,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._sessions = sessions
        self._store = store
        self._engine = engine
        self._renderer = renderer
        self._clock = clock

    async def chat(self, session_id: str, chat: ChatRequest, headers: Mapping[str, str]) -> dict[str, Any]:
        """Generates and records one turn, and only then returns the engine's answer (INV-1).

        A request that is refused or fails changes nothing. Concurrent requests from one parent become
        siblings: none is thrown away.

        Raises:
            EngineRefusal: the engine's own refusal, to be passed on.
            TokentapeError: see `tokentape_contracts.errors`.
        """
        requested_at = self._clock()
        state = await self._sessions.load(session_id)
        ensure_open(state)
        at = position(state, chat.messages, MATCHERS[state.opened.matcher])
        inherited = at.parent.tools if at.parent else None
        tools = chat.tools if chat.tools is not None else inherited
        prompt, tokens = await build_prompt(self._renderer, at, tools, chat.template_kwargs)
        settings = {**chat.fields, **state.opened.pins}
        if chat.template_kwargs:
            settings["chat_template_kwargs"] = chat.template_kwargs
        request = {**settings, "messages": chat.messages}
        if tools is not None:
            request["tools"] = tools
        generated = await self._engine.generate(session_id, tokens, request, headers)
        event = record_turn(
            state,
            at,
            prompt.keep,
            prompt.suffix,
            generated.generation,
            event_id=uuid.uuid4().hex,
            tools=tools,
            request=settings,
            requested_at=requested_at,
            committed_at=self._clock(),
        )
        await self._commit(session_id, state, event)
        return generated.answer

    async def _commit(self, session_id: str, state: SessionState, event: TurnRecorded) -> None:
        """Appends the turn; if another took its seq, under the next one and with its own parent."""
        while True:
            seq = len(state.turns) + 1
            try:
                await self._store.append(session_id, seq, event)
            except SeqTaken:
                state = await self._sessions.load(session_id)
                continue
            except SessionNotFound:
                self._sessions.forget(session_id)
                raise
            self._sessions.appended(session_id, state, seq, event)
            return
