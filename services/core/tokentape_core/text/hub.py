"""Where a tokenizer is: in a directory, on the model hub, or in the hub's local cache.

The hub's own client tries again for most of a minute if nobody listens, and waits for ever for a silent hub.
So the hub is asked once, for seconds, whether it answers; if not, its client is not used.
"""

import logging
from pathlib import Path
from typing import Final

from tokentape_core.text.errors import TokenizerError

PROBE_S: Final = 5.0
"""The longest wait for a connection, and for the answer."""

log = logging.getLogger("tokentape.text")


def locate(name_or_dir: str) -> str:
    """What to load a tokenizer from: its directory, or its name if it has to come from the hub.

    What this gives for a model is its directory in the local cache if the hub does not answer. Whoever starts
    several processes calls it once for all. Raises `TokenizerError` if there is neither.
    """
    directory = Path(name_or_dir).expanduser()
    if directory.is_dir():
        return str(directory)
    if name_or_dir.startswith(("/", ".", "~")):
        raise TokenizerError(f"no tokenizer at {name_or_dir}: there is no such directory")
    away = _why_away()
    return name_or_dir if away is None else _cached(name_or_dir, away)


def cannot_load(name_or_dir: str, reason: str) -> TokenizerError:
    """The error that says what to do."""
    return TokenizerError(
        f"cannot load a tokenizer from {name_or_dir}: {reason}. Give a directory that holds tokenizer.json "
        "and tokenizer_config.json, or the name of a model that is cached or can be downloaded"
    )


def _cached(model: str, away: str) -> str:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        file = try_to_load_from_cache(model, "tokenizer_config.json")
    except HFValidationError:
        raise cannot_load(model, "it is no directory, and no model can have that name") from None
    if not isinstance(file, str):
        raise cannot_load(model, f"{away}, and it is not in the local cache")
    log.info("%s: the tokenizer of %s is taken from the local cache", away, model)
    return str(Path(file).parent)


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
