"""Noise: published answers of Philox, hand-computed answers of G, and what a row's noise may depend on."""

from __future__ import annotations

import math

import pytest
import torch

from deepinfer_core.sampling.philox import gumbel, gumbel_noise, gumbel_noise_at, philox4x32, random_words, uniform
from deepinfer_core.sampling.streams import Stream
from tests.core.sampling import oracle

MASK = 0xFFFFFFFF

# Random123 1.14, tests/kat_vectors, "philox4x32 10".
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((MASK, MASK, MASK, MASK), (MASK, MASK), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_known_answers_of_random123(
    counter: tuple[int, int, int, int], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    assert philox4x32(counter, key) == expected
    in_tensors = philox4x32(tuple(torch.tensor([c]) for c in counter), tuple(torch.tensor([k]) for k in key))
    assert tuple(int(word) for word in in_tensors) == expected


# -ln(-ln((w + 0.5) / 2^32)) with 60 digits (decimal), rounded to float32.
@pytest.mark.parametrize(
    ("w", "expected"), [(0, -3.1299946308135986), (2**32 - 128, 17.33259391784668), (2**32 - 1, 22.873857498168945)]
)
def test_gumbel_noise_of_extreme_words_is_finite_and_exact(w: int, expected: float) -> None:
    assert float(gumbel(torch.tensor([w]))) == expected


def test_uniforms_stay_inside_the_open_interval() -> None:
    low, high = uniform(torch.tensor([0, 2**32 - 1])).tolist()
    assert (low, high) == (2.0**-33, 1.0 - 2.0**-33)


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**63, 2**64 - 1])
@pytest.mark.parametrize("position", [0, 7, 2**32 + 3])
def test_words_follow_the_counter_layout(seed: int, position: int) -> None:
    signed = seed - 2**64 if seed >= 2**63 else seed
    words = random_words(torch.tensor([signed]), torch.tensor([position]), 11, Stream.DRAFT)
    assert words[0].tolist() == [oracle.word(seed, position, v, stream=3) for v in range(11)]


@pytest.mark.parametrize("num_ids", [1, 4, 10, 3_072, 129_280])
def test_noise_of_a_row_does_not_depend_on_other_rows(num_ids: int) -> None:
    seed, position = torch.arange(7) * 12345 - 3, torch.arange(7) * 1000
    together = gumbel_noise(seed, position, num_ids)
    for row in (0, 3, 6):
        assert torch.equal(gumbel_noise(seed[row : row + 1], position[row : row + 1], num_ids)[0], together[row])


def test_noise_of_an_id_does_not_depend_on_the_vocabulary() -> None:
    seed, position = torch.tensor([9]), torch.tensor([4])
    assert torch.equal(gumbel_noise(seed, position, 50), gumbel_noise(seed, position, 3_001)[:, :50])


def test_noise_of_single_ids_is_that_of_the_whole_row() -> None:
    seed, position = torch.tensor([9, -4]), torch.tensor([4, 2**33])
    row, ids = torch.tensor([0, 1, 0, 1, 1]), torch.tensor([0, 1, 2_999, 1, 42])
    whole = gumbel_noise(seed, position, 3_000)
    assert torch.equal(gumbel_noise_at(seed[row], position[row], ids), whole[row, ids])


def test_streams_are_unrelated() -> None:
    words = [random_words(torch.tensor([1]), torch.tensor([2]), 64, stream) for stream in Stream]
    assert len({int(word) for row in words for word in row[0]}) == 64 * len(Stream)


def test_noise_has_the_moments_of_a_gumbel_variable() -> None:
    noise = gumbel_noise(torch.arange(20), torch.zeros(20, dtype=torch.int64), 10_000).double()
    assert abs(float(noise.mean()) - 0.5772156649) < 0.01
    assert abs(float(noise.var()) - math.pi**2 / 6) < 0.03
