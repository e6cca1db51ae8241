"""What a chat template writes after an assistant's turn, found out behind a dummy history."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import jinja2

from tokentape_core.text.boundary import Boundary
from tokentape_core.text.dummies import OPENING, OTHER, PROBES, SENTINELS, Probe, dummy_assistant, kind_of
from tokentape_core.text.errors import NotAppendable, RenderError, TokenizerError
from tokentape_core.text.messages import ArgumentsForm, Message
from tokentape_core.text.template import Request, Template

__all__ = ["Continuation"]

_INSIDE: Final = "the template writes it before the end of the turn that it follows"


class Continuation:
    """The text of messages that follow a turn. Immutable and safe to share between threads.

    Attributes:
        refusal: why the template can extend no turn at all; None if it can.
    """

    def __init__(self, template: Template, boundary: Boundary, arguments: ArgumentsForm) -> None:
        """Raises `TokenizerError` if the template is not valid."""
        self._template = template
        self._boundary = boundary
        self._arguments = arguments
        self.refusal = self._try_template()
        self._reasons = {kind: self._reason_against(kind) for kind in PROBES}

    def reason_against(self, message: Message, role: str) -> str | None:
        """Why no such message can follow a turn; None if it may."""
        return self._reasons.get(kind_of(message, role))

    def write(self, assistant: Message, new: Sequence[Message], request: Request) -> str:
        """What the template writes from the end of an assistant's turn on, boundary token included.

        Rendered after a dummy history: neither the length of the real one nor the special treatment that some
        templates give to a *last* assistant message has any influence. Raises `NotAppendable` if it cannot be
        cut there, `RenderError` if the template refuses the messages.
        """
        end, following = self._cut(assistant, new, request)
        # Some templates write assistants' messages in a row as one, which the first boundary then ends.
        if _has_answer(new) and end != self._cut(assistant, _otherwise(new), request)[0]:
            raise NotAppendable(_INSIDE)
        return following

    def _cut(
        self,
        assistant: Message,
        new: Sequence[Message],
        request: Request,
        earlier: Sequence[Message] = (),
    ) -> tuple[str, str]:
        """What follows the assistant's text before the boundary token, and all from that on."""
        for sentinel in SENTINELS:
            turn = dummy_assistant(assistant, sentinel, self._arguments)
            text = self._template.write([*OPENING, *earlier, turn, *new], request)
            if text.count(sentinel) == 1:
                break
        else:
            raise NotAppendable("the template does not write an assistant's message exactly once")
        start = text.index(sentinel) + len(sentinel)
        end = self._boundary.find(text, start)
        if end is None:
            raise NotAppendable(f"the template does not end an assistant's turn with {self._boundary.names}")
        return text[start:end], text[end:]

    def _try_template(self) -> str | None:
        """Compile the template; say why it cannot extend any turn, or None if it can."""
        try:
            self._cut({}, (), Request())
        except NotAppendable as error:
            return str(error)
        except RenderError as error:
            if isinstance(error.__cause__, jinja2.TemplateSyntaxError):
                raise TokenizerError(f"the chat template is not valid: {error.__cause__}") from error
            return f"the template refuses a system, a user and an assistant message in a row: {error}"
        return None

    def _reason_against(self, kind: str) -> str | None:
        return next(filter(None, map(self._reason_of, PROBES[kind])), None)

    def _reason_of(self, probe: Probe) -> str | None:
        """Why what follows the probe's turn cannot be found out behind a dummy history.

        A template that counts tool calls over the whole conversation writes something else if there were such
        turns before: after a dummy history it would write a wrong number.
        """
        following, earlier = self._template.convert(probe.following), self._template.convert(probe.earlier)
        try:
            end, first = self._cut(probe.turn, following, Request())
            # `write` looks at every single answer: what it may not follow directly, it may follow later.
            if not _has_answer(following):
                other, _ = self._cut(probe.turn, _otherwise(following), Request())
                if end != other:
                    return _INSIDE
            _, again = self._cut(probe.turn, following, Request(), earlier)
        except (NotAppendable, RenderError):
            return None  # `write` meets the same refusal, and has the reason
        return None if again == first else "what the template writes for it depends on the turns before"


def _has_answer(messages: Sequence[Message]) -> bool:
    return any(message["role"] == "assistant" for message in messages)


def _otherwise(messages: Sequence[Message]) -> list[Message]:
    """The same messages with another content: where a template writes that, it writes the messages."""
    return [
        {key: value for key, value in message.items() if key != "reasoning_content"} | {"content": OTHER}
        for message in messages
    ]
