"""Filters of rows with different parameters. They are an operation of the contract, so they lie with the reference
operations.
"""

from __future__ import annotations

from deepinfer_core.kernels.reference.columns import rows_of, to_device
from deepinfer_core.kernels.reference.filters import RowFilters, apply_temperature

__all__ = ["RowFilters", "apply_temperature", "rows_of", "to_device"]
