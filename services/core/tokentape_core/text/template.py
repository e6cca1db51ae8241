"""A chat template with all that it is told besides the messages: their text, and its ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import jinja2
import numpy as np
import numpy.typing as npt

from tokentape_contracts import limits
from tokentape_core.text.errors import RenderError, TextTooLong, TokenizerError
from tokentape_core.text.families import Family
from tokentape_core.text.literal import LiteralEncoder
from tokentape_core.text.messages import Message, template_messages
from tokentape_core.text.settings import AS_TEMPLATE
from tokentape_core.text.tokenizer import Tokenizer
from tokentape_core.text.tools import AS_SENT, Tool, tools_in_form

__all__ = ["Request", "Template"]

# A template is somebody else's program: this is what its expressions raise on input that it did not expect.
_TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


@dataclass(frozen=True, slots=True)
class Request:
    """What a prompt depends on besides its messages.

    Attributes:
        tools: in the form that the template gets.
        template_kwargs: those that win over the renderer's.
        opened_at: what time it is, in Unix seconds.
        mark: the character that breaks the spellings of special tokens in the messages; "" if they hold none,
            or if those shall be special tokens.
    """

    tools: Sequence[Tool] | None = None
    template_kwargs: Mapping[str, object] | None = None
    opened_at: float = 0.0
    mark: str = ""


class Template:
    """A tokenizer's chat template. Immutable and safe to share between threads."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        family: Family,
        template_kwargs: Mapping[str, object],
        *,
        tools_form: str = AS_SENT,
        special_tokens_in_text: str = AS_TEMPLATE,
    ) -> None:
        """Raises `TokenizerError` without a template, `RenderError` for arguments that none can have."""
        if not tokenizer.has_template:
            raise TokenizerError("the tokenizer has no chat template: give one as a Jinja file")
        self._tokenizer = tokenizer
        self._family = family
        self._knows_developer = any(_names_developer(source) for source in tokenizer.templates)
        self._tools_form = tools_form
        self._literal = None if special_tokens_in_text == AS_TEMPLATE else LiteralEncoder(tokenizer)
        self.kwargs: Mapping[str, object] = MappingProxyType(self._checked(dict(template_kwargs)))

    def convert(self, messages: Sequence[Message]) -> list[dict[str, object]]:
        """The messages as the template takes them. Raises `RenderError`."""
        return template_messages(
            messages,
            arguments=self._family.arguments,
            extra_roles=self._family.append_roles,
            knows_developer=self._knows_developer,
        )

    def request(
        self,
        *messages: Message,
        tools: Sequence[Tool] | None,
        template_kwargs: Mapping[str, object] | None,
        opened_at: float,
    ) -> Request:
        """A request for all prompts of which `messages`, converted, are part. Raises `RenderError`."""
        given = tools_in_form(self._tools_form, tools)
        mark = "" if self._literal is None else self._literal.mark_for(messages, given, template_kwargs)
        return Request(given, template_kwargs, opened_at, mark)

    def write(self, messages: Sequence[Message], request: Request, *, generation_prompt: bool = True) -> str:
        """The text of converted messages, with the request's mark in it. Raises `RenderError`."""
        tools, kwargs = request.tools, request.template_kwargs or {}
        if self._literal is not None and request.mark:
            messages, tools, kwargs = self._literal.marked((messages, tools, kwargs), request.mark)
        try:
            return self._tokenizer.apply_template(
                messages,
                tools=tools,
                template_kwargs=self._checked({**self.kwargs, **kwargs}),
                generation_prompt=generation_prompt,
                opened_at=request.opened_at,
            )
        except _TEMPLATE_ERRORS as error:
            raise RenderError(f"the chat template refused the messages: {error}") from error

    def encode(self, text: str, request: Request) -> npt.NDArray[np.int32]:
        """The ids of what `write` wrote, or of a part of it. Raises `TextTooLong`, `RenderError`."""
        if (size := _size(text)) > limits.PROMPT_TEXT_BYTES:
            raise TextTooLong(
                f"the messages and tools are {size} bytes of text, more than {limits.PROMPT_TEXT_BYTES}: "
                "send less, or in several turns"
            )
        try:
            if self._literal is not None and request.mark and request.mark in text:
                ids = self._literal.encode(text, request.mark)
            else:
                ids = self._tokenizer.encode(text)
        except ValueError as error:
            raise RenderError(f"the messages cannot be tokenised: {error}") from error
        return np.array(ids, dtype=np.int32)

    def _checked(self, template_kwargs: dict[str, object]) -> dict[str, object]:
        reserved = sorted(self._tokenizer.reserved_kwargs & set(template_kwargs))
        if reserved:
            raise RenderError(f"template arguments may not be named {', '.join(reserved)}")
        return template_kwargs


def _size(text: str) -> int:
    """Bytes of UTF-8."""
    return len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))


def _names_developer(template: str) -> bool:
    return "'developer'" in template or '"developer"' in template
