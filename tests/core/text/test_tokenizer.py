"""Text to ids and back: special spellings, BOS, bytes that are no UTF-8, held-back characters, stop strings."""

from __future__ import annotations

import random

import pytest
import tokenizers

from deepinfer_core.errors import CheckpointError, ModelNotFoundError, RequestError
from deepinfer_core.text import TextStream, Tokenizer
from tests.core.harness import FIXTURES

FILE = FIXTURES / "tiny-a" / "tokenizer.json"
BOS = "<｜begin▁of▁sentence｜>"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_path(FILE, bos_token_id=0, eos_token_id=1)


@pytest.fixture(scope="module")
def oracle() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(FILE))


def random_ids(tokenizer: Tokenizer, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(len(tokenizer)) for _ in range(rng.randrange(1, 40))]


def test_a_text_starts_with_one_bos(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("Hello")[0] == 0
    assert tokenizer.encode("Hello").count(0) == 1
    assert tokenizer.encode("Hello", add_bos=False) == tokenizer.encode("Hello")[1:]


def test_a_spelled_bos_counts_only_where_spellings_are_parsed(tokenizer: Tokenizer) -> None:
    parsed = tokenizer.encode(f"{BOS}Hi", parse_special=True)
    assert parsed.count(0) == 1
    plain = tokenizer.encode(f"{BOS}Hi")
    assert plain.count(0) == 1
    assert tokenizer.decode(plain[1:]) == f"{BOS}Hi"


def test_spellings_of_special_tokens_are_text(tokenizer: Tokenizer, oracle: tokenizers.Tokenizer) -> None:
    for token_id in tokenizer.special_ids:
        spelling = str(oracle.id_to_token(token_id))
        ids = tokenizer.encode(f"a{spelling}b", add_bos=False)
        assert not tokenizer.special_ids.intersection(ids)
        assert tokenizer.decode(ids) == f"a{spelling}b"
        assert token_id in tokenizer.encode(f"a{spelling}b", parse_special=True)


@pytest.mark.parametrize(
    "text", ["", "plain", " two  spaces\n\ttab", "naïve Ελληνικά 漢字 🙂\u200d", "\0\x7f", "a" * 5_000]
)
def test_encoding_then_decoding_is_lossless(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text, add_bos=False)) == text


@pytest.mark.parametrize("skip", [True, False])
def test_decoding_agrees_with_the_library(tokenizer: Tokenizer, oracle: tokenizers.Tokenizer, skip: bool) -> None:
    for seed in range(300):
        ids = random_ids(tokenizer, seed)
        assert tokenizer.decode(ids, skip_special_tokens=skip) == oracle.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("skip", [True, False])
def test_a_stream_adds_up_to_the_whole_text(tokenizer: Tokenizer, skip: bool) -> None:
    for seed in range(300):
        ids = random_ids(tokenizer, seed)
        stream = TextStream(tokenizer, skip_special_tokens=skip)
        pieces: list[str] = []
        for token_id in ids:
            stream.push(token_id)
            pieces.append(stream.take_new(finished=False))
        stream.finish()
        pieces.append(stream.take_new(finished=True))
        assert "".join(pieces) == stream.text == tokenizer.decode(ids, skip_special_tokens=skip)


def test_a_character_is_held_back_until_it_is_complete(tokenizer: Tokenizer) -> None:
    ids = [
        next(i for i in range(len(tokenizer)) if tokenizer.token_bytes(i) == bytes([byte])) for byte in "🙂".encode()
    ]
    stream = TextStream(tokenizer)
    seen: list[str] = []
    for token_id in ids:
        stream.push(token_id)
        seen.append(stream.take_new(finished=False))
    assert seen == ["", "", "", "🙂"]
    stream.push(ids[0])
    assert stream.text == "🙂"
    stream.finish()
    assert stream.text == "🙂\ufffd"


def stopped(tokenizer: Tokenizer, text: str, stop: list[str], **options: bool) -> tuple[str, str | None, str]:
    """(text, stop string, what was streamed) after pushing `text` token by token."""
    stream = TextStream(tokenizer, stop, **options)
    streamed = ""
    for token_id in tokenizer.encode(text, add_bos=False):
        done = stream.push(token_id)
        streamed += stream.take_new(finished=done)
        if done:
            break
    else:
        stream.finish()
        streamed += stream.take_new(finished=True)
    return stream.text, stream.stopped_by, streamed


def test_the_first_stop_string_in_the_text_wins(tokenizer: Tokenizer) -> None:
    text, by, streamed = stopped(tokenizer, "one two three", ["three", "two"])
    assert (text, by, streamed) == ("one ", "two", "one ")


def test_a_stop_string_may_span_tokens_and_be_shown(tokenizer: Tokenizer) -> None:
    text, by, streamed = stopped(tokenizer, "abc END def", ["c END d"])
    assert (text, by, streamed) == ("ab", "c END d", "ab")
    text, by, streamed = stopped(tokenizer, "abc END def", ["c END d"], include_stop=True)
    assert (text, by, streamed) == ("abc END d", "c END d", "abc END d")


def test_what_only_looked_like_a_stop_string_is_streamed_in_the_end(tokenizer: Tokenizer) -> None:
    text, by, streamed = stopped(tokenizer, "EN EN END", ["ENDING"])
    assert (text, by, streamed) == ("EN EN END", None, "EN EN END")


def test_streamed_text_never_shows_part_of_a_stop_string(tokenizer: Tokenizer) -> None:
    rng = random.Random(0)
    for _ in range(200):
        text = "".join(rng.choice("ab") for _ in range(30))
        stop = "".join(rng.choice("ab") for _ in range(rng.randrange(1, 6)))
        got, by, streamed = stopped(tokenizer, text, [stop])
        at = text.find(stop)
        assert got == streamed == (text if at < 0 else text[:at])
        assert by == (None if at < 0 else stop)


def test_stop_strings_before_min_tokens_are_part_of_the_text(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, ["a"])
    (token_id,) = tokenizer.encode("a", add_bos=False)
    assert not stream.push(token_id, may_stop=False)
    assert stream.push(token_id)
    assert stream.text == "a"


def test_only_stop_strings_that_end_after_min_tokens_count_and_nothing_shown_is_taken_back(
    tokenizer: Tokenizer,
) -> None:
    rng = random.Random(1)
    letters = {letter: tokenizer.encode(letter, add_bos=False)[0] for letter in "abc"}
    for _ in range(200):
        text = "".join(rng.choice("abc") for _ in range(12))
        stops = ["".join(rng.choice("abc") for _ in range(rng.randrange(1, 5))) for _ in range(3)]
        min_tokens = rng.randrange(12)
        stream, shown = TextStream(tokenizer, stops), ""
        for count, letter in enumerate(text, 1):
            stopped_here = stream.push(letters[letter], may_stop=count > min_tokens)
            shown += stream.take_new(finished=stopped_here)
            if stopped_here:
                break
        shown += stream.take_new(finished=True)
        ends = [end for end in range(min_tokens + 1, 13) if text[:end].endswith(tuple(stops))]
        longest = max((len(stop) for stop in stops if ends and text[: ends[0]].endswith(stop)), default=0)
        assert shown == stream.text == (text[: ends[0] - longest] if ends else text)


@pytest.mark.bad_input
def test_a_lone_surrogate_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="lone surrogate at character 2"):
        tokenizer.encode("ab\udfff")


@pytest.mark.bad_input
@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[]", b"[" * 100_000, b"null", b'{"model": {}}', b'{"decoder": {"type": "ByteLevel"}}', b"\xff\xfe"],
)
def test_a_damaged_file_is_named(raw: bytes) -> None:
    with pytest.raises(CheckpointError, match="somewhere"):
        Tokenizer(raw, bos_token_id=0, eos_token_id=1, where="somewhere")


@pytest.mark.bad_input
def test_a_bos_outside_the_tokenizer_is_refused() -> None:
    with pytest.raises(CheckpointError, match="bos_token_id is 384"):
        Tokenizer.from_path(FILE, bos_token_id=384, eos_token_id=1)


@pytest.mark.bad_input
def test_a_missing_file_is_named() -> None:
    with pytest.raises(ModelNotFoundError, match=r"/nowhere.*cannot be read"):
        Tokenizer.from_path("/nowhere", bos_token_id=0, eos_token_id=1)
