"""Builds the training corpus: documents -> tokenizer.json and arrays of token ids.

    kind      what                                    share of the training tokens (kinds.py)
    prose     the text of sources.py                                          55 %
    chat      dialogues.py, tool_dialogues.py                                 35 %
    stories   stories.py, as plain text                                       10 %

Every document is bos, text, eos. `{split}.npz` holds by kind the ids one after another (uint16) and `{kind}_starts`,
the positions where a training sample may start: the beginnings of documents, and of paragraphs in prose. The held-out
split is the last part of every package's text, and other dialogues and stories. Beside them: tokenizer.json,
config.json and token_tables.npz (bytes and Engram class of every token), so that the machine that trains needs neither
the packages nor deepseek-recipe.

    python -m tools.train_tiny.data --packages FOLDER --out build/train_tiny
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from deepinfer_core.checkpoint.token_classes import token_classes
from deepseek_recipe.tokens import SpecialToken
from tools.train_tiny import dialogues, sources, stories, tool_dialogues
from tools.train_tiny.dialogues import Exchange, Segments
from tools.train_tiny.shape import VOCAB_SIZE, config_json
from tools.train_tiny.tokenizer import NOISE, SPECIALS, Encoder, build

NUM_CHATS, NUM_STORIES = 42_000, 7_000
_HELD_OUT_PART = 0.03
_CHUNK_CHARACTERS = 40_000  # a novel is split into documents of about this length, at paragraph ends


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--packages", type=Path, required=True, help="folder into which the Debian packages were unpacked"
    )
    parser.add_argument("--out", type=Path, default=Path("build/train_tiny"))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    texts = sources.collect(arguments.packages)
    words = list(sources.glosses(sorted(arguments.packages.glob("**/wordnet/data.*"))))
    splits = {
        "train": prose_split(texts, held_out=False) | generated(words, texts, seed=1, part=1.0),
        "held": prose_split(texts, held_out=True) | generated(words, texts, seed=2, part=_HELD_OUT_PART),
    }
    tokenizer = build(_tokenizer_sample(splits["train"]), VOCAB_SIZE)
    tokenizer.save(str(arguments.out / "tokenizer.json"), pretty=False)
    encoder = Encoder(tokenizer)
    _save_tables(tokenizer, arguments.out)
    newline = tokenizer.token_to_id("Ċ")
    for split, kinds in splits.items():
        arrays: dict[str, np.ndarray] = {}
        for kind, documents in kinds.items():
            ids, starts = _arrays(encoder.encode(documents), newline if kind == "prose" else None)
            arrays |= {kind: ids, f"{kind}_starts": starts}
            size = sum(len(text.encode()) for document in documents for text, special in document if not special)
            print(f"{split} {kind}: {len(documents)} documents, {size / 1e6:.1f} MB, {len(ids) / 1e6:.2f} M tokens, "
                  f"{size / len(ids):.2f} bytes a token, {len(starts)} starts")  # fmt: skip
        np.savez_compressed(arguments.out / f"{split}.npz", allow_pickle=False, **arrays)


def _save_tables(tokenizer: Tokenizer, folder: Path) -> None:
    classes = token_classes(tokenizer)
    ids = {
        "bos": 0,
        "eos": 1,
        "pad": 2,
        "image": tokenizer.token_to_id(SpecialToken.Image.default_str()),
        "noise": tokenizer.token_to_id(NOISE),
    }
    config = config_json(ids, max(classes) + 1)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    # A byte-level token has one character for each byte.
    sizes = [
        0 if token in SPECIALS else len(token)
        for token, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    ]
    np.savez(folder / "token_tables.npz", bytes=np.array(sizes, np.int64), classes=np.array(classes, np.int64))


def _plain(text: str) -> Segments:
    return [(SPECIALS[0], True), (text, False), (SPECIALS[1], True)]


def prose_split(texts: dict[str, list[str]], *, held_out: bool) -> dict[str, list[Segments]]:
    """The first 97 % or the last 3 % of every package's documents, by paragraphs."""
    documents: list[Segments] = []
    for package_documents in texts.values():
        paragraphs = [p for text in package_documents for p in _chunks(text)]
        cut = round(len(paragraphs) * (1 - _HELD_OUT_PART))
        documents += [_plain(p) for p in (paragraphs[cut:] if held_out else paragraphs[:cut])]
    return {"prose": documents}


def _chunks(text: str) -> Iterable[str]:
    start = 0
    while start < len(text):
        end = text.find("\n\n", start + _CHUNK_CHARACTERS)
        end = len(text) if end < 0 else end
        yield text[start:end].strip()
        start = end


def generated(
    words: Sequence[tuple[str, str, str, list[str]]], texts: dict[str, list[str]], *, seed: int, part: float
) -> dict[str, list[Segments]]:
    """Dialogues and stories of one split."""
    rng = random.Random(seed)
    passages = _passages(texts, rng)
    common = [entry for entry in words if entry[3]]
    tasks: list[tuple[Callable[[random.Random], Exchange], float]] = [
        *dialogues.TASKS,
        *tool_dialogues.TASKS,
        (lambda r: dialogues.explain_word(r, common), 1.5),
        (lambda r: dialogues.remember(r, passages), 2.0),
    ]
    chosen = rng.choices([task for task, _ in tasks], [weight for _, weight in tasks], k=round(NUM_CHATS * part))
    return {
        "chat": [dialogues.document(task(rng), rng) for task in chosen],
        "stories": [_plain(stories.story(rng)) for _ in range(round(NUM_STORIES * part))],
    }


def _passages(texts: dict[str, list[str]], rng: random.Random) -> list[str]:
    """Pieces of prose for `remember`: mostly a few hundred characters, a few as long as half of the context."""
    long_texts = [
        t for name in ("r-cran-janeaustenr", "sword-text-web", "python3-doc") for t in texts[name] if len(t) > 20_000
    ]
    passages: list[str] = []
    for _ in range(4000):
        text = rng.choice(long_texts)
        length = rng.randint(200, 1500) if rng.random() < 0.9 else rng.randint(2000, 12_000)
        start = text.find(". ", rng.randrange(len(text) - 2000)) + 2
        passages.append(text[start : text.rfind(".", start, start + length) + 1] or text[start : start + length])
    return passages


def _tokenizer_sample(kinds: dict[str, list[Segments]]) -> Iterable[str]:
    """All prose, and as much of the generated text as its share asks for."""
    for kind, documents in kinds.items():
        for document in documents if kind == "prose" else documents[: len(documents) // 8]:
            yield from (text for text, special in document if not special)


def _arrays(documents: list[np.ndarray], newline: int | None) -> tuple[np.ndarray, np.ndarray]:
    ids = np.concatenate(documents)
    lengths = np.array([len(d) for d in documents])
    starts = np.cumsum(lengths) - lengths + 1  # after bos
    if newline is not None:  # the pre-tokenizer splits a blank line into two newlines
        blank = np.flatnonzero((ids[:-1] == newline) & (ids[1:] == newline))
        starts = np.union1d(starts, blank + 2)
    return ids, starts.astype(np.uint32)


if __name__ == "__main__":
    main()
