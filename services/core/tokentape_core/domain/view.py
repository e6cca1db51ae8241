"""Views of a session: what GET shows of it, rebuilt from the events."""

from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import numpy as np

from tokentape_contracts.accounting import Accounting
from tokentape_core.domain.counters import prefix_cache_info, spec_info
from tokentape_core.domain.state import SessionState, Turn
from tokentape_core.domain.tree import tables

Compare = Callable[[Turn], list[dict[str, Any]] | None]
"""Where the chat template would write something else than the tokens of this turn's path; None: unknown."""


def session_metadata(
    state: SessionState, accounting: Accounting | None, compare: Compare | None = None
) -> dict[str, Any]:
    """What GET and every samples reply say about the whole session.

    `accumulated_token_ids`: int32[T], all tokens of the path to the newest turn. `max_trim_tokens`: how many
    trailing tokens of a turn the next prompt may render anew. `counters`: `generations`, `prefix_cache_info`
    and `spec_info` over all turns, each counted once, whatever paths it is on. In tree mode also the `tree`
    tables. `accounting`: what became of every sampled token; absent if that is not known.
    `tito_session_mismatch`: what `compare` finds on that path; absent if that is unknown.
    """
    tokens = state.head.tokens if state.head else np.empty(0, np.int32)
    metadata: dict[str, Any] = {
        "accumulated_token_ids": tokens,
        "max_trim_tokens": state.opened.max_trim_tokens,
        "counters": {
            "generations": len(state.turns),
            "prefix_cache_info": prefix_cache_info(state.turns),
            "spec_info": spec_info(state.turns),
        },
    }
    if accounting is not None:
        metadata["accounting"] = accounting.to_json()
    if state.opened.mode == "tree":
        metadata["tree"] = tables(state)
    if state.head is not None:
        metadata.update(mismatch(state.head, compare))
    return metadata


def mismatch(turn: Turn, compare: Compare | None) -> dict[str, Any]:
    """The metadata key `tito_session_mismatch` of this turn's path, or no key if that is unknown."""
    found = compare(turn) if compare is not None else None
    return {} if found is None else {"tito_session_mismatch": found}


def records(state: SessionState, path: str) -> Iterator[dict[str, Any]]:
    """The turns of the active path as requests and responses, each made when it is wanted.

    The shape is that of the Miles session server's `GET /sessions/{sid}`. A request shows the full `messages`
    and `input_ids`, so the answer grows with turns times length: it is for people and for existing tools.

    Args:
        path: where chat completions are asked for.
    """
    return (_record(turn, path) for turn in (state.head.path if state.head else ()))


def _record(turn: Turn, path: str) -> dict[str, Any]:
    event = turn.event
    tokens = turn.tokens
    messages = [message for t in turn.path for message in t.event.messages]
    request = {**event.request, "messages": messages[:-1], "input_ids": tokens[: turn.prompt_length]}
    if (tools := turn.tools) is not None:
        request["tools"] = tools
    triples = [[p, i, None] for p, i in zip(event.logprobs.tolist(), event.output.tolist(), strict=True)]
    choice = {
        **event.reply["choices"][0],
        "message": messages[-1],
        "finish_reason": event.finish,
        "meta_info": {**event.meta, "output_token_logprobs": triples},
    }
    return {
        "timestamp": event.committed_at,
        "request_timestamp": event.requested_at,
        "method": "POST",
        "path": path,
        "status_code": 200,
        "request": request,
        "response": {**event.reply, "id": event.response_id, "choices": [choice]},
    }


def compact(state: SessionState) -> list[dict[str, Any]]:
    """The events themselves, as JSON: what grows with the new tokens only."""
    view: list[dict[str, Any]] = [_event(state.opened)]
    view += [{"seq": turn.seq, **_event(turn.event)} for turn in state.turns]
    if state.sealed is not None:
        view.append(_event(state.sealed))
    return view


def _event(event: Any) -> dict[str, Any]:
    content = {field.name: getattr(event, field.name) for field in fields(event)}
    return {"type": event.TYPE, "v": event.VERSION, **content}
