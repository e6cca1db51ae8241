"""The reference engine's process: a small, honest inference server for demos and tests.

It answers SGLang's chat and generate shapes over a model of at most 0.5 M parameters that is trained in
seconds. Sampling, log-probs, stop tokens, tool calls and prefix caching are real; the answers are only as
good as such a model. For what a trainer does around an engine there is more:

- Experts: with `--model moe` a request may ask for the experts that the model's routers chose.
- Changing weights: `POST /update_weights` adds noise to the weights in memory and gives them a new version,
  while requests run or after it has aborted them. Every reply says which version each token is from.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import uvicorn
from transformers.utils import logging as transformers_logging

from tokentape_engine.app import build_app
from tokentape_engine.model import TinyModel
from tokentape_engine.options import DEFAULT_MODEL_DIRS, DEFAULT_PORT, TRAIN_STEPS, Kind, add_arguments
from tokentape_engine.training import train


def serve(
    host: str = "127.0.0.1",
    port: int = DEFAULT_PORT,
    *,
    kind: Kind | None = None,
    model_dir: Path | None = None,
    train_steps: int = TRAIN_STEPS,
    seed: int = 0,
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """Train the model if `model_dir` holds none, then serve it until SIGINT or SIGTERM.

    `kind` is that of the model to train, by default a dense one; each kind has its own default `model_dir`.
    `port` 0 takes a free one. `on_ready` is called once with the base URL, when requests are accepted.
    """
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    model_dir = model_dir or DEFAULT_MODEL_DIRS[kind or "dense"]
    app = build_app(load_or_train(model_dir, train_steps, seed, kind), seed=seed)
    # Both of uvicorn's event loops set TCP_NODELAY on accepted connections: small replies leave at once.
    config = uvicorn.Config(app, host=host, port=port, log_config=None, log_level="warning", access_log=False)
    # uvicorn stops in order and then raises the signal again.
    with contextlib.suppress(KeyboardInterrupt):
        _Server(config, on_ready).run()


def load_or_train(
    model_dir: Path, train_steps: int = TRAIN_STEPS, seed: int = 0, kind: Kind | None = None
) -> TinyModel:
    """The model in `model_dir`; if there is none, it is trained and saved there.

    What the default training of a dense model leads to comes with the package and is taken from there. The
    directory appears by rename when it is complete, so an interrupted start leaves no half model. Raises
    `ValueError` when it holds a model of another kind than `kind`; None takes either, and trains a dense one.
    """
    if not (model_dir / "config.json").exists():
        if (kind or "dense", train_steps, seed) == ("dense", TRAIN_STEPS, 0):
            model = TinyModel.trained()
        else:
            model = TinyModel.create(seed, kind or "dense")
            train(model, train_steps, seed)
        partial = model_dir.with_name(f".{model_dir.name}.{os.getpid()}")
        model.save(partial)
        try:
            partial.rename(model_dir)
        except OSError:
            shutil.rmtree(partial)
            # Unless another process was faster, the directory holds something else.
            if not (model_dir / "config.json").exists():
                raise
    loaded = TinyModel.load(model_dir)
    if kind not in (None, loaded.kind):
        raise ValueError(f"{model_dir} holds a {loaded.kind} model, not a {kind} one")
    return loaded


def run(args: argparse.Namespace) -> int:
    """Serve with the options of `add_arguments`; returns the exit status after a clean stop."""
    serve(
        args.host,
        args.port,
        kind=args.model,
        model_dir=args.model_dir,
        train_steps=args.train_steps,
        seed=args.seed,
        on_ready=lambda url: print(f"reference engine ready on {url}", file=sys.stderr, flush=True),
    )
    return 0


def main(argv: list[str] | None = None) -> int:
    """The command `python -m tokentape_engine`."""
    parser = argparse.ArgumentParser(
        prog="python -m tokentape_engine",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)
    return run(parser.parse_args(argv))


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, on_ready: Callable[[str], None] | None) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, *args: object, **kwargs: object) -> None:
        await super().startup(*args, **kwargs)  # type: ignore[arg-type]
        if self._on_ready is not None and self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            self._on_ready(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")
