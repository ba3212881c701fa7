"""The losses of ``contrastile.integrations.sentence_transformers`` against the library's, also in its wrappers."""

from __future__ import annotations

import functools
import itertools
import random
import string
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from recipes import recipe
from sentence_tables import DIMENSION, ROWS, Table, columns, tolerance
from torch import Tensor, nn

pytestmark = pytest.mark.slow
SCALE = 5.0
STRATEGIES = "absolute", "relative"


def libraries() -> tuple[Any, Any]:
    """The library's losses and ours, imported late because the import takes seconds."""
    from sentence_transformers.sentence_transformer import losses

    from contrastile.integrations import sentence_transformers as ours

    return losses, ours


@pytest.mark.parametrize("cached", [False, True])
def test_the_library_s_wrappers_accept_our_losses(cached: bool) -> None:
    from sentence_transformers import SentenceTransformer, SparseEncoder, util
    from sentence_transformers.sparse_encoder import losses as sparse

    losses, ours = libraries()
    name = f"{'Cached' * cached}MultipleNegativesRankingLoss"
    options: dict[str, Any] = {"mini_batch_size": 3, "scale": SCALE} if cached else {}
    splade: Any = functools.partial(sparse.CachedSpladeLoss, mini_batch_size=3) if cached else sparse.SpladeLoss
    config = getattr(ours, name)(SentenceTransformer(modules=[Table(1)], device="cpu"), mask_duplicates=True)
    assert config.get_config_dict()["mask_duplicates"]
    our_loss = functools.partial(ours.MultipleNegativesRankingLoss, scale=1.0, similarity_fct=util.dot_score)

    def matryoshka(loss_class: Any, model: Any) -> Any:
        return losses.MatryoshkaLoss(model, loss_class(model, **options), [DIMENSION, 5, 3], [1.0, 0.5, 0.25])

    for kind, wrap, loss_classes, scale in (
        (SentenceTransformer, matryoshka, (getattr(losses, name), getattr(ours, name)), 3 * 20.0),
        (
            SparseEncoder,
            lambda loss_class, model: splade(model, loss_class(model), 0.1, 0.2),
            (sparse.SparseMultipleNegativesRankingLoss, our_loss),
            1.0,
        ),
    ):
        results = []
        for loss_class in loss_classes:
            model = kind(modules=[Table(3 * ROWS)], device="cpu")
            value = wrap(loss_class, model)(columns(3), None)
            value = sum(value.values()) if isinstance(value, dict) else value
            (2.0 * value).backward()
            results.append((value.detach(), model[0].embeddings.grad / 2.0))
        assert all((x - y).abs().max().item() <= tolerance(4 * ROWS, scale) for x, y in zip(*results, strict=True))


def test_the_recipe_trains_a_transformer(tmp_path: Path) -> None:
    _, ours = libraries()
    model = tiny_models.sentences(tmp_path)
    letters = [" ".join(string.ascii_lowercase[i : i + 1 + i % 3]) for i in range(3 * ROWS)]
    texts = [model.preprocess(letters[i * ROWS : (i + 1) * ROWS]) for i in range(3)]
    kinds = ours.MultipleNegativesRankingLoss, ours.CachedMultipleNegativesRankingLoss
    for loss, kind in zip(recipe("sentence-transformers")["losses"](model), kinds, strict=True):
        assert type(loss) is kind
        model.zero_grad()
        loss([dict(x) for x in texts], None).backward()
        assert all(x.grad.abs().max() > 0 for name, x in model.named_parameters() if "pooler" not in name)


class RecordingEncoder(nn.Linear):
    """An encoder that records the dtypes of its products."""

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:  # type: ignore[override]
        x = super().forward(features["x"])
        self.dtypes = [*getattr(self, "dtypes", ()), (x.dtype, torch.is_grad_enabled())]
        return {"sentence_embedding": x}


@pytest.mark.parametrize("inside", ["forward", "both"])
def test_both_passes_of_the_cached_loss_have_the_autocast_of_the_first(inside: str) -> None:
    _, ours = libraries()
    encoder = RecordingEncoder(DIMENSION, DIMENSION)
    loss = ours.CachedMultipleNegativesRankingLoss(nn.Sequential(encoder), mini_batch_size=3)
    x = torch.randn(2, ROWS, DIMENSION, generator=torch.Generator().manual_seed(3))
    with torch.autocast("cpu", torch.bfloat16):
        value = loss([{"x": features} for features in x], torch.empty(0))
        if inside == "both":
            value.backward()
    if inside == "forward":
        value.backward()
    passes = [(torch.bfloat16, is_second) for is_second in (False, True) for _ in range(2 * -(-ROWS // 3))]
    assert encoder.dtypes == passes
    assert encoder.weight.grad is not None
    assert encoder.weight.grad.abs().min() > 0


class ShiftedGuide(nn.Module):
    """A guide whose similarities are positive; some negatives are more similar than a positive."""

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**features, "sentence_embedding": 1.0 + features["sentence_embedding"].flip(1)}


def test_a_tie_of_the_guide_leaves_nothing_out(tmp_path: Path) -> None:
    _, ours = libraries()
    model = tiny_models.sentences(tmp_path)
    anchors, positives, guide = torch.randn(3, 64, 100, generator=torch.manual_seed(0))
    losses = [ours.GISTEmbedLoss(model, model, margin=x) for x in (0.0, -10.0)]
    value, without_guide = (loss._of([anchors, positives], [guide, guide]) for loss in losses)
    assert value == without_guide


@pytest.mark.parametrize("name", ["GISTEmbedLoss", "CachedGISTEmbedLoss"])
@pytest.mark.parametrize("choice", [*itertools.product((False, True), (False, True), (2, 3))])
def test_gist_equals_the_loss_of_the_library(tmp_path: Path, name: str, choice: tuple[bool, bool, int]) -> None:
    losses, ours = libraries()
    anchors, positives, count = choice
    retokenizes = anchors == positives
    model = tiny_models.sentences(tmp_path)
    letters = string.ascii_lowercase
    guide = tiny_models.sentences(tmp_path / "guide", letters[::-1] if retokenizes else letters)
    guide.append(ShiftedGuide())
    options: dict[str, Any] = {"temperature": 1 / SCALE, "contrast_anchors": anchors, "contrast_positives": positives}
    options |= {"mini_batch_size": 3} if name.startswith("Cached") else {}
    rng = random.Random(count)
    texts = [" ".join(rng.choices(letters, k=1 + i % 5)) for i in range(count * ROWS)]
    results = []
    for library, margin in ((losses, 0.02 * count), (ours, 0.02 * count), (losses, -10.0)):
        gist = getattr(library, name)(model, guide, margin=margin, margin_strategy=STRATEGIES[anchors], **options)
        assert gist.must_retokenize == retokenizes
        model.zero_grad()
        # the wrapper passes the same features at every width
        loss = losses.MatryoshkaLoss(model, gist, [8, 4])
        value = loss([model.preprocess(texts[i * ROWS : (i + 1) * ROWS]) for i in range(count)], None)
        value.backward()
        results.append([value.detach(), *(x.grad for name, x in model.named_parameters() if "pooler" not in name)])
    for x, y in zip(*results[:2], strict=True):
        assert (x - y).abs().max().item() <= 1e-12 * (1 + x.abs().max().item())
    # with a margin below all similarities the guide masks nothing, so that the loss differs
    assert abs(results[2][0] - results[0][0]) > 1e-3
