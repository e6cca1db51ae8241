"""Prompts from messages: a whole one, or only what a turn adds to the tokens that are already recorded."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from tokentape_core.text.boundary import Boundary
from tokentape_core.text.continuation import Continuation
from tokentape_core.text.errors import NotAppendable, RenderError, TextTooLong
from tokentape_core.text.families import FAMILIES, Family
from tokentape_core.text.messages import Message, template_role
from tokentape_core.text.segments import Segments, Splitter
from tokentape_core.text.settings import AS_TEMPLATE
from tokentape_core.text.template import Request, Template
from tokentape_core.text.tokenizer import Tokenizer
from tokentape_core.text.tools import AS_SENT, Tool

__all__ = ["ChatRenderer", "NotAppendable", "Prompt", "RenderError", "TextTooLong"]

_Ids = npt.NDArray[np.int32]

_NO_KWARGS: Mapping[str, object] = MappingProxyType({})


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """A prompt as a change to its parent's tokens: `parent_tokens[:keep]`, then `suffix` (int32[S])."""

    keep: int
    suffix: _Ids


class ChatRenderer:
    """Renders a model's chat template into token ids. Immutable and safe to share between threads.

    A suffix of a few hundred tokens takes less than a millisecond. Run it in a thread for messages of more
    than some ten thousand characters: tokenising lets other threads run, the template itself takes
    milliseconds.

    Everywhere `opened_at` is the time at which the session was opened, in Unix seconds. A template that
    writes the date writes that one, in UTC: a session has the same prompt on every machine, in every replay.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        family: Family,
        template_kwargs: Mapping[str, object] = _NO_KWARGS,
        *,
        tools_form: str = AS_SENT,
        special_tokens_in_text: str = AS_TEMPLATE,
    ) -> None:
        """`template_kwargs` go to the template with every call (for example `enable_thinking`).

        `tools_form` is one of `TOOLS_FORMS`, `special_tokens_in_text` one of `SPECIAL_TOKENS_IN_TEXT`.
        Raises `TokenizerError` if the tokenizer lacks a valid template or the family's boundary token,
        `RenderError` for a template argument that no template can have.
        """
        self._tokenizer = tokenizer
        self._family = family
        self._template = Template(
            tokenizer,
            family,
            template_kwargs,
            tools_form=tools_form,
            special_tokens_in_text=special_tokens_in_text,
        )
        self._boundary = Boundary(tokenizer, family)
        self._splitter = Splitter(tokenizer, self._boundary)
        self._continuation = Continuation(self._template, self._boundary, family.arguments)
        self._fingerprint = self._digest(
            {
                "tools_form": (tools_form, AS_SENT),
                "special_tokens_in_text": (special_tokens_in_text, AS_TEMPLATE),
            }
        )

    @property
    def tokenizer(self) -> Tokenizer:
        """What the prompts are encoded with."""
        return self._tokenizer

    @property
    def fingerprint(self) -> str:
        """16 hex digits that change with the tokenizer, its template, the family and all other arguments."""
        return self._fingerprint

    @property
    def template_kwargs(self) -> Mapping[str, object]:
        """The template arguments of every call that does not say otherwise; read-only."""
        return self._template.kwargs

    @property
    def family(self) -> Family:
        """The row of the family table."""
        return self._family

    @property
    def boundary(self) -> Boundary:
        """The boundary tokens of the family in this tokenizer."""
        return self._boundary

    @property
    def splitter(self) -> Splitter:
        """Cuts conversations at the special tokens of this tokenizer."""
        return self._splitter

    @property
    def max_trim_tokens(self) -> int:
        """How many of a parent's last tokens `extend` may leave out."""
        return self._family.max_trim_tokens

    @property
    def append_roles(self) -> frozenset[str]:
        """The roles that `extend` accepts."""
        return self._family.append_roles | {"assistant"}

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] | None = None,
        template_kwargs: Mapping[str, object] | None = None,
        opened_at: float = 0.0,
    ) -> _Ids:
        """The ids (int32[T]) of a whole conversation and the generation prompt.

        `template_kwargs` win over those of the renderer. A message that spells a special token yields that
        token, as in an engine that applies the template itself. Raises `RenderError`.
        """
        converted, request = self._request(messages, tools, template_kwargs, opened_at)
        return self._template.encode(self._template.write(converted, request), request)

    def render_text(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] | None = None,
        template_kwargs: Mapping[str, object] | None = None,
        generation_prompt: bool = True,
        opened_at: float = 0.0,
    ) -> str:
        """As `render`, but not yet tokenised, with or without the generation prompt. Raises `RenderError`."""
        converted, request = self._request(messages, tools, template_kwargs, opened_at)
        text = self._template.write(converted, request, generation_prompt=generation_prompt)
        return text.replace(request.mark, "") if request.mark else text

    def segments(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] | None = None,
        template_kwargs: Mapping[str, object] | None = None,
        opened_at: float = 0.0,
    ) -> Segments:
        """What `render` would give without generation prompt, cut at its special tokens, as text."""
        converted, request = self._request(messages, tools, template_kwargs, opened_at)
        text = self._template.write(converted, request, generation_prompt=False)
        if self._tokenizer.is_byte_level:
            return self._splitter.of_text(text, request.mark)
        return self._splitter.of_ids(self._template.encode(text, request))[0]

    def extend(
        self,
        parent_tokens: npt.NDArray[np.integer],
        assistant: Message,
        new_messages: Sequence[Message],
        *,
        tools: Sequence[Tool] | None = None,
        template_kwargs: Mapping[str, object] | None = None,
        opened_at: float = 0.0,
    ) -> Prompt:
        """The prompt that continues a recorded turn with `new_messages` and the generation prompt.

        `parent_tokens` (int[T], the parent's prompt and output) stay as they are, less at most
        `max_trim_tokens` at the end. None of them is decoded or tokenised again, and the cost does not depend
        on T. `assistant` is the parent's recorded message; the template sees only the names and ids of its
        tool calls, which tool messages may refer to. `new_messages` may be empty. Assistants' messages among
        them, which the caller brings and no model of this session sampled, are prompt like the others.

        A parent that does not end with a token that ends a turn in this family (it was cut at its length, or
        it stopped at another token, such as <|endoftext|>) keeps all its tokens, and the suffix begins with
        the token that the template writes there.

        Raises `NotAppendable` for a role that cannot be appended, for a template that cannot be cut after the
        assistant's turn or does not take another assistant's message there, and where the template's text
        depends on turns before that one; `RenderError` for messages that cannot be rendered.
        """
        if self._continuation.refusal is not None:
            raise NotAppendable(self._continuation.refusal)
        self._check_roles(new_messages)
        new = self._template.convert(new_messages)
        request = self._template.request(
            assistant, *new, tools=tools, template_kwargs=template_kwargs, opened_at=opened_at
        )
        try:
            text = self._continuation.write(assistant, new, request)
        except RenderError as error:
            if any(message["role"] == "assistant" for message in new):
                raise NotAppendable(f"an assistant's message cannot be written here: {error}") from error
            raise
        # The boundary token is tokenised with the rest: a vocabulary may let it swallow the spaces after it.
        following = self._template.encode(text, request)
        if not self._boundary.at_start(following):
            raise NotAppendable(f"the tokenizer does not read {self._boundary.names} as one token")
        keep, suffix = self._boundary.join(parent_tokens, following)
        return Prompt(keep=keep, suffix=suffix)

    def sample(
        self,
        history: Sequence[Message],
        assistant: Message,
        *,
        tools: Sequence[Tool] | None = None,
        template_kwargs: Mapping[str, object] | None = None,
        opened_at: float = 0.0,
    ) -> _Ids:
        """What a model that follows the template would sample as `assistant`, its stop token included.

        Where the template does not go on from its own generation prompt, that is what it writes after the
        tokens of the prompt that it keeps. Raises `RenderError`.
        """
        converted, request = self._request([*history, assistant], tools, template_kwargs, opened_at)
        before = self._template.write(converted[:-1], request)
        after = self._boundary.sampled(self._template.write(converted, request, generation_prompt=False))
        # Other vocabularies than byte-level ones may put a space before what is tokenised on its own.
        if after.startswith(before) and self._tokenizer.is_byte_level:
            return self._template.encode(after[len(before) :], request)
        prompt, turn = self._template.encode(before, request), self._template.encode(after, request)
        shared = min(len(prompt), len(turn))
        different = np.flatnonzero(prompt[:shared] != turn[:shared])
        return turn[int(different[0]) if different.size else shared :]

    def _request(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None,
        template_kwargs: Mapping[str, object] | None,
        opened_at: float,
    ) -> tuple[list[dict[str, object]], Request]:
        converted = self._template.convert(messages)
        request = self._template.request(
            *converted, tools=tools, template_kwargs=template_kwargs, opened_at=opened_at
        )
        return converted, request

    def _check_roles(self, messages: Sequence[Message]) -> None:
        for message in messages:
            given = message.get("role") if isinstance(message, Mapping) else None
            # A template that knows developers treats them like systems.
            role = template_role(given, knows_developer=False)
            if not isinstance(role, str) or role not in self.append_roles:
                raise NotAppendable(
                    f"a message with role {given!r} cannot follow a recorded turn of family "
                    f"{self._family.name}; allowed: {', '.join(sorted(self.append_roles))}"
                )
            reason = self._continuation.reason_against(message, role)
            if reason is not None:
                raise NotAppendable(f"a message with role {given!r} cannot follow a recorded turn: {reason}")

    def _digest(self, options: Mapping[str, tuple[str, str]]) -> str:
        """Over what makes the ids; `options` holds each value and the default, which adds nothing."""
        parts: list[object] = [self._tokenizer.fingerprint, self._family.name, dict(self._template.kwargs)]
        others: dict[str, object] = {
            name: value for name, (value, default) in options.items() if value != default
        }
        if self._family != FAMILIES.get(self._family.name):
            others["end_tokens"] = self._family.end_tokens
        if others:
            parts.append(others)
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]
