"""What the command's options accept."""

import argparse
from collections.abc import Mapping
from pathlib import Path

import pytest

from tokentape_api.settings import ApiSettings
from tokentape_assembler.settings import AssemblerSettings
from tokentape_cli import options
from tokentape_cli.main import main
from tokentape_contracts import limits
from tokentape_core.text.settings import TextSettings

SECRET = "s3cr3t"
SCHEMES = {"engine-url": "http", "redis-url": "redis", "queue-redis-url": "redis", "archive-url": "ftp"}


def _retention(text: str) -> int:
    given = argparse.Namespace(retention_s=text)
    value: int = options.resolve(given, ("retention-s",))["retention-s"].value
    return value


def test_retention() -> None:
    """From the shortest to the longest, and no second less or more."""
    for edge in (limits.RETENTION_MIN_S, limits.RETENTION_MAX_S):
        assert _retention(str(edge)) == edge
    for beyond in (limits.RETENTION_MIN_S - 1, limits.RETENTION_MAX_S + 1):
        with pytest.raises(options.UsageError, match="must be a whole number from 21600 to 2592000"):
            _retention(str(beyond))


@pytest.mark.parametrize(
    ("option", "url", "shown"),
    [
        ("engine-url", f"https://{SECRET}@h:1/x", "https://***@h:1/x"),
        ("engine-url", f"https://{SECRET}:@h", "https://***@h"),
        ("engine-url", f"https://u:{SECRET}@h", "https://u:***@h"),
        ("engine-url", f"http://u:1#{SECRET}@h", "http://u:***@h"),
        ("engine-url", "http://h:1/x", "http://h:1/x"),
        ("redis-url", f"redis://{SECRET}@h/1", "redis://***@h/1"),
        ("redis-url", f"redis://:{SECRET}@h/1", "redis://:***@h/1"),
        ("redis-url", f"unix:///run/redis?password={SECRET}&db=1", "unix:///run/redis?password=***&db=1"),
        ("archive-url", f"https://{SECRET}@h/x", "https://***@h/x"),
        ("archive-url", f"https://u:x/{SECRET}@h/x", "https://u:***@h/x"),
        ("archive-url", f"simplecache::https://{SECRET}@h/x", "simplecache::https://***@h/x"),
        ("archive-url", f"zip://x::https://{SECRET}@h/x", "zip://x:***@h/x"),
        ("archive-url", f"dir::https://{SECRET}@h::ftp://u:p@i/x", "dir::https://***@i/x"),
        ("archive-url", "file:///data", "file:///data"),
    ],
)
def test_config_shows_no_secret(
    option: str, url: str, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither a password nor a token that stands alone, in whichever URL and wherever in it; but the rest."""
    assert main(["config", f"--{option}", url]) == 0
    output = capsys.readouterr().out
    assert SECRET not in output
    assert f" {shown} " in output


@pytest.mark.parametrize("option", ["engine-url", "redis-url", "queue-redis-url", "archive-url"])
@pytest.mark.parametrize("userinfo", [f"u:{SECRET}：", f"u:[{SECRET}]x", f"u:{SECRET}["])
def test_a_refusal_shows_no_secret(option: str, userinfo: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What Python cannot take apart it quotes; we do not."""
    assert main(["config", f"--{option}", f"{SCHEMES[option]}://{userinfo}@h/x"]) == 2
    error = capsys.readouterr().err
    assert SECRET not in error
    assert "is not a URL; special characters" in error


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://[x", "is not a URL"),
        (f"http://u:{SECRET}@/x", "a host is missing"),
        (f"http://u:{SECRET}@a\\b/x", "holds what no host's name can"),
    ],
)
def test_an_engine_url_that_is_none(url: str, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It is refused at the start; without a host, the HTTP client would quote it in every error."""
    assert main(["config", "--engine-url", url]) == 2
    error = capsys.readouterr().err
    assert reason in error
    assert SECRET not in error


TEXT = {
    "tokenizer": "t",
    "chat-template": __file__,
    "family": "default",
    "chat-template-kwargs": '{"a": {"b": [1, null]}, "c": "é"}',
    "tools-form": "sglang-0.5.23",
    "end-tokens": " <turn|> ,<x>",
    "special-tokens-in-text": "as-text",
}
ENGINE = {"engine-url": "http://e", "redis-url": "redis://r"}


def _resolved(given: Mapping[str, str], **environment: str) -> dict[str, options.Setting]:
    flags = argparse.Namespace(**{name.replace("-", "_"): value for name, value in given.items()})
    return options.resolve(flags, options.ALL, environment)


def test_api_and_worker_make_the_same_of_the_same_options() -> None:
    """All that decides ids is in both settings, so that their fingerprints are equal."""
    assert tuple(TEXT) == options.TEXT
    settings = _resolved(TEXT | ENGINE)

    api, assembler = options.api_settings(settings), options.assembler_settings(settings)

    text = options.text_settings(settings)
    assert api.to_json() == assembler.to_json() == text.to_json()
    assert text == TextSettings(
        tokenizer="t",
        chat_template=Path(__file__),
        chat_template_kwargs={"a": {"b": [1, None]}, "c": "é"},
        tools_form="sglang-0.5.23",
        end_tokens=("<turn|>", "<x>"),
        special_tokens_in_text="as-text",
    )


@pytest.mark.parametrize("given", [{}, TEXT, {"pins": '{"temperature": 1.0, "stop": ["a"]}'}])
def test_a_child_process_gets_the_settings_as_they_are(given: dict[str, str]) -> None:
    """The variables that `up` gives to its processes spell the values that it has."""
    settings = _resolved({"tokenizer": "t"} | ENGINE | given)

    variables = options.environment(settings, options.ALL)

    again = _resolved({}, **variables)
    assert {name: setting.value for name, setting in again.items()} == {
        name: setting.value for name, setting in settings.items()
    }


def test_settings_have_the_defaults_of_their_options() -> None:
    """Who makes the settings in Python gets what the command gives."""
    settings = _resolved({"tokenizer": "t"} | ENGINE)

    assert options.api_settings(settings) == ApiSettings(
        engine_url="http://e", tokenizer="t", redis_url="redis://r"
    )
    assert options.assembler_settings(settings) == AssemblerSettings(tokenizer="t", redis_url="redis://r")


@pytest.mark.parametrize(
    ("option", "value", "complaint"),
    [
        ("chat-template-kwargs", "[1]", "must be a JSON object"),
        ("chat-template-kwargs", "{", "must be a JSON object"),
        ("pins", "1", "must be a JSON object"),
        ("pins", "[" * 100_000, "must be a JSON object"),
        ("end-tokens", "", "must be words with a comma between them"),
        ("end-tokens", "<a>,", "must be words with a comma between them"),
        ("tools-form", "sglang", "must be one of as-sent, sglang-0.5.16, sglang-0.5.23"),
        ("altered-answer", "drop", "must be one of refuse, keep"),
    ],
)
def test_a_value_that_cannot_be_read_is_refused(option: str, value: str, complaint: str) -> None:
    """With the option's name and what it takes."""
    with pytest.raises(options.UsageError, match=f"--{option}.*{complaint}"):
        _resolved({option: value})


def test_what_cannot_be_pinned_is_refused_at_the_start() -> None:
    """A pin that no session could have ends the process, with all that can be pinned."""
    with pytest.raises(options.UsageError, match="'messages' cannot be pinned; known: frequency_penalty"):
        options.api_settings(
            _resolved({"tokenizer": "t", "pins": '{"messages": [], "lora_path": "x"}'} | ENGINE)
        )

    pinned = options.api_settings(_resolved({"tokenizer": "t", "pins": '{"lora_path": "x"}'} | ENGINE))
    assert (pinned.pins, pinned.altered_answer) == ({"lora_path": "x"}, "refuse")


def test_config_shows_values_as_they_are_given(capsys: pytest.CaptureFixture[str]) -> None:
    """A JSON object is JSON, and several words have a comma between them; none of them is a dash."""
    arguments = ["config", "--pins", '{"top_p": 1}', "--end-tokens", "<a>, <b>"]
    assert main(arguments) == 0
    rows = {line.split()[0]: line.split(maxsplit=1)[1] for line in capsys.readouterr().out.splitlines()}
    assert rows["TOKENTAPE_PINS"].startswith('{"top_p": 1} ')
    assert rows["TOKENTAPE_END_TOKENS"].startswith("<a>,<b> ")
    assert main(["config"]) == 0
    assert f"{options.variable('end-tokens')} " in (output := capsys.readouterr().out)
    assert next(line for line in output.splitlines() if "END_TOKENS" in line).split() == [
        "TOKENTAPE_END_TOKENS",
        "-",
        "default",
    ]
