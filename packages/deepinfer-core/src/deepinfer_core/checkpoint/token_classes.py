"""Engram's token classes: ids whose text differs only in case, accents or spacing hash alike.

    text of the id (special tokens kept) ── has U+FFFD (part of a character) ──► key = the raw vocabulary string
        └► NFKC, NFD, strip accents, lowercase, runs of [ \\t\\r\\n] -> " "
              └► exactly " "? -> U+E000;  strip;  U+E000 -> " ";  empty? -> the text as it was              = key

Classes are numbered in the order in which their keys first appear. The normal forms are those of the `tokenizers`
library: accents are all of Mn, Mc and Me, lowercase works per code point, strip removes Unicode White_Space.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import Regex, Tokenizer, normalizers

from deepinfer_core.config.model import ModelConfig
from deepinfer_core.errors import CheckpointError

__all__ = ["load_token_classes", "token_classes"]

_LONE_SPACE = "\ue000"
_FOLD = normalizers.Sequence(
    [
        normalizers.NFKC(),
        normalizers.NFD(),
        normalizers.StripAccents(),
        normalizers.Lowercase(),
        normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
    ]
)
_STRIP = normalizers.Strip()


def load_token_classes(folder: Path, config: ModelConfig) -> list[int]:
    """Class of every id below vocab_size by `folder/tokenizer.json`; ids that the tokenizer lacks get the pad token's.

    All zeros for a model without Engram. Raises CheckpointError when the tokenizer is missing, larger than the
    vocabulary, or does not have engram_compressed_vocab_size classes (then it is not the one that the tables were
    trained with).
    """
    if not config.engram_layer_ids:
        return [0] * config.vocab_size
    path = folder / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises bare Exception for a file it cannot parse
        raise CheckpointError(
            f"{path} cannot be read as a tokenizer ({error}); Engram needs the tokenizer of this checkpoint"
        ) from error
    classes = token_classes(tokenizer)
    if len(classes) > config.vocab_size:
        raise CheckpointError(f"{path} has {len(classes)} tokens; config.json has a vocabulary of {config.vocab_size}")
    count = max(classes, default=-1) + 1
    if count != config.engram_compressed_vocab_size:
        raise CheckpointError(
            f"{path} gives {count} Engram token classes; config.json has engram_compressed_vocab_size "
            f"{config.engram_compressed_vocab_size}: use the tokenizer.json that belongs to these weights"
        )
    if config.engram_pad_token_id >= len(classes):
        raise CheckpointError(
            f"{path} has {len(classes)} tokens and lacks engram_pad_token_id {config.engram_pad_token_id}"
        )
    return classes + [classes[config.engram_pad_token_id]] * (config.vocab_size - len(classes))


def token_classes(tokenizer: Tokenizer) -> list[int]:
    """Class of each id 0 .. len(tokenizer) - 1, added tokens included."""
    numbers: dict[str, int] = {}
    return [
        numbers.setdefault(_key(tokenizer, token_id), len(numbers))
        for token_id in range(tokenizer.get_vocab_size(with_added_tokens=True))
    ]


def _key(tokenizer: Tokenizer, token_id: int) -> str:
    text = tokenizer.decode([token_id], skip_special_tokens=False)
    if "\ufffd" in text:
        return tokenizer.id_to_token(token_id) or text
    folded = _FOLD.normalize_str(text)
    if folded == " ":
        folded = _LONE_SPACE
    return _STRIP.normalize_str(folded).replace(_LONE_SPACE, " ") or text
