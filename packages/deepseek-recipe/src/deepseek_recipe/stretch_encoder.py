"""Encodes plain stretches of a prompt, fast: what was encoded before is remembered, whole and word by word.

    stretch ─▶ remembered whole? ─▶ ids
               └▶ chunks ─▶ pieces of the pre-tokenizer ─▶ remembered? ─▶ ids
                                                           └▶ one batch to the backend ─▶ remember

The ids are those of the backend on the whole stretch: pieces are encoded apart from each other anyway, and a chunk
with an unsettled character, or with many new words, goes to the backend as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, islice

from tokenizers import Tokenizer as Backend

from deepseek_recipe.pretokenize import Pretokenizer, ascii_twin

__all__ = ["StretchEncoder"]

Ids = Sequence[int]

_CHUNK_CHARS = 8_192
_FINE_CHUNK_CHARS = 256
_GROUP_CHARS = 16 * _CHUNK_CHARS  # what goes to the backend in one batch
_MAX_WORD_CHARS = 256  # no longer word is remembered: a chunk with one goes to the backend as a whole
_NEW_WORDS_LIMIT = 3  # a chunk with more than one new word in three goes to the backend as a whole
_MAX_PAUSE_FACTOR = 32  # after a group of unlike text, so many times its length goes to the backend unseen
_MAX_PAUSE_CHARS = 2**20
_ALONE_CHARS = 512
_BYTES_PER_ID = 36  # an int and its place in a list
_TEXT_OVERHEAD_BYTES = 160


def _memory_bytes(text: str, ids: Ids) -> int:
    """About what it takes to remember the ids of a text."""
    return 4 * len(text) + _BYTES_PER_ID * len(ids) + _TEXT_OVERHEAD_BYTES


class StretchMemory:
    """Stretch → ids, bounded by bytes: two generations, the older one is dropped when the younger is half full."""

    def __init__(self, max_bytes: int) -> None:
        self._generation_bytes = max_bytes // 2
        self._young: dict[str, Ids] = {}
        self._old: dict[str, Ids] = {}
        self._young_bytes = 0

    def get(self, text: str) -> Ids | None:
        """The ids of a stretch, if they are remembered."""
        ids = self._young.get(text)
        if ids is None:
            ids = self._old.get(text)
            if ids is not None:
                self.put(text, ids)
        return ids

    def put(self, text: str, ids: Ids) -> None:
        """Remembers the ids of a stretch, unless it would fill a generation alone."""
        size = _memory_bytes(text, ids)
        if size > self._generation_bytes:
            return
        if self._young_bytes + size > self._generation_bytes:
            self._old, self._young, self._young_bytes = self._young, {}, 0
        self._young[text] = ids
        self._young_bytes += size


class StretchEncoder:
    """Encodes with the added vocabulary off.

    `piece_bytes` is how many bytes each id stands for. Without a `pretokenizer` every new stretch goes to the backend.
    `cache_bytes` bounds the memory of stretches and words, half each. Threads may share an encoder: the memories only
    ever gain right entries, and a call keeps to the generation of words that it began with.
    """

    def __init__(
        self, backend: Backend, pretokenizer: Pretokenizer | None, piece_bytes: list[int], cache_bytes: int
    ) -> None:
        self._backend = backend
        self._ascii_backend = backend if pretokenizer is None else ascii_twin(backend)
        self._pretokenizer = pretokenizer
        self._piece_bytes = piece_bytes
        self._stretches = StretchMemory(cache_bytes // 2)
        self._words: dict[str, Ids] = {}  # the younger of two generations, as in `StretchMemory`
        self._old_words: dict[str, Ids] = {}
        self._words_bytes = 0
        self._words_generation_bytes = cache_bytes // 4
        self._pause_chars = 0  # text to leave to the backend, since it does not repeat its words
        self._pause_factor = 1

    def encode(self, stretches: Sequence[str]) -> list[Ids]:
        """The ids of each stretch."""
        remembered = self._stretches.get
        found = [remembered(stretch) for stretch in stretches]
        if None not in found:
            return found  # pyright: ignore[reportReturnType]
        new = list(dict.fromkeys(text for text, ids in zip(stretches, found, strict=True) if ids is None))
        encoded = dict(zip(new, self._encode_new(new), strict=True))
        for text, ids in encoded.items():
            self._stretches.put(text, ids)
        return [encoded[text] if ids is None else ids for text, ids in zip(stretches, found, strict=True)]

    def _encode_new(self, stretches: Sequence[str]) -> list[Ids]:
        pretokenizer = self._pretokenizer
        if pretokenizer is None:
            return [*self._from_backend(list(stretches))]
        chunks = [list(pretokenizer.chunks(text, _CHUNK_CHARS)) for text in stretches]
        ids = iter(self._encode_chunks(list(chain.from_iterable(chunks)), pretokenizer))
        return [next(ids) if len(own) == 1 else list(chain.from_iterable(next(ids) for _ in own)) for own in chunks]

    def _encode_chunks(self, chunks: list[str], pretokenizer: Pretokenizer) -> list[Ids]:
        out: list[Ids] = []
        start = 0
        while start < len(chunks):
            end, num_chars = start, 0
            while end < len(chunks) and (end == start or num_chars < _GROUP_CHARS):
                num_chars += len(chunks[end])
                end += 1
            out.extend(self._encode_group(chunks[start:end], pretokenizer))
            start = end
        return out

    def _encode_group(self, chunks: list[str], pretokenizer: Pretokenizer) -> list[Ids]:
        """The ids of each chunk. One with an unsettled character is cut finer, so that little goes to the backend."""
        parts: list[str] = []
        pieces_of: list[list[str] | None] = []
        num_parts: list[int] = []
        is_paused = self._pause_chars > 0
        if is_paused:
            self._pause_chars -= sum(map(len, chunks))
        for chunk in chunks:
            own, own_pieces = [chunk], [None if is_paused else pretokenizer.pieces(chunk)]
            if own_pieces[0] is None and len(chunk) > 2 * _FINE_CHUNK_CHARS and not is_paused:
                own = list(pretokenizer.chunks(chunk, _FINE_CHUNK_CHARS))
                own_pieces = [pretokenizer.pieces(part) for part in own]
            parts += own
            pieces_of += own_pieces
            num_parts.append(len(own))
        ids = iter(self._encode_parts(parts, pieces_of))
        return [next(ids) if num == 1 else list(chain.from_iterable(islice(ids, num))) for num in num_parts]

    def _encode_parts(self, chunks: list[str], pieces_of: list[list[str] | None]) -> list[Ids]:
        """The ids of each part of a group, with at most one call of the backend."""
        words = self._words
        out: list[Ids | None] = []
        whole: list[int] = []
        new_words: dict[str, None] = {}
        num_unlike = 0
        for index, pieces in enumerate(pieces_of):
            out.append(None)
            if pieces is None:
                whole.append(index)
                continue
            ids = list(map(words.get, pieces))
            if None not in ids:
                out[index] = list(chain.from_iterable(ids))  # pyright: ignore[reportArgumentType] - no None in it
                continue
            new = self._still_new((piece for piece, known in zip(pieces, ids, strict=True) if known is None), words)
            is_unlike = len(new) * _NEW_WORDS_LIMIT > len(pieces)
            if is_unlike or max(map(len, new), default=0) > _MAX_WORD_CHARS:
                whole.append(index)
                num_unlike += is_unlike
            else:
                new_words.update(new)
        if num_unlike > len(chunks) - len(whole):
            self._pause_chars = min(self._pause_factor * sum(map(len, chunks)), _MAX_PAUSE_CHARS)
            self._pause_factor = min(2 * self._pause_factor, _MAX_PAUSE_FACTOR)
        elif len(whole) < len(chunks):
            self._pause_factor = 1
        texts = [*new_words, *(chunks[index] for index in whole)]
        encoded = self._from_backend(texts) if texts else []
        for word, ids in zip(new_words, encoded, strict=False):
            self._remember(word, tuple(ids), words)
        for index, ids in zip(whole, encoded[len(new_words) :], strict=True):
            out[index] = ids
            if (pieces := pieces_of[index]) is not None:
                self._learn(pieces, ids, words)
        for index, pieces in enumerate(pieces_of):
            if out[index] is None:
                out[index] = list(chain.from_iterable(map(words.__getitem__, pieces or ())))
        if self._words_bytes > self._words_generation_bytes and words is self._words:
            self._old_words, self._words, self._words_bytes = words, {}, 0
        return out  # pyright: ignore[reportReturnType] - every place is filled

    def _still_new(self, pieces: Iterable[str], words: dict[str, Ids]) -> dict[str, None]:
        """The different pieces without those of the older generation, which are taken over."""
        new = dict.fromkeys(pieces)
        old_words = self._old_words
        if old_words:
            for piece in [piece for piece in new if piece in old_words]:
                self._remember(piece, old_words[piece], words)
                del new[piece]
        return new

    def _remember(self, word: str, ids: Ids, words: dict[str, Ids]) -> None:
        words[word] = ids
        self._words_bytes += _memory_bytes(word, ids)

    def _learn(self, pieces: list[str], ids: Ids, words: dict[str, Ids]) -> None:
        """Remembers the pieces of a chunk that was encoded as a whole: each takes the ids that spell its bytes."""
        piece_bytes = self._piece_bytes
        start = 0
        for piece in pieces:
            known = words.get(piece)
            if known is not None:
                start += len(known)
                continue
            num_bytes = len(piece) if piece.isascii() else len(piece.encode())
            end = start
            while num_bytes > 0:
                num_bytes -= piece_bytes[ids[end]]
                end += 1
            if len(piece) <= _MAX_WORD_CHARS:
                self._remember(piece, tuple(ids[start:end]), words)
            start = end

    def _from_backend(self, texts: list[str]) -> list[list[int]]:
        backend = self._ascii_backend if all(map(str.isascii, texts)) else self._backend
        if sum(map(len, texts)) <= _ALONE_CHARS:  # not worth waking the backend's threads
            return [backend.encode(text, add_special_tokens=False).ids for text in texts]
        return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)]
