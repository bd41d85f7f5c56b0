"""Parts of the training: rounding, drafter, optimizer, dialogues, the shipped checkpoint."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

import deepinfer_core
from deepinfer_core.checkpoint.dequantize import dequantize_fp4, dequantize_fp8_blocks, dequantize_rows
from deepinfer_core.checkpoint.loader import load_model_weights
from deepinfer_core.checkpoint.quantize import quantize_fp4, quantize_fp8_blocks, quantize_rows
from deepinfer_core.config.model import ModelConfig
from deepseek_recipe.tokens import SpecialToken
from tests.tools.test_train_model import FIXTURE, Fixture
from tools.train_tiny import dialogues, stories, tool_dialogues
from tools.train_tiny.draft import draft
from tools.train_tiny.export import model_weights
from tools.train_tiny.optim import orthogonal
from tools.train_tiny.params import initial, rounded, slots, straight_through
from tools.train_tiny.tokenizer import SPECIALS, Encoder, build

TINY = Path(deepinfer_core.__file__).parent / "models/tiny"


@pytest.mark.parametrize("shape", [(64, 128), (40, 96), (33, 65)])
def test_fp8_training_rounds_as_the_checkpoint_writer_does(shape: tuple[int, int]) -> None:
    value = torch.randn(shape) * torch.logspace(-3, 2, shape[0])[:, None]
    assert torch.equal(rounded(value, "blocks"), dequantize_fp8_blocks(*quantize_fp8_blocks(value)))


def test_fp4_and_engram_rows_round_as_the_checkpoint_writer_does() -> None:
    value = torch.randn(3, 16, 64) * torch.logspace(-3, 2, 16)[:, None]
    assert torch.equal(rounded(value, "fp4"), dequantize_fp4(*quantize_fp4(value)))
    assert torch.equal(rounded(value[0], "rows"), dequantize_rows(*quantize_rows(value[0])))


def test_the_gradient_passes_the_weight_rounding_unchanged() -> None:
    config = ModelConfig.from_folder(FIXTURE)
    name = "layers.0.attn.wq_a.weight"
    value = torch.randn(slots(config)[name].shape, requires_grad=True)
    stored = straight_through({name: value}, config)[name]
    weight = torch.randn_like(value)
    (stored * weight).sum().backward()
    assert torch.equal(stored.detach(), rounded(value.detach(), "blocks"))
    assert torch.equal(value.grad if value.grad is not None else torch.empty(0), weight)


def test_drafts_equal_the_fixtures() -> None:
    fixture = Fixture(FIXTURE)
    features = fixture.tensors["len37.features"]
    for case in fixture.expected["dspark"]:
        anchor = case["anchor_position"]
        tokens = torch.tensor([[0] * anchor + [case["anchor_token"], *case["draft_tokens"]]])
        with torch.no_grad():
            drafted = draft(fixture.params, fixture.config, features[None, :anchor], tokens, torch.tensor([[anchor]]))
        assert (drafted.logits[0] - fixture.tensors[f"dspark.{anchor}.draft_logits"]).abs().max() < 1e-4
        expected = fixture.tensors[f"dspark.{anchor}.confidence_logit"].flatten()
        assert (drafted.confidence[0] - expected).abs().max() < 1e-4


def test_muon_updates_have_singular_values_near_one() -> None:
    update = orthogonal(torch.randn(2, 48, 32, generator=torch.Generator().manual_seed(0))).float()
    values = torch.linalg.svdvals(update)
    assert values.min() > 0.5
    assert values.max() < 1.4


def test_a_story_keeps_to_its_facts() -> None:
    rng = random.Random(5)
    facts = stories.cast(rng, hero="Mia", thing="kite")
    text = stories.story(rng, facts)
    assert facts.hero == "Mia"
    assert text.count("Mia") > 2
    assert "kite" in text
    assert facts.helper in text


def test_dialogues_follow_the_chat_format_and_their_ids_give_the_text_back() -> None:
    rng = random.Random(7)
    tasks = [task for task, _ in dialogues.TASKS + tool_dialogues.TASKS]
    documents = [dialogues.document(task(rng), rng) for task in tasks for _ in range(4)]
    tokenizer = build((text for document in documents for text, special in document if not special), 400)
    eos, assistant = SpecialToken.Eos.default_str(), SpecialToken.Assistant.default_str()
    for document, ids in zip(documents, Encoder(tokenizer).encode(documents), strict=True):
        marks = [text for text, special in document if special]
        assert marks[0] == SPECIALS[0]
        assert marks[-1] == eos
        assert assistant in marks
        assert tokenizer.decode(ids.tolist(), skip_special_tokens=False) == "".join(text for text, _ in document)


def test_special_spellings_inside_plain_text_stay_text() -> None:
    tokenizer = build(["plain text"], 300)
    eos = SpecialToken.Eos.default_str()
    (ids,) = Encoder(tokenizer).encode([[(eos, False), (eos, True)]])
    assert np.count_nonzero(ids == 1) == 1
    assert len(ids) > 2


def test_a_fresh_model_can_be_exported_and_its_experts_keep_their_places() -> None:
    config = ModelConfig.from_folder(FIXTURE)
    values = initial(config, seed=0)
    weights = model_weights(values, config)
    assert torch.equal(weights.layers[2].ffn.w2, values["layers.2.ffn.experts.w2.weight"])
    assert weights.draft is not None
    assert len(weights.draft.stages) == config.num_nextn_predict_layers


def test_the_shipped_checkpoint_is_complete_small_and_long_enough() -> None:
    config = ModelConfig.from_folder(TINY)
    weights = load_model_weights(TINY, config, progress=False)
    assert len(weights.layers) == config.num_hidden_layers
    assert config.max_position_embeddings >= 8192
    assert sum(path.stat().st_size for path in TINY.iterdir()) <= 9_800_000


def test_the_shipped_tokenizer_has_the_special_tokens_where_the_config_says() -> None:
    config = ModelConfig.from_folder(TINY)
    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    assert [tokenizer.token_to_id(spelling) for spelling in SPECIALS[:3]] == [0, 1, 2]
    assert all(tokenizer.token_to_id(spelling) is not None for spelling in SPECIALS)
    assert tokenizer.token_to_id("<｜noise｜>") == config.dspark_noise_token_id
    assert tokenizer.token_to_id(SpecialToken.Image.default_str()) == config.image_token_id
    assert tokenizer.get_vocab_size() == config.vocab_size
    text = "Ünïcode, 日本 and\n\n  spaces\t!"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_the_card_repeats_the_measured_numbers() -> None:
    card = (TINY / "MODEL_CARD.md").read_text("utf-8")
    measured = json.loads((Path(__file__).parents[2] / "tools/train_tiny/evaluation.json").read_text("utf-8"))
    for kind in ("prose", "chat", "stories"):
        assert f"{measured[kind]['bits_per_byte']:.3f}" in card
        assert f"{measured[kind]['accepted_length']:.2f}" in card
