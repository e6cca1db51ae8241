"""Inference engines: the port (`port`) and its adapters."""

from collections.abc import Mapping
from typing import Final

from tokentape_api.engine.client import HttpEngine
from tokentape_api.engine.port import Check, Engine, EngineRefusal, Generated, Network, Wanted
from tokentape_api.engine.sglang import SGLangEngine
from tokentape_api.engine.vllm import VLLMEngine
from tokentape_api.settings import ApiSettings

ADAPTERS: Final[Mapping[str, type[HttpEngine]]] = {"sglang": SGLangEngine, "vllm": VLLMEngine}
"""Engine (of `tokentape_api.settings.ENGINES`) → adapter."""


def connect_engine(settings: ApiSettings, network: Network | None = None) -> HttpEngine:
    """The engine of these settings. Connects to nothing yet.

    Args:
        network: None for the real one.
    """
    return ADAPTERS[settings.engine](
        settings.engine_url,
        timeout_s=settings.engine_timeout_s,
        replay=wanted(settings),
        incremental=settings.replay == "incremental",
        network=network,
    )


def wanted(settings: ApiSettings) -> dict[str, Wanted]:
    """The routing replay payloads that turns ask for, each from its first row on."""
    kinds = {}
    if settings.replay != "off":
        kinds["routed_experts"] = Wanted(layers=settings.replay_layers)
    if settings.indexer_topk == "on":
        kinds["indexer_topk"] = Wanted()
    return kinds


__all__ = [
    "Check",
    "Engine",
    "EngineRefusal",
    "Generated",
    "Network",
    "SGLangEngine",
    "VLLMEngine",
    "Wanted",
    "connect_engine",
    "wanted",
]
