"""Features of transformers' image-text models, and the recipes for them in docs/how-to/integrations.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from recipes import recipe
from torch import Tensor, nn

import contrastile
from contrastile import training
from contrastile.integrations.transformers import ImageTextFeatures
from contrastile.verify.arithmetic import gamma
from contrastile.verify.rounding import UNIT

pytestmark = pytest.mark.slow
N, D = tiny_models.PAIRS, 8


def test_clap_has_two_scales_and_transformers_loss_one_direction_twice() -> None:
    model, given = tiny_models.clap()
    audio, text, of_audio, of_text = ImageTextFeatures(model)(**given)
    own, logits = torch.arange(N), audio @ text.T
    # as in tests/test_switching.py, with the features' own error
    allowed = 2 * N * gamma(UNIT["float64"] * (3 * D + 2 * N + 24)) * (2 + 4 * of_audio.item()) * (1 + of_audio.item())
    towards = nn.functional.cross_entropy(of_audio * logits, own), nn.functional.cross_entropy(of_text * logits.T, own)
    found = recipe("transformers")["clap_loss"](audio, text, of_audio, of_text)
    assert abs(found - sum(towards) / 2).item() <= allowed
    texts = [contrastile.info_nce(text, audio, scale) for scale in (of_audio, of_text)]
    theirs = model(**given, return_loss=True).loss
    assert abs(theirs - sum(texts) / 2).item() <= allowed
    assert abs(theirs - found).item() > allowed
    assert all(x.item() for x in torch.autograd.grad(found, [model.logit_scale_a, model.logit_scale_t]))


@pytest.mark.parametrize("make", [tiny_models.clip, tiny_models.siglip])
def test_a_rank_without_samples_has_features_and_gradients_of_zero(make: Any) -> None:
    """DDP waits for the gradient of every parameter on every rank."""
    model = make()
    given = {name: x[:0] for name, x in tiny_models.inputs().items()}
    features, replay = training.embed(lambda chunk: ImageTextFeatures(model)(**chunk), given, 4)
    assert [x.shape for x in features[:2]] == [(0, D)] * 2
    replay([torch.zeros_like(x) for x in features])
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def gradients(model: Any) -> list[Tensor]:
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return found


def test_the_recipes_are_one_step_with_and_without_chunks() -> None:
    steps, given, model = recipe("transformers"), tiny_models.inputs(), tiny_models.clip(dropout=0.5)
    torch.manual_seed(4)
    value = steps["step"](model, given)
    expected = gradients(model)
    torch.manual_seed(4)
    cached = steps["cached_step"](ImageTextFeatures(model), given, N)
    assert torch.equal(value, cached)
    assert all(torch.equal(x, y) for x, y in zip(expected, gradients(model), strict=True))


def test_the_trainer_recipe_keeps_the_best_model(tmp_path: Path) -> None:
    from transformers import CLIPModel, TrainingArguments, default_data_collator

    model, kind = ImageTextFeatures(tiny_models.clip(dropout=0.5)), recipe("transformers")["Trainer"]
    kind.chunk = 4
    given = tiny_models.inputs()
    rows = [dict(zip(given, x, strict=True)) for x in zip(*given.values(), strict=True)]
    settings: Any = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "remove_unused_columns": False}
    settings |= dict.fromkeys(("per_device_train_batch_size", "per_device_eval_batch_size"), N)
    settings |= {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 1, "save_steps": 1, "max_steps": 2}
    # the second step is too long: the first is the best
    settings |= {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}
    arguments = TrainingArguments(str(tmp_path), activation_checkpointing=True, learning_rate=1e-3, **settings)
    trainer = kind(model, arguments, default_data_collator, rows, rows)
    trainer.train()
    # it would add up, not average, the losses of accumulated batches with labels
    assert not trainer.model_accepts_loss_kwargs
    assert model.is_activation_checkpointing
    assert model.config.projection_dim == D

    best = CLIPModel.from_pretrained(trainer.state.best_model_checkpoint).eval()
    assert all(map(torch.equal, model.parameters(), best.parameters()))
    last = ImageTextFeatures.from_pretrained(tmp_path / "checkpoint-2")
    assert not all(map(torch.equal, last.parameters(), best.parameters()))
    value = contrastile.clip_loss(*ImageTextFeatures(best)(**given)).item()
    # which the Trainer takes the mean of, one for each row
    assert abs(value - trainer.state.best_metric) <= gamma((N + 2) * UNIT["float64"]) * value
