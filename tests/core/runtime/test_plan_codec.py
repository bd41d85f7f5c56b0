"""A plan survives its way over the wire, whatever is in it; what is damaged is named."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import pytest

from deepinfer_core import SamplingParams, StructuredOutput
from deepinfer_core.errors import ParallelError
from deepinfer_core.runtime.plan_codec import decode_plan, encode_plan
from deepinfer_core.scheduling.plan import Admission, Release, StepPlan
from tests.core.harness import Chunk, plan_of


def full_plan() -> StepPlan:
    """With something in every field."""
    params = SamplingParams(
        temperature=0.7,
        top_p=0.9,
        stop=["end", "stop"],
        stop_token_ids=[4, 5],
        logit_bias={3: -1.5, 8: 2.0},
        max_tokens=17,
        logprobs=3,
        structured=StructuredOutput(json={"type": "object", "properties": {"é": {"type": "integer"}}}),
    )
    plain = Admission(0, 1, 2**40, np.arange(9), 7, 0, SamplingParams(min_tokens=2), 2**64 - 1)
    image = plain._replace(
        slot=2,
        params=params,
        content=np.array([0, 1, 1, 0], np.uint8),
        embedded_positions=np.array([1, 2]),
        embeddings=np.full((2, 3), -0.5, np.float32),
    )
    plan = plan_of([Chunk(0, 5, [1, 2, 3], 4), Chunk(2, 0, [9], 0, 1)], step=7, padded_rows=8)
    masks = {2: np.array([2**32 - 1, 5], np.uint32), 3: np.zeros(2, np.uint32)}
    return replace(plan, admissions=(plain, image), releases=(Release(1, 3),), grammar_masks=masks)


def assert_same(value: Any, other: Any) -> None:
    if isinstance(value, np.ndarray):
        assert value.dtype == other.dtype
        assert np.array_equal(value, other)
    elif is_dataclass(value):
        assert type(value) is type(other)
        for spec in fields(value):
            assert_same(getattr(value, spec.name), getattr(other, spec.name))
    elif isinstance(value, tuple):
        assert type(value) is type(other)
        assert len(value) == len(other)
        for one, two in zip(value, other, strict=True):
            assert_same(one, two)
    elif isinstance(value, dict):
        assert value.keys() == other.keys()
        for key, one in value.items():
            assert_same(one, other[key])
    else:
        assert value == other


def test_every_field_of_a_plan_arrives() -> None:
    plan = full_plan()
    assert_same(plan, decode_plan(encode_plan(plan)))


def test_a_dummy_step_arrives() -> None:
    nothing = plan_of([Chunk(0, 0, [])])
    plan = replace(nothing, is_dummy=True, block_tables=np.zeros((1, 0), np.int32))
    assert_same(plan, decode_plan(encode_plan(plan)))


@pytest.mark.bad_input
@pytest.mark.parametrize("count", [0, 1, 10, 200])
def test_a_plan_that_is_cut_off_is_an_error(count: int) -> None:
    with pytest.raises(ParallelError, match=f"{count} bytes that are no plan"):
        decode_plan(encode_plan(full_plan())[:count])


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"<i8", b"|O8"),  # an array of objects
        (b"row_token", b"row_taken"),
        (b"temperature\xcb\x3f", b"temperature\xcb\xff"),  # a negative number
    ],
)
def test_a_plan_with_something_wrong_in_it_is_an_error(old: bytes, new: bytes) -> None:
    data = encode_plan(full_plan())
    assert old in data
    with pytest.raises(ParallelError, match="no plan"):
        decode_plan(data.replace(old, new, 1))


@pytest.mark.bad_input
def test_an_array_that_is_not_as_long_as_it_says_is_an_error() -> None:
    data = encode_plan(full_plan())
    at = data.index(b"<i8") + 3
    assert data[at : at + 2] == b"\x91\x04"  # a list of one number, 4 rows
    with pytest.raises(ParallelError, match=r"an array of shape \[5\] has 32 bytes"):
        decode_plan(data[: at + 1] + b"\x05" + data[at + 2 :])


@pytest.mark.bad_input
def test_what_is_not_even_a_map_is_an_error() -> None:
    with pytest.raises(ParallelError, match="no plan"):
        decode_plan(b"\x93\x01\x02\x03")
