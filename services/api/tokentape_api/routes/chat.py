"""`POST /sessions/{sid}/…` in every dialect: one turn."""

from starlette.requests import Request
from starlette.responses import Response

from tokentape_api.dialects.port import Dialect
from tokentape_api.http.connected import while_connected
from tokentape_api.http.responses import JSON
from tokentape_api.services import Services
from tokentape_contracts import limits


async def turn(request: Request, dialect: Dialect) -> Response:
    """Generates and records one turn."""
    services: Services = request.app.state.services
    session_id = request.path_params["sid"]
    body = services.bodies.parsed(
        request, limits.CHAT_BODY_BYTES, dialect.parse, lambda asked: asked.request.size
    )
    with services.telemetry.turn(session_id, request.headers):
        async with body as (asked, cost):
            work = services.recorder.chat(session_id, asked.request, request.headers, cost)
            generated = await while_connected(request, work)
    if asked.request.stream:
        # At once, as all of it is there: one event after the other would cost a turn of the loop each.
        events = b"".join(asked.events(generated))
        return Response(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
    return Response(asked.reply(generated), media_type=JSON)
