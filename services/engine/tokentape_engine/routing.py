"""Which experts the routers of a network choose.

Shapes: `B` sequences, `T` tokens of each, `L` layers with experts, `K` experts per token.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from tokentape_engine.model import Network


def routing_shape(network: Network) -> tuple[int, int]:
    """`(L, K)` of the network; `(0, 0)` for a dense one."""
    routers = _routers(network)
    return (len(routers), routers[0].top_k) if routers else (0, 0)


@contextmanager
def watch_routers(network: Network) -> Iterator[list[Tensor]]:
    """While the block runs, note what each router chooses: int64[B * T, K], one per layer and forward pass.

    Experts are in the router's order, the strongest first. A dense network chooses nothing.
    """
    chosen: list[Tensor] = []

    def note(_router: nn.Module, _inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
        _logits, _weights, experts = output
        chosen.append(experts)

    with ExitStack() as hooks:
        for router in _routers(network):
            hooks.enter_context(router.register_forward_hook(note))
        yield chosen


def _routers(network: Network) -> list[Qwen3MoeTopKRouter]:
    return [module for module in network.modules() if isinstance(module, Qwen3MoeTopKRouter)]
