"""Settings of an API process."""

from dataclasses import dataclass, field
from pathlib import Path

from tokentape_contracts import limits


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiSettings:
    """Everything an API process can be told.

    Attributes:
        engine_url: base URL of the SGLang server or router, without `/v1`.
        tokenizer: name or directory of the model's tokenizer.
        redis_url: where the sessions are kept; may hold a password, so it is never shown.
        chat_template: a Jinja file that replaces the tokenizer's own chat template.
        family: the model family, whose boundary rules apply.
        mode: of sessions that name none.
        matcher: of sessions that name none; a built-in name, or the import path of a function.
        host: address to listen on.
        port: port to listen on; 0 takes a free one.
        engine_timeout_s: the longest generation.
    """

    engine_url: str
    tokenizer: str
    redis_url: str = field(repr=False)
    chat_template: Path | None = None
    family: str = "default"
    mode: str = "linear"
    matcher: str = "loose_tool_call"
    host: str = "127.0.0.1"
    port: int = 8080
    engine_timeout_s: float = limits.ENGINE_TIMEOUT_S
