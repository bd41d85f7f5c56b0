"""DeepSeek-V4.1-Flash as in docs/model.md, one file a concept. Knows no scheduling and no backend."""

from __future__ import annotations

from deepinfer_core.model.backbone import Backbone, ForwardOutput, LayerTrace
from deepinfer_core.model.batch import Batch, build_batch
from deepinfer_core.model.draft import Drafter, DraftOutput
from deepinfer_core.model.params import ModelParams, build_params

__all__ = [
    "Backbone",
    "Batch",
    "DraftOutput",
    "Drafter",
    "ForwardOutput",
    "LayerTrace",
    "ModelParams",
    "build_batch",
    "build_params",
]
