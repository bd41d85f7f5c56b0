"""What hypothesis draws for the determinism tests: jobs that share prefixes, arriving and being aborted at any step,
and the settings of the engine that serves them.
"""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from tests.core.engine.traces import STYLES, Job, Setup, Traffic

__all__ = ["SETTINGS", "SHARED", "preempted_steps", "random_traffic", "setups"]

SHARED = (0, 5, 140, 300, 520)  # tokens of a document: none, within a window, blocks and a bit
# Failing traces are not shrunk: a trace takes a second, shrinking takes hundreds of them.
SETTINGS = settings(
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)

setups = st.builds(
    Setup,
    max_num_seqs=st.sampled_from([1, 3, 8]),
    max_num_batched_tokens=st.sampled_from([9, 64, 400]),
    max_prefill_chunk_tokens=st.sampled_from([None, 7, 50]),
    num_blocks=st.sampled_from([5, 9, 40]),
    num_drafts=st.sampled_from([0, 3, 5]),
    draft_schedule=st.sampled_from(["fixed", "scheduled"]),
    overlap=st.booleans(),
    prefix_replay=st.sampled_from(["off", "exact", "exact"]),
    decoder_prefill=st.sampled_from(["compact", "exact", "full"]),
)
preempted_steps = st.frozensets(st.integers(0, 60), max_size=4)


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
