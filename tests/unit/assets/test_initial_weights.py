"""Planted heads: before any training, the first layer looks one token back and the second finds matches."""

import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from assets.training.initial import plant_copying_heads
from assets.training.recipes import RECIPES
from assets.training.sequences import IGNORED, drill_rows
from assets.training.train_model import MODELS


def _planted() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = RECIPES["chat"].config(AutoTokenizer.from_pretrained(MODELS / "kedge-chat"))
    config._attn_implementation = "eager"
    model = LlamaForCausalLM(config)
    plant_copying_heads(model)
    return model


def test_planted_heads_look_where_they_should() -> None:
    model = _planted()
    tokens, _ = drill_rows(model.config.vocab_size, 5, 1, 128)
    with torch.no_grad():
        first, second = model(tokens, output_attentions=True).attentions[:2]
    for head in (0, 1):
        assert first[0, head].diagonal(-1 - head).mean() > 0.7
    same_as_previous = tokens[0, :-1][None, :] == tokens[0, 1:][:, None]
    matches = torch.nonzero(same_as_previous.tril())
    weights = torch.stack([second[0, 0, i + 1, j + 1] for i, j in matches.tolist() if j < i])
    assert weights.mean() > 3 / 128


def test_drill_labels_repeat_what_stood_before() -> None:
    tokens, labels = drill_rows(2048, 9, 2, 256)
    again, _ = drill_rows(2048, 9, 2, 256)
    assert tokens.equal(again)
    for row, wanted in zip(tokens.tolist(), labels.tolist(), strict=True):
        for i, label in enumerate(wanted):
            if label != IGNORED:
                assert label == row[i]
                pair = row[i - 1 : i + 1]
                assert any(row[j : j + 2] == pair for j in range(i - 1))
