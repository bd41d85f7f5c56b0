"""Two ranks look at their checkpoints before they load: the same, another one, none."""

from __future__ import annotations

import datetime
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from deepinfer_core.config.engine import EngineConfig
from deepinfer_core.errors import ModelNotFoundError, ParallelError
from deepinfer_core.parallel.launch import Rendezvous
from deepinfer_core.runtime.rank_preflight import check_before_loading
from tests.core.harness import FIXTURES

MODEL = FIXTURES / "tiny-a"


def check(folders: list[Path], **settings: Any) -> list[Exception | None]:
    """One rank a folder, each in a thread; what stopped it."""
    store = HashStore()
    store.set_timeout(datetime.timedelta(seconds=10))
    found: list[Exception | None] = [None] * len(folders)

    def run(rank: int) -> None:
        size = len(folders)
        config = EngineConfig.from_settings(
            model=str(folders[rank]),
            data_parallel_size=size,
            expert_parallel_size=size,
            **{"start_deadline_s": 5.0} | settings,
        )
        try:
            meeting = Rendezvous(rank, size, rank, size, "127.0.0.1", 1)
            check_before_loading(config, store, meeting, torch.device("cpu"))
        except (ParallelError, ModelNotFoundError) as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(folders))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.fixture
def changed(tmp_path: Path) -> Path:
    """The same checkpoint but for one bit of its weights."""
    folder = tmp_path / "changed"
    shutil.copytree(MODEL, folder)
    (shard, *_) = sorted(folder.glob("model-*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.chmod(0o644)
    shard.write_bytes(data)
    return folder


def test_copies_of_one_checkpoint_are_the_same_wherever_they_lie(tmp_path: Path) -> None:
    shutil.copytree(MODEL, tmp_path / "copy")
    assert check([MODEL, tmp_path / "copy"]) == [None, None]


def test_a_rank_with_other_weights_is_named(changed: Path) -> None:
    for error in check([MODEL, MODEL, changed]):
        assert isinstance(error, ParallelError)
        assert "rank 2 on" in str(error)
        assert "another weights" in str(error)
        assert "settings" not in str(error)


def test_a_rank_without_the_checkpoint_says_so_and_is_missed_by_the_others(tmp_path: Path) -> None:
    found = check([MODEL, tmp_path / "nowhere"], start_deadline_s=1.5)
    assert isinstance(found[1], ModelNotFoundError)
    assert "rank 1 of 2 did not appear within 1.5 s" in str(found[0])
