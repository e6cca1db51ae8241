"""The model families: where an assistant's turn ends in tokens, and what may follow it.

A row is here only if a test renders a real template of the family turn by turn and gets the same ids as from
rendering the whole conversation at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from tokentape_core.text.errors import UnknownFamilyError
from tokentape_core.text.messages import ArgumentsForm

__all__ = ["FAMILIES", "Family", "get_family"]


@dataclass(frozen=True, kw_only=True)
class Family:
    """What a renderer must know about a model beyond its template.

    A turn ends in one of two ways. Either the template closes it with an end token (`end_tokens`): the
    sampled end token stays, and what the template writes after it belongs to the next suffix. Or there is no
    such token and the model stops by sampling the token that opens the next message (`openers`): that one is
    dropped, because the next message brings its own. With neither, the tokenizer's end-of-sequence token is
    the end token.
    """

    name: str
    append_roles: frozenset[str]
    """Roles whose messages may follow a recorded turn. Assistant turns are recorded, never appended."""
    end_tokens: tuple[str, ...] = ()
    """Spellings. A vocabulary must have the first; it may lack the others."""
    openers: tuple[str, ...] = ()
    """Spellings, as above."""
    arguments: ArgumentsForm
    """How the template wants `function.arguments`."""
    notes: str

    @property
    def max_trim_tokens(self) -> int:
        """How many of a turn's last tokens the next prompt may leave out."""
        return 1 if self.openers else 0


_ROWS = (
    Family(
        name="default",
        append_roles=frozenset({"user", "tool"}),
        arguments="object",
        notes="Turns end with the tokenizer's end-of-sequence token. System messages are not appended: some "
        "templates move them to the front, where they would be lost.",
    ),
    Family(
        name="qwen2.5",
        append_roles=frozenset({"system", "user", "tool"}),
        end_tokens=("<|im_end|>",),
        arguments="object",
        notes="The template would quote arguments that are a string a second time.",
    ),
    Family(
        name="qwen3",
        append_roles=frozenset({"system", "user", "tool"}),
        end_tokens=("<|im_end|>",),
        arguments="object",
        notes="Qwen3 and Qwen3-Instruct-2507. The original Qwen3 template drops earlier reasoning at a new "
        "user message; the recorded tokens keep it.",
    ),
    Family(
        name="qwen3.5",
        append_roles=frozenset({"user", "tool"}),
        end_tokens=("<|im_end|>",),
        arguments="object",
        notes="Qwen3.5, 3.6 and 3.8. The template refuses a system message that is not the first.",
    ),
    Family(
        name="llama3",
        append_roles=frozenset({"system", "user", "tool", "ipython"}),
        end_tokens=("<|eot_id|>", "<|eom_id|>"),
        arguments="object",
        notes="Llama 3 to 3.2. From 3.1 on, calls end with <|eom_id|> if there are built-in tools.",
    ),
    Family(
        name="glm4",
        append_roles=frozenset({"system", "user", "tool"}),
        openers=("<|user|>", "<|observation|>", "<|system|>", "<|assistant|>"),
        arguments="object",
        notes="GLM-4.5 and its successors. The model stops by sampling <|user|> or <|observation|>.",
    ),
)

FAMILIES: Mapping[str, Family] = MappingProxyType({family.name: family for family in _ROWS})
"""Every known family by name."""


def get_family(name: str) -> Family:
    """The family of that name. Raises `UnknownFamilyError`, which lists the names."""
    try:
        return FAMILIES[name]
    except KeyError:
        known = ", ".join(sorted(FAMILIES))
        raise UnknownFamilyError(f"no model family {name!r}; there are: {known}") from None
