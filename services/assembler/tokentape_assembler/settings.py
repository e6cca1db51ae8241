"""What a worker process is started with."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class AssemblerSettings:
    """Settings of one worker process.

    Attributes:
        redis_url: `redis://`, `rediss://` or `unix://`; may hold a password, so it is never shown.
        tokenizer: directory or name of the model's tokenizer, which decodes the samples' text.
        pick_hook: import path of the function that picks a tree's leaves; None is the default.
        finish_hook: import path of the function that finishes a tree's samples; None is the default.
        workers: assemblies that run at the same time, each in a child process of its own.

    Raises:
        ValueError: `workers` is less than 1.
    """

    redis_url: str = field(repr=False)
    tokenizer: str
    workers: int = 1
    pick_hook: str | None = None
    finish_hook: str | None = None

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ValueError(f"workers must be at least 1, not {self.workers}")
