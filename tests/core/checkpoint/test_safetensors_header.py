"""Headers: what is read from a valid file, and that whatever else stands there is one clean error."""

from __future__ import annotations

import json
import random
import struct
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from deepinfer_core.checkpoint.safetensors_header import parse_header, read_header
from deepinfer_core.errors import CheckpointError

TENSORS = {
    "a.weight": torch.zeros(4, 6, dtype=torch.float8_e4m3fn),
    "a.scale": torch.ones(1, 1, dtype=torch.float8_e8m0fnu),
    "b": torch.arange(10, dtype=torch.float32),
    "c": torch.ones(2, 3, 4, dtype=torch.bfloat16),
    "empty": torch.zeros(0, 5, dtype=torch.int8),
    "scalar": torch.tensor(3, dtype=torch.int64),
}


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("header") / "valid.safetensors"
    save_file(TENSORS, path, metadata={"format": "pt"})
    return path


def write(path: Path, header: Any, payload: bytes = b"", *, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + payload)
    return path


def entry(start: int, end: int, dtype: str = "I8", shape: list[int] | None = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [end - start] if shape is None else shape, "data_offsets": [start, end]}


def test_a_header_gives_each_tensors_type_shape_and_place(valid: Path) -> None:
    tensors = read_header(valid).tensors
    assert {name: tensor.shape for name, tensor in tensors.items()} == {
        name: tuple(tensor.shape) for name, tensor in TENSORS.items()
    }
    stored = tensors["b"]
    assert stored.dtype == "F32"
    data = valid.read_bytes()[stored.offset : stored.offset + stored.num_bytes]
    assert struct.unpack("<10f", data) == tuple(range(10))


def test_a_file_without_tensors_is_valid(tmp_path: Path) -> None:
    assert read_header(write(tmp_path / "x", {})).tensors == {}


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("header", "payload", "why"),
    [
        (b"", b"", "JSON"),
        (b"[]", b"", "not a JSON object"),
        (b"[" * 100_000, b"", "nested too deeply"),
        (b'{"a":' * 50_000, b"", "nested too deeply"),
        (b'{"a\xff": 1}', b"", "JSON"),
        (b'{"a": {"dtype": "I8", "shape": [1], "data_offsets": [0, 1]}, "a": 2}', b"1", "occurs twice"),
        (b'{"a": {"dtype": "I8", "dtype": "I8", "shape": [1], "data_offsets": [0, 1]}}', b"1", "occurs twice"),
        (b'{"a": {"dtype": "I8", "shape": [1e0], "data_offsets": [0, 1]}}', b"1", "not an integer"),
        (b'{"a": {"dtype": "I8", "shape": [NaN], "data_offsets": [0, 1]}}', b"1", "not an integer"),
        (b'{"a": {"dtype": "I8", "shape": [' + b"9" * 5000 + b'], "data_offsets": [0, 1]}}', b"1", "JSON"),
        ({"a": 1}, b"", "exactly dtype, shape and data_offsets"),
        ({"a": {"dtype": "I8", "shape": [1]}}, b"1", "exactly"),
        ({"a": entry(0, 1) | {"extra": 1}}, b"1", "exactly"),
        ({"a": entry(0, 1, "F9")}, b"1", "unknown dtype"),
        ({"a": entry(0, 1) | {"dtype": ["I8"]}}, b"1", "unknown dtype"),
        ({"a": entry(0, 1, shape=[-1])}, b"1", "impossible shape"),
        ({"a": entry(0, 1) | {"shape": 1}}, b"1", "impossible shape"),
        ({"a": entry(0, 1) | {"shape": [True]}}, b"1", "impossible shape"),
        ({"a": entry(0, 1, shape=[1] * 9)}, b"1", "impossible shape"),
        ({"a": entry(0, 1, shape=[2**63])}, b"1", "impossible shape"),
        ({"a": entry(0, 1) | {"data_offsets": [1, 0]}}, b"1", "impossible data_offsets"),
        ({"a": entry(0, 1) | {"data_offsets": [0]}}, b"1", "impossible data_offsets"),
        ({"a": entry(0, 1) | {"data_offsets": [-1, 0]}}, b"1", "impossible data_offsets"),
        ({"a": entry(0, 4, "F32", [2])}, b"1234", "span 4 bytes"),
        ({"a": entry(0, 1, shape=[2**32, 2**32])}, b"1", "span 1 bytes"),
        ({"a": entry(0, 2), "b": entry(1, 3)}, b"123", "overlaps"),
        ({"a": entry(0, 2), "b": entry(0, 2)}, b"12", "overlaps"),
        ({"a": entry(0, 1), "b": entry(2, 3)}, b"123", "gap"),
        ({"a": entry(1, 2)}, b"12", "gap"),
        ({"a": entry(0, 8)}, b"1234567", "truncated"),
        ({"a": entry(0, 1)}, b"12", "too long"),
        ({"__metadata__": []}, b"", "__metadata__"),
        ({"__metadata__": {"a": 1}}, b"", "__metadata__"),
    ],
)
def test_a_damaged_header_is_refused_for_its_reason(tmp_path: Path, header: Any, payload: bytes, why: str) -> None:
    path = write(tmp_path / "shard.safetensors", header, payload)
    with pytest.raises(CheckpointError, match=why) as caught:
        read_header(path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.bad_input
@pytest.mark.parametrize("data", [b"", b"\0" * 7, b"\xff" * 8, b"\xff" * 100])
def test_a_file_too_short_for_its_header_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="truncated"):
        read_header(path)


@pytest.mark.bad_input
def test_a_header_over_the_limit_of_the_format_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 100_000_001))
        file.truncate(8 + 100_000_001)  # sparse
    with pytest.raises(CheckpointError, match="the limit is 100000000"):
        read_header(path)


@pytest.mark.bad_input
def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "missing", tmp_path):
        with pytest.raises(CheckpointError, match="cannot be read"):
            read_header(path)


def mutate(header: bytes, rng: random.Random) -> bytes:
    """Damage a header's text, or its structure."""
    if rng.random() < 0.5:
        data = bytearray(header)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(data))
            kind = rng.randrange(3)
            if kind == 0:
                data[at] = rng.randrange(256)
            elif kind == 1:
                del data[at : at + rng.randint(1, 20)]
            else:
                data[at:at] = bytes(rng.choices(b'{}[]",:0129-.eE\\u\x00\xff', k=rng.randint(1, 5)))
            data = data or bytearray(b"{")
        return bytes(data)
    entries = json.loads(header)
    junk: list[Any] = [None, -1, 0, 1, 2**31, 2**63, 2**64, 1e300, "", "F32", [], {}, True, [0, 2**62], ["x"]]
    name = rng.choice(list(entries))
    if rng.random() < 0.3:
        entries[rng.choice(["new", "", "\0", "__metadata__"])] = rng.choice([*junk, entries[name]])
    elif rng.random() < 0.2:
        del entries[name]
    elif isinstance(entries[name], dict):
        field = rng.choice(list(entries[name]))
        value = entries[name][field]
        if isinstance(value, list) and value and rng.random() < 0.7:
            value[rng.randrange(len(value))] = rng.choice([*junk, rng.randint(-5, 300)])
        else:
            entries[name][field] = rng.choice(junk)
    return json.dumps(entries).encode()


@pytest.mark.bad_input
def test_two_thousand_mutated_headers_are_valid_or_one_clean_error(valid: Path) -> None:
    data = valid.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header, payload_bytes = data[8 : 8 + length], len(data) - 8 - length
    rng = random.Random(0)
    refused = 0
    for _ in range(2000):
        text = mutate(header, rng)
        try:
            tensors = parse_header(text, payload_bytes, valid)
        except CheckpointError:
            refused += 1
            continue
        # Accepted: then every tensor lies in the payload and together they cover it once.
        spans = sorted((tensor.offset, tensor.num_bytes) for tensor in tensors.values())
        assert sum(size for _, size in spans) == payload_bytes
        assert all(8 + len(text) <= start for start, _ in spans)
        assert all(a + size <= b for (a, size), (b, _) in pairwise(spans))
    assert 1000 < refused < 2000


@pytest.mark.bad_input
def test_a_long_duplicate_free_header_with_a_duplicate_at_its_end_is_refused_quickly(tmp_path: Path) -> None:
    names = ",".join(f'"{i}":0' for i in range(200_000))
    with pytest.raises(CheckpointError, match="'7' occurs twice"):
        read_header(write(tmp_path / "x", f'{{{names},"7":0}}'.encode()))
