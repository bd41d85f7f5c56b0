"""A checkpoint of the release's size: 48 sparse shards with real headers, 510 GB of zeros that take no space."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from deepinfer_core.checkpoint.engram_store import EngramTable
from deepinfer_core.checkpoint.folder import INDEX_NAME, open_checkpoint
from deepinfer_core.checkpoint.manifest import manifest
from deepinfer_core.checkpoint.reading import CheckpointReader
from tests.core.model_configs import release_config, release_json

pytestmark = pytest.mark.slow

NUM_SHARDS = 48


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("release")
    specs = list(manifest(release_config()))
    weight_map: dict[str, str] = {}
    for number in range(NUM_SHARDS):
        file = f"model-{number + 1:05d}-of-{NUM_SHARDS:05d}.safetensors"
        header, end = {}, 0
        for spec in specs[number::NUM_SHARDS]:
            offsets = [end, end := end + spec.num_bytes]
            header[spec.name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": offsets}
            weight_map[spec.name] = file
        text = json.dumps(header).encode()
        with (folder / file).open("wb") as shard:
            shard.write(struct.pack("<Q", len(text)) + text)
            try:
                shard.truncate(8 + len(text) + end)
            except OSError as error:
                pytest.skip(f"this file system holds no sparse file of {end} bytes: {error}")
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(release_json()))
    yield folder
    shutil.rmtree(folder)


def test_a_checkpoint_of_full_size_opens_from_its_headers(release: Path) -> None:
    checkpoint = open_checkpoint(release, release_config())
    assert len(checkpoint.tensors) == 96_085
    assert sum(tensor.num_bytes for tensor in checkpoint.tensors.values()) == 510_286_023_000


def test_rows_of_a_table_of_98_gb_are_looked_up_on_disk(release: Path) -> None:
    config = release_config()
    reader = CheckpointReader(open_checkpoint(release, config), lambda _: None)
    num_rows = config.engram_num_embeddings[1]
    name = "layers.14.engram.embed.weight"
    stored = reader.checkpoint.tensors[name]
    with stored.path.open("r+b") as shard:  # the last row: e4m3 ones
        shard.seek(stored.offset + (num_rows - 1) * 256)
        shard.write(b"\x38" * 256)
    codes = reader.map_rows(name, range(num_rows))
    scales = reader.map_rows("layers.14.engram.embed.scale", range(num_rows))
    table = EngramTable(codes, scales, num_rows, 0, torch.float32, torch.device("cpu"))
    rows = table.lookup(torch.tensor([num_rows - 1, 0, num_rows // 2]))
    assert torch.equal(rows[0], torch.full((256,), 2.0**-127))  # scale byte 0
    assert not rows[1:].any()
