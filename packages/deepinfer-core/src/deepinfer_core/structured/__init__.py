"""Structured output: grammars that the tokens of an answer must follow.

compiler = GrammarCompiler(tokenizer)
grammar = compiler.compile(params.structured)                       GrammarError before any work
constraint = GrammarConstraint(grammar, params.structured, prompt)  `Constraint` and `TokenWatcher` of the scheduler
"""

from __future__ import annotations

from deepinfer_core.structured.accepts import Verdict, check_text
from deepinfer_core.structured.compiler import CompiledGrammar, GrammarCompiler
from deepinfer_core.structured.constraint import GrammarConstraint, WatcherChain
from deepinfer_core.structured.matcher import Matcher

__all__ = [
    "CompiledGrammar",
    "GrammarCompiler",
    "GrammarConstraint",
    "Matcher",
    "Verdict",
    "WatcherChain",
    "check_text",
]
