"""The recipes of docs/how-to/integrations.md for open_clip and its losses, and sentence-transformers over ranks."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import launch
from pages import blocks, printed, read
from recipes import SECTIONS, recipe
from torch import Tensor, nn

import contrastile
from contrastile import training
from contrastile.integrations.open_clip import ChunkedModel, replace_losses

pytestmark = pytest.mark.slow
PROGRAM = str(Path(__file__).parent / "programs" / "train_by_others.py")
DOUBLE = torch.float64


class Towers(nn.Module):
    """Two towers with dropout and a scale, with the inputs and outputs of open_clip's models."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.image, self.text = (nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5)).to(DOUBLE) for _ in range(2))
        self.log_scale = nn.Parameter(torch.tensor(0.7, dtype=DOUBLE))

    def forward(self, image: Tensor, text: Tensor) -> dict[str, Tensor]:
        features = {"image_features": self.image(image), "text_features": self.text(text)}
        return features | {"logit_scale": self.log_scale.exp()}


def inputs() -> tuple[Tensor, Tensor]:
    return tuple(torch.randn(2, 13, 4, dtype=DOUBLE, generator=torch.Generator().manual_seed(1)))


def cached_gradients(chunk: int) -> list[Any]:
    model = Towers()
    torch.manual_seed(2)
    training.cached_step(lambda *x: tuple(model(*x).values()), inputs(), contrastile.clip_loss, chunk=chunk)
    return [parameter.grad for parameter in model.parameters()]


def test_the_recipe_for_open_clip_s_loop_and_a_call_with_keywords() -> None:
    model, chunked, (images, texts) = Towers(), ChunkedModel(Towers(), 4), inputs()
    torch.manual_seed(2)
    recipe("open_clip")["step"](model, images, texts, contrastile.nn.ClipLoss())
    torch.manual_seed(2)
    contrastile.nn.ClipLoss()(**chunked(images, text=texts)).backward()
    # a chunk of 256 is the whole batch
    for trained, chunk in ((model, 13), (chunked, 4)):
        assert all(torch.equal(p.grad, x) for p, x in zip(trained.parameters(), cached_gradients(chunk), strict=True))


def test_open_clip_s_losses_are_replaced_and_the_others_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loss, factory = (types.ModuleType(f"open_clip.{name}") for name in ("loss", "factory"))
    for name in ("ClipLoss", "CoCaLoss", "SigLipLoss", "DistillClipLoss", "GenLipLoss"):
        setattr(loss, name, type(name, (nn.Module,), {}))
    factory.ClipLoss = loss.ClipLoss  # type: ignore[attr-defined]
    library: Any = types.ModuleType("open_clip_train")
    library.main = types.SimpleNamespace(main=lambda words: library.main.train_one_epoch(Towers(), *words))
    library.main.train_one_epoch = lambda model, *words: print(type(model))
    for module in (loss, factory, library):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    assert "ChunkedModel" in printed(*blocks(read("docs/tutorials/larger-batch.md"), r' \{\.python title="train'))
    assert replace_losses() == ["GenLipLoss"]
    assert "these stay open_clip's own: GenLipLoss" in caplog.text
    replaced: Any = factory.ClipLoss(local_loss=True), loss.SigLipLoss(chunk_size=8), loss.CoCaLoss(2.0, 1.0)  # type: ignore[attr-defined]
    assert [type(x).__module__ for x in replaced] == ["contrastile.nn"] * 3


def test_under_ddp_sentence_transformers_gradients_are_those_of_the_global_loss() -> None:
    result = launch("torch", PROGRAM, ranks=2, seconds=1200)
    assert result.code == 0, result.output
    for rank in range(2):
        ratios = dict(line.split(": ", 1) for line in result.lines(rank))
        assert len(ratios) == 10 * 4 * 3 + 3
        for trial, ratio in ratios.items():
            assert float(ratio) < 1, (trial, ratio)
    assert result.orphans == 0


def test_every_recipe_runs_somewhere() -> None:
    """The tests of this folder call the recipe of every section with Python blocks."""
    recipes = {name for name, text in SECTIONS.items() if "```python" in text}
    packages = {"Tevatron", "FlagEmbedding", "GradCache", "NeMo Automodel"}
    assert recipes == {"sentence-transformers", "transformers", "open_clip", "Lightning", "accelerate"} | packages
