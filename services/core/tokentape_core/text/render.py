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
from tokentape_core.text.errors import NotAppendable, RenderError, TokenizerError
from tokentape_core.text.families import Family
from tokentape_core.text.messages import Message, template_messages
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

# One of these stands for the assistant's text in a dummy history: the first that no message contains.
_SENTINELS = tuple(f"tokentape-sentinel-{i}" for i in range(8))


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
        self._kwargs = self._checked(dict(template_kwargs))
        self._boundary = Boundary(tokenizer, family)
        self._refusal = self._try_template()
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
    def max_trim_tokens(self) -> int:
        """How many of a parent's last tokens `extend` may leave out."""
        return self._family.max_trim_tokens

    @property
    def append_roles(self) -> frozenset[str]:
        """The roles that `extend` accepts."""
        return self._family.append_roles

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: _Tools | None = None,
        template_kwargs: Mapping[str, object] | None = None,
    ) -> _Ids:
        """The ids (int32[T]) of a whole conversation and the generation prompt.

        `template_kwargs` win over those of the renderer. A message that spells a special token yields that
        token, as in an engine that applies the template itself. Raises `RenderError`.
        """
        return self._encode(self._apply(self._convert(messages), tools, template_kwargs))

    def extend(
        self,
        parent_tokens: npt.NDArray[np.integer],
        assistant: Message,
        new_messages: Sequence[Message],
        *,
        tools: _Tools | None = None,
        template_kwargs: Mapping[str, object] | None = None,
    ) -> Prompt:
        """The prompt that continues a recorded turn with `new_messages` and the generation prompt.

        `parent_tokens` (int[T], the parent's prompt and output) stay as they are, less at most
        `max_trim_tokens` at the end. None of them is decoded or tokenised again, and the cost does not depend
        on T. `assistant` is the parent's recorded message; the template sees only the names and ids of its
        tool calls, which tool messages may refer to. `new_messages` may be empty.

        A parent that does not end with a token that ends a turn in this family (it was cut at its length, or
        it stopped at another token, such as <|endoftext|>) keeps all its tokens, and the suffix begins with
        the token that the template writes there.

        Raises `NotAppendable` for a role that cannot be appended and for a template that cannot be cut after
        the assistant's turn, `RenderError` for messages that cannot be rendered.
        """
        if self._refusal is not None:
            raise NotAppendable(self._refusal)
        self._check_roles(new_messages)
        new = self._convert(new_messages)
        text = self._render_after_turn(assistant, new, tools, template_kwargs)
        # The boundary token is tokenised with the rest: a vocabulary may let it swallow the spaces after it.
        following = self._encode(text)
        if not self._boundary.at_start(following):
            raise NotAppendable(f"the tokenizer does not read {self._boundary.names} as one token")
        keep, suffix = self._boundary.join(parent_tokens, following)
        return Prompt(keep=keep, suffix=suffix)

    def _convert(self, messages: Sequence[Message]) -> list[dict[str, object]]:
        return template_messages(messages, arguments=self._family.arguments, extra_roles=self.append_roles)

    def _check_roles(self, messages: Sequence[Message]) -> None:
        for message in messages:
            role = message.get("role") if isinstance(message, Mapping) else None
            if not isinstance(role, str) or role not in self.append_roles:
                raise NotAppendable(
                    f"a message with role {role!r} cannot follow a recorded turn of family "
                    f"{self._family.name}; allowed: {', '.join(sorted(self.append_roles))}"
                )

    def _render_after_turn(
        self,
        assistant: Message,
        new: Sequence[Message],
        tools: _Tools | None,
        template_kwargs: Mapping[str, object] | None,
    ) -> str:
        """What the template writes from the end of an assistant's turn on, boundary token included.

        Rendered after a dummy history: neither the length of the real one nor the special treatment that some
        templates give to a *last* assistant message has any influence.
        """
        for sentinel in _SENTINELS:
            dummies: list[Message] = [
                {"role": "system", "content": "system"},
                {"role": "user", "content": "user"},
                self._dummy_assistant(assistant, sentinel),
            ]
            text = self._apply([*dummies, *new], tools, template_kwargs)
            if text.count(sentinel) == 1:
                break
        else:
            raise NotAppendable("the template does not write an assistant's message exactly once")
        end = self._boundary.find(text, text.index(sentinel) + len(sentinel))
        if end is None:
            raise NotAppendable(f"the template does not end an assistant's turn with {self._boundary.names}")
        return text[end:]

    def _dummy_assistant(self, assistant: Message, sentinel: str) -> Message:
        """A message with the recorded tool calls, and the sentinel in what the template writes last of it.

        That is the text, or the last call's arguments. The recorded ones are in the parent's tokens, and no
        tool message refers to them. Without them the cost stays constant, and a conversation can go on after
        the model sampled broken JSON.
        """
        recorded = assistant.get("tool_calls")
        if not isinstance(recorded, list | tuple) or not recorded:
            return {"role": "assistant", "content": sentinel}
        calls: list[Message] = []
        for i, call in enumerate(recorded):
            function = call.get("function") if isinstance(call, Mapping) else None
            if not isinstance(function, Mapping):
                raise RenderError("a tool call of the recorded turn has no function")
            arguments = {"text": sentinel} if i == len(recorded) - 1 else {}
            dummy = {
                "name": function.get("name"),
                "arguments": json.dumps(arguments) if self._family.arguments == "string" else arguments,
            }
            calls.append({"id": call.get("id"), "type": "function", "function": dummy})
        return {"role": "assistant", "content": "", "tool_calls": calls}

    def _apply(
        self, messages: Sequence[Message], tools: _Tools | None, template_kwargs: Mapping[str, object] | None
    ) -> str:
        kwargs = self._checked({**self._kwargs, **(template_kwargs or {})})
        try:
            # Some templates tell an empty list of tools from none; requests do not.
            return self._tokenizer.apply_template(messages, tools=tools or None, template_kwargs=kwargs)
        except _TEMPLATE_ERRORS as error:
            raise RenderError(f"the chat template refused the messages: {error}") from error

    def _checked(self, template_kwargs: Mapping[str, object]) -> Mapping[str, object]:
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
            self._render_after_turn({}, (), None, None)
        except NotAppendable as error:
            return str(error)
        except RenderError as error:
            if isinstance(error.__cause__, jinja2.TemplateSyntaxError):
                raise TokenizerError(f"the chat template is not valid: {error.__cause__}") from error
            return f"the template refuses a system, a user and an assistant message in a row: {error}"
        return None

    def _digest(self) -> str:
        parts = [self._tokenizer.fingerprint, self._family.name, dict(self._kwargs)]
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]
