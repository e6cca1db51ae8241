"""What the command's options accept."""

import argparse

import pytest

from tokentape_cli import options
from tokentape_cli.main import main
from tokentape_contracts import limits

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
        with pytest.raises(options.UsageError, match="must be from 21600 to 2592000"):
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
