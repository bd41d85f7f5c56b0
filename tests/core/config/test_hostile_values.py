"""Whatever a parameter or setting is given, it is taken, or refused by an error of `errors`: no other exception."""

from __future__ import annotations

import dataclasses
import math
from decimal import Decimal
from typing import Any

import numpy as np
import pytest

from deepinfer_core.config.checks import shown
from deepinfer_core.config.engine import EngineConfig, all_settings
from deepinfer_core.config.sampling import SamplingParams, StructuredOutput
from deepinfer_core.errors import ConfigError, RequestError

pytestmark = pytest.mark.bad_input


class Unprintable:
    """An object that cannot be shown in an error message."""

    def __repr__(self) -> str:
        raise RuntimeError("on purpose")


HUGE = 10**5000  # more digits than Python writes, and beyond every float
VALUES: list[Any] = [
    HUGE, -HUGE, 10**400, 2**64, -(2**63) - 1, math.nan, math.inf, True, False, "", "\0", "\ud800", b"x", [], {}, (),
    [None], [HUGE], [True], ["\ud800"], {1: HUGE}, {HUGE: 1}, {True: 1}, np.array([1, 2]), np.bool_(True), Decimal(1),
    1j, object(), Unprintable(), Unprintable, ["a"] * 10_000, "a" * 5_000, range(5),
]  # fmt: skip
FORMS = ("json", "json_object", "regex", "grammar", "choice")


@pytest.mark.parametrize(
    "name", [*(one.name for one in dataclasses.fields(SamplingParams)), "seq_seed", "top_logprobs", "so_args"]
)
def test_a_sampling_parameter_takes_or_refuses(name: str) -> None:
    refused = 0
    for value in VALUES:
        try:
            SamplingParams(**{name: value})
        except RequestError:
            refused += 1
    assert refused >= len(VALUES) // 2


@pytest.mark.parametrize("name", [one.name for one in dataclasses.fields(StructuredOutput)])
def test_a_form_takes_or_refuses(name: str) -> None:
    refused = 0
    for value in VALUES:
        try:
            StructuredOutput(**{"regex": "a", name: value} if name not in FORMS else {name: value})
        except RequestError:
            refused += 1
    assert refused >= len(VALUES) // 2


@pytest.mark.parametrize("name", list(all_settings()))
def test_a_setting_takes_or_refuses(name: str) -> None:
    refused = 0
    for value in VALUES:
        try:
            EngineConfig.from_settings(**{name: value})
        except ConfigError:
            refused += 1
    assert refused >= len(VALUES) // 2


@pytest.mark.parametrize("value", [0, False, "", {}], ids=repr)
def test_an_empty_value_of_the_wrong_type_is_not_taken_for_no_stop_tokens(value: Any) -> None:
    with pytest.raises(RequestError, match="stop_token_ids"):
        SamplingParams(stop_token_ids=value)


@pytest.mark.parametrize(
    "make",
    [
        lambda: SamplingParams(stop=["a\ud800"]),
        lambda: StructuredOutput(choice=["a\ud800"]),
        lambda: StructuredOutput(regex="a\ud800"),
        lambda: StructuredOutput(json={"const": "\ud800"}),
        lambda: StructuredOutput(json='{"const": "\\ud800"}'),
    ],
    ids=["stop", "choice", "regex", "json", "json-escape"],
)
def test_a_lone_surrogate_is_refused_because_no_token_can_spell_it(make: Any) -> None:
    with pytest.raises(RequestError, match="lone surrogate at character"):
        make()


def test_what_cannot_be_shown_is_named_by_its_type_and_size() -> None:
    assert shown(HUGE) == "<int of 16610 bits>"
    assert shown(Unprintable()) == "<Unprintable>"
