"""Temperature, top-k, top-p and min-p of rows with different parameters: each step runs on the rows that use it.

    x / T  ->  top-k    the k largest, ties to the lower id
           ->  top-p    p = softmax of the rest; the smallest set in the order (p descending, id ascending), summed in
                        that order in float64, that reaches top_p; the token that crosses it stays
           ->  min-p    p_v >= min_p times the largest p

Every function keeps the promise of the row: what becomes of a row does not depend, bit for bit, on the other rows.
Reductions that a library may split by the shape of the batch (float sums) are therefore scans along the row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer_core.kernels.reference.columns import rows_of, to_device

__all__ = ["RowFilters", "apply_temperature", "filter_logits", "keep_min_p", "keep_top_k", "keep_top_p", "top_k_mask"]

_NEVER = float("-inf")

# torch.topk is fast for a share of the row below 1 / this.
_FEW_SHARE = 64


@dataclass(frozen=True, slots=True)
class RowFilters:
    """Parameters of R rows, on the host; 0, 1 and 0 turn top_k, top_p and min_p off."""

    temperature: NDArray[np.float32]  # [R] above 0
    top_k: NDArray[np.int64]  # [R]
    top_p: NDArray[np.float64]  # [R]
    min_p: NDArray[np.float64]  # [R]

    @classmethod
    def of(cls, records: NDArray[np.void]) -> RowFilters:
        """From records with fields of these names, one a row."""
        return cls(records["temperature"], records["top_k"], records["top_p"], records["min_p"])

    @property
    def heats(self) -> bool:
        """Whether any row has a temperature other than 1."""
        return bool((self.temperature != 1.0).any())

    @property
    def chooses(self) -> bool:
        """Whether any row may not draw every id."""
        return bool((self.top_k > 0).any() or (self.top_p < 1.0).any() or (self.min_p > 0.0).any())


def filter_logits(logits: Tensor, filters: RowFilters) -> Tensor:
    """Logits [R, ids] float32 -> those that softmax turns into the distribution to draw from; what may not be drawn is
    -inf. The input itself where nothing changes it.
    """
    if filters.heats:
        logits = apply_temperature(logits, to_device(filters.temperature, logits.device))
    k = np.minimum(filters.top_k, logits.shape[1])
    logits = _on_some(logits, k > 0, keep_top_k, k, int(k.max(initial=0)))
    logits = _on_some(logits, filters.top_p < 1.0, keep_top_p, filters.top_p)
    return _on_some(logits, filters.min_p > 0.0, keep_min_p, filters.min_p)


def _on_some(
    logits: Tensor, chosen: NDArray[np.bool_], step: Callable[..., Tensor], parameter: NDArray[Any], *more: int
) -> Tensor:
    """Apply `step(rows, parameter, *more)` to the chosen rows."""
    index = np.flatnonzero(chosen)
    if not index.size:
        return logits
    result = step(rows_of(logits, index), to_device(parameter[index], logits.device), *more)
    return result if len(index) == len(logits) else logits.index_copy(0, to_device(index, logits.device), result)


def apply_temperature(logits: Tensor, temperature: Tensor) -> Tensor:
    """x / T. temperature: float32 [R], above 0."""
    return logits / temperature[:, None]


def top_k_mask(logits: Tensor, k: Tensor, max_k: int) -> Tensor:
    """True for exactly k entries a row: the largest, ties to the lower id. k: int64 [R], 1 <= k <= max_k <= V."""
    return _largest_mask(logits, _largest_values(logits, max_k), k)


def keep_top_k(logits: Tensor, k: Tensor, max_k: int) -> Tensor:
    """-inf outside the k largest of each row. k and max_k as for `top_k_mask`."""
    return logits.masked_fill(~top_k_mask(logits, k, max_k), _NEVER)


def keep_top_p(logits: Tensor, top_p: Tensor) -> Tensor:
    """-inf outside the smallest set that holds `top_p` of the probability. top_p: float64 [R], in (0, 1].

    That set is the n largest entries, ties to the lower id, so sorting values without their ids is enough to find n.
    """
    values = _largest_values(logits, logits.shape[1])
    total = _weights(values, values[:, :1]).cumsum(1)  # [R, V]
    wanted = top_p[:, None] * total[:, -1:]
    num_kept = (total[:, :-1] < wanted).sum(1) + 1  # an entry stays if the ones before it do not reach top_p
    return logits.masked_fill(~_largest_mask(logits, values, num_kept), _NEVER)


def keep_min_p(logits: Tensor, min_p: Tensor) -> Tensor:
    """-inf where the probability is below `min_p` times the largest. min_p: float64 [R], in [0, 1]."""
    weights = _weights(logits, logits.amax(1, keepdim=True))
    return logits.masked_fill(weights < min_p[:, None], _NEVER)


def _weights(values: Tensor, largest: Tensor) -> Tensor:
    """exp(x - max) in float64: probabilities up to a factor a row, 1 for the largest.

    The difference is taken in float64, where it is exact: logits that differ keep their order as probabilities.
    """
    return (values.double() - largest).exp_()


def _largest_values(logits: Tensor, count: int) -> Tensor:
    """The `count` largest values of each row, descending: [R, count]."""
    if logits.device.type != "cpu" or count * _FEW_SHARE <= logits.shape[1]:
        return logits.topk(count, dim=1).values
    # On a CPU numpy sorts values many times faster than torch, which carries indices along.
    ascending = np.sort(logits.detach().float().numpy(), axis=1)
    return torch.from_numpy(ascending[:, ::-1][:, :count].copy())


def _largest_mask(logits: Tensor, values: Tensor, k: Tensor) -> Tensor:
    """True for the k largest entries a row, ties to the lower id; `values`: the row's largest, descending."""
    threshold = values.gather(1, k[:, None] - 1)  # [R, 1]
    above, equal = logits > threshold, logits == threshold
    num_equal = k[:, None] - above.sum(1, keepdim=True)
    return above | equal & (equal.cumsum(1) <= num_equal)
