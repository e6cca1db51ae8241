"""Wrong usage: every command tells it in one sentence, of every option, wherever its value comes from."""

import re
import socket
from pathlib import Path

import pytest

from tokentape_cli import options
from tokentape_cli.main import main
from tokentape_cli.options import API, ASSEMBLER, ENGINE, LOGS, OPTIONS, TEXT, variable

NUMBERS = ("", " ", "x", "1.5", "0x10", "NaN", "١x", "9" * 5_000, "1 2", "\x00")
URLS = (
    "",
    "x",
    "://",
    "http://",
    "http:///x",
    "http://h:x",
    "http://h:99999",
    "http://[::1",
    "http://a b",
    "\x00",
)
WRONG: dict[str, tuple[str, ...]] = {
    "host": ("", " ", "\x00"),
    "port": (*NUMBERS, "-1", "65536"),
    "engine-url": (*URLS, "ftp://h", "http://h:30000/v1", "http://h/v1/", "https://user:secret@h/x/v1"),
    "engine": ("", "sgl", "SGLANG"),
    "replay": ("", "on"),
    "replay-layers": (*NUMBERS, "0", "-1"),
    "replay-prefix": ("", "first"),
    "indexer-topk": ("", "yes"),
    "tokenizer": ("", " ", "\x00"),
    "chat-template": ("", "/nowhere", "/", "/dev/null", "\x00"),
    "family": ("", "qwen"),
    "chat-template-kwargs": ("", "x", "[]", "1", "null", "{", "{'a': 1}", "[" * 100_000),
    "tools-form": ("", "x"),
    "end-tokens": ("", ",", "a,,b"),
    "special-tokens-in-text": ("", "text"),
    "pins": ("", "x", "[]", "{", '{"nothing": 1}'),
    "altered-answer": ("", "x"),
    "mode": ("", "graph"),
    "matcher": ("", " ", "\x00"),
    "redis-url": (
        "",
        "x",
        "redis://",
        "http://h",
        "redis://h:x",
        "redis+sentinel://h",
        "redis+cluster://h/3",
    ),
    "queue-redis-url": ("x", "redis://", "http://h", "redis+cluster://h"),
    "redis-wait-replicas": (*NUMBERS, "-1"),
    "tokens-file": ("", "/nowhere", "/", "/dev/zero", "\x00"),
    "pick-hook": ("", "\x00"),
    "finish-hook": ("", "\x00"),
    "metrics-port": (*NUMBERS, "-1", "65536"),
    "log-format": ("", "text"),
    "workers": (*NUMBERS, "0"),
    "archive-url": ("", "x", "://x", "s3://"),
    "engine-timeout-s": (*NUMBERS[:3], "0", "-1", "inf", "\x00"),
    "retention-s": (*NUMBERS, "0", "-1", "1e9"),
}
COMMANDS = {
    "api": (*API, *LOGS),
    "assembler": (*ASSEMBLER, *LOGS),
    "up": tuple(OPTIONS),
    "engine check": ENGINE,
    "family check": TEXT,
    "config": tuple(OPTIONS),
}
OTHERS: dict[str, tuple[str, ...]] = {
    "nothing": (),
    "no command": ("nonsense",),
    "no flag": ("api", "--nonsense"),
    "no value": ("api", "--port"),
    "replay what": ("replay",),
    "replay of a turn": ("replay", "x", "--at", "first"),
    "replay of a turn below": ("replay", "x", "--at", "-1"),
    "export where": ("export", "x"),
    "export what": ("export", "--output", "x"),
    "import what": ("import",),
    "token of nobody": ("token", "create", "--tenant", "t", "--scope", "agent"),
    "token with a space": ("token", "create", "--name", "a b", "--tenant", "t", "--scope", "agent"),
    "token for what": ("token", "create", "--name", "a", "--tenant", "t", "--scope", "everything"),
    "agents": ("demo", "--agents", "many"),
    "no agents": ("demo", "--agents", "0"),
    "engine's port": ("engine", "--port", "x"),
    "engine's port above all": ("engine", "--port", "65536"),
    "engine's model": ("engine", "--model", "large"),
    "engine's steps": ("engine", "--train-steps", "-1"),
    "engine's seed": ("engine", "--seed", "x"),
}
INTERNAL = re.compile(
    r"Traceback|invalid literal|could not convert|Errno|Expecting|embedded null|codec can't|has no attribute"
    r"|NoneType|Exceeds the limit|invalid int|nothing stands|unpack|Error\b|Exception"
)
"""What Python says to programmers."""


def _told(given: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What a command line that is wrong says on standard error."""
    try:
        code = main(given)
    except SystemExit as ended:  # argparse's way
        code = int(ended.code or 0)
    out, said = capsys.readouterr()
    assert (code, out) == (2, ""), (given, out, said)
    assert not INTERNAL.search(said), said
    return said


def test_every_option_is_swept() -> None:
    """A new option needs a line in the table."""
    assert WRONG.keys() == OPTIONS.keys()


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("source", ["flag", "environment"])
def test_wrong_values(
    name: str,
    source: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """One line, which names the flag or the variable, and not Python's own words; nothing is started."""
    for command in [command for command, names in COMMANDS.items() if name in names]:
        given = {"engine-url": "http://h", "tokenizer": str(tmp_path), "redis-url": "redis://h"}
        given = {other: text for other, text in given.items() if other in COMMANDS[command] and other != name}
        flags = [f"--{other}={text}" for other, text in given.items()]
        for value in WRONG[name]:
            if source == "environment" and "\x00" in value:
                continue
            if source == "flag":
                said = _told([*command.split(), *flags, f"--{name}={value}"], capsys)
            else:
                with monkeypatch.context() as patch:
                    patch.setenv(variable(name), value)
                    said = _told([*command.split(), *flags], capsys)
            assert said.count("\n") == 1, said
            assert said.startswith(f"tokentape {command}: "), said
            where = f"--{name}" if source == "flag" else variable(name)
            assert where in said or name in said, said
            assert "secret" not in said
            assert len(said) < 600, said


@pytest.mark.parametrize("name", OTHERS)
def test_other_arguments(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Beside the usage there is one sentence."""
    said = _told(list(OTHERS[name]), capsys)
    assert said.splitlines()[-1].startswith("tokentape")


def test_the_engine_url_without_v1(capsys: pytest.CaptureFixture[str]) -> None:
    """The sentence has the right form, without a password."""
    flags = ["--tokenizer", "t", "--redis-url", "redis://h"]
    said = _told(["api", "--engine-url", "http://me:secret@h:30000/v1/", *flags], capsys)
    assert "without /v1, which is added: http://me:***@h:30000" in said


@pytest.mark.parametrize(
    "arguments", [("--help",), ("--version",), *((*c.split(), "--help") for c in COMMANDS)]
)
def test_help_and_version(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """They work whatever the environment holds."""
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    assert ended.value.code == 0
    assert "tokentape" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("api", "port"),
        ("assembler", "metrics-port"),
        ("up", "port"),
        ("up", "metrics-port"),
        ("engine", "port"),
    ],
)
def test_a_port_that_is_taken(command: str, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It is told before anything is loaded or started."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        given = {"engine-url": "http://h", "tokenizer": "/nowhere", "redis-url": "redis://h"}
        names = COMMANDS.get(command, ())
        flags = [f"--{name}={text}" for name, text in given.items() if name in names]
        said = _told([command, *flags, f"--{option}", port], capsys)
    assert said == (
        f"tokentape {command}: --{option} {port}: something listens there already; end it, or choose another "
        "port\n"
    )


@pytest.mark.parametrize("host", ["no.such.host.invalid", "203.0.113.7", "300.1.1.1"])
def test_a_host_that_is_not_ours(host: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It is told with its name."""
    flags = ["--engine-url=http://h", "--tokenizer=/nowhere", "--redis-url=redis://h"]
    said = _told(["api", *flags, f"--host={host}"], capsys)
    assert said.startswith(f"tokentape api: --host {host}")
    assert options.OPTIONS["host"].help
