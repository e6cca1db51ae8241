"""`tokentape COMMAND …`: the composition of processes."""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Final

from tokentape_cli import options
from tokentape_cli.options import UsageError
from tokentape_core import logs

Run = Callable[[argparse.Namespace], int]

DESCRIPTION: Final = (
    "Records LLM agents in RL rollouts as exact token ids and assembles training samples on the server."
)
EPILOG: Final = (
    "Every option of api, assembler, up and config has an environment variable, named in the command's "
    "--help; a flag wins. Start with `tokentape demo`."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; the exit code is 0 for success, 1 for a failure, 2 for wrong usage."""
    parser = build_parser()
    parsed = parser.parse_args(joined(sys.argv[1:] if arguments is None else arguments))
    logs.configure()
    try:
        run: Run = parsed.run
        return run(parsed)
    except UsageError as error:
        print(f"tokentape {parsed.command}: {error}", file=sys.stderr)
        return 2


def build_parser() -> argparse.ArgumentParser:
    """The whole command line; also read by the test that compares it with the docs."""
    parser = argparse.ArgumentParser(prog="tokentape", description=DESCRIPTION, epilog=EPILOG)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (add, run, text) in _COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        add(command)
        command.set_defaults(run=run)
    return parser


def joined(arguments: Sequence[str]) -> list[str]:
    """The arguments with a command of two words as one."""
    words = " ".join(arguments[:2])
    return [words, *arguments[2:]] if len(arguments) > 1 and words in _COMMANDS else list(arguments)


def _add(names: Sequence[str]) -> Callable[[argparse.ArgumentParser], None]:
    return lambda parser: options.add_options(parser, names)


def _api(arguments: argparse.Namespace) -> int:
    settings = options.resolve(arguments, (*options.API, *options.LOGS))
    options.required(settings, "engine-url", "tokenizer", "redis-url")
    checked = options.api_settings(settings)
    from tokentape_api.auth import TokensError
    from tokentape_api.run import run
    from tokentape_core.loading import LoadError
    from tokentape_core.text.errors import TokenizerError

    logs.configure(settings["log-format"].value)
    try:
        return run(checked)
    except (LoadError, TokenizerError, TokensError) as error:
        raise UsageError(str(error)) from error


def _assembler(arguments: argparse.Namespace) -> int:
    settings = options.resolve(arguments, (*options.ASSEMBLER, *options.LOGS))
    options.required(settings, "tokenizer", "redis-url")
    checked = options.assembler_settings(settings)
    from tokentape_assembler.run import run

    logs.configure(settings["log-format"].value)
    return run(checked)


def _up(arguments: argparse.Namespace) -> int:
    settings = options.resolve(arguments, options.ALL)
    options.required(settings, "engine-url", "tokenizer")
    options.api_settings(settings)
    options.assembler_settings(settings)
    from tokentape_cli.up import run

    return run(settings)


def _config(arguments: argparse.Namespace) -> int:
    settings = options.resolve(arguments, options.ALL)
    rows = [
        (options.variable(name), options.masked(options.text(name, setting)) or "-", setting.source)
        for name, setting in settings.items()
    ]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for name, value, source in rows:
        print(f"{name:<{widths[0]}}  {value:<{widths[1]}}  {source}")
    return 0


def _add_family_check(parser: argparse.ArgumentParser) -> None:
    from tokentape_cli.family import add_arguments

    add_arguments(parser)


def _family_check(arguments: argparse.Namespace) -> int:
    from tokentape_cli.family import check

    return check(arguments)


def _add_engine_check(parser: argparse.ArgumentParser) -> None:
    from tokentape_cli.engine_check import add_arguments

    add_arguments(parser)


def _engine_check(arguments: argparse.Namespace) -> int:
    from tokentape_cli.engine_check import check

    return check(arguments)


def _add_replay(parser: argparse.ArgumentParser) -> None:
    from tokentape_cli.audit import add_arguments

    add_arguments(parser)


def _replay(arguments: argparse.Namespace) -> int:
    from tokentape_cli.audit import replay

    return replay(arguments)


def _add_export(parser: argparse.ArgumentParser) -> None:
    from tokentape_cli.transfer import add_export

    add_export(parser)


def _export(arguments: argparse.Namespace) -> int:
    from tokentape_cli.transfer import export

    return export(arguments)


def _add_import(parser: argparse.ArgumentParser) -> None:
    from tokentape_cli.transfer import add_import

    add_import(parser)


def _import(arguments: argparse.Namespace) -> int:
    from tokentape_cli.transfer import import_

    return import_(arguments)


def _add_engine(parser: argparse.ArgumentParser) -> None:
    from tokentape_engine.options import add_arguments

    add_arguments(parser)


def _engine(arguments: argparse.Namespace) -> int:
    from tokentape_engine.server import run

    return run(arguments)


def _add_token_create(parser: argparse.ArgumentParser) -> None:
    from tokentape_cli.token import add_arguments

    add_arguments(parser)


def _token_create(arguments: argparse.Namespace) -> int:
    from tokentape_cli.token import create

    return create(arguments)


def _add_demo(parser: argparse.ArgumentParser) -> None:
    from tokentape_cli.demo.options import add_arguments

    add_arguments(parser)


def _demo(arguments: argparse.Namespace) -> int:
    from tokentape_cli.demo.run import run

    return run(arguments)


_COMMANDS: Final[dict[str, tuple[Callable[[argparse.ArgumentParser], None], Run, str]]] = {
    "api": (_add((*options.API, *options.LOGS)), _api, "run one API process"),
    "assembler": (_add((*options.ASSEMBLER, *options.LOGS)), _assembler, "run one worker process"),
    "up": (
        _add(options.ALL),
        _up,
        "run the API and a worker, and a bundled Valkey server unless --redis-url is given; Ctrl-C stops all",
    ),
    "demo": (
        _add_demo,
        _demo,
        "record live agents on the reference engine, collect their samples and verify every one",
    ),
    "engine": (_add_engine, _engine, "run the reference engine: a tiny model, for demos and tests"),
    "engine check": (
        _add_engine_check,
        _engine_check,
        "tell whether an engine or router sends what the recording needs (exit code 0: all of it, 1: not)",
    ),
    "family check": (
        _add_family_check,
        _family_check,
        "tell at which boundaries a chat template is append-only (exit code 0: at all of them, 1: not)",
    ),
    "replay": (
        _add_replay,
        _replay,
        "assemble a session anew, and tell whether that is what was delivered "
        "(exit code 0: it is, 1: it is not, 2: nothing to compare)",
    ),
    "export": (_add_export, _export, "write sessions to a file, to the byte"),
    "import": (_add_import, _import, "write the sessions of a file to Redis, to the byte"),
    "token create": (
        _add_token_create,
        _token_create,
        "make a bearer token: its entry for the tokens file goes to standard output, the token to standard "
        "error",
    ),
    "config": (_add(options.ALL), _config, "print the effective settings, secrets masked"),
}
