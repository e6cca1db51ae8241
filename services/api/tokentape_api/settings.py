"""Settings of an API process."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tokentape_contracts import limits
from tokentape_contracts.http import ALTERED_ANSWER, pins_refusal
from tokentape_core.addresses import queue_url
from tokentape_core.text.settings import TextSettings, ensure_choices

ENGINES: Final = ("sglang", "vllm")
REPLAY: Final = ("off", "full", "incremental")
REPLAY_PREFIX: Final = ("latest", "recorded")
INDEXER_TOPK: Final = ("off", "on")
_CHOICES: Final = {
    "altered_answer": ALTERED_ANSWER,
    "engine": ENGINES,
    "replay": REPLAY,
    "replay_prefix": REPLAY_PREFIX,
    "indexer_topk": INDEXER_TOPK,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiSettings(TextSettings):
    """Everything an API process can be told.

    Attributes:
        engine_url: base URL of the engine or router, without `/v1`; may hold a password, so it is never
            shown.
        redis_url: where the sessions are kept (`tokentape_core.addresses`); may hold a password, so it is
            never shown.
        mode: of sessions that name none.
        matcher: of sessions that name none; a built-in name, or the import path of a function.
        altered_answer: what linear sessions that name nothing else do with a recorded answer that comes back
            altered, one of `ALTERED_ANSWER`.
        pins: sampling parameters of every session, under its own (`PIN_FIELDS`).
        host: address to listen on.
        port: port to listen on; 0 takes a free one.
        engine_timeout_s: the longest generation.
        engine: what answers there, one of `ENGINES`.
        replay: how routed experts are asked for, one of `REPLAY`: not at all, all rows with every turn, or
            only the rows that the session has not.
        replay_layers: layers in the engine's routed_experts payload; SGLang's does not say it.
        replay_prefix: of which turn a row is taken that several turns sent, one of `REPLAY_PREFIX`: the last
            one's, or that of the turn in which its token was first read.
        indexer_topk: whether the indexer's choices are asked for, one of `INDEXER_TOPK`.
        tokens_file: the callers' bearer tokens (`http.access`); None for a server that asks for none.
        queue_redis_url: where the workers' queue is; None for where the sessions are. Never shown either.
        redis_wait_replicas: so many replicas must have a turn before it is answered; 0 waits for none.
        retention_s: a session that this process deletes stays in Redis for so long, for collects that were
            accepted before, audits and the archive.

    Raises:
        ValueError: a setting has no such value, or does not fit another.
    """

    engine_url: str = field(repr=False)
    redis_url: str = field(repr=False)
    mode: str = "linear"
    matcher: str = "equivalent"
    altered_answer: str = "refuse"
    pins: Mapping[str, Any] = field(default_factory=dict)
    host: str = "127.0.0.1"
    port: int = 8080
    engine_timeout_s: float = limits.ENGINE_TIMEOUT_S
    engine: str = "sglang"
    replay: str = "off"
    replay_layers: int | None = None
    replay_prefix: str = "latest"
    indexer_topk: str = "off"
    tokens_file: Path | None = None
    queue_redis_url: str | None = field(default=None, repr=False)
    redis_wait_replicas: int = 0
    retention_s: int = limits.RETENTION_S

    @property
    def queue_url(self) -> str:
        """Where the queue is, whether told or not."""
        return queue_url(self.redis_url, self.queue_redis_url)

    def __post_init__(self) -> None:
        TextSettings.__post_init__(self)
        _ = self.queue_url
        if refusal := pins_refusal(self.pins):
            raise ValueError(refusal)
        if self.redis_wait_replicas < 0:
            raise ValueError(f"redis_wait_replicas must be at least 0, not {self.redis_wait_replicas}")
        ensure_choices(self, _CHOICES)
        if self.replay_layers is not None and self.replay_layers < 1:
            raise ValueError(f"replay_layers must be at least 1, not {self.replay_layers}")
        if self.engine == "sglang" and self.replay != "off" and self.replay_layers is None:
            raise ValueError(
                f"replay {self.replay} with SGLang needs replay-layers, the number of layers in its "
                "routed_experts: the payload does not say it"
            )
        if self.engine == "vllm" and self.replay == "incremental":
            raise ValueError("replay incremental needs SGLang: vLLM sends all rows with every turn. Use full")
        if self.engine == "vllm" and self.indexer_topk == "on":
            raise ValueError("indexer-topk on needs SGLang: vLLM does not send it")
