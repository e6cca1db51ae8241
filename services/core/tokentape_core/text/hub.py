"""The model hub: asked once, for seconds, whether it answers, before its own client asks many times."""

import logging
from pathlib import Path
from typing import Final

PROBE_S: Final = 5.0
"""The longest wait for a connection, and for the answer."""

log = logging.getLogger("tokentape.text")


def source(model: str) -> str:
    """What a model is loaded from: its name if the hub answers, else its directory in the local cache.

    The hub's own client tries again for most of a minute if nobody listens, and waits for ever for a silent
    hub. Raises `ConnectionError` if the hub is away and the model is not in the cache.
    """
    from huggingface_hub import try_to_load_from_cache

    away = _why_away()
    if away is None:
        return model
    cached = try_to_load_from_cache(model, "tokenizer_config.json")
    if not isinstance(cached, str):
        raise ConnectionError(f"{away}, and it is not in the local cache")
    log.info("%s: the tokenizer of %s is taken from the local cache", away, model)
    return str(Path(cached).parent)


def _why_away() -> str | None:
    """Why the hub cannot be asked for a model; None if it can."""
    from huggingface_hub import constants, get_session, is_offline_mode

    if is_offline_mode():
        return "HF_HUB_OFFLINE is set"
    hub = f"the model hub {constants.ENDPOINT}"
    try:
        status = get_session().head(constants.ENDPOINT, timeout=PROBE_S).status_code
    except Exception as error:  # whatever its HTTP client raises
        return f"{hub} does not answer ({str(error) or type(error).__name__})"
    return f"{hub} answers with status {status}" if status >= 500 else None
