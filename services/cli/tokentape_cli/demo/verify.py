"""What the demo's samples are verified on: the reference engine's own model, loaded once more."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

TOLERANCE = 1e-4
"""Nats. Decoding with a KV cache and one teacher-forced pass differ by about 4e-6 in float32; one wrong token
anywhere in the prompt moves the log-probs of all later ones by far more."""


def load_model(directory: str) -> Any:
    """The reference model in float32, which `TOLERANCE` is for."""
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
