"""Every option of the command, once: its flag, its environment variable, its default and its help.

`--engine-url` is `TOKENTAPE_ENGINE_URL`, and so on; a flag wins over the environment. An environment variable
`TOKENTAPE_…` that no option has is refused: a misspelt setting must not go unnoticed. What Kubernetes sets in
pods for a Service called `tokentape…` is no setting, and ignored.
"""

import argparse
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import SplitResult, urlsplit

from tokentape_api.settings import ENGINES, INDEXER_TOPK, REPLAY, REPLAY_PREFIX, ApiSettings
from tokentape_assembler.settings import AssemblerSettings
from tokentape_contracts import limits
from tokentape_contracts.http import ALTERED_ANSWER, MODES, PIN_FIELDS, pins_refusal
from tokentape_core.addresses import Address, queue_url
from tokentape_core.domain.match import MATCHERS
from tokentape_core.domain.tree import DEFAULT_HOOKS, PICKS
from tokentape_core.text.families import FAMILIES
from tokentape_core.text.settings import AS_TEMPLATE, SPECIAL_TOKENS_IN_TEXT, TextSettings
from tokentape_core.text.tools import AS_SENT, TOOLS_FORMS

_S = TypeVar("_S", bound=TextSettings)

PREFIX: Final = "TOKENTAPE_"
LOG_FORMATS: Final = ("console", "json")
_HOST: Final = re.compile(r"[\w.:%-]+")
_ENCODE: Final = "special characters of a password must be percent-encoded"


class UsageError(Exception):
    """The command line or the environment is wrong; one sentence for the user."""


@dataclass(frozen=True, slots=True)
class Option:
    """One option.

    Attributes:
        help: what it does, for `--help` and the reference page.
        default: its value if neither flag nor environment gives one; None means none.
        parse: reads a value; raises ValueError.
        choices: the allowed values.
        metavar: what stands for the value in `--help`.
        text: writes a value as `parse` reads it.
    """

    help: str
    default: Any = None
    parse: Callable[[str], Any] = str
    choices: tuple[str, ...] = ()
    metavar: str = "VALUE"
    text: Callable[[Any], str] = str

    @property
    def shown_default(self) -> str:
        """The default for people; "" for none."""
        return "" if self.default is None else self.text(self.default)


def _text(text: str) -> str:
    if not text.strip() or not text.isprintable():
        raise ValueError("must be printable text, and some")
    return text


def _file(text: str) -> Path:
    if "\0" in text or not Path(text).exists():
        raise ValueError("there is no such file")
    if not Path(text).is_file():
        raise ValueError("is not a regular file")
    return Path(text)


def at_least(lowest: int) -> Callable[[str], int]:
    """Reads a whole number of this or more. Raises `ValueError`."""
    return _whole(lowest, None, f"must be a whole number of at least {lowest}")


def _from_to(lowest: int, highest: int) -> Callable[[str], int]:
    return _whole(lowest, highest, f"must be a whole number from {lowest} to {highest}")


def _whole(lowest: int, highest: int | None, wanted: str) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ValueError(wanted) from None
        if value < lowest or (highest is not None and value > highest):
            raise ValueError(wanted)
        return value

    return parse


_PORT: Final = _from_to(0, 65_535)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ValueError("must be a number of seconds above 0")
    return value


def _split(text: str) -> SplitResult:
    try:
        return urlsplit(text)
    except ValueError:  # whose text quotes the password too
        raise ValueError(f"is not a URL; {_ENCODE}") from None


def _url(*schemes: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        parts = _split(text)
        if parts.scheme not in schemes or not text.partition("://")[2]:
            raise ValueError(f"must be a URL that begins with {' or '.join(f'{s}://' for s in schemes)}")
        try:
            _ = parts.port
        except ValueError:  # whose text quotes what stands there, which may be a part of a password
            raise ValueError(f"its port is no number; {_ENCODE}") from None
        if not _HOST.fullmatch(parts.hostname or ""):
            raise ValueError("a host is missing, or holds what no host's name can")
        return text

    return parse


def _engine_url(text: str) -> str:
    url = _url("http", "https")(text).rstrip("/")
    if url.endswith("/v1"):
        raise ValueError(f"must be given without /v1, which is added: {masked(url.removesuffix('/v1'))}")
    return text


def _redis_url(text: str) -> str:
    _split(text)
    Address.parse(text)
    return text


def _queue_redis_url(text: str) -> str:
    return queue_url(_redis_url(text), None)


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ValueError('must be a JSON object, such as {"name": 1}')
    return value


def _pins(text: str) -> dict[str, Any]:
    pins = _json_object(text)
    if refusal := pins_refusal(pins):
        raise ValueError(refusal)
    return pins


def _words(text: str) -> tuple[str, ...]:
    words = tuple(word.strip() for word in text.split(","))
    if not all(words):
        raise ValueError("must be words with a comma between them")
    return words


def _any_url(text: str) -> str:
    if not _split(text).scheme or not text.partition("://")[2]:
        raise ValueError("must be a URL like file:///directory or s3://bucket/directory")
    return text


OPTIONS: Final[Mapping[str, Option]] = {
    "host": Option("address that the process listens on", "127.0.0.1", _text, metavar="ADDRESS"),
    "port": Option("port that the API listens on", 8080, _PORT, metavar="PORT"),
    "engine-url": Option("base URL of the engine or router, without /v1", parse=_engine_url, metavar="URL"),
    "engine": Option("what answers there", ENGINES[0], choices=ENGINES, metavar="|".join(ENGINES)),
    "replay": Option(
        "routing replay: whether the engine is asked for routed experts, and for all rows with every turn or "
        "only for new ones",
        REPLAY[0],
        choices=REPLAY,
        metavar="|".join(REPLAY),
    ),
    "replay-layers": Option(
        "layers in the engine's routed_experts; needed with SGLang, whose payload does not say it",
        parse=at_least(1),
        metavar="N",
    ),
    "replay-prefix": Option(
        "of which turn a routing replay row is taken that several turns sent: the last one's, or that of the "
        "turn in which its token was first read",
        REPLAY_PREFIX[0],
        choices=REPLAY_PREFIX,
        metavar="|".join(REPLAY_PREFIX),
    ),
    "indexer-topk": Option(
        "whether the sparse attention indexer's choices are asked for",
        INDEXER_TOPK[0],
        choices=INDEXER_TOPK,
        metavar="|".join(INDEXER_TOPK),
    ),
    "tokenizer": Option(
        "the model's tokenizer: a directory, or a name that transformers can load",
        parse=_text,
        metavar="DIR_OR_NAME",
    ),
    "chat-template": Option(
        "a Jinja file in place of the tokenizer's own chat template", parse=_file, metavar="FILE"
    ),
    "family": Option(
        "the model family, whose boundary rules apply", "default", choices=tuple(FAMILIES), metavar="NAME"
    ),
    "chat-template-kwargs": Option(
        'a JSON object of arguments for the chat template (`{"enable_thinking": false}`), in all requests '
        "that do not say otherwise",
        {},
        _json_object,
        metavar="JSON",
        text=json.dumps,
    ),
    "tools-form": Option(
        "in which form the chat template gets tools: as the agent sent them, or as the chat endpoint of this "
        "version of SGLang writes them",
        AS_SENT,
        choices=tuple(TOOLS_FORMS),
        metavar="FORM",
    ),
    "end-tokens": Option(
        "the tokens that end an assistant's turn, with a comma between them; for models without a family "
        "(`--family default`), in place of the tokenizer's end-of-sequence token",
        (),
        _words,
        metavar="TOKENS",
        text=",".join,
    ),
    "special-tokens-in-text": Option(
        "what the spelling of a special token in a message becomes: the token, as in an engine that applies "
        "the template itself, or ordinary text",
        AS_TEMPLATE,
        choices=SPECIAL_TOKENS_IN_TEXT,
        metavar="|".join(SPECIAL_TOKENS_IN_TEXT),
    ),
    "pins": Option(
        'a JSON object of sampling parameters that requests cannot change (`{"temperature": 1.0}`); a '
        f"session's own pins win. Known: {', '.join(sorted(PIN_FIELDS))}",
        {},
        _pins,
        metavar="JSON",
        text=json.dumps,
    ),
    "altered-answer": Option(
        "what a linear session that does not say does with a recorded answer that comes back altered: refuse "
        "the request with 400, or go on from the recorded one",
        ALTERED_ANSWER[0],
        choices=ALTERED_ANSWER,
        metavar="|".join(ALTERED_ANSWER),
    ),
    "mode": Option("mode of sessions that name none", MODES[0], choices=MODES, metavar="|".join(MODES)),
    "matcher": Option(
        "how a request's messages are compared with the recorded ones, in sessions that name none: "
        f"{', '.join(MATCHERS)}, or the import path of a function",
        "equivalent",
        _text,
        metavar="NAME",
    ),
    "redis-url": Option(
        "where sessions are kept: redis://, rediss:// or unix:// for one server, redis+sentinel:// for the "
        "primary that Sentinels name, redis+cluster:// for a cluster",
        parse=_redis_url,
        metavar="URL",
    ),
    "queue-redis-url": Option(
        "where the workers' queue is, which cannot be in a cluster; where the sessions are if not given",
        parse=_queue_redis_url,
        metavar="URL",
    ),
    "redis-wait-replicas": Option(
        "replicas of Redis that must have a turn before it is answered; 0 waits for none",
        0,
        at_least(0),
        metavar="N",
    ),
    "tokens-file": Option(
        "a TOML file with the callers' bearer tokens (`tokentape token create`), read again when it changes; "
        "without it every caller may do everything",
        parse=_file,
        metavar="FILE",
    ),
    "pick-hook": Option(
        f"which leaves of a tree become samples: {', '.join(PICKS)}, or the import path of a function; "
        f"{DEFAULT_HOOKS.pick.__name__} if not given",
        parse=_text,
        metavar="NAME",
    ),
    "finish-hook": Option(
        "import path of the function that finishes a tree's samples, in place of the default",
        parse=_text,
        metavar="PATH",
    ),
    "metrics-port": Option(
        "port of a worker's /metrics, /health and /ready; not opened without it",
        parse=_PORT,
        metavar="PORT",
    ),
    "log-format": Option(
        "how log lines look; console on a terminal and json elsewhere if not given",
        choices=LOG_FORMATS,
        metavar="|".join(LOG_FORMATS),
    ),
    "workers": Option("assemblies that run at the same time", 1, at_least(1), metavar="N"),
    "archive-url": Option(
        "where sealed sessions are copied to before they expire: a directory as fsspec understands it; "
        "not at all without it",
        parse=_any_url,
        metavar="URL",
    ),
    "engine-timeout-s": Option(
        "the longest generation, in seconds", limits.ENGINE_TIMEOUT_S, _seconds, metavar="SECONDS"
    ),
    "retention-s": Option(
        "how long a deleted session stays in Redis, in whole seconds",
        limits.RETENTION_S,
        _from_to(limits.RETENTION_MIN_S, limits.RETENTION_MAX_S),
        metavar="SECONDS",
    ),
}

TEXT: Final = (
    "tokenizer",
    "chat-template",
    "family",
    "chat-template-kwargs",
    "tools-form",
    "end-tokens",
    "special-tokens-in-text",
)
"""All that decides which ids a conversation has: the same for every process that reads a session."""
ENGINE: Final = ("engine-url", "engine", "replay", "replay-layers", "indexer-topk")
API: Final = (
    "host",
    "port",
    *ENGINE,
    "replay-prefix",
    *TEXT,
    "mode",
    "matcher",
    "altered-answer",
    "pins",
    "redis-url",
    "queue-redis-url",
    "redis-wait-replicas",
    "retention-s",
    "tokens-file",
    "engine-timeout-s",
)
ASSEMBLER: Final = (
    *TEXT,
    "redis-url",
    "queue-redis-url",
    "workers",
    "pick-hook",
    "finish-hook",
    "archive-url",
    "host",
    "metrics-port",
)
LOGS: Final = ("log-format",)
"""Of every process: not a setting of what it does."""
ALL: Final = tuple(OPTIONS)

_OTHER_VARIABLES: Final = frozenset({f"{PREFIX}CACHE_DIR"})
_SERVICE_LINK: Final = re.compile(
    r"""TOKENTAPE(_\w+)?_(
        SERVICE_HOST=.+
      | SERVICE_PORT(_\w+)?=\d+
      | PORT(_\d+_(TCP|UDP|SCTP))?=(tcp|udp|sctp)://.+
      | PORT_\d+_(TCP|UDP|SCTP)_(PROTO|PORT|ADDR)=.+
    )""",
    re.VERBOSE,
)
"""A variable that Kubernetes sets for a Service. `TOKENTAPE_PORT` is one as `tcp://…`, and as a number our
option."""


def variable(name: str) -> str:
    """The environment variable of an option."""
    return PREFIX + name.upper().replace("-", "_")


def add_options(parser: argparse.ArgumentParser, names: Iterable[str]) -> None:
    """Adds the flags of these options; a flag that is not given leaves None."""
    for name in names:
        option = OPTIONS[name]
        default = f" (default: {option.shown_default})" if option.shown_default else ""
        choices = f"; one of {', '.join(option.choices)}" if option.choices else ""
        parser.add_argument(
            f"--{name}", metavar=option.metavar, help=f"{option.help}{choices}{default} [{variable(name)}]"
        )


@dataclass(frozen=True, slots=True)
class Setting:
    """An option's value and where it came from: `flag`, `environment`, `default` or `not set`."""

    value: Any
    source: str


def resolve(
    arguments: argparse.Namespace, names: Iterable[str], environment: Mapping[str, str] = os.environ
) -> dict[str, Setting]:
    """The effective value of each option.

    Raises:
        UsageError: a value is wrong, or the environment holds an unknown `TOKENTAPE_…`.
    """
    environment = {
        key: text for key, text in environment.items() if not _SERVICE_LINK.fullmatch(f"{key}={text}")
    }
    known = {variable(name) for name in OPTIONS} | _OTHER_VARIABLES
    if unknown := sorted(key for key in environment if key.startswith(PREFIX) and key not in known):
        raise UsageError(
            f"the environment variable {unknown[0]} is unknown; known: {', '.join(sorted(known))}"
        )
    return {name: _resolve(name, arguments, environment) for name in names}


def _resolve(name: str, arguments: argparse.Namespace, environment: Mapping[str, str]) -> Setting:
    option = OPTIONS[name]
    flag = getattr(arguments, name.replace("-", "_"), None)
    text = flag if flag is not None else environment.get(variable(name))
    if text is None:
        return Setting(option.default, "not set" if option.default is None else "default")
    where, source = (f"--{name}", "flag") if flag is not None else (variable(name), "environment")
    if option.choices and text not in option.choices:
        raise UsageError(f"{where} must be one of {', '.join(option.choices)}, not {_quoted(text)}")
    try:
        return Setting(option.parse(text), source)
    except ValueError as error:
        shown = "(not shown: it may hold a password)" if "@" in text else _quoted(masked(text))
        raise UsageError(f"{where} {shown}: {error}") from None


def _quoted(text: str) -> str:
    most = limits.QUOTED_VALUE_CHARS
    return repr(text) if len(text) <= most else f"{text[:most]!r} …"


def required(settings: Mapping[str, Setting], *names: str) -> None:
    """Raises `UsageError` for the first of these options that has no value."""
    for name in names:
        if settings[name].value is None:
            raise UsageError(f"--{name} is needed (or {variable(name)}): {OPTIONS[name].help}")


def values(settings: Mapping[str, Setting], names: Iterable[str]) -> dict[str, Any]:
    """The values by attribute name (`engine_url`), for a settings class."""
    return {name.replace("-", "_"): settings[name].value for name in names}


def api_settings(settings: Mapping[str, Setting], names: Iterable[str] = API, **others: Any) -> ApiSettings:
    """The settings of the API, which checks what one option needs of another.

    Args:
        names: the options that they are taken from.
        others: attributes that do not come from an option.

    Raises:
        UsageError: two options do not fit each other.
    """
    return _fitting(ApiSettings, {**values(settings, names), **others})


def assembler_settings(settings: Mapping[str, Setting]) -> AssemblerSettings:
    """The settings of a worker. Raises `UsageError` as `api_settings` does."""
    return _fitting(AssemblerSettings, values(settings, ASSEMBLER))


def text_settings(settings: Mapping[str, Setting]) -> TextSettings:
    """What renders and tokenises, from the options `TEXT`. Raises `UsageError` as `api_settings` does."""
    return _fitting(TextSettings, values(settings, TEXT))


def _fitting(kind: Callable[..., _S], fields: Mapping[str, Any]) -> _S:
    try:
        return kind(**fields)
    except ValueError as error:
        raise UsageError(str(error)) from error


def environment(settings: Mapping[str, Setting], names: Iterable[str]) -> dict[str, str]:
    """The variables that give a child process these settings; a command line would show passwords to all."""
    given = [name for name in names if settings[name].value not in (None, ())]
    return {variable(name): text(name, settings[name]) for name in given}


def text(name: str, setting: Setting) -> str:
    """The setting's value as a flag or a variable gives it; "" for none."""
    return "" if setting.value is None else OPTIONS[name].text(setting.value)


def masked(value: Any) -> str:
    """The value as it may be shown: a URL without its password, wherever that stands.

    A user without a password may be a token, and is not shown either. All before the last `@` counts as user
    and password: someone may have forgotten to percent-encode theirs.
    """
    text = re.sub(r"([?&]\w*password=)[^&]*", r"\1***", "" if value is None else str(value))
    return re.sub(r"://([^:@/?#]*:(?!@))?.*@", r"://\1***@", text, flags=re.DOTALL)
