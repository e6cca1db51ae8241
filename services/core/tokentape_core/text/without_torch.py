"""Start-up of a process that tokenizes and never computes with a model."""

import os
import sys


def without_torch() -> None:
    """Keeps transformers from importing torch, where that is installed: it costs seconds and 180 MB.

    For a whole process, before it imports transformers. torch cannot be imported afterwards.
    """
    sys.modules["torch"] = None  # type: ignore[assignment]
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
