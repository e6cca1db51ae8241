"""`tokentape COMMAND …`: the composition of processes."""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from tokentape_cli import arguments, options
from tokentape_cli.options import Setting, UsageError
from tokentape_cli.processes import ensure_free
from tokentape_core import logs
from tokentape_engine import options as engine_options

Run = Callable[[argparse.Namespace], int]

DESCRIPTION: Final = (
    "Records LLM agents in RL rollouts as exact token ids and assembles training samples on the server."
)
EPILOG: Final = (
    "Every option of api, assembler, up and config has an environment variable, named in the command's "
    "--help; a flag wins. Start with `tokentape demo`."
)


def main(given: Sequence[str] | None = None) -> int:
    """Runs the command line; the exit code is 0 for success, 1 for a failure, 2 for wrong usage."""
    parser = build_parser()
    parsed = parser.parse_args(joined(sys.argv[1:] if given is None else given))
    logs.configure()
    command = _COMMANDS[parsed.command]
    try:
        return command.run(parsed)
    except UsageError as error:
        reason = str(error)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if not package or package.startswith("tokentape"):
            raise
        reason = f"{package} is not installed: pip install '.[{command.extra}]' in a clone of Tokentape"
    print(f"tokentape {parsed.command}: {reason}", file=sys.stderr)
    return 2


def build_parser() -> argparse.ArgumentParser:
    """The whole command line; also read by the test that compares it with the docs."""
    parser = argparse.ArgumentParser(prog="tokentape", description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument("--version", action="version", version=f"tokentape {_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in _COMMANDS.items():
        text = command.text
        command.add(commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + "."))
    return parser


def joined(given: Sequence[str]) -> list[str]:
    """The arguments with a command of two words as one."""
    words = " ".join(given[:2])
    return [words, *given[2:]] if len(given) > 1 and words in _COMMANDS else list(given)


def _version() -> str:
    try:
        return version("tokentape")
    except PackageNotFoundError:
        return "(not installed)"


def _add(names: Sequence[str]) -> Callable[[argparse.ArgumentParser], None]:
    return lambda parser: options.add_options(parser, names)


def _api(given: argparse.Namespace) -> int:
    settings = options.resolve(given, (*options.API, *options.LOGS))
    options.required(settings, "engine-url", "tokenizer", "redis-url")
    checked = options.api_settings(settings)
    from tokentape_api.http.access import TokensError
    from tokentape_api.run import run
    from tokentape_core.loading import LoadError
    from tokentape_core.text.errors import TokenizerError

    ensure_free(settings, "port")
    logs.configure(settings["log-format"].value)
    try:
        return run(checked)
    except (LoadError, TokenizerError, TokensError) as error:
        raise UsageError(str(error)) from error


def _assembler(given: argparse.Namespace) -> int:
    settings = options.resolve(given, (*options.ASSEMBLER, *options.LOGS))
    options.required(settings, "tokenizer", "redis-url")
    checked = options.assembler_settings(settings)
    from tokentape_assembler.archive import ArchiveError
    from tokentape_assembler.executor import ChildDied
    from tokentape_assembler.run import run
    from tokentape_core.text.errors import TokenizerError

    ensure_free(settings, "metrics-port")
    logs.configure(settings["log-format"].value)
    try:
        return run(checked)
    except (ArchiveError, ChildDied, TokenizerError) as error:
        raise UsageError(f"the assembler cannot start: {error}") from error


def _up(given: argparse.Namespace) -> int:
    settings = options.resolve(given, options.ALL)
    options.required(settings, "engine-url", "tokenizer")
    options.api_settings(settings)
    options.assembler_settings(settings)
    from tokentape_cli.up import run

    return run(settings)


def _engine(given: argparse.Namespace) -> int:
    ensure_free({name: Setting(getattr(given, name), "flag") for name in ("host", "port")}, "port")
    return _later("engine.server", "run")(given)


def _config(given: argparse.Namespace) -> int:
    settings = options.resolve(given, options.ALL)
    rows = [
        (options.variable(name), options.masked(options.text(name, setting)) or "-", setting.source)
        for name, setting in settings.items()
    ]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for name, value, source in rows:
        print(f"{name:<{widths[0]}}  {value:<{widths[1]}}  {source}")
    return 0


def _later(module: str, function: str) -> Run:
    """A function of a module that is imported when it is called: it may need an extra."""

    def run(arguments: argparse.Namespace) -> int:
        found: Run = getattr(import_module(f"tokentape_{module}"), function)
        return found(arguments)

    return run


@dataclass(frozen=True, slots=True)
class _Command:
    """A command.

    Attributes:
        text: what it does, for `--help`.
        add: adds its arguments.
        run: does it.
        extra: of the distribution, with which it has all packages that it needs.
    """

    text: str
    add: Callable[[argparse.ArgumentParser], None]
    run: Run
    extra: str


_COMMANDS: Final[Mapping[str, _Command]] = {
    "api": _Command("run one API process", _add((*options.API, *options.LOGS)), _api, "api"),
    "assembler": _Command(
        "run one worker process", _add((*options.ASSEMBLER, *options.LOGS)), _assembler, "assembler"
    ),
    "up": _Command(
        "run the API and a worker, and a bundled Valkey server unless --redis-url is given; Ctrl-C stops all",
        _add(options.ALL),
        _up,
        "all",
    ),
    "demo": _Command(
        "record live agents on the reference engine, collect their samples and verify every one",
        arguments.demo,
        _later("cli.demo.run", "run"),
        "all",
    ),
    "engine": _Command(
        "run the reference engine: a tiny model, for demos and tests",
        engine_options.add_arguments,
        _engine,
        "engine",
    ),
    "engine check": _Command(
        "tell whether an engine or router sends what the recording needs (exit code 0: all of it, 1: not)",
        _add(options.ENGINE),
        _later("cli.engine_check", "check"),
        "api",
    ),
    "family check": _Command(
        "tell at which boundaries a chat template is append-only (exit code 0: at all of them, 1: not)",
        _add(options.TEXT),
        _later("cli.family", "check"),
        "core",
    ),
    "replay": _Command(
        "assemble a session anew, and tell whether that is what was delivered "
        "(exit code 0: it is, 1: it is not, 2: nothing to compare)",
        arguments.replay,
        _later("cli.audit", "replay"),
        "assembler",
    ),
    "export": _Command(
        "write sessions to a file, to the byte", arguments.export, _later("cli.transfer", "export"), "core"
    ),
    "import": _Command(
        "write the sessions of a file to Redis, to the byte",
        arguments.import_,
        _later("cli.transfer", "import_"),
        "core",
    ),
    "token create": _Command(
        "make a bearer token: its entry for the tokens file goes to standard output, the token to standard "
        "error",
        arguments.token_create,
        _later("cli.token", "create"),
        "api",
    ),
    "config": _Command("print the effective settings, secrets masked", _add(options.ALL), _config, "core"),
}
