"""The arguments of each command beside the options that several share; importing this needs no extra."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tokentape_cli import options
from tokentape_contracts.http import SCOPES

DEMO_AGENTS: Final = 8
DEMO_MODEL_DIR: Final = ".tokentape/reference-model"
REPLAY_OPTIONS: Final = ("redis-url", *options.TEXT, "pick-hook", "finish-hook")
TRANSFER_OPTIONS: Final = ("redis-url",)


def number(lowest: int, what: str) -> Callable[[str], int]:
    """What reads such an argument: a whole number of at least `lowest`."""

    def parse(text: str) -> int:
        try:
            return options.at_least(lowest)(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r}: {what} {error}") from None

    return parse


def replay(parser: argparse.ArgumentParser) -> None:
    """What to replay, and the options of the assembler that a payload depends on."""
    parser.add_argument(
        "session",
        metavar="SESSION_OR_FILE",
        help="a session's id, or a file that `export` or an archive wrote",
    )
    parser.add_argument(
        "--at",
        type=number(0, "a turn"),
        metavar="SEQ",
        help="as of this turn, 0 for none yet; without it, the last one",
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="assemble anew all that was delivered, each with its own parameters, and compare the digests",
    )
    options.add_options(parser, REPLAY_OPTIONS)


def export(parser: argparse.ArgumentParser) -> None:
    """Which sessions, and where to."""
    parser.add_argument("session", nargs="+", metavar="SESSION", help="the id of a session; any number")
    parser.add_argument("--output", required=True, type=Path, metavar="FILE", help="the file to write")
    options.add_options(parser, TRANSFER_OPTIONS)


def import_(parser: argparse.ArgumentParser) -> None:
    """Which file, and where to."""
    parser.add_argument("file", type=Path, metavar="FILE", help="a file that `export` or an archive wrote")
    options.add_options(parser, TRANSFER_OPTIONS)


def token_create(parser: argparse.ArgumentParser) -> None:
    """Whose token, and for what."""
    parser.add_argument("--name", metavar="NAME", required=True, help="who gets the token; for people")
    parser.add_argument(
        "--tenant", metavar="NAME", required=True, help="whose sessions the token opens and reaches"
    )
    parser.add_argument(
        "--scope",
        metavar="SCOPE",
        action="append",
        required=True,
        choices=SCOPES,
        help=f"what the token is for, once for each scope; one of {', '.join(SCOPES)}",
    )


def demo(parser: argparse.ArgumentParser) -> None:
    """The demo's own options."""
    parser.add_argument(
        "--agents",
        type=number(1, "the number of agents"),
        default=DEMO_AGENTS,
        metavar="N",
        help=f"agents at the same time (default: {DEMO_AGENTS})",
    )
    parser.add_argument(
        "--model-dir",
        default=DEMO_MODEL_DIR,
        metavar="DIR",
        help=f"where the reference model is kept (default: {DEMO_MODEL_DIR})",
    )
