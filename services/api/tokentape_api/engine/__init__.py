"""Inference engines: the port (`port`) and its adapters."""

from tokentape_api.engine.port import Engine, EngineRefusal, Generated
from tokentape_api.engine.sglang import SGLangEngine

__all__ = ["Engine", "EngineRefusal", "Generated", "SGLangEngine"]
