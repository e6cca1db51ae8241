"""`tokentape family check`: is a chat template append-only, and what does the recorder do where it is not?"""

import argparse
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from tokentape_cli import options
from tokentape_cli.options import UsageError

if TYPE_CHECKING:
    from tokentape_core.text.check import BoundaryCheck

_DOES: Final = {
    "ok": "",
    "differs": "The recorder extends the recording and keeps its tokens.",
    "refused": "The recorder refuses with 400; in tree mode it opens a new root.",
    "unsupported": "Nothing to record there: such a request gets 400, or a new root in tree mode.",
}


def check(arguments: argparse.Namespace) -> int:
    """Prints a line for each boundary and the verdict; 0 if the template is append-only, 1 if not.

    Raises:
        UsageError: the tokenizer cannot be loaded or does not fit the family.
    """
    settings = options.resolve(arguments, options.TEXT)
    options.required(settings, "tokenizer")
    text = options.text_settings(settings)
    from tokentape_core.text.without_torch import without_torch

    without_torch()
    from tokentape_core.text.check import check_boundaries, is_append_only
    from tokentape_core.text.errors import TokenizerError
    from tokentape_core.text.load import load_renderer

    try:
        renderer = load_renderer(text)
    except TokenizerError as error:
        raise UsageError(str(error)) from error
    checks = check_boundaries(renderer)
    append_only = is_append_only(checks)
    family = renderer.family
    print(f"family {family.name}: {family.notes}")
    if not family.proven:
        print("No test holds a real template of this family against it: trust the lines below.")
    print()
    print("\n".join(_lines(checks)))
    print()
    print("\n".join(_verdict(checks, append_only)))
    return 0 if append_only else 1


def _lines(checks: Sequence["BoundaryCheck"]) -> Iterator[str]:
    widths = [max(len(text) for text in column) for column in zip(*map(_head, checks), strict=True)]
    for boundary in checks:
        outcome, name = _head(boundary)
        yield f"{outcome:<{widths[0]}}  {name:<{widths[1]}}  {_found(boundary)}".rstrip()


def _head(boundary: "BoundaryCheck") -> tuple[str, str]:
    return boundary.outcome.value, boundary.name


def _found(boundary: "BoundaryCheck") -> str:
    if boundary.position is None:
        return boundary.reason
    template, recorded = map(_quoted, (boundary.template, boundary.recorded))
    return f"at token {boundary.position}: template {template} vs recorded {recorded}"


def _quoted(text: str) -> str:
    return "«" + text.replace("\n", "\\n") + "»" if text else "(the end)"


def _verdict(checks: Sequence["BoundaryCheck"], append_only: bool) -> Iterator[str]:
    outcomes = {boundary.outcome.value for boundary in checks}
    if append_only:
        yield "append-only: every turn is recorded exactly as the template would write it."
    elif outcomes & {"ok", "differs"}:
        yield "not append-only, but usable: sampled tokens are never changed."
    else:
        yield "not append-only: no turn can be continued, so each one is recorded alone, in tree mode."
    for outcome, text in _DOES.items():
        if text and outcome in outcomes:
            yield f"  {outcome}: {text}"
