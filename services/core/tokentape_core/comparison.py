"""`tito_session_mismatch`: a recorded path against the chat template's own rendering of its messages."""

from typing import Any

from tokentape_core.domain.state import Turn
from tokentape_core.domain.view import Compare
from tokentape_core.text.errors import RenderError
from tokentape_core.text.mismatch import find_mismatches
from tokentape_core.text.render import ChatRenderer


def comparison(renderer: ChatRenderer, template: str, opened_at: float = 0.0) -> Compare | None:
    """How a session's paths are compared.

    Args:
        template: the session's fingerprint; None is returned if the renderer's is another, because it would
            compare with somebody else's template.
        opened_at: when the session was opened, in Unix seconds: the date that its template writes.
    """
    if renderer.fingerprint != template:
        return None

    def compare(turn: Turn) -> list[dict[str, Any]] | None:
        messages = [message for t in turn.path for message in t.event.messages]
        try:
            return find_mismatches(
                renderer,
                turn.tokens,
                messages,
                sampled=turn.sampled,
                tools=turn.tools,
                template_kwargs=turn.event.request.get("chat_template_kwargs"),
                opened_at=opened_at,
            )
        except RenderError:
            return None

    return compare
