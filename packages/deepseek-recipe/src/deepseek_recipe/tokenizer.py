"""The tokenizer of a model: ids of prompts with their special tokens known, ids of arbitrary text, bytes of ids.

prompt    <bos> <User> "Hello <User>" <Assistant>       special tokens are ids of the added vocabulary
encode     0    128803  plain stretch   128804          a stretch never becomes a special id, whatever it spells
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from tokenizers import Tokenizer as Backend

from deepseek_recipe.checks import require_int_in, require_str, shown
from deepseek_recipe.json_text import is_object
from deepseek_recipe.pretokenize import Pretokenizer, matches_pretokenizer
from deepseek_recipe.rendering.prompt import RenderedPrompt
from deepseek_recipe.stretch_encoder import StretchEncoder
from deepseek_recipe.tokens import SpecialToken

if TYPE_CHECKING:
    from deepseek_recipe.streaming.vocabulary import Vocabulary

__all__ = ["DEFAULT_CACHE_BYTES", "Tokenizer"]

DEFAULT_CACHE_BYTES = 128 * 2**20
_MAX_CACHE_BYTES = 2**40
_MAX_TOKEN_ID = 2**24


class Tokenizer:
    """A tokenizer.json. Build one with `from_file`, `from_str` or `from_pretrained`.

    `cache_bytes` bounds the memory of stretches and words that were encoded: a conversation that grew by a turn encodes
    only what is new. Ids never depend on it. Safe to share between threads.
    """

    def __init__(self, text: str, *, cache_bytes: int = DEFAULT_CACHE_BYTES) -> None:
        require_str("text", text)
        require_int_in("cache_bytes", cache_bytes, 0, _MAX_CACHE_BYTES)
        self._text = text
        spec = _read_spec(text)
        self._ids_by_spelling = {token["content"]: token["id"] for token in spec["added_tokens"]}
        plain: dict[str, Any] = {
            **spec,
            "added_tokens": [],
            "post_processor": None,
            "truncation": None,
            "padding": None,
        }
        self._encoder = StretchEncoder(
            _backend(msgspec.json.encode(plain).decode()), _pretokenizer_of(spec), _piece_bytes(spec), cache_bytes
        )

    @classmethod
    def from_str(cls, text: str, *, cache_bytes: int = DEFAULT_CACHE_BYTES) -> Tokenizer:
        """The tokenizer that the text of a tokenizer.json describes. RuntimeError when it does not."""
        return cls(text, cache_bytes=cache_bytes)

    @classmethod
    def from_file(cls, path: str | Path, *, cache_bytes: int = DEFAULT_CACHE_BYTES) -> Tokenizer:
        """The tokenizer of a tokenizer.json. RuntimeError when it cannot be read or is none."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RuntimeError(f"cannot read the tokenizer {path}: {error}") from None
        return cls(text, cache_bytes=cache_bytes)

    @classmethod
    def from_pretrained(
        cls,
        identifier: str,
        revision: str | None = None,
        token: str | None = None,
        *,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
    ) -> Tokenizer:
        """The tokenizer.json of a model on the Hugging Face Hub. RuntimeError when it cannot be had."""
        require_str("identifier", identifier)
        require_str("revision", revision, optional=True)
        require_str("token", token, optional=True)
        from huggingface_hub import hf_hub_download  # pyright: ignore[reportUnknownVariableType] - untyped arguments

        try:
            path = hf_hub_download(identifier, "tokenizer.json", revision=revision, token=token)
        except Exception as error:
            raise RuntimeError(f"cannot get tokenizer.json of {identifier}: {error}") from error
        return cls.from_file(path, cache_bytes=cache_bytes)

    def encode(self, text: str) -> list[int]:
        """The ids of `text` with the full vocabulary: special spellings become special ids. No tokens are added."""
        require_str("text", text)
        return self._full.encode(text, add_special_tokens=False).ids

    def encode_plain(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text with the added vocabulary off: no spelling becomes a special id."""
        for text in texts:
            require_str("texts", text)
        return [list(ids) for ids in self._encoder.encode(texts)]

    def encode_rendered(self, prompt: RenderedPrompt) -> list[int]:
        """The ids of a rendered prompt: special tokens by their spelling, the rest with the added vocabulary off.

        RuntimeError names a special token that the added vocabulary lacks.
        """
        plain = [text for text, special in zip(prompt.segments, prompt.is_special, strict=True) if not special]
        encoded = iter(self._encoder.encode(plain))
        special_id = self._ids_by_spelling
        ids: list[int] = []
        try:
            for text, special in zip(prompt.segments, prompt.is_special, strict=True):
                if special:
                    ids.append(special_id[text])
                else:
                    ids += next(encoded)
            return ids
        except KeyError as error:
            raise RuntimeError(f"the tokenizer has no special token {shown(error.args[0])}") from None

    def special_token_id(self, spelling: str) -> int:
        """The id of a special token. RuntimeError when the added vocabulary lacks it."""
        try:
            return self._ids_by_spelling[spelling]
        except KeyError:
            raise RuntimeError(f"the tokenizer has no special token {shown(spelling)}") from None

    @property
    def image_token_id(self) -> int:
        """The id that stands for image patches, from this tokenizer's own vocabulary."""
        return self.special_token_id(SpecialToken.Image.default_str())

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The bytes of every id, for decoding."""
        from deepseek_recipe.streaming.vocabulary import Vocabulary

        return Vocabulary(self._full)

    @cached_property
    def _full(self) -> Backend:
        return _backend(self._text)

    def __repr__(self) -> str:
        return f"Tokenizer({len(self._ids_by_spelling)} added tokens)"


def _backend(text: str) -> Backend:
    try:
        return Backend.from_str(text)
    except Exception as error:
        raise RuntimeError(f"not a tokenizer.json: {error}") from None


def _read_spec(text: str) -> dict[str, Any]:
    try:
        spec = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise RuntimeError(f"not a tokenizer.json: {error}") from None
    if not is_object(spec) or not is_object(spec.get("model")):
        raise RuntimeError("not a tokenizer.json: it has no model")
    added: list[Any] = spec.get("added_tokens") or []
    if not all(_is_added_token(token) for token in added):
        raise RuntimeError("not a tokenizer.json: added_tokens need content and id")
    return {**spec, "added_tokens": added}


def _is_added_token(value: Any) -> bool:
    return is_object(value) and isinstance(value.get("content"), str) and isinstance(value.get("id"), int)


def _pretokenizer_of(spec: dict[str, Any]) -> Pretokenizer | None:
    """The fast pre-tokenizer, where the file describes just that and nothing changes the text before it."""
    normalizer, model = spec.get("normalizer"), spec["model"]
    changes_text = normalizer is not None and normalizer.get("normalizers") != []
    is_plain_bpe = model.get("type") == "BPE" and not model.get("dropout") and not model.get("ignore_merges")
    prefixes = model.get("continuing_subword_prefix") or model.get("end_of_word_suffix")
    if changes_text or not is_plain_bpe or prefixes or not matches_pretokenizer(spec.get("pre_tokenizer")):
        return None
    return Pretokenizer()


def _piece_bytes(spec: dict[str, Any]) -> list[int]:
    """Bytes by id: the vocabulary of a byte-level model spells every byte as one character."""
    vocabulary = spec["model"].get("vocab")
    if not is_object(vocabulary) or not vocabulary:
        return []
    largest = max(vocabulary.values())
    if not isinstance(largest, int) or largest > _MAX_TOKEN_ID:
        raise RuntimeError(f"not a tokenizer.json: the token id {shown(largest)} is beyond {_MAX_TOKEN_ID}")
    sizes = [0] * (largest + 1)
    for spelling, token_id in vocabulary.items():
        sizes[token_id] = len(spelling)
    return sizes
