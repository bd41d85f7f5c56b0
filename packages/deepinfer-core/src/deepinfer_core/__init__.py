"""DeepInfer's engine: DeepSeek-V4.1-Flash on any backend that fills the table of `deepinfer_core.kernels`.

    from deepinfer_core import LLM, SamplingParams

Names are loaded when they are first used, so importing the package costs nothing and needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepinfer_core.config.engine import EngineConfig
    from deepinfer_core.config.sampling import SamplingParams, StructuredOutput
    from deepinfer_core.engine import Engine
    from deepinfer_core.llm import LLM
    from deepinfer_core.outputs import Chunk, CompletionOutput, Logprob, RequestOutput
    from deepinfer_core.text import Tokenizer

__all__ = [
    "LLM",
    "Chunk",
    "CompletionOutput",
    "Engine",
    "EngineConfig",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutput",
    "Tokenizer",
]

__version__ = "0.1.0"

_MODULE_OF = {
    "LLM": "llm",
    "Chunk": "outputs",
    "CompletionOutput": "outputs",
    "Engine": "engine",
    "EngineConfig": "config.engine",
    "Logprob": "outputs",
    "RequestOutput": "outputs",
    "SamplingParams": "config.sampling",
    "StructuredOutput": "config.sampling",
    "Tokenizer": "text",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
