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
    model, inputs = tiny_models.clap()
    audio, text, s_audio, s_text = ImageTextFeatures(model)(**inputs)
    targets, logits = torch.arange(N), audio @ text.T
    # the bound of tests/test_switching.py, plus the error of the features
    tolerance = 2 * N * gamma(UNIT["float64"] * (3 * D + 2 * N + 24)) * (2 + 4 * s_audio.item()) * (1 + s_audio.item())
    scaled_logits = s_audio * logits, s_text * logits.T
    directions = [nn.functional.cross_entropy(x, targets) for x in scaled_logits]
    loss = recipe("transformers")["clap_loss"](audio, text, s_audio, s_text)
    assert abs(loss - sum(directions) / 2).item() <= tolerance
    text_losses = [contrastile.info_nce(text, audio, scale) for scale in (s_audio, s_text)]
    theirs = model(**inputs, return_loss=True).loss
    assert abs(theirs - sum(text_losses) / 2).item() <= tolerance
    assert abs(theirs - loss).item() > tolerance
    assert all(x.item() for x in torch.autograd.grad(loss, [model.logit_scale_a, model.logit_scale_t]))


@pytest.mark.parametrize("make", [tiny_models.clip, tiny_models.siglip])
def test_a_rank_without_samples_has_features_and_gradients_of_zero(make: Any) -> None:
    """DDP waits for the gradient of every parameter on every rank."""
    model = make()
    inputs = {name: x[:0] for name, x in tiny_models.inputs().items()}
    features, replay = training.embed(lambda chunk: ImageTextFeatures(model)(**chunk), inputs, 4)
    assert [x.shape for x in features[:2]] == [(0, D)] * 2
    replay([torch.zeros_like(x) for x in features])
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def gradients(model: Any) -> list[Tensor]:
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return gradients


def test_the_recipes_are_one_step_with_and_without_chunks() -> None:
    steps, inputs, model = recipe("transformers"), tiny_models.inputs(), tiny_models.clip(dropout=0.5)
    torch.manual_seed(4)
    value = steps["step"](model, inputs)
    expected = gradients(model)
    torch.manual_seed(4)
    cached_value = steps["cached_step"](ImageTextFeatures(model), inputs, N)
    assert torch.equal(value, cached_value)
    assert all(torch.equal(x, y) for x, y in zip(expected, gradients(model), strict=True))


def test_the_trainer_recipe_keeps_the_best_model(tmp_path: Path) -> None:
    from transformers import CLIPModel, TrainingArguments, default_data_collator

    model, kind = ImageTextFeatures(tiny_models.clip(dropout=0.5)), recipe("transformers")["Trainer"]
    kind.chunk = 4
    inputs = tiny_models.inputs()
    rows = [dict(zip(inputs, x, strict=True)) for x in zip(*inputs.values(), strict=True)]
    settings: Any = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "remove_unused_columns": False}
    settings |= dict.fromkeys(("per_device_train_batch_size", "per_device_eval_batch_size"), N)
    settings |= {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 1, "save_steps": 1, "max_steps": 2}
    # the second step is too large, so that the first model is the best
    settings |= {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}
    arguments = TrainingArguments(str(tmp_path), activation_checkpointing=True, learning_rate=1e-3, **settings)
    trainer = kind(model, arguments, default_data_collator, rows, rows)
    trainer.train()
    # otherwise the Trainer would add, and not average, the losses of accumulated batches with labels
    assert not trainer.model_accepts_loss_kwargs
    assert model.is_activation_checkpointing
    assert model.config.projection_dim == D

    best = CLIPModel.from_pretrained(trainer.state.best_model_checkpoint).eval()
    assert all(map(torch.equal, model.parameters(), best.parameters()))
    last = ImageTextFeatures.from_pretrained(tmp_path / "checkpoint-2")
    assert not all(map(torch.equal, last.parameters(), best.parameters()))
    value = contrastile.clip_loss(*ImageTextFeatures(best)(**inputs)).item()
    # the Trainer averages one loss per row
    assert abs(value - trainer.state.best_metric) <= gamma((N + 2) * UNIT["float64"]) * value
