"""The model families: where an assistant's turn ends in tokens, and what may follow it.

A test renders a real template of each proven family turn by turn and gets the same ids as from rendering the
whole conversation at once, in the dialogues in which the template only ever appends. Rows that no test with a
real template stands behind say so (`proven`).
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
    """Roles whose messages may follow a recorded turn, besides `assistant`, which may in every family."""
    end_tokens: tuple[str, ...] = ()
    """Spellings. A vocabulary must have the first; it may lack the others."""
    openers: tuple[str, ...] = ()
    """Spellings, as above."""
    replaced: tuple[str, ...] = ()
    """Those of the end tokens that a model samples but no prompt may hold: the template writes another one in
    their place, so they are dropped."""
    arguments: ArgumentsForm
    """How the template wants `function.arguments`."""
    notes: str
    proven: bool = True
    """Whether the tests hold a real template of the family against this row."""

    @property
    def max_trim_tokens(self) -> int:
        """How many of a turn's last tokens the next prompt may leave out."""
        return 1 if self.openers or self.replaced else 0


_CHATML = ("<|im_end|>",)
_DEEPSEEK = ("<｜end▁of▁sentence｜>",)

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
        end_tokens=_CHATML,
        arguments="object",
        notes="Append-only. The template would quote arguments that are a string a second time.",
    ),
    Family(
        name="qwen3",
        append_roles=frozenset({"system", "user", "tool"}),
        end_tokens=_CHATML,
        arguments="object",
        notes="Qwen3 and Qwen3-Instruct-2507; the latter is append-only. The original Qwen3 template drops "
        "earlier reasoning at a new user message and writes an empty think block into a last answer without "
        "reasoning. The recorded tokens keep what was sampled.",
    ),
    Family(
        name="qwen3-thinking",
        append_roles=frozenset({"system", "user", "tool"}),
        end_tokens=_CHATML,
        arguments="object",
        notes="Qwen3-Thinking-2507: as qwen3, but the generation prompt opens the think block. Proven with "
        "Qwen3's template and that generation prompt.",
    ),
    Family(
        name="qwen3.5",
        append_roles=frozenset({"user", "tool"}),
        end_tokens=_CHATML,
        arguments="object",
        notes="Qwen3.5, 3.6 and 3.8. The template refuses a system message that is not the first. The "
        "original templates of 3.5 and 3.6 drop earlier reasoning at a new user message; that of 3.8 is "
        "append-only, that of 3.6 with the template argument preserve_thinking=true.",
    ),
    Family(
        name="llama3",
        append_roles=frozenset({"system", "user", "tool", "ipython"}),
        end_tokens=("<|eot_id|>", "<|eom_id|>"),
        arguments="object",
        notes="Llama 3 to 3.2. Append-only. Llama 3's template writes no tool calls, so what follows such a "
        "turn is refused; from 3.1 on it takes one call per turn, and calls end with <|eom_id|> if there are "
        "built-in tools. 3.2's writes the date, which is that of the session's opening.",
    ),
    Family(
        name="glm4",
        append_roles=frozenset({"system", "user", "tool"}),
        openers=("<|user|>", "<|observation|>", "<|system|>", "<|assistant|>"),
        arguments="object",
        notes="GLM-4.5 and its successors. The model stops by sampling <|user|> or <|observation|>. The "
        "template drops earlier reasoning at a new user message.",
    ),
    Family(
        name="deepseek-v3",
        append_roles=frozenset({"user", "tool"}),
        end_tokens=_DEEPSEEK,
        arguments="string",
        notes="V3 and V3.1. All system messages move to the front, so none is appended. V3's template "
        "opens the block of tool outputs once per conversation, so tool messages are refused. Where its "
        "generation prompt opens a think block, the template drops that from every turn that it renders "
        "again. V3.1's, which no test has, takes tool messages.",
    ),
    Family(
        name="deepseek-v4",
        append_roles=frozenset({"user", "tool"}),
        end_tokens=_DEEPSEEK,
        arguments="object",
        notes="V3.2 and V4, which ship an encoder in Python and no template: give a Jinja file. System "
        "messages move to the front. Earlier reasoning is dropped at a new user message unless there are "
        "tools or drop_thinking=false.",
        proven=False,
    ),
    Family(
        name="minimax-m2",
        append_roles=frozenset({"user", "tool"}),
        end_tokens=("[e~[",),
        arguments="object",
        notes="The template skips a system message that is not the first, drops earlier reasoning at a new "
        "user message, and closes no think block in a turn without reasoning, though the generation prompt "
        "opens one.",
        proven=False,
    ),
    Family(
        name="nemotron3",
        append_roles=frozenset({"system", "user", "tool"}),
        end_tokens=_CHATML,
        arguments="object",
        notes="Nano, Super and Ultra. Earlier reasoning is dropped at a new user message, unless the "
        "template argument truncate_history_thinking=false is given. A turn without reasoning is written as "
        "<think></think>, though the generation prompt opens a think block unless "
        "enable_thinking=false. low_effort and medium_effort write a hint into the last user message only.",
    ),
    Family(
        name="kimi-k2",
        append_roles=frozenset({"system", "user", "tool"}),
        end_tokens=_CHATML,
        arguments="as_is",
        notes="The template of K2-Thinking drops reasoning once a final answer is in the history. Tool "
        "messages are refused by templates that number the calls of a conversation. The published "
        "tokenizer needs code of its own: convert it to tokenizer.json first.",
        proven=False,
    ),
    Family(
        name="gpt-oss",
        append_roles=frozenset({"user", "tool"}),
        end_tokens=("<|end|>", "<|call|>", "<|return|>"),
        replaced=("<|return|>",),
        arguments="object",
        notes="Harmony. The model ends an answer with <|return|>, for which the template writes <|end|> once "
        "a message follows; <|call|> stays. The template drops the analysis of earlier answers, and that of "
        "earlier tool calls at the final answer; it writes one tool call per turn, so parallel calls are "
        "refused; it skips system messages that are not the first; it puts the date into the first message, "
        "which is that of the session's opening.",
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
