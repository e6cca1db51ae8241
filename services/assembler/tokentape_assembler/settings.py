"""What a worker process is started with."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tokentape_core.addresses import queue_url
from tokentape_core.text.literal import AS_TEMPLATE
from tokentape_core.text.load import TextSettings
from tokentape_core.text.tools import AS_SENT


@dataclass(frozen=True, slots=True, kw_only=True)
class AssemblerSettings:
    """Settings of one worker process.

    Attributes:
        redis_url: where the sessions are kept (`tokentape_core.addresses`); may hold a password, so it is
            never shown.
        tokenizer: directory or name of the model's tokenizer, which decodes the samples' text.
        chat_template, family, chat_template_kwargs, tools_form, end_tokens, special_tokens_in_text: as the
            API has them (`TextSettings`). With others than a session's, samples come without
            `tito_session_mismatch`.
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
    tokenizer: str
    chat_template: Path | None = None
    family: str = "default"
    chat_template_kwargs: Mapping[str, object] = field(default_factory=dict)
    tools_form: str = AS_SENT
    end_tokens: tuple[str, ...] = ()
    special_tokens_in_text: str = AS_TEMPLATE
    workers: int = 1
    pick_hook: str | None = None
    finish_hook: str | None = None
    archive_url: str | None = field(default=None, repr=False)
    host: str = "127.0.0.1"
    metrics_port: int | None = None
    queue_redis_url: str | None = field(default=None, repr=False)

    @property
    def text(self) -> TextSettings:
        """What the renderer is made from."""
        return TextSettings(
            tokenizer=self.tokenizer,
            chat_template=self.chat_template,
            family=self.family,
            template_kwargs=self.chat_template_kwargs,
            tools_form=self.tools_form,
            end_tokens=self.end_tokens,
            special_tokens_in_text=self.special_tokens_in_text,
        )

    @property
    def queue_url(self) -> str:
        """Where the queue is, whether told or not."""
        return queue_url(self.redis_url, self.queue_redis_url)

    def __post_init__(self) -> None:
        _ = self.queue_url, self.text
        if self.workers < 1:
            raise ValueError(f"workers must be at least 1, not {self.workers}")
