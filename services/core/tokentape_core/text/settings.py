"""What a renderer is made from, as settings: importing this loads no tokenizer's code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from tokentape_core.text.tools import AS_SENT, TOOLS_FORMS

__all__ = ["AS_TEMPLATE", "AS_TEXT", "SPECIAL_TOKENS_IN_TEXT", "TextSettings", "ensure_choices"]

AS_TEMPLATE: Final = "as-template"
AS_TEXT: Final = "as-text"
SPECIAL_TOKENS_IN_TEXT: Final = (AS_TEMPLATE, AS_TEXT)
"""What becomes of a special token that a message spells: the token, or its spelling's ordinary tokens."""

_CHOICES: Final = {"tools_form": tuple(TOOLS_FORMS), "special_tokens_in_text": SPECIAL_TOKENS_IN_TEXT}


def ensure_choices(settings: object, choices: Mapping[str, tuple[str, ...]]) -> None:
    """Raises `ValueError` for the first of these attributes that is none of its allowed values."""
    for name, allowed in choices.items():
        value = getattr(settings, name)
        if value not in allowed:
            raise ValueError(f"{name} must be one of {', '.join(allowed)}, not {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSettings:
    """What a renderer is made from. Processes with equal settings give equal ids, and so inherit these.

    Attributes:
        tokenizer: directory or name of the model's tokenizer.
        chat_template: a Jinja file that replaces the tokenizer's own chat template.
        family: the model family, whose boundary rules apply.
        chat_template_kwargs: template arguments of every prompt that does not say otherwise.
        tools_form: in which form the template gets tools, one of `TOOLS_FORMS`.
        end_tokens: spellings of the tokens that end a turn, for a model without a family of its own.
        special_tokens_in_text: what becomes of a special token that a message spells, one of
            `SPECIAL_TOKENS_IN_TEXT`.

    Raises:
        ValueError: a setting has no such value, or does not fit another.
    """

    tokenizer: str
    chat_template: Path | None = None
    family: str = "default"
    chat_template_kwargs: Mapping[str, object] = field(default_factory=dict)
    tools_form: str = AS_SENT
    end_tokens: tuple[str, ...] = ()
    special_tokens_in_text: str = AS_TEMPLATE

    def __post_init__(self) -> None:
        ensure_choices(self, _CHOICES)
        if self.end_tokens and self.family != "default":
            raise ValueError(
                f"end-tokens are for models without a family: {self.family} has its own. Use family default"
            )

    def to_json(self) -> dict[str, Any]:
        """The settings for another process, as `from_json` reads them: these, and none of a class below."""
        values = {each.name: getattr(self, each.name) for each in fields(TextSettings)}
        path = values["chat_template"]
        return {**values, "chat_template": None if path is None else str(path)}

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> TextSettings:
        """The settings that another process gave. Raises `TypeError` for other keys than `to_json` writes."""
        path = values["chat_template"]
        return TextSettings(
            **{
                **values,
                "chat_template": Path(path) if path else None,
                "end_tokens": tuple(values["end_tokens"]),
            }
        )
