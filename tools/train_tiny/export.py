"""Trained values -> the bundled checkpoint: released layout, tokenizer files, generation settings.

    OUT/draft-*.safetensors ─► ModelWeights ─► checkpoint.writer ─► folder

`python -m tools.train_tiny.export --run OUT --data build/train_tiny --to FOLDER`
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from deepinfer_core.checkpoint import released_names as names
from deepinfer_core.checkpoint.engram_hash import EngramHash, engram_hashes
from deepinfer_core.checkpoint.engram_store import EngramTable
from deepinfer_core.checkpoint.quantize import quantize_rows
from deepinfer_core.checkpoint.weights import (
    AttentionWeights,
    CompressorWeights,
    DraftWeights,
    EngramWeights,
    HyperWeights,
    IndexerWeights,
    IndexKeyWeights,
    LayerWeights,
    ModelWeights,
    MoeWeights,
)
from deepinfer_core.checkpoint.writer import write_checkpoint
from deepinfer_core.config.model import ModelConfig

Values = Mapping[str, Tensor]


def model_weights(values: Values, config: ModelConfig) -> ModelWeights:
    """The engine's structure around parameters named as in params.py; without token classes: the writer needs none."""
    hashes = engram_hashes(config)
    return ModelWeights(
        embed=values["embed.weight"],
        head=values["head.weight"],
        norm=values["norm.weight"],
        layers=[_layer(values, config, layer, hashes.get(layer)) for layer in range(config.num_hidden_layers)],
        draft=_draft(values, config),
        token_classes=torch.empty(0, dtype=torch.int64),
        fingerprint="",
    )


def _fields(values: Values, prefix: str, table: Mapping[str, str]) -> dict[str, Tensor]:
    return {field: values[prefix + name] for field, name in table.items() if prefix + name in values}


def _draft(values: Values, config: ModelConfig) -> DraftWeights:
    first, stages = config.num_hidden_layers, config.num_nextn_predict_layers
    return DraftWeights(
        stages=[_layer(values, config, first + stage, None) for stage in range(stages)],
        **_fields(values, "mtp.0.", names.DRAFT_FIRST),
        **_fields(values, f"mtp.{stages - 1}.", names.DRAFT_LAST),
    )


def _layer(values: Values, config: ModelConfig, layer: int, engram_hash: EngramHash | None) -> LayerWeights:
    prefix = names.layer_prefix(layer, config.num_hidden_layers)
    experts = {matrix: values[f"{prefix}.ffn.experts.{matrix}.weight"] for matrix in names.EXPERT}
    return LayerWeights(
        **_fields(values, f"{prefix}.", names.NORMS),
        hc_attn=HyperWeights(**_fields(values, f"{prefix}.", names.hyper("attn"))),
        hc_ffn=HyperWeights(**_fields(values, f"{prefix}.", names.hyper("ffn"))),
        attn=_attention(values, config, layer, f"{prefix}.attn."),
        ffn=MoeWeights(
            **_fields(values, f"{prefix}.ffn.", names.MOE), **experts, expert_ids=tuple(range(len(experts["w1"])))
        ),
        engram=None if engram_hash is None else _engram(values, f"{prefix}.engram.", engram_hash),
    )


def _attention(values: Values, config: ModelConfig, layer: int, prefix: str) -> AttentionWeights:
    compressor = index_key = indexer = None
    if layer in config.kv_source_layer_ids:
        compressor = CompressorWeights(**{"wgate": None, **_fields(values, f"{prefix}compressor.", names.COMPRESSOR)})
        index_key = IndexKeyWeights(**_fields(values, f"{prefix}indexer.", names.INDEX_KEY))
    if layer in config.index_source_layer_ids:
        indexer = IndexerWeights(**_fields(values, f"{prefix}indexer.", names.INDEXER))
    own = _fields(values, prefix, names.ATTENTION)
    own["wo_a"] = own["wo_a"].unflatten(0, (config.o_groups, -1))
    return AttentionWeights(**own, compressor=compressor, index_key=index_key, indexer=indexer)


def _engram(values: Values, prefix: str, engram_hash: EngramHash) -> EngramWeights:
    codes, scales = (stored.view(torch.uint8) for stored in quantize_rows(values[f"{prefix}embed.weight"]))
    return EngramWeights(
        **_fields(values, prefix, names.ENGRAM),
        table=EngramTable(codes, scales, len(codes), 0, torch.float32, torch.device("cpu")),
        multipliers=torch.tensor(engram_hash.multipliers),
        primes=torch.tensor(engram_hash.primes),
        offsets=torch.tensor(engram_hash.offsets),
    )


def write_tokenizer_files(folder: Path, config_json: Mapping[str, object], max_length: int) -> None:
    """tokenizer_config.json and generation_config.json beside the tokenizer.json in `folder`."""
    added = {
        token["id"]: token["content"]
        for token in json.loads((folder / "tokenizer.json").read_text("utf-8"))["added_tokens"]
    }
    ids = {name: config_json[f"{name}_token_id"] for name in ("bos", "eos", "pad")}
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{f"{name}_token": added[token_id] for name, token_id in ids.items()},
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
    generation = {
        **{f"{name}_token_id": i for name, i in ids.items()},
        "do_sample": True,
        "temperature": 1.0,
        "top_p": 0.95,
    }
    for name, content in (("tokenizer_config.json", tokenizer_config), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", "utf-8")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="folder with draft-*.safetensors")
    parser.add_argument("--data", type=Path, default=Path("build/train_tiny"))
    parser.add_argument("--to", type=Path, required=True)
    arguments = parser.parse_args()
    config_json = json.loads((arguments.data / "config.json").read_text())
    config = ModelConfig.from_dict(config_json)
    values: dict[str, Tensor] = {}
    for path in sorted(arguments.run.glob("draft-*.safetensors")):
        values |= load_file(path)
    write_tokenizer_files(arguments.data, config_json, config.max_position_embeddings)
    write_checkpoint(arguments.to, model_weights(values, config), config_json, tokenizer_folder=arguments.data)
    for path in sorted(arguments.to.iterdir()):
        print(f"{path.stat().st_size:>10,}  {path.name}")


if __name__ == "__main__":
    main()
