"""Conformance suite: every operation of a provider against the reference.

    pytest --pyargs deepinfer_core.kernels.conformance --provider nvidia

`cases` builds inputs on random and edge shapes, `test_conformance` compares. The provider "reference" checks the
reference's own promise of row invariance. Options: `--provider NAME`, `--provider-dtype float32|bfloat16`.
"""

from __future__ import annotations
