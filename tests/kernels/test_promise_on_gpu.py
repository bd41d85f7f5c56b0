"""The promise on a GPU: a request's answer does not depend on load, settings and disturbances, with our kernels, in
graphs and without, with either kind of products. tests/core/engine/test_determinism.py holds the CPU to the same.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.engine.random_traffic import SETTINGS, Setup, preempted_steps, random_traffic, setups
from tests.core.engine.test_determinism import play_crowd
from tests.core.engine.traces import Oracle, Traffic, play_anywhere
from tests.fixture_models import FIXTURES

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")


@pytest.fixture(scope="module", params=[False, True], ids=["bfloat16", "float8_products"])
def oracle(request: pytest.FixtureRequest) -> Iterator[Oracle]:
    """Each request alone on the same GPU, without graphs."""
    numbers = {"accelerator": "nvidia", "batch_invariant": True, "float8_products": request.param}
    made = Oracle(FIXTURES / "tiny-a", 640, **numbers, enforce_eager=True)
    yield made
    made.close()


@pytest.mark.parametrize("part", range(4))  # for as many processes
@settings(SETTINGS, max_examples=6)
@given(setups, random_traffic(6), preempted_steps, st.booleans())
def test_answers_do_not_depend_on_load_settings_and_disturbances(
    oracle: Oracle, part: int, setup: Setup, traffic: list[Traffic], preempts: frozenset[int], eager: bool
) -> None:
    play_anywhere(oracle, setup, traffic, preempts, enforce_eager=eager)


def test_a_crowd_with_hits_preemptions_and_drafts_gets_the_answers_of_each_request_alone(oracle: Oracle) -> None:
    play_crowd(oracle, **oracle.settings | {"enforce_eager": False})
