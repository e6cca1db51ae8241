"""What an assembly needs besides the events: the tokenizer, its chat template, the hooks."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from tokentape_contracts.audit import AssembledBy
from tokentape_core.domain.path import Decode
from tokentape_core.domain.tree import DEFAULT_HOOKS, PICKS, Hooks
from tokentape_core.loading import load_function
from tokentape_core.text.load import load_tokenizer, renderer_of
from tokentape_core.text.render import ChatRenderer
from tokentape_core.text.settings import TextSettings


@dataclass(frozen=True, slots=True, eq=False)
class Toolchain:
    """The arguments of `outcome_of` that are the same for every job, and their names.

    Attributes:
        decode: token ids to text.
        hooks: of sessions in tree mode.
        renderer: of the chat template, if there is one.
        by: what the audit says of them.
    """

    decode: Decode
    hooks: Hooks
    renderer: ChatRenderer | None
    by: AssembledBy


def load_toolchain(
    text: TextSettings, *, pick_hook: str | None = None, finish_hook: str | None = None
) -> Toolchain:
    """Loads everything; takes seconds.

    Raises:
        TokenizerError: the tokenizer or its template cannot be used.
        LoadError: a hook cannot be used.
    """
    tokenizer = load_tokenizer(text)
    renderer = renderer_of(tokenizer, text) if tokenizer.has_template else None
    hooks = Hooks(
        PICKS.get(pick_hook) or load_function(pick_hook) if pick_hook else DEFAULT_HOOKS.pick,
        load_function(finish_hook) if finish_hook else DEFAULT_HOOKS.finish,
    )
    return Toolchain(tokenizer.decode, hooks, renderer, assembled_by(hooks, renderer, tokenizer.fingerprint))


def assembled_by(hooks: Hooks, renderer: ChatRenderer | None, tokenizer: str = "") -> AssembledBy:
    """What the audit says of these; `tokenizer` is its fingerprint."""
    return AssembledBy(
        tokentape=_version(),
        tokenizer=tokenizer,
        template=renderer.fingerprint if renderer else None,
        pick=_path(hooks.pick),
        finish=_path(hooks.finish),
    )


def _version() -> str:
    try:
        return version("tokentape")
    except PackageNotFoundError:  # a source tree that was never installed
        return "unknown"


def _path(hook: Callable[..., Any]) -> str:
    return f"{getattr(hook, '__module__', '?')}.{getattr(hook, '__qualname__', repr(hook))}"
