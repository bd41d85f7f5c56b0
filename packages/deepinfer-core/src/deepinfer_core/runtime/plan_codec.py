"""A plan as bytes: how a leader tells the ranks of its context group what to run.

    StepPlan ─► msgpack map of its fields; an array is an extension [dtype, shape, bytes], parameters are as replayed

Nothing is evaluated; the parameters of a request and the size of every array are checked where they arrive.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from deepinfer_core.errors import ConfigError, ParallelError, RequestError
from deepinfer_core.outputs.replay import params_from_json, params_to_json
from deepinfer_core.scheduling.plan import Admission, Release, StepPlan

__all__ = ["decode_plan", "encode_plan"]

_ARRAY: Final = 1  # code of the extension
_DTYPES: Final = MappingProxyType({
    np.dtype(dtype).str: np.dtype(dtype) for dtype in (np.int32, np.int64, np.uint8, np.uint32, np.bool_, np.float32)
})  # fmt: skip
_MAX_DIMENSIONS: Final = 2


def encode_plan(plan: StepPlan) -> bytes:
    """All of it."""
    admissions = [one._asdict() | {"params": params_to_json(one.params)} for one in plan.admissions]
    columns = {spec.name: getattr(plan, spec.name) for spec in fields(plan)}
    return _encoder.encode(columns | {"admissions": admissions})


def decode_plan(data: bytes) -> StepPlan:
    """What `encode_plan` was given; arrays are read-only. Raises ParallelError."""
    try:
        raw: dict[str, Any] = _decoder.decode(data)
        raw["admissions"] = tuple(
            Admission(**{**one, "params": params_from_json(one["params"])}) for one in raw["admissions"]
        )
        raw["releases"] = tuple(Release(*one) for one in raw["releases"])
        return StepPlan(**raw)
    except (msgspec.DecodeError, RecursionError, TypeError, KeyError, ValueError, ConfigError, RequestError) as error:
        raise ParallelError(f"the leader sent {len(data)} bytes that are no plan: {error}") from error


def _encode_other(value: Any) -> Any:
    """What msgpack has no form for."""
    if isinstance(value, np.ndarray):
        array: NDArray[Any] = np.ascontiguousarray(value)
        return msgspec.msgpack.Ext(_ARRAY, _encoder.encode([array.dtype.str, array.shape, array.tobytes()]))
    if isinstance(value, Mapping):
        return dict(value)  # a read-only one
    raise TypeError(f"a plan holds a {type(value).__name__}, which has no form as bytes")


def _decode_array(code: int, data: memoryview) -> NDArray[Any]:
    dtype_name, shape, content = _arrays.decode(data)
    dtype = _DTYPES.get(dtype_name)
    if code != _ARRAY or dtype is None or len(shape) > _MAX_DIMENSIONS or min(shape, default=0) < 0:
        raise ValueError(f"an array of type {dtype_name} and shape {shape} is not part of a plan")
    if math.prod(shape) * dtype.itemsize != len(content):
        raise ValueError(f"an array of shape {shape} has {len(content)} bytes")
    return np.frombuffer(content, dtype).reshape(shape)


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_other)
_decoder = msgspec.msgpack.Decoder(ext_hook=_decode_array)
_arrays = msgspec.msgpack.Decoder(tuple[str, list[int], bytes])
