"""Who is late is found by following who waits for whom."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from deepinfer_core.parallel.signs import Sign, decode_sign, encode_sign, find_culprits

GROUPS = {"all": (0, 1, 2, 3), "left": (0, 1), "right": (2, 3), "odd": (1, 3)}


def sign(rank: int, entered: dict[str, int], inside: str | None = None, **fields: Any) -> Sign:
    values = {"host": f"host{rank}", "process_id": 100 + rank, "beat": 1, "step": 5, "state": "running", "label": "x"}
    return Sign(rank=rank, entered=entered, inside=inside, **(values | fields))


def culprits(signs: list[Sign], group: str, number: int, silent: dict[int, float] | None = None) -> dict[int, str]:
    found = find_culprits({s.rank: s for s in signs}, silent or {}, GROUPS, group, number, asking=0)
    return {culprit.rank: culprit.text for culprit in found}


def test_a_busy_rank_that_has_not_entered_is_late() -> None:
    signs = [sign(0, {"all": 7}, "all"), sign(1, {"all": 6}, label="combine"), *(sign(r, {"all": 7}) for r in (2, 3))]
    found = culprits(signs, "all", 7)
    assert list(found) == [1]
    assert "rank 1 on host1 (process 101) is late: it is busy in step 5, its last collective was combine" in found[1]


def test_a_rank_that_waits_elsewhere_is_not_the_culprit_but_the_one_it_waits_for_is() -> None:
    signs = [
        sign(0, {"all": 7}, "all"),
        sign(1, {"all": 6, "odd": 3}, "odd"),
        sign(2, {"all": 7}, "all"),
        sign(3, {"all": 6, "odd": 2}),
    ]
    assert list(culprits(signs, "all", 7)) == [3]


def test_a_silent_rank_is_named_even_where_it_had_entered() -> None:
    signs = [sign(rank, {"all": 7}, "all") for rank in range(4)]
    found = culprits(signs, "all", 7, silent={2: 4.0})
    assert list(found) == [2]
    assert "no sign for 4.0 s" in found[2]


def test_the_failure_behind_other_failures_is_named() -> None:
    signs = [
        sign(0, {"all": 7}, "all"),
        sign(1, {"all": 6}, state="failed", blames=(2,), reason="rank 2 is gone"),
        sign(2, {"all": 6}, state="failed", blames=(), reason="ValueError: boom"),
        sign(3, {"all": 6}, state="failed", blames=(1, 2), reason="ranks 1 and 2 are gone"),
    ]
    found = culprits(signs, "all", 7)
    assert list(found) == [2]
    assert "failed: ValueError: boom" in found[2]


def test_a_rank_that_gave_up_on_the_one_that_asks_is_named_with_its_reason() -> None:
    signs = [sign(0, {"left": 7}, "left"), sign(1, {"left": 7}, state="failed", blames=(0,), reason="0 is late")]
    assert culprits(signs, "left", 7) == {1: "rank 1 on host1 (process 101) failed: 0 is late"}


def test_a_circle_of_waiting_ends_and_names_its_members() -> None:
    signs = [
        sign(0, {"all": 7}, "all"),
        sign(1, {"all": 6, "odd": 3}, "odd"),
        sign(2, {"all": 7}, "all"),
        sign(3, {"all": 6, "odd": 2, "right": 4}, "right"),
    ]
    found = culprits(signs, "all", 7)  # 0 waits for 1 and 3, 1 for 3, 3 for 2, and 2 for 1 and 3
    assert set(found) == {1, 3}
    assert "waits in group right: ranks make their calls in different orders" in found[3]


def test_ranks_that_wait_for_the_one_that_asks_are_not_called_busy() -> None:
    signs = [sign(0, {"all": 7, "left": 0}, "all"), sign(1, {"all": 6, "left": 1}, "left")]
    signs += [sign(rank, {"all": 7}, "all") for rank in (2, 3)]
    found = culprits(signs, "all", 7)  # 0 waits for 1 in one group, 1 for 0 in another
    assert list(found) == [1]
    assert "waits in group left: ranks make their calls in different orders" in found[1]


def test_ranks_that_a_failed_one_waited_for_in_another_group_are_not_called_busy() -> None:
    signs = [sign(rank, {"all": 7, "right": 0}, "all") for rank in range(3)]
    signs.append(sign(3, {"all": 6, "right": 1}, "right", state="failed", blames=(2,), reason="2 is elsewhere"))
    found = culprits(signs, "all", 7)  # 3 gave up on 2 in another group, where 2 has not come since it waits for 3
    assert list(found) == [3]
    assert "different orders" in found[3]


def test_nobody_is_named_where_all_have_entered() -> None:
    assert culprits([sign(rank, {"all": 7}, "all") for rank in range(4)], "all", 7) == {}


def test_a_sign_survives_its_encoding() -> None:
    original = sign(3, {"all": 2}, "all", blames=(1,), state="failed", reason="ä")
    assert decode_sign(encode_sign(original).encode()) == original


@pytest.mark.bad_input
@pytest.mark.parametrize("data", [b"", b"{}", b"[1]", b'{"rank": "x"}', encode_sign(sign(0, {})).encode()[:-2]])
def test_what_is_no_sign_is_refused(data: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_sign(data)
