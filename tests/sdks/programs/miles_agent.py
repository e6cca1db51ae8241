"""An agent as Miles calls it."""

from typing import Any

from tests.sdks.programs.openai_sdk import by_hand


async def run(
    base_url: str, prompt: Any, request_kwargs: dict[str, Any], metadata: dict[str, Any], **_: Any
) -> dict[str, Any]:
    """Plays the episode with the sampling settings of the trainer."""
    await by_hand(f"{base_url}/v1", stream=False, **request_kwargs)
    return {"reward": 0.5, "base_url": base_url}
