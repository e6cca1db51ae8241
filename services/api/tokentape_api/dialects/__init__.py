"""The protocols that agent programs speak: a module for each, and a row in `DIALECTS`."""

import re
from typing import Final

from tokentape_api.dialects import chat
from tokentape_api.dialects.port import Dialect

DIALECTS: tuple[Dialect, ...] = (chat.DIALECT,)

_BELOW_SESSION: Final = re.compile("/sessions/[^/]+/(.+)")


def dialect_at(path: str) -> Dialect | None:
    """The dialect of a request's path, if it is one's."""
    found = _BELOW_SESSION.fullmatch(path)
    return next((dialect for dialect in DIALECTS if found and found[1] == dialect.path), None)
