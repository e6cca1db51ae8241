"""The demo's own options; importing them loads no model code."""

import argparse

AGENTS = 8
MODEL_DIR = ".tokentape/reference-model"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The demo's own options."""
    parser.add_argument(
        "--agents",
        type=int,
        default=AGENTS,
        metavar="N",
        help=f"agents at the same time (default: {AGENTS})",
    )
    parser.add_argument(
        "--model-dir",
        default=MODEL_DIR,
        metavar="DIR",
        help=f"where the reference model is kept (default: {MODEL_DIR})",
    )
