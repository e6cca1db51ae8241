"""The forms of a Redis URL, and what the command says of those that do not do."""

import subprocess
import sys

import pytest

from tokentape_cli.options import masked
from tokentape_core.addresses import Address, queue_url

SECRET = "s3cr3t"


@pytest.mark.parametrize(
    ("text", "url", "hosts", "service"),
    [
        ("redis://u:p@h:1/2", "redis://u:p@h:1/2", (), ""),
        ("unix:///run/redis.sock?db=3", "unix:///run/redis.sock?db=3", (), ""),
        ("redis+cluster://h1:1,h2:2", "redis://h1:1", (("h1", 1), ("h2", 2)), ""),
        ("redis+cluster://h1", "redis://h1:6379", (("h1", 6379),), ""),
        (
            "rediss+cluster://u:p%40@h1:1,[::1]:2/0?ssl_ca_certs=/ca",
            "rediss://u:p%40@h1:1?ssl_ca_certs=/ca",
            (("h1", 1), ("::1", 2)),
            "",
        ),
        ("redis+sentinel://h1:1,h2/main", "redis://h1:1/0", (("h1", 1), ("h2", 26379)), "main"),
        (
            "rediss+sentinel://u:p@h1:1/main/5?ssl_ca_certs=%2Fca&sentinel_password=q%2F",
            "rediss://u:p@h1:1/5?ssl_ca_certs=%2Fca",
            (("h1", 1),),
            "main",
        ),
    ],
)
def test_an_address_is_taken_apart(
    text: str, url: str, hosts: tuple[tuple[str, int], ...], service: str
) -> None:
    """Hosts and service are read, and what is left is a URL as redis-py knows it."""
    address = Address.parse(text)
    assert (address.url, address.hosts, address.service) == (url, hosts, service)
    assert dict(address.sentinel) == ({"password": "q/"} if "sentinel_password" in text else {})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (f"http://u:{SECRET}@h", "must begin with one of redis://"),
        ("redis://", "it must go on after"),
        (f"redis://u:{SECRET}/x@h:1", "port is no number"),
        (f"redis+cluster://u:{SECRET}@h1:1,h2:x", "port is no number"),
        ("redis+cluster://h1:1,,h2:2", "host is missing"),
        ("redis+cluster://h1:1/2", "no databases"),
        ("redis+sentinel://h1:1,h2:2", "name of the service is missing"),
        ("redis+sentinel://h1:1/main/x", "no number of a database"),
    ],
)
def test_a_wrong_address_is_refused(text: str, reason: str) -> None:
    """The reason says what is missing, and never what stands there: it may be a password."""
    with pytest.raises(ValueError, match=reason) as caught:
        Address.parse(text)
    assert SECRET not in str(caught.value)
    assert SECRET not in repr(caught.value)


def test_the_queue_is_where_the_sessions_are() -> None:
    """Unless told otherwise; never in a cluster."""
    assert queue_url("redis://a", None) == "redis://a"
    assert queue_url("redis+cluster://a", "redis+sentinel://b/main") == "redis+sentinel://b/main"
    for urls in (("redis+cluster://a", None), ("redis://a", "rediss+cluster://b")):
        with pytest.raises(ValueError, match="queue-redis-url is needed, and may not be a cluster"):
            queue_url(*urls)


@pytest.mark.parametrize(
    "text",
    [
        f"rediss+cluster://u:{SECRET}@h1:1,h2:2",
        f"rediss+cluster://{SECRET}@h1:1,h2:2",
        f"redis+sentinel://u:{SECRET}@h1:1,h2:2/main?sentinel_username=u&sentinel_password={SECRET}",
    ],
)
def test_passwords_are_masked(text: str) -> None:
    """`tokentape config` shows hosts and users, and neither of the passwords."""
    assert SECRET not in masked(text)
    assert "h1:1,h2:2" in masked(text)


@pytest.mark.parametrize("command", ["api", "assembler"])
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--redis-url", "redis+cluster://h"), "queue-redis-url is needed"),
        (("--redis-url", "redis://h", "--queue-redis-url", "redis+cluster://h"), "may not be a cluster"),
        (("--redis-url", "redis+sentinel://h"), "name of the service is missing"),
    ],
)
def test_the_command_refuses_at_the_start(command: str, options: tuple[str, ...], reason: str) -> None:
    """A queue in a cluster, or half a URL, is wrong usage: exit code 2 and one sentence."""
    needed = ("--tokenizer", "none", *(("--engine-url", "http://h") if command == "api" else ()))
    ended = subprocess.run(
        [sys.executable, "-m", "tokentape_cli", command, *needed, *options],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 2
    assert reason in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
