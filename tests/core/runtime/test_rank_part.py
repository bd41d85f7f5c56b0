"""What ranks agree on before their first step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer_core.errors import KernelError
from deepinfer_core.parallel.communicator import Communicator
from deepinfer_core.runtime.rank_part import RankPart
from tests.core.parallel.in_process import on_ranks

PACKED = torch.zeros(2, 4, 3, 40, dtype=torch.int32)  # of two experts
DECODED = torch.zeros(2, 32, 8, dtype=torch.bfloat16)


def verdicts(*held: dict[int, tuple[Tensor, ...]]) -> list[str]:
    def agree(comm: Communicator) -> str:
        world: Any = SimpleNamespace(control=comm)
        try:
            RankPart(world, None, None, None).require_alike(held[comm.rank])
        except KernelError as error:
            return str(error)
        return ""

    return on_ranks(len(held), agree)


def test_ranks_whose_experts_have_the_same_forms_move_them() -> None:
    own = {0: (PACKED, PACKED), 1: (DECODED, DECODED)}
    another = {0: (PACKED[:1], PACKED[:1]), 1: (DECODED, DECODED)}
    assert verdicts(own, another, own) == ["", "", ""]


@pytest.mark.bad_input
def test_an_expert_that_one_rank_alone_decoded_is_refused_by_all_ranks() -> None:
    found = verdicts({0: (PACKED, PACKED)}, {0: (DECODED, DECODED)})
    assert found[0] == found[1]
    assert "take weight_form='bfloat16', or expert_rearrangement_interval=0" in found[0]
