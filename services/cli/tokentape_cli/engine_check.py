"""`tokentape engine check`: does an engine or router send what the recording needs?"""

import argparse
import asyncio
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from tokentape_cli import options

if TYPE_CHECKING:
    from tokentape_api.engine import Check
    from tokentape_api.settings import ApiSettings


def check(arguments: argparse.Namespace) -> int:
    """Prints a line for each thing that the recording needs, and the verdict; 0 if all are there, 1 if not.

    Raises:
        UsageError: two options do not fit each other.
    """
    settings = options.resolve(arguments, options.ENGINE)
    options.required(settings, "engine-url")
    from tokentape_contracts import limits

    checked = options.api_settings(
        settings, options.ENGINE, tokenizer="", redis_url="", engine_timeout_s=limits.PROBE_TIMEOUT_S
    )
    checks = asyncio.run(_probe(checked))
    print("\n".join(_lines(checks)))
    print()
    failed = [found.name for found in checks if found.state != "ok"]
    if failed:
        print(f"not usable as it is: {', '.join(failed)}.")
        return 1
    print("usable: the engine sends all that the recording needs.")
    return 0


async def _probe(settings: "ApiSettings") -> "Sequence[Check]":
    from tokentape_api.engine import connect_engine
    from tokentape_contracts import limits

    engine = connect_engine(settings)
    try:
        # The probe ends by itself, at its own limit.
        return await engine.probe(2 * limits.PROBE_TIMEOUT_S) or []
    finally:
        await engine.close()


def _lines(checks: "Sequence[Check]") -> Iterator[str]:
    widths = [max(len(text) for text in column) for column in zip(*map(_head, checks), strict=True)]
    for found in checks:
        state, name = _head(found)
        yield f"{state:<{widths[0]}}  {name:<{widths[1]}}  {found.detail}"


def _head(found: "Check") -> tuple[str, str]:
    return found.state, found.name
