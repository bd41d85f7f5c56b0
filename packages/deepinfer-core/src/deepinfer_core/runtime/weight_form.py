"""How an accelerator holds the FP8 and FP4 weights of large products. The form is memory and speed, never an answer.

    bfloat16   all decoded when they are loaded
    experts    routed experts in the bytes of the checkpoint, dense products in bfloat16: faster while experts have few
               rows each, a little slower where they have many (docs/kernels.md)
    packed     dense products in their bytes, too: the least memory

`auto` takes the first of them whose weights leave half of the device to the caches, else the least that can be had.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from deepinfer_core.config.engine import EngineConfig, WeightForm
from deepinfer_core.config.model import ModelConfig
from deepinfer_core.errors import KernelError
from deepinfer_core.kernels.contract import CODED_OPS, TakesPacked
from deepinfer_core.kernels.reference.packed import Packing
from deepinfer_core.kernels.registry import KernelChoice, OpSource
from deepinfer_core.runtime.memory import total_bytes, weights_bytes

__all__ = ["PACKINGS", "choose_packing", "first_that_leaves_room"]

PACKINGS: Mapping[WeightForm, Packing] = {"bfloat16": "none", "experts": "experts", "packed": "products"}
_DECODING_OPS: Mapping[Packing, frozenset[str]] = {"experts": frozenset(("run_experts",)), "products": CODED_OPS}
_WEIGHTS_SHARE = 0.5  # of a device's memory


def choose_packing(
    config: EngineConfig, choice: KernelChoice, op_sources: Sequence[OpSource], dtype: torch.dtype, model: ModelConfig
) -> Packing:
    """What stays packed. Raises KernelError where the setting asks for a form that the kernels don't take."""
    if config.float8_products:
        return "products"  # coded from packed ones, layer by layer
    if config.weight_form != "auto":
        packing = PACKINGS[config.weight_form]
        reason = _reason_against(packing, choice, op_sources, dtype)
        if reason is not None:
            raise KernelError(
                f"weight_form is {config.weight_form!r}, and {reason}; take 'bfloat16', or leave it at 'auto'"
            )
        return packing
    offered: list[Packing] = [
        one for one in PACKINGS.values() if _reason_against(one, choice, op_sources, dtype) is None
    ]
    if offered == ["none"]:
        return "none"
    return first_that_leaves_room(
        offered,
        lambda packing: weights_bytes(config, model, "bfloat16" if packing == "none" else packing),
        total_bytes(choice.device),
    )


def first_that_leaves_room(
    offered: Sequence[Packing], bytes_of: Callable[[Packing], int], device_bytes: int
) -> Packing:
    """The first whose weights take at most half of the device, else the last; `offered` is in falling order of bytes
    and not empty.
    """
    for packing in offered:
        if bytes_of(packing) <= _WEIGHTS_SHARE * device_bytes:
            return packing
    return offered[-1]


def _reason_against(
    packing: Packing, choice: KernelChoice, op_sources: Sequence[OpSource], dtype: torch.dtype
) -> str | None:
    """None where the kernels read weights that are packed so."""
    if packing == "none":
        return None
    if not isinstance(choice.provider, TakesPacked):
        return f"the kernels of {choice.name} decode no weights"
    if dtype != torch.bfloat16:
        return f"they decode to bfloat16, and dtype is {str(dtype).removeprefix('torch.')}"
    ours = {source.op for source in op_sources if source.provider == choice.provider.name}
    lacking = sorted(_DECODING_OPS[packing] - (ours & choice.provider.packed_ops))
    return f"the kernels of {choice.name} have no such form of {', '.join(lacking)}" if lacking else None
