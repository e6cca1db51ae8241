"""The proof: the model itself, asked again, gives every sampled token the recorded log-prob."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tokentape_driver import RolloutSample

TOLERANCE = 1e-4
"""Nats. Decoding with a KV cache and one teacher-forced pass differ by about 4e-6 in float32; one wrong token
anywhere in the prompt moves the log-probs of all later ones by far more."""


def load_model(directory: str) -> Any:
    """The reference model, for one forward pass per sample."""
    torch.set_num_threads(1)
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return model.eval()


def largest_difference(sample: RolloutSample, model: Any) -> float:
    """The largest difference in nats between recorded and recomputed log-probs, where the mask is 1.

    The whole sample goes through the model once (teacher forcing), at temperature 1.
    """
    tokens = torch.tensor([sample.tokens])
    with torch.inference_mode():
        logits = model(tokens).logits[0, :-1].float()
    recomputed = torch.log_softmax(logits, -1).gather(1, tokens[0, 1:, None])[:, 0]
    recorded = torch.tensor(sample.rollout_log_probs, dtype=torch.float64)
    mask = torch.tensor(sample.loss_mask, dtype=torch.bool)
    difference = (recomputed[-len(mask) :].double() - recorded).abs()[mask]
    return float(difference.max()) if len(difference) else float("inf")
