"""`POST /sessions`, `GET /sessions/{sid}`, `DELETE /sessions/{sid}`."""

import time
import uuid
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from tokentape_api.dialects import chat
from tokentape_api.http.access import caller_of
from tokentape_api.http.responses import JSON, json_response
from tokentape_api.services import Services
from tokentape_api.settings import ApiSettings
from tokentape_api.work import Sender
from tokentape_contracts import limits
from tokentape_contracts.errors import InvalidRequest, SessionDeleted
from tokentape_contracts.events import ReplaySpec, SessionOpened, SessionSealed
from tokentape_contracts.http import OpenRequest, pinned
from tokentape_core import logs
from tokentape_core.comparison import comparison
from tokentape_core.domain import view
from tokentape_core.domain.assemble import expected_accounting
from tokentape_core.domain.state import SessionState


async def open_session(request: Request) -> Response:
    """Opens a session and answers its id."""
    services: Services = request.app.state.services
    parse = partial(OpenRequest.parse, matchers=tuple(services.matchers))
    async with services.bodies.parsed(request, limits.SMALL_BODY_BYTES, parse) as (wanted, _):
        return await _open(services, wanted, caller_of(request).tenant)


async def _open(services: Services, wanted: OpenRequest, tenant: str) -> Response:
    settings, renderer = services.settings, services.renderer
    session_id = uuid.uuid4().hex
    opened = SessionOpened(
        id=uuid.uuid4().hex,
        mode=wanted.mode or settings.mode,
        matcher=wanted.matcher or settings.matcher,
        altered_answer=_altered_answer(wanted, settings),
        family=settings.family,
        max_trim_tokens=renderer.max_trim_tokens,
        template=renderer.fingerprint,
        labels=wanted.labels,
        pins=pinned(settings.pins, wanted.pins),
        replay=_replay(settings),
        tenant=tenant,
        opened_at=time.time(),
    )
    await services.store.open(session_id, opened)
    services.telemetry.sessions_opened.inc()
    logs.note(opened=session_id)
    return json_response({"session_id": session_id})


def _altered_answer(wanted: OpenRequest, settings: ApiSettings) -> str:
    if wanted.altered_answer == "keep" and (wanted.mode or settings.mode) == "tree":
        raise InvalidRequest(
            "altered_answer keep needs mode linear: in a tree an altered answer begins a new root"
        )
    return wanted.altered_answer or settings.altered_answer


def _replay(settings: ApiSettings) -> dict[str, ReplaySpec]:
    """Which routing replay rows the session's turns ask for. The indexer's always come whole."""
    specs = {}
    if settings.replay != "off":
        specs["routed_experts"] = ReplaySpec(
            rows=settings.replay, layers=settings.replay_layers, prefix=settings.replay_prefix
        )
    if settings.indexer_topk == "on":
        specs["indexer_topk"] = ReplaySpec(rows="full", layers=None, prefix=settings.replay_prefix)
    return specs


async def get_session(request: Request) -> Response:
    """The active path's turns as requests and responses; with `?view=events` the events themselves."""
    services: Services = request.app.state.services
    session_id = request.path_params["sid"]
    state = await services.sessions.load(session_id, is_shown=True)
    if state.sealed is not None:
        raise SessionDeleted("the session was deleted")
    if request.query_params.get("view") == "events":
        dump = partial(_dump_events, session_id, state)
    else:
        dump = partial(_dump_records, services, session_id, state)
    sender = Sender(state.opened.tenant, session_id)
    return Response(await services.workers.run(state.size, sender, dump), media_type=JSON)


def _dump_events(session_id: str, state: SessionState) -> bytes:
    return _dump({"session_id": session_id}, events=view.compact(state))


def _dump_records(services: Services, session_id: str, state: SessionState) -> bytes:
    tokens = sum(turn.length for turn in state.head.path) if state.head else 0
    if tokens > limits.VIEW_TOKENS:
        raise InvalidRequest(
            f"the records hold {tokens} tokens, as each repeats its whole prompt; ?view=events has each once"
        )
    compare = comparison(services.renderer, state.opened.template, state.opened.opened_at)
    metadata = view.session_metadata(state, expected_accounting(state), compare)
    records = view.records(state, f"/{chat.DIALECT.path}")
    return _dump({"session_id": session_id, "metadata": metadata}, records=records)


def _dump(content: Mapping[str, Any], **lists: Iterable[Any]) -> bytes:
    """A JSON object. The lists are written item by item, between which other threads run."""
    pieces = [orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)[:-1]]
    for name, items in lists.items():
        written = (orjson.dumps(item, option=orjson.OPT_SERIALIZE_NUMPY) for item in items)
        pieces += [b',"%s":[' % name.encode(), b",".join(written), b"]"]
    return b"".join([*pieces, b"}"])


async def delete_session(request: Request) -> Response:
    """Seals the session; may be sent any number of times (INV-8)."""
    services: Services = request.app.state.services
    sealed = SessionSealed(id=uuid.uuid4().hex, reason="deleted", sealed_at=time.time())
    await services.store.seal(request.path_params["sid"], sealed)
    services.telemetry.sessions_deleted.inc()
    return Response(status_code=204)
