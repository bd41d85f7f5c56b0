"""Expert exchange by DeepEP (`deepinfer-ep` 2.5, import deep_ep), in place of all_to_all. **Never run**: no machine
with the NCCL that it needs was at hand; its calls are tested against a recording fake with the published signatures.

    pair (row, choice) = one token with one expert:   dispatch(x [R k, D], slots [R k, 1], weights [R k, 1])
                                                      combine(outputs)  ->  [R k, D], one output a pair, nothing added

DeepEP's combine adds what the experts of a token give, in an order of its own. As every pair is a token here, it has
nothing to add: the sum is this engine's, in ascending expert id, and tokens stay the same for any number of ranks. The
price is that a row travels once an expert instead of once a rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module, metadata
from typing import Any

import torch
from torch import Tensor

from deepinfer_core.errors import KernelError, ParallelError
from deepinfer_core.parallel.communicator import Communicator
from deepinfer_core.parallel.experts import DispatchedRows, RowOrigin, SharedExperts
from deepinfer_core.parallel.placement_tables import PlacementTable

__all__ = ["DeepEpExperts", "why_no_deepep"]

_DISTRIBUTION = "deepinfer-ep"
_OLDEST = (2, 5)
_OLDEST_NCCL = (2, 32, 3)


def why_no_deepep(device: torch.device) -> str | None:
    """None where DeepEP can be tried, else what is missing. Imports nothing of it."""
    if device.type != "cuda":
        return f"DeepEP runs on CUDA devices, and this is {device}"
    try:
        version = metadata.version(_DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return f"{_DISTRIBUTION} is not installed (the package that PyPI calls deep-ep is an obsolete one)"
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    if numbers < _OLDEST:
        return f"{_DISTRIBUTION} {version} is installed; {'.'.join(map(str, _OLDEST))} or later is needed"
    nccl: tuple[int, ...] = import_module("torch.cuda.nccl").version()
    if nccl < _OLDEST_NCCL:
        return f"NCCL {'.'.join(map(str, nccl))} is loaded; DeepEP needs {'.'.join(map(str, _OLDEST_NCCL))} or later"
    return None


@dataclass(frozen=True, eq=False)
class _Sent(DispatchedRows):
    layer: int
    handle: Any  # DeepEP's
    num_rows: int
    num_chosen: int


class DeepEpExperts(SharedExperts):
    """A step goes as with `SharedExperts`. most_rows: of a step, draft blocks included; the same on every rank.

    Raises KernelError where a layer's slots are not spread evenly: DeepEP knows only equal shares.
    """

    def __init__(
        self,
        comm: Communicator,
        tables: Mapping[int, PlacementTable],
        num_slots: int,
        *,
        group: Any,
        most_rows: int,
        num_chosen: int,
        hidden_size: int,
    ) -> None:
        super().__init__(comm, tables, num_slots)
        for layer, table in tables.items():
            counts = torch.bincount(table.owner, minlength=comm.size)
            if not bool((counts == counts[0]).all()):
                raise KernelError(
                    f"layer {layer} has {len(table.owner)} expert slots over {comm.size} ranks; DeepEP needs a "
                    "multiple: change num_extra_experts, or take expert_transport='torch'"
                )
        self._buffer = import_module("deep_ep").EPBuffer(
            group,
            num_max_tokens_per_rank=most_rows * num_chosen,
            hidden=hidden_size,
            num_topk=1,
            use_fp8_dispatch=False,
            deterministic=True,
        )
        self._sent: _Sent | None = None

    def dispatch(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor, origin: RowOrigin) -> DispatchedRows:
        """See `ExpertExchange`. x must be bfloat16."""
        self.take_turn(layer)
        rows, k = ids.shape
        table = self.tables[layer]
        owner, local = self.locate(layer, ids, origin)
        slot = owner * (len(table.owner) // self.comm.size) + local  # contiguous: the same slots on every rank
        # Nothing is asynchronous here: the calls are queued behind the work of the current stream.
        received, slots_in, weights_in, handle, _ = self._buffer.dispatch(
            x.repeat_interleave(k, 0),
            topk_idx=slot.view(-1, 1),
            topk_weights=weights.reshape(-1, 1),
            num_experts=len(table.owner),
            expert_alignment=1,
            do_cpu_sync=True,
        )
        self._sent = _Sent(received, slots_in, weights_in, layer, handle, rows, k)
        if self.observer is not None:
            self.observer.experts_begin(layer)
        return self._sent

    def combine(self, sent: DispatchedRows, pairs: Tensor) -> Tensor:
        """See `ExpertExchange`."""
        if sent is not self._sent or self._sent is None:
            raise ParallelError("outputs are combined that were not dispatched last; this is a bug in the engine")
        last, self._sent = self._sent, None
        if self.observer is not None:
            self.observer.experts_end(last.layer)
        outputs, _, _ = self._buffer.combine(pairs[:, 0].contiguous(), handle=last.handle)
        return outputs.view(last.num_rows, last.num_chosen, pairs.shape[-1])

    def unfinished(self) -> list[int]:
        """See `SharedExperts`."""
        if self._sent is not None:
            sent = self._sent
            self.combine(sent, sent.rows.new_zeros(len(sent.rows), 1, sent.rows.shape[1]))
        return super().unfinished()
