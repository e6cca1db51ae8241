"""The engine's options; importing them loads no model code."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

DEFAULT_PORT = 30000
Kind = Literal["dense", "moe"]
"""A dense model, or a mixture of experts with real routing."""

DEFAULT_MODEL_DIRS: Mapping[Kind, Path] = {
    "dense": Path(".tokentape/reference-model"),
    "moe": Path(".tokentape/reference-model-moe"),
}
TRAIN_STEPS = 200


def _whole_number(lowest: int, highest: int = 2**63 - 1) -> Callable[[str], int]:
    wanted = f"must be a whole number from {lowest} to {highest}"

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(wanted) from None
        if not lowest <= value <= highest:
            raise argparse.ArgumentTypeError(wanted)
        return value

    return parse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the engine's options to a command's parser; `run` reads them."""
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument(
        "--port",
        type=_whole_number(0, 65_535),
        default=DEFAULT_PORT,
        help="port to listen on, 0 for a free one (default: %(default)s)",
    )
    parser.add_argument(
        "--model",
        choices=list(DEFAULT_MODEL_DIRS),
        help="kind of model: dense, or moe with experts (default: the kind that DIR holds, else dense)",
    )
    parser.add_argument(
        "--model-dir",
        type=Path,
        metavar="DIR",
        help="where the model is kept; the dense one comes trained, others are trained at the first start "
        f"(default: {DEFAULT_MODEL_DIRS['dense']}, with --model moe {DEFAULT_MODEL_DIRS['moe']})",
    )
    parser.add_argument(
        "--train-steps",
        type=_whole_number(0),
        default=TRAIN_STEPS,
        metavar="N",
        help="training steps if DIR holds no model; 0 leaves random weights (default: %(default)s)",
    )
    parser.add_argument(
        "--seed",
        type=_whole_number(0),
        default=0,
        metavar="N",
        help="seed of weights, training and sampling (default: %(default)s)",
    )
