"""Engram's constants, token classes and table rows, against the release's numbers and the tiny checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models

from deepinfer_core.checkpoint.engram_hash import engram_hashes
from deepinfer_core.checkpoint.engram_store import EngramTable
from deepinfer_core.checkpoint.token_classes import load_token_classes, token_classes
from deepinfer_core.errors import CheckpointError, ConfigError
from tests.core.checkpoint.conftest import Tiny
from tests.core.model_configs import release_config, small_config

RELEASE_MULTIPLIERS = {
    1: (76632096046245, 4839876093313, 35959672319349, 73987337458391),
    14: (67716810739261, 51510806800915, 30921347202721, 82619226485591),
}
RELEASE_PRIMES_ABOVE_16M = {
    1: "57 79 81 97 121 129 133 183 189 207 211 253 277 289 307 321 339 381 393 399 403 409 447 463",
    14: "477 487 499 507 511 573 609 627 667 669 693 697 711 729 759 769 781 799 813 819 841 877 879 889",
}


def test_the_release_has_the_specified_multipliers_and_primes() -> None:
    hashes = engram_hashes(release_config())
    assert {layer: h.multipliers for layer, h in hashes.items()} == RELEASE_MULTIPLIERS
    assert {layer: [p - 16_000_000 for p in h.primes] for layer, h in hashes.items()} == {
        layer: [int(p) for p in text.split()] for layer, text in RELEASE_PRIMES_ABOVE_16M.items()
    }
    assert [sum(h.primes) for h in hashes.values()] == [384006168, 384016682]


def test_a_column_starts_where_the_one_before_ends() -> None:
    for constants in engram_hashes(release_config()).values():
        ends = [offset + prime for offset, prime in zip(constants.offsets, constants.primes, strict=True)]
        assert constants.offsets == (0, *ends[:-1])


def test_the_search_for_primes_includes_its_start_and_goes_on_over_layers() -> None:
    hashes = engram_hashes(small_config(engram_layer_ids=[0, 2], engram_num_embeddings=[48, 102], engram_vocab_size=7))
    assert [h.primes for h in hashes.values()] == [(7, 11, 13, 17), (19, 23, 29, 31)]


def test_primes_agree_with_a_sieve() -> None:
    limit = 3000
    sieve = [True] * limit
    for i in range(2, limit):
        for multiple in range(2 * i, limit, i):
            sieve[multiple] = False
    for start in (1, 2, 4, 90, 1729, 2047):
        expected = [i for i in range(max(start, 2), limit) if sieve[i]][:4]
        config = small_config(engram_vocab_size=start, engram_num_embeddings=[12_000])
        assert list(engram_hashes(config)[0].primes) == expected


def test_a_table_may_have_more_rows_than_its_columns_need() -> None:
    assert engram_hashes(small_config(engram_num_embeddings=[61]))[0].primes == (11, 13, 17, 19)


@pytest.mark.bad_input
def test_a_table_too_small_for_its_columns_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"is 59 for layer 0.* need 60 rows"):
        engram_hashes(small_config(engram_num_embeddings=[59]))


def test_the_tiny_checkpoints_have_the_expected_constants_and_classes(tiny: Tiny) -> None:
    expected = tiny.expected["engram"]
    for layer, constants in engram_hashes(tiny.config).items():
        assert list(constants.multipliers) == expected["multipliers"][str(layer)]
        assert list(constants.primes) == expected["primes"][str(layer)]
    classes = torch.tensor(load_token_classes(tiny.folder, tiny.config))
    assert torch.equal(classes, tiny.tensors["engram.token_classes"].long())
    assert classes.max() + 1 == expected["classes"]
    assert classes[tiny.config.engram_pad_token_id] == expected["pad_class"]


def classes_of(*texts: str) -> list[int]:
    """Classes of a vocabulary that decodes to `texts`."""
    tokenizer = Tokenizer(models.WordLevel({text: i for i, text in enumerate(texts)}))
    tokenizer.decoder = decoders.Fuse()
    return token_classes(tokenizer)


@pytest.mark.parametrize(
    ("texts", "classes"),
    [
        (("Apple", "apple", "APPLE", "pear"), [0, 0, 0, 1]),
        (("é", "e", "É", "e\u0301", "e\u20dd", "è"), [0] * 6),  # marks of categories Mn and Me
        (("\u0915\u093e", "\u0915"), [0, 0]),  # Mc
        (("ﬁ", "fi", "①", "1", "Ａ", "a"), [0, 0, 1, 1, 2, 2]),  # compatibility forms
        ((" ", "  ", "\n", "\t \r\n"), [0] * 4),
        ((" a", "a", "a\n", "\u3000a\u00a0"), [0] * 4),
        (("\u0085", "\x0b", "\x0c"), [0, 1, 2]),  # stripped to nothing: keep their own text
        (("\x1ca", "a", "\u200ba", "\ufeffa"), [0, 1, 2, 3]),  # not White_Space
        (("ΟΣ", "οσ", "ος"), [0, 0, 1]),  # a final capital sigma is lowered by code point
        (("\ue000", " "), [0, 0]),  # the sentinel of the rule itself
        (("a b", "a  b", "a\nb"), [0] * 3),
    ],
)
def test_texts_that_differ_only_in_form_share_a_class(texts: tuple[str, ...], classes: list[int]) -> None:
    assert classes_of(*texts) == classes


def test_parts_of_a_character_keep_their_raw_spelling_apart() -> None:
    """Byte-level tokens that are no whole character all decode to U+FFFD."""
    tokenizer = Tokenizer(models.BPE(vocab={"Ã": 0, "Â": 1, "a": 2, "A": 3}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    assert token_classes(tokenizer) == [0, 1, 2, 2]


def test_added_tokens_are_classed_by_their_text() -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0}))
    tokenizer.add_special_tokens([AddedToken("<End>", special=True), AddedToken("<end>", special=True)])
    assert token_classes(tokenizer) == [0, 1, 1]


def test_ids_beyond_the_tokenizer_have_the_class_of_the_pad_token(small: Path) -> None:
    config = small_config()
    classes = load_token_classes(small, config)
    assert len(classes) == config.vocab_size
    assert classes[60:] == [classes[config.engram_pad_token_id]] * 4


def test_a_model_without_engram_needs_no_tokenizer(tmp_path: Path) -> None:
    config = small_config(engram_layer_ids=[], engram_num_embeddings=[])
    assert load_token_classes(tmp_path, config) == [0] * config.vocab_size


@pytest.mark.bad_input
def test_a_tokenizer_of_another_model_is_refused(small: Path) -> None:
    with pytest.raises(CheckpointError, match=r"gives 50 Engram token classes; config\.json has .* 49"):
        load_token_classes(small, small_config(engram_compressed_vocab_size=49))
    with pytest.raises(CheckpointError, match=r"has 60 tokens; config\.json has a vocabulary of 59"):
        load_token_classes(small, small_config(vocab_size=59))


@pytest.mark.bad_input
@pytest.mark.parametrize("text", [None, b"", b"{}", b"\xff"])
def test_an_unreadable_tokenizer_is_refused(tmp_path: Path, text: bytes | None) -> None:
    if text is not None:
        (tmp_path / "tokenizer.json").write_bytes(text)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        load_token_classes(tmp_path, small_config())


def test_the_owners_of_a_table_add_up_to_the_whole() -> None:
    codes = torch.randint(0, 127, (20, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    scales = torch.full((20, 1), 120, dtype=torch.uint8)

    def table(rows: range) -> EngramTable:
        part = slice(rows.start, rows.stop)
        return EngramTable(codes[part], scales[part], 20, rows.start, torch.float32, torch.device("cpu"))

    rows = torch.tensor([0, 19, 7, 7, 8, 12])
    whole = table(range(20)).lookup(rows)
    shares = [table(range(8)), table(range(8, 8)), table(range(8, 20))]
    assert torch.equal(sum((share.lookup(rows) for share in shares), torch.zeros(6, 32)), whole)
    assert shares[2].owned_rows == range(8, 20)
    assert not shares[0].lookup(rows)[1].any()
