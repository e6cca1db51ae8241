"""What a worker process is started with."""

from dataclasses import dataclass, field

from tokentape_core.addresses import queue_url
from tokentape_core.text.settings import TextSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class AssemblerSettings(TextSettings):
    """Settings of one worker process.

    With other settings of the text than a session's, its samples come without `tito_session_mismatch`.

    Attributes:
        redis_url: where the sessions are kept (`tokentape_core.addresses`); may hold a password, so it is
            never shown.
        pick_hook: name of a built-in pick hook (`tree.PICKS`), or import path of a function; None is the
            default.
        finish_hook: import path of the function that finishes a tree's samples; None is the default.
        workers: assemblies that run at the same time, each in a child process of its own.
        archive_url: where sealed sessions are copied to, as fsspec understands it; None is nowhere. It may
            hold a password, so it is never shown.
        host: address of the HTTP endpoint.
        metrics_port: its port, for metrics and probes; 0 takes a free one, None opens none.
        queue_redis_url: where the queue is; None for where the sessions are. Never shown either.

    Raises:
        ValueError: `workers` is less than 1, the queue would be in a cluster, or a setting of the text has no
            such value.
    """

    redis_url: str = field(repr=False)
    workers: int = 1
    pick_hook: str | None = None
    finish_hook: str | None = None
    archive_url: str | None = field(default=None, repr=False)
    host: str = "127.0.0.1"
    metrics_port: int | None = None
    queue_redis_url: str | None = field(default=None, repr=False)

    @property
    def queue_url(self) -> str:
        """Where the queue is, whether told or not."""
        return queue_url(self.redis_url, self.queue_redis_url)

    def __post_init__(self) -> None:
        TextSettings.__post_init__(self)
        _ = self.queue_url
        if self.workers < 1:
            raise ValueError(f"workers must be at least 1, not {self.workers}")
