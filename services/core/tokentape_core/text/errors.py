"""What can go wrong between messages and tokens, and who must act.

TextError
├── TokenizerError           the operator: another tokenizer, template or family
│   └── UnknownFamilyError
├── RenderError              the caller: messages, tools or template arguments that cannot be rendered
│   └── TextTooLong          the caller: less text
└── NotAppendable             nobody: the turn cannot continue its parent; start a new root or refuse it
"""

from __future__ import annotations


class TextError(Exception):
    """Base class. `str(error)` is one sentence fit for the person who must act."""


class TokenizerError(TextError):
    """The tokenizer cannot be loaded, or it does not fit the family."""


class UnknownFamilyError(TokenizerError):
    """No row of the family table has that name."""


class RenderError(TextError):
    """The messages cannot be rendered: they are malformed, or the chat template refused them."""


class TextTooLong(RenderError):
    """What the template wrote is longer than `limits.PROMPT_TEXT_BYTES`; it was not tokenised."""


class NotAppendable(TextError):
    """The new messages cannot be appended to the parent's tokens without guessing."""
