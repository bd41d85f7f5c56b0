"""Seeds: what is derived from what."""

from __future__ import annotations

import pytest

from deepinfer_core.sampling import fork_seed, request_seed
from tests.core.sampling import oracle


@pytest.mark.parametrize("seed", [0, 12345, 2**64 - 1])
def test_forks_are_the_first_two_words_of_the_fork_stream(seed: int) -> None:
    assert fork_seed(seed, 0) == seed
    for sample in (1, 2, 1000):
        low, high, _, _ = oracle.philox((sample, 0, 0, 1), (seed & oracle.MASK, seed >> 32))
        assert fork_seed(seed, sample) == low + (high << 32)


def test_given_seeds_are_taken_modulo_two_to_the_64() -> None:
    assert request_seed(-1, 7, 3) == 2**64 - 1
    assert request_seed(9, None, 0) == 9


def test_arrival_numbers_give_different_seeds_that_repeat() -> None:
    seeds = [request_seed(None, 7, number) for number in [*range(1000), 2**32, 2**32 + 1]]
    assert len(set(seeds)) == len(seeds)
    assert seeds[:5] == [request_seed(None, 7, number) for number in range(5)]
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_without_an_engine_seed_they_come_from_the_operating_system() -> None:
    assert len({request_seed(None, None, 0) for _ in range(100)}) == 100
