"""What a grammar may cost. Everything that a request brings is measured against these before and while it is compiled.

text ── counts and depths below ──► llguidance with explicit fuel ──► cache with a size in bytes
        └───────── in a child process that is killed at the deadline ─────────┘
"""

from __future__ import annotations

from typing import Final

__all__ = [
    "COMPILE_DEADLINE_S",
    "MAX_EARLEY_ITEMS_A_MASK",
    "MAX_EARLEY_ROW",
    "MAX_ENUM_VALUES",
    "MAX_FORCED_CHARS",
    "MAX_FORCED_CHARS_TOGETHER",
    "MAX_GRAMMAR_SYMBOLS",
    "MAX_LEXER_FUEL",
    "MAX_LEXER_FUEL_A_MASK",
    "MAX_LEXER_STATES",
    "MAX_NESTED_REPETITIONS",
    "MAX_NESTING",
    "MAX_PROPERTIES",
    "MAX_REGEX_CHARS",
    "MAX_REHEARSAL_S",
    "MAX_REPETITIONS",
    "MAX_RULES",
    "MAX_SCHEMA_NODES",
    "REHEARSED_TOKENS",
    "STARTUP_DEADLINE_S",
]

# Seconds for one grammar, from text to its first mask; then the child process is killed.
COMPILE_DEADLINE_S: Final = 1.2
# Seconds for the child process to start, import llguidance and read the vocabulary.
STARTUP_DEADLINE_S: Final = 60.0

MAX_REGEX_CHARS: Final = 65_536
MAX_NESTING: Final = 100  # groups within groups; llguidance recurses, and a deep stack ends the process
MAX_REPETITIONS: Final = 100_000  # bound of a counted repetition
# Product of the bounds of those inside one another. An automaton for exact counts is slow at every token.
MAX_NESTED_REPETITIONS: Final = 50_000
MAX_SCHEMA_NODES: Final = 20_000  # subschemas of a JSON Schema
MAX_ENUM_VALUES: Final = 20_000  # of all enums of a schema together
MAX_PROPERTIES: Final = 5_000  # of all objects of a schema together
MAX_RULES: Final = 5_000  # of a grammar
# Fixed texts up to this length are followed to their end, and tokenized, at every mask: about 1 ms (forcing.py).
MAX_FORCED_CHARS: Final = 256
MAX_FORCED_CHARS_TOGETHER: Final = 16_384  # of all names and values of a schema, an enum's longest

# A random walk of so many tokens is tried before a grammar is accepted: it finds those that start well and then die.
REHEARSED_TOKENS: Final = 48
MAX_REHEARSAL_S: Final = 0.25  # CPU time; about 5 ms a token, which every request of the batch would wait for

# llguidance's own limits, mostly the defaults of version 1.x, written out so that a new version cannot move them.
MAX_EARLEY_ROW: Final = 2_000  # items of one row: how ambiguous a grammar may be
MAX_LEXER_FUEL: Final = 1_000_000  # to build the lexer
MAX_LEXER_FUEL_A_MASK: Final = 200_000  # about 15 ms
MAX_EARLEY_ITEMS_A_MASK: Final = 50_000  # about 3 ms
MAX_LEXER_STATES: Final = 65_536  # about 2 kB each
MAX_GRAMMAR_SYMBOLS: Final = 500_000
