"""Is a sample what the model did? The trainer's own model is asked again, and the log-probs are compared.

Shapes: `T` tokens of the sample, `L` layers, `K` experts per token. Row `t` of the routing is what was chosen
while token `t` was read, so the last token has none.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tokentape_driver.collate import collate

if TYPE_CHECKING:
    import torch

_ROUTER: Final = "Qwen3MoeTopKRouter"
"""The class of transformers whose choice can be replaced, also as the base of another (FSDP makes such)."""
_ROWS_AT_ONCE: Final = 1024
"""Rows of logits that are in float32 at a time: a vocabulary of 150,000 takes 0.6 GB for this many."""


@dataclass(frozen=True, kw_only=True)
class Verification:
    """How far the recorded log-probs of the sampled tokens are from those that the model gives them now.

    Attributes:
        tokens: how many were compared: those with loss mask 1.
        largest: the largest absolute difference, in nats.
        mean: the mean absolute difference, in nats.
        worst: the position in `sample.tokens` of the largest difference.
        routing_changed: the number of (row, layer) pairs in which the model's own router would have chosen
            another set of experts than the recorded one, when it reads what the layers below it gave
            with recorded routing. None if none was used.
        routing_total: the number of such pairs, T - 1 times the layers with a router, or None.
    """

    tokens: int
    largest: float
    mean: float
    worst: int
    routing_changed: int | None = None
    routing_total: int | None = None


def verify(
    sample: Any, model: "torch.nn.Module", *, temperature: float = 1.0, replay_routing: bool = True
) -> Verification:
    """Passes the sample through the model once, and compares the log-prob of every sampled token.

    In float32, decoding with a KV cache and this one pass agree to about 4e-6 nats. Allow 1e-4: a wrong
    token, a wrong temperature, or routing that is off by a row moves the log-probs by more. Lower precision
    has no such bound.

    Recorded routing (`rollout_routed_experts`, for Qwen3-MoE of transformers 5) makes each router choose the
    recorded experts, weighted by its own probabilities as `norm_topk_prob` says.

    The pass runs in evaluation mode, without gradients, in the model's dtype and on its device; the softmax
    is in float32. The model is as before afterwards, also after an error; meanwhile no other thread may use
    it.

    Args:
        sample: `tokens`, `response_length`, `loss_mask` and `rollout_log_probs`, as `collate` takes them. Its
            `rollout_routed_experts`, if there are any, are int[T - 1, L, K], where L counts either all of the
            model's layers or only those with a router.
        model: a causal language model whose call takes `input_ids` and `use_cache` and returns `.logits`,
            with the weights that sampled.
        temperature: the one that the tokens were sampled at; 1.0 for greedy decoding, whose log-probs an
            engine gives unscaled.
        replay_routing: False lets the model's routers choose, and does not look at the recorded routing.

    Raises:
        ValueError: the sample has nothing to verify (no token with loss mask 1, as when it was aborted), or
            token 0 has loss mask 1, which nothing predicts; lengths or a mask that `collate` refuses; routing
            that does not fit the sample or the model, or a model without routers of the known kind; a
            temperature that is not positive.
        ImportError: torch is not installed.
    """
    try:
        import torch
    except ImportError as error:
        raise ImportError("verify needs torch: pip install '.[torch]' in a clone of Tokentape") from error
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, not {temperature}; it is 1.0 for greedy decoding")
    batch = collate([sample], packed=True)
    tokens, positions = batch["tokens"], batch["loss_mask"].nonzero()[:, 0]
    if len(positions) == 0:
        raise ValueError("there is nothing to verify: the sample has no token with loss mask 1")
    if positions[0] == 0:
        raise ValueError("token 0 has loss mask 1, but there is no token before it to predict it")
    experts = getattr(sample, "rollout_routed_experts", None) if replay_routing else None
    routing = {} if experts is None else _routing(experts, model, rows=len(tokens) - 1)

    device = next(model.parameters()).device
    with torch.no_grad(), _evaluating(model), _replaying(routing) as changed:
        logits = model(input_ids=tokens[None, :-1].to(device), use_cache=False).logits[0]
        recomputed = torch.cat(
            [
                torch.log_softmax(logits[part - 1].float() / temperature, -1)
                .gather(1, tokens[part, None].to(logits.device))[:, 0]
                .cpu()
                for part in torch.split(positions, _ROWS_AT_ONCE)
            ]
        )
    if len(changed) != len(routing):
        raise ValueError(f"the model's pass called its routers {len(changed)} times, not {len(routing)}")
    difference = (recomputed.double() - batch["rollout_log_probs"][positions]).abs()
    return Verification(
        tokens=len(positions),
        largest=float(difference.max()),
        mean=float(difference.mean()),
        worst=int(positions[difference.argmax()]),
        routing_changed=sum(int(rows.sum()) for rows in changed) if routing else None,
        routing_total=sum(len(rows) for rows in changed) if routing else None,
    )


def _routing(experts: Any, model: "torch.nn.Module", *, rows: int) -> "dict[Any, torch.Tensor]":
    """Router → the experts recorded for it, int64[rows, K]; in the order of the layers."""
    import torch

    routers: dict[int, Any] = {}
    depth = 0
    for name, module in model.named_modules():
        if any(kind.__name__ == _ROUTER for kind in type(module).__mro__):
            before, _, after = name.partition("layers.")
            routers[int(after.partition(".")[0])] = module
            depth = len(list(model.get_submodule(f"{before}layers").children()))
    if not routers:
        raise ValueError(
            f"the sample has rollout_routed_experts, but {type(model).__name__} has no {_ROUTER} to use "
            "them; replay_routing=False verifies without them"
        )
    values = np.array(experts, np.int64)
    router = next(iter(routers.values()))
    layers = {depth: list(routers), len(routers): list(range(len(routers)))}
    if values.ndim != 3 or values.shape[1] not in layers or values.shape[::2] != (rows, router.top_k):
        raise ValueError(
            f"rollout_routed_experts has shape {values.shape}; {rows + 1} tokens and this model need "
            f"[{rows}, {' or '.join(map(str, sorted(layers)))}, {router.top_k}]"
        )
    values = values[:, layers[values.shape[1]]]
    ascending = np.sort(values, -1)
    for wrong, what in (
        ((values < 0) | (values >= router.num_experts), f"an id outside 0 to {router.num_experts - 1}"),
        (ascending[..., 1:] == ascending[..., :-1], "an expert twice"),
    ):
        if wrong.any():
            row, nth, _ = np.argwhere(wrong)[0]
            raise ValueError(
                f"rollout_routed_experts names {what} in row {row}, layer {list(routers)[nth]}: "
                f"{values[row, nth].tolist()}"
            )
    return {router: torch.from_numpy(values[:, nth]) for nth, router in enumerate(routers.values())}


@contextlib.contextmanager
def _replaying(routing: "Mapping[Any, torch.Tensor]") -> "Iterator[list[torch.Tensor]]":
    """Makes each router choose what was recorded for it, while it lasts.

    Yields:
        A list to which each call of a router adds bool[rows]: would it have chosen another set of experts?
    """
    changed: list[torch.Tensor] = []

    def choose(router: Any, _inputs: Any, output: Any) -> Any:
        logits, _, own = output
        recorded = routing[router].to(logits.device)
        weights = logits.float().softmax(-1).gather(1, recorded)
        if router.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        changed.append((own.sort(-1).values != recorded.sort(-1).values).any(-1))
        return logits, weights.to(logits.dtype), recorded

    with contextlib.ExitStack() as hooks:
        for router in routing:
            hooks.enter_context(router.register_forward_hook(choose))
        yield changed


@contextlib.contextmanager
def _evaluating(model: "torch.nn.Module") -> Iterator[None]:
    """Evaluation mode (no dropout) while it lasts; then each module is in its own mode again."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
