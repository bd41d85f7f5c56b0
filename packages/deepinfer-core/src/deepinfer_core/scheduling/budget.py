"""DSpark budget: how many drafts each request has verified, as pure functions of survivals and costs.

    survival a[r, j] = c[r, 1] c[r, 2] .. c[r, j]     probability that drafts 1..j of r are all accepted, falling in j
    rows     B(K)    = base rows + K                  K drafts verified in all
    tokens   tau(K)  = samplers + sum of the K largest a
    choose   K       = argmax tau(K) / cost(B(K))     expected tokens a second
    beside   K       = argmax tau(K) - price cost(B)  in a step that runs prompts: tokens that its time would bring
                                                      in steps without prompts are taken off
    fill     the K largest a, in the order (-a, j, r)

Because a falls in j, the K largest are a prefix of every request's drafts. `choose_budget` searches all K: cost
curves are staircases and have many local optima. With ratio verification such a search must not see the drafts it
decides on: a draft could vote, through the confidences after it, on its own verification, and the output distribution
would shift (counter-example in the tests). So K comes from confidences of an earlier step and only the filling looks
at the current ones, where ties go by position first: then no draft's place depends on its own successors. Coupled
verification has no such bias, whatever the search sees: there K may come from current confidences.
`causal_lengths` is the paper's synchronous rule, which stops at the first K that does not improve and so may use
current confidences; it is the oracle. Source: DSpark paper, algorithm 1.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from deepinfer_core.scheduling.plan import FloatArray, Int64Array

__all__ = [
    "MIN_SURVIVAL",
    "Budget",
    "accumulate_positions",
    "causal_lengths",
    "choose_budget",
    "fill_budget",
    "survivals",
]

type Float64Array = NDArray[np.float64]

MIN_SURVIVAL = 1e-6  # drafts less likely than this are never worth a row


def survivals(confidences: FloatArray, num_drafts: Int64Array) -> FloatArray:
    """a [D, R] from conditional confidences [D, R]; 0 beyond num_drafts[r] and where a confidence is not a number."""
    clean = np.minimum(np.fmax(confidences, np.float32(0.0)), np.float32(1.0))  # fmax takes 0 for not-a-number
    return _within(accumulate_positions(np.multiply, clean), num_drafts)


def accumulate_positions(operation: np.ufunc, values: FloatArray) -> FloatArray:
    """`operation.accumulate(values, axis=0)` in place, [D, R]: row by row, since numpy's own goes down each column and
    takes ten times as long for 256 requests.
    """
    for before, row in itertools.pairwise(values):
        operation(before, row, out=row)
    return values


class Budget(NamedTuple):
    """Drafts to verify in all, and how many of them are expected to be accepted."""

    num_drafts: int
    expected: float


def choose_budget(
    survival: FloatArray, caps: Int64Array, step_seconds: Float64Array, num_samplers: int, price: float | None = None
) -> Budget:
    """The K that maximises expected tokens a second, or tokens - `price` x seconds; the smallest such K.

    survival [D, R]; caps [R] = most drafts of each request; step_seconds [>= 1] = cost of a step with k drafts,
    k = 0, 1, .. (its length limits K); num_samplers = requests that draw a token in this step. With the largest rate
    as `price` both give the same K.
    """
    candidates = _within(survival, caps).ravel()
    candidates = np.sort(candidates[candidates >= MIN_SURVIVAL])[::-1][: len(step_seconds) - 1]
    tokens = np.empty(len(candidates) + 1)
    tokens[0] = num_samplers
    np.cumsum(candidates, out=tokens[1:], dtype=np.float64)
    tokens[1:] += num_samplers
    seconds = step_seconds[: len(tokens)]
    best = int(np.argmax(tokens / seconds if price is None else tokens - price * seconds))
    return Budget(best, float(tokens[best]) - num_samplers)


def fill_budget(budget: int, survival: FloatArray, caps: Int64Array) -> Int64Array:
    """Drafts of each request [R], `budget` in all: the most likely ones, ties by position, then request."""
    values = _within(survival, caps)
    admissible = values >= MIN_SURVIVAL
    if budget >= np.count_nonzero(admissible):
        return admissible.sum(axis=0, dtype=np.int64)
    if budget <= 0:
        return np.zeros(values.shape[1], np.int64)
    threshold = np.partition(values.ravel(), values.size - budget)[values.size - budget]
    lengths = (values > threshold).sum(axis=0, dtype=np.int64)
    left = budget - int(lengths.sum())
    for position, row in enumerate(values):
        tied = np.flatnonzero((row == threshold) & (lengths == position))[:left]
        lengths[tied] += 1
        left -= len(tied)
        if left == 0:
            break
    return lengths


def causal_lengths(survival: FloatArray, caps: Int64Array, step_seconds: Float64Array, num_samplers: int) -> Int64Array:
    """Lengths [R] by the synchronous rule: admit in the order (-a, j, r), stop at the first that does not improve.

    Arguments as for `choose_budget`. Whether a draft is admitted depends on nothing that comes after it.
    """
    values = _within(survival, caps)
    position, request = np.nonzero(values >= MIN_SURVIVAL)
    order = np.lexsort((request, position, -values[position, request]))
    lengths = np.zeros(values.shape[1], np.int64)
    tokens = float(num_samplers)
    best = tokens / step_seconds[0]
    for k, i in enumerate(order[: len(step_seconds) - 1], start=1):
        tokens += float(values[position[i], request[i]])
        rate = tokens / step_seconds[k]
        if rate <= best:
            break
        best = rate
        lengths[request[i]] += 1
    return lengths


def _within(survival: FloatArray, caps: Int64Array) -> FloatArray:
    """`survival` [D, R] with 0 beyond the first caps[r] positions of each request."""
    if caps.min(initial=len(survival)) >= len(survival):
        return survival
    position = np.arange(len(survival), dtype=np.int64)[:, None]
    return np.where(position < caps, survival, np.float32(0.0))
