"""`POST /sessions/{sid}/v1/chat/completions`."""

from starlette.requests import Request
from starlette.responses import Response

from tokentape_api import stream
from tokentape_api.http.bodies import ChatRequest
from tokentape_api.http.connected import while_connected
from tokentape_api.http.responses import JSON
from tokentape_api.services import Services
from tokentape_contracts import limits


async def chat_completions(request: Request) -> Response:
    """Generates and records one turn."""
    services: Services = request.app.state.services
    session_id = request.path_params["sid"]
    body = services.bodies.parsed(request, limits.CHAT_BODY_BYTES, ChatRequest.parse, lambda chat: chat.size)
    with services.telemetry.turn(session_id, request.headers):
        async with body as (chat, cost):
            work = services.recorder.chat(session_id, chat, request.headers, cost)
            generated = await while_connected(request, work)
    if chat.stream:
        # At once, as all of it is there: one event after the other would cost a turn of the loop each.
        events = b"".join(
            stream.chunks(
                generated.answer,
                include_usage=chat.include_usage,
                include_logprobs=chat.fields.get("logprobs") is True,
            )
        )
        return Response(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
    return Response(generated.written, media_type=JSON)
