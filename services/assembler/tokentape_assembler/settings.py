"""What a worker process is started with."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class AssemblerSettings:
    """Settings of one worker process.

    Attributes:
        redis_url: `redis://`, `rediss://` or `unix://`; may hold a password, so it is never shown.
        tokenizer: directory or name of the model's tokenizer, which decodes the samples' text.
        workers: assemblies that run at the same time, each in a child process of its own.

    Raises:
        ValueError: `workers` is less than 1.
    """

    redis_url: str = field(repr=False)
    tokenizer: str
    workers: int = 1

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ValueError(f"workers must be at least 1, not {self.workers}")
