"""What hypothesis draws for the determinism tests: jobs that share prefixes, arriving and being aborted at any step."""

from __future__ import annotations

from hypothesis import strategies as st

from tests.core.engine.traces import STYLES, Job, Traffic

__all__ = ["SHARED", "random_traffic"]

SHARED = (0, 5, 140, 300, 520)  # tokens of a document: none, within a window, blocks and a bit


def random_traffic(most: int) -> st.SearchStrategy[list[Traffic]]:
    """One to `most` requests."""
    jobs = st.builds(
        Job,
        document=st.integers(0, 1),
        shared=st.sampled_from(SHARED),
        own=st.integers(1, 40),
        style=st.sampled_from(tuple(STYLES)),
        seed=st.integers(0, 3),
        max_tokens=st.sampled_from([2, 7, 20, 60]),
    )
    traffic = st.builds(
        Traffic,
        job=jobs,
        arrives=st.integers(0, 30),
        priority=st.integers(-1, 1),
        aborted_after=st.none() | st.none() | st.integers(0, 12),
    )
    return st.lists(traffic, min_size=1, max_size=most)
