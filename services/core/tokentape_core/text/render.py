"""Prompts from messages: a whole one, or only what a turn adds to the tokens that are already recorded."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import jinja2
import numpy as np
import numpy.typing as npt

from tokentape_core.text.boundary import Boundary
from tokentape_core.text.dummies import OPENING, PROBES, SENTINELS, Probe, dummy_assistant, kind_of
from tokentape_core.text.errors import NotAppendable, RenderError, TokenizerError
from tokentape_core.text.families import Family
from tokentape_core.text.messages import Message, template_messages, template_role
from tokentape_core.text.segments import Segments, Splitter
from tokentape_core.text.tokenizer import Tokenizer

__all__ = ["ChatRenderer", "NotAppendable", "Prompt", "RenderError"]

_Ids = npt.NDArray[np.int32]
_Tools = Sequence[Mapping[str, object]]

_NO_KWARGS: Mapping[str, object] = MappingProxyType({})

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


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """A prompt as a change to its parent's tokens: `parent_tokens[:keep]`, then `suffix` (int32[S])."""

    keep: int
    suffix: _Ids


@dataclass(frozen=True, slots=True)
class _Request:
    """What a prompt depends on besides its messages."""

    tools: _Tools | None = None
    template_kwargs: Mapping[str, object] | None = None
    opened_at: float = 0.0


class ChatRenderer:
    """Renders a model's chat template into token ids. Immutable and safe to share between threads.

    A suffix of a few hundred tokens takes less than a millisecond. Run it in a thread for messages of more
    than some ten thousand characters: tokenising lets other threads run, the template itself takes
    milliseconds.

    Everywhere `opened_at` is the time at which the session was opened, in Unix seconds. A template that
    writes the date writes that one, in UTC: a session has the same prompt on every machine, in every replay.
    """

    def __init__(
        self, tokenizer: Tokenizer, family: Family, template_kwargs: Mapping[str, object] = _NO_KWARGS
    ) -> None:
        """`template_kwargs` go to the template with every call (for example `enable_thinking`).

        Raises `TokenizerError` if the tokenizer lacks a valid template or the family's boundary token,
        `RenderError` for a template argument that no template can have.
        """
        if not tokenizer.has_template:
            raise TokenizerError("the tokenizer has no chat template: give one as a Jinja file")
        self._tokenizer = tokenizer
        self._family = family
        self._kwargs = MappingProxyType(self._checked(dict(template_kwargs)))
        self._knows_developer = any(_names_developer(source) for source in tokenizer.templates)
        self._boundary = Boundary(tokenizer, family)
        self._splitter = Splitter(tokenizer, self._boundary)
        self._refusal = self._try_template()
        self._refused_kinds = self._kinds_that_depend_on_history()
        self._fingerprint = self._digest()

    @property
    def tokenizer(self) -> Tokenizer:
        """What the prompts are encoded with."""
        return self._tokenizer

    @property
    def fingerprint(self) -> str:
        """16 hex digits that change if the tokenizer, its template, the family or `template_kwargs` do."""
        return self._fingerprint

    @property
    def template_kwargs(self) -> Mapping[str, object]:
        """The template arguments of every call that does not say otherwise; read-only."""
        return self._kwargs

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
        tools: _Tools | None = None,
        template_kwargs: Mapping[str, object] | None = None,
        opened_at: float = 0.0,
    ) -> _Ids:
        """The ids (int32[T]) of a whole conversation and the generation prompt.

        `template_kwargs` win over those of the renderer. A message that spells a special token yields that
        token, as in an engine that applies the template itself. Raises `RenderError`.
        """
        request = _Request(tools, template_kwargs, opened_at)
        return self._encode(self._apply(self._convert(messages), request))

    def render_text(
        self,
        messages: Sequence[Message],
        *,
        tools: _Tools | None = None,
        template_kwargs: Mapping[str, object] | None = None,
        generation_prompt: bool = True,
        opened_at: float = 0.0,
    ) -> str:
        """As `render`, but not yet tokenised, with or without the generation prompt. Raises `RenderError`."""
        request = _Request(tools, template_kwargs, opened_at)
        return self._apply(self._convert(messages), request, generation_prompt)

    def segments(
        self,
        messages: Sequence[Message],
        *,
        tools: _Tools | None = None,
        template_kwargs: Mapping[str, object] | None = None,
        opened_at: float = 0.0,
    ) -> Segments:
        """What `render` would give without generation prompt, cut at its special tokens, as text."""
        request = _Request(tools, template_kwargs, opened_at)
        text = self._apply(self._convert(messages), request, False)
        if self._tokenizer.is_byte_level:
            return self._splitter.of_text(text)
        return self._splitter.of_ids(self._encode(text))[0]

    def extend(
        self,
        parent_tokens: npt.NDArray[np.integer],
        assistant: Message,
        new_messages: Sequence[Message],
        *,
        tools: _Tools | None = None,
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
        if self._refusal is not None:
            raise NotAppendable(self._refusal)
        self._check_roles(new_messages)
        new = self._convert(new_messages)
        try:
            text = self._render_after_turn(assistant, new, _Request(tools, template_kwargs, opened_at))
        except RenderError as error:
            if any(message["role"] == "assistant" for message in new):
                raise NotAppendable(f"an assistant's message cannot be written here: {error}") from error
            raise
        # The boundary token is tokenised with the rest: a vocabulary may let it swallow the spaces after it.
        following = self._encode(text)
        if not self._boundary.at_start(following):
            raise NotAppendable(f"the tokenizer does not read {self._boundary.names} as one token")
        keep, suffix = self._boundary.join(parent_tokens, following)
        return Prompt(keep=keep, suffix=suffix)

    def sample(
        self,
        history: Sequence[Message],
        assistant: Message,
        *,
        tools: _Tools | None = None,
        template_kwargs: Mapping[str, object] | None = None,
        opened_at: float = 0.0,
    ) -> _Ids:
        """What a model that follows the template would sample as `assistant`, its stop token included.

        Where the template does not go on from its own generation prompt, that is what it writes after the
        tokens of the prompt that it keeps. Raises `RenderError`.
        """
        request = _Request(tools, template_kwargs, opened_at)
        before = self._apply(self._convert(history), request)
        after = self._boundary.sampled(self._apply(self._convert([*history, assistant]), request, False))
        # Other vocabularies than byte-level ones may put a space before what is tokenised on its own.
        if after.startswith(before) and self._tokenizer.is_byte_level:
            return self._encode(after[len(before) :])
        prompt, turn = self._encode(before), self._encode(after)
        shared = min(len(prompt), len(turn))
        different = np.flatnonzero(prompt[:shared] != turn[:shared])
        return turn[int(different[0]) if different.size else shared :]

    def _convert(self, messages: Sequence[Message]) -> list[dict[str, object]]:
        return template_messages(
            messages,
            arguments=self._family.arguments,
            extra_roles=self.append_roles,
            knows_developer=self._knows_developer,
        )

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
            kind = kind_of(message, role)
            if kind in self._refused_kinds:
                raise NotAppendable(
                    f"what the template writes for a message with role {given!r} depends on the turns before"
                )

    def _render_after_turn(
        self,
        assistant: Message,
        new: Sequence[Message],
        request: _Request,
        earlier: Sequence[Message] = (),
    ) -> str:
        """What the template writes from the end of an assistant's turn on, boundary token included.

        Rendered after a dummy history: neither the length of the real one nor the special treatment that some
        templates give to a *last* assistant message has any influence.
        """
        for sentinel in SENTINELS:
            turn = dummy_assistant(assistant, sentinel, self._family.arguments)
            text = self._apply([*OPENING, *earlier, turn, *new], request)
            if text.count(sentinel) == 1:
                break
        else:
            raise NotAppendable("the template does not write an assistant's message exactly once")
        end = self._boundary.find(text, text.index(sentinel) + len(sentinel))
        if end is None:
            raise NotAppendable(f"the template does not end an assistant's turn with {self._boundary.names}")
        return text[end:]

    def _apply(self, messages: Sequence[Message], request: _Request, generation_prompt: bool = True) -> str:
        kwargs = self._checked({**self._kwargs, **(request.template_kwargs or {})})
        try:
            return self._tokenizer.apply_template(
                messages,
                # Some templates tell an empty list of tools from none; requests do not.
                tools=request.tools or None,
                template_kwargs=kwargs,
                generation_prompt=generation_prompt,
                opened_at=request.opened_at,
            )
        except _TEMPLATE_ERRORS as error:
            raise RenderError(f"the chat template refused the messages: {error}") from error

    def _checked(self, template_kwargs: dict[str, object]) -> dict[str, object]:
        reserved = sorted(self._tokenizer.reserved_kwargs & set(template_kwargs))
        if reserved:
            raise RenderError(f"template arguments may not be named {', '.join(reserved)}")
        return template_kwargs

    def _encode(self, text: str) -> _Ids:
        try:
            return np.array(self._tokenizer.encode(text), dtype=np.int32)
        except ValueError as error:
            raise RenderError(f"the messages cannot be tokenised: {error}") from error

    def _try_template(self) -> str | None:
        """Compile the template; say why it cannot extend any turn, or None if it can."""
        try:
            self._render_after_turn({}, (), _Request())
        except NotAppendable as error:
            return str(error)
        except RenderError as error:
            if isinstance(error.__cause__, jinja2.TemplateSyntaxError):
                raise TokenizerError(f"the chat template is not valid: {error.__cause__}") from error
            return f"the template refuses a system, a user and an assistant message in a row: {error}"
        return None

    def _kinds_that_depend_on_history(self) -> frozenset[str]:
        """The kinds of message for which the template writes something else if there were such turns before.

        A template that counts tool calls over the whole conversation is one: after a dummy history it would
        write a wrong number.
        """
        return frozenset(
            kind for kind, probes in PROBES.items() if any(map(self._depends_on_history, probes))
        )

    def _depends_on_history(self, probe: Probe) -> bool:
        following, earlier = self._convert(probe.following), self._convert(probe.earlier)
        try:
            first = self._render_after_turn(probe.turn, following, _Request())
            return first != self._render_after_turn(probe.turn, following, _Request(), earlier)
        except (NotAppendable, RenderError):
            return False  # `extend` meets the same refusal, and has the reason

    def _digest(self) -> str:
        parts = [self._tokenizer.fingerprint, self._family.name, dict(self._kwargs)]
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _names_developer(template: str) -> bool:
    return "'developer'" in template or '"developer"' in template
