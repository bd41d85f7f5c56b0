"""Text for the tiny checkpoint from four Debian packages whose licences permit it.

    package               text                                       licence           form inside the package
    r-cran-janeaustenr    six novels by Jane Austen                  public domain/MIT R lazy-load database (zlib + XDR)
    sword-text-web        World English Bible                        public domain     SWORD zText blocks (zlib + OSIS)
    wordnet-base          definitions and example sentences          WordNet 3.0       data.{noun,verb,adj,adv}
    python3-doc           tutorial, guides, library reference        PSF 2             reStructuredText sources

`collect(folder)` takes a folder into which the packages were unpacked with `dpkg -x` (README.md) and returns documents:
plain text, paragraphs parted by one blank line.
"""

from __future__ import annotations

import html
import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("r-cran-janeaustenr", "sword-text-web", "wordnet-base", "python3-doc")

_STRING_VECTOR, _STRING_ELEMENT = 16, 9  # SEXP type numbers of R's serialization format


def collect(folder: Path) -> dict[str, list[str]]:
    """Documents by package name from packages unpacked under `folder`; FileNotFoundError names what is missing."""
    return {
        "r-cran-janeaustenr": list(_novels(_only(folder, "**/janeaustenr/data/Rdata.rdb"))),
        "sword-text-web": [
            doc for part in ("ot", "nt") for doc in _bible(_only(folder, f"**/engWEB2015eb/{part}.bzz"))
        ],
        "wordnet-base": list(
            _definitions([_only(folder, f"**/wordnet/data.{p}") for p in ("noun", "verb", "adj", "adv")])
        ),
        "python3-doc": list(_python_docs(_only(folder, "**/html/_sources"))),
    }


def _only(folder: Path, pattern: str) -> Path:
    found = sorted(folder.glob(pattern))
    if not found:
        raise FileNotFoundError(
            f"{folder} holds no {pattern}; unpack {', '.join(PACKAGES)} there (tools/train_tiny/README.md)"
        )
    return found[0]


# ---- Jane Austen: one R string vector per novel, an element a line -------------------------------------------------


def _novels(path: Path) -> Iterator[str]:
    data = path.read_bytes()
    position = 0
    while position + 4 <= len(data):
        # Every chunk opens with its uncompressed length; the stream itself says where it ends.
        stream = zlib.decompressobj()
        lines = _r_strings(stream.decompress(data[position + 4 :]))
        position = len(data) - len(stream.unused_data)
        if len(lines) > 1000:
            yield _paragraphs(lines)


def _r_strings(blob: bytes) -> list[str]:
    """The elements of a serialized R character vector; [] for any other object."""
    position = 2 + 12  # "X\n", format version, writer version, oldest reader
    if struct.unpack_from(">I", blob, 2)[0] == 3:
        position += 4 + struct.unpack_from(">I", blob, position)[0]  # version 3 names its native encoding
    kind, count = struct.unpack_from(">II", blob, position)
    if kind & 0xFF != _STRING_VECTOR:
        return []
    position += 8
    lines: list[str] = []
    for _ in range(count):
        flags, length = struct.unpack_from(">Ii", blob, position)
        if flags & 0xFF != _STRING_ELEMENT:
            raise ValueError(
                f"R string vector: element type {flags & 0xFF} at byte {position}, expected {_STRING_ELEMENT}"
            )
        position += 8
        lines.append(blob[position : position + max(length, 0)].decode("utf-8", "replace"))
        position += max(length, 0)
    return lines


def _paragraphs(lines: list[str]) -> str:
    text = "\n".join(line.strip() for line in lines)
    blocks = (re.sub(r"\s+", " ", block).strip() for block in re.split(r"\n{2,}", text))
    return "\n\n".join(block.replace("_", "") for block in blocks if block)


# ---- World English Bible: a zlib stream a book, OSIS markup ---------------------------------------------------------


def _bible(path: Path) -> Iterator[str]:
    data, index = path.read_bytes(), path.with_suffix(".bzs").read_bytes()
    for offset, size, _ in struct.iter_unpack("<III", index):
        book = zlib.decompress(data[offset : offset + size]).decode("utf-8", "replace")
        text = re.sub(r"<note\b.*?</note>", " ", book, flags=re.S)
        text = re.sub(r"<title\b.*?</title>", "\n\n", text, flags=re.S)
        text = re.sub(r"<(div|chapter|p|lg)\b[^>]*>", "\n\n", text)
        text = re.sub(r"<lb\b[^>]*>|</l>", " ", text)
        text = html.unescape(re.sub(r"<[^>]+>", "", text))
        blocks = (re.sub(r"\s+([,.;:!?]?)", _join, block).strip() for block in re.split(r"\n\s*\n", text))
        text = "\n\n".join(block for block in blocks if len(block) > 40)
        if len(text) > 2000:
            yield _plain_quotes(text)


def _join(space: re.Match[str]) -> str:
    """One space, or none before a punctuation mark (where a footnote was taken out)."""
    return space.group(1) or " "


# ---- WordNet: "word (noun): definition. Example." -------------------------------------------------------------------

_PART_OF_SPEECH = {"n": "noun", "v": "verb", "a": "adjective", "s": "adjective", "r": "adverb"}


def glosses(paths: list[Path]) -> Iterator[tuple[str, str, str, list[str]]]:
    """(word, part of speech, definition, example sentences) of every synset whose first word is plain lower case."""
    for path in paths:
        for line in path.read_text("latin-1").splitlines():
            if line.startswith(" ") or "|" not in line:
                continue
            fields, gloss = line.split("|", 1)
            parts = fields.split()
            word = parts[4].split("(")[0].replace("_", " ")
            if not re.fullmatch(r"[a-z][a-z \-]+", word):
                continue
            examples = [e for e in re.findall(r'"([^"]+)"', gloss) if len(e) > 15]
            definition = re.sub(r"\s+", " ", gloss.split(';  "')[0].split('; "')[0]).strip(" ;")
            if 15 < len(definition) < 160 and "(" not in definition:
                yield word, _PART_OF_SPEECH[parts[2]], definition, examples


def _definitions(paths: list[Path]) -> Iterator[str]:
    """Definitions that come with an example sentence (the common words), forty to a document."""
    lines: list[str] = []
    for word, kind, definition, examples in glosses(paths):
        if not examples:
            continue
        example = examples[0][0].upper() + examples[0][1:]
        lines.append(f"{word} ({kind}): {definition}. {example}{'' if example[-1] in '.?!' else '.'}")
        if len(lines) == 40:
            yield "\n".join(lines)
            lines = []
    if lines:
        yield "\n".join(lines)


# ---- Python documentation: prose of the reStructuredText sources -----------------------------------------------------

_DOC_FOLDERS = ("tutorial", "howto", "faq", "using", "reference", "library", "extending", "whatsnew")


def _python_docs(folder: Path) -> Iterator[str]:
    for part in _DOC_FOLDERS:
        for path in sorted((folder / part).glob("*.rst.txt")):
            text = _rst_prose(path.read_text("utf-8", "replace"))
            if len(text) > 2000:
                yield text


def _rst_prose(text: str) -> str:
    """Paragraphs of running text: directives, tables, code and indented material are left out, roles unwrapped."""
    kept: list[str] = []
    for block in re.split(r"\n\s*\n", text):
        lines = block.splitlines()
        if not lines or any(line.startswith((" ", "\t", "..", ">>>", "+-", "==", "| ")) for line in lines):
            continue
        if re.search(r"^[=\-~^*#\"'.]{3,}\s*$", block, flags=re.M):
            continue
        joined = re.sub(r"\s+", " ", block).strip()
        joined = re.sub(r":[\w:+.\-]+:`[!~]?([^`<]*?)(?:\s*<[^`]*>)?`", r"\1", joined)
        joined = re.sub(r"`+([^`<]*?)(?:\s*<[^`]*>)?`+_*", r"\1", joined)
        joined = re.sub(r"\*\*?([^*]+)\*\*?", r"\1", joined).replace("::", ":").replace("\\", "")
        if len(joined) > 60 and "|" not in joined:
            kept.append(joined)
    return "\n\n".join(kept)


def _plain_quotes(text: str) -> str:
    return text.translate({0x2018: "'", 0x2019: "'", 0x201C: '"', 0x201D: '"', 0x2014: "--", 0x2013: "-"})
