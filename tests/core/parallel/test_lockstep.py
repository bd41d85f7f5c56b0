"""What ranks agree on before a step, and what becomes of a step that failed somewhere."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_core.errors import ParallelError, PeerError
from deepinfer_core.parallel.communicator import Communicator
from deepinfer_core.parallel.lockstep import Agreement, Lockstep, Notice
from tests.core.parallel.in_process import on_ranks

notices = st.builds(
    Notice,
    num_rows=st.sampled_from([0, 0, 3, 100]),
    fixed_rows=st.sampled_from([0, 2]),
    runs_decoder=st.booleans(),
    drafts=st.booleans(),
    has_work=st.booleans(),
    is_closing=st.booleans(),
    epoch=st.sampled_from([2, 2, 2**60]),
    num_staged=st.integers(0, 3),
)


@settings(deadline=None, max_examples=25)
@given(st.lists(notices, min_size=1, max_size=4))
def test_all_ranks_agree_on_the_same(given_notices: list[Notice]) -> None:
    agreements = on_ranks(len(given_notices), lambda comm: Lockstep(comm).agree(given_notices[comm.rank]))
    idle = all(not one.num_rows and not one.has_work for one in given_notices)
    idle = idle and len({one.epoch for one in given_notices}) == 1
    want = Agreement(
        step=0,
        most_rows=max(one.num_rows for one in given_notices),
        most_fixed_rows=max(one.fixed_rows for one in given_notices),
        runs_decoder=any(one.runs_decoder for one in given_notices),
        drafts=any(one.drafts for one in given_notices),
        pauses=idle,
        closes=idle and all(one.is_closing for one in given_notices),
        num_staged=min(one.num_staged for one in given_notices),
    )
    assert agreements == [want] * len(given_notices)


def test_a_command_that_one_rank_has_not_seen_keeps_all_awake() -> None:
    def work(comm: Communicator) -> list[bool]:
        lockstep = Lockstep(comm)
        epochs = [(7, 7), (8, 7), (8, 8)]
        return [lockstep.agree(Notice(epoch=both[comm.rank])).pauses for both in epochs]

    assert on_ranks(2, work) == [[True, False, True]] * 2


def test_a_step_that_failed_on_one_rank_counts_on_none() -> None:
    def work(comm: Communicator) -> str:
        lockstep = Lockstep(comm)
        for failing in ((), (1,), (0, 2)):
            lockstep.agree(Notice(num_rows=1))
            failed = comm.rank in failing
            try:
                lockstep.conclude(failed)
            except PeerError as error:
                assert not failed
                last = str(error)
            else:
                assert failed or not failing
                last = "own" if failed else ""
        return last

    assert on_ranks(3, work) == ["own", "step 2 failed on rank 0, 2, so it counts nowhere", "own"]


def test_ranks_at_different_steps_are_named() -> None:
    def work(comm: Communicator) -> None:
        lockstep = Lockstep(comm)
        lockstep.num_steps = 4 + comm.rank
        lockstep.agree(Notice())

    with pytest.raises(ParallelError, match=r"rank \d is at step \d, rank \d at \d: the ranks have lost each other"):
        on_ranks(2, work)
