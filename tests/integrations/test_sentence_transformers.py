"""The losses of ``contrastile.integrations.sentence_transformers`` in the library's own wrappers, beside its own."""

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
from sentence_tables import DIMENSION, ROWS, Table, allowed, columns
from torch import Tensor, nn

pytestmark = pytest.mark.slow
SCALE = 5.0
STRATEGIES = "absolute", "relative"


def libraries() -> tuple[Any, Any]:
    """The library's losses and ours: its import takes seconds."""
    from sentence_transformers.sentence_transformer import losses

    from contrastile.integrations import sentence_transformers as ours

    return losses, ours


@pytest.mark.parametrize("cached", [False, True])
def test_the_library_s_wrappers_take_it_as_their_own_losses(cached: bool) -> None:
    from sentence_transformers import SentenceTransformer, SparseEncoder, util
    from sentence_transformers.sparse_encoder import losses as sparse

    losses, ours = libraries()
    name = f"{'Cached' * cached}MultipleNegativesRankingLoss"
    more: dict[str, Any] = {"mini_batch_size": 3, "scale": SCALE} if cached else {}
    splade: Any = functools.partial(sparse.CachedSpladeLoss, mini_batch_size=3) if cached else sparse.SpladeLoss
    of_ours = functools.partial(ours.MultipleNegativesRankingLoss, scale=1.0, similarity_fct=util.dot_score)

    def matryoshka(made: Any, model: Any) -> Any:
        return losses.MatryoshkaLoss(model, made(model, **more), [DIMENSION, 5, 3], [1.0, 0.5, 0.25])

    for kind, wrapped, made, scale in (
        (SentenceTransformer, matryoshka, (getattr(losses, name), getattr(ours, name)), 3 * 20.0),
        (
            SparseEncoder,
            lambda made, model: splade(model, made(model), 0.1, 0.2),
            (sparse.SparseMultipleNegativesRankingLoss, of_ours),
            1.0,
        ),
    ):
        found = []
        for each in made:
            model = kind(modules=[Table(3 * ROWS)], device="cpu")
            value = wrapped(each, model)(columns(3), None)
            value = sum(value.values()) if isinstance(value, dict) else value
            (2.0 * value).backward()
            found.append((value.detach(), model[0].embeddings.grad / 2.0))
        assert all((x - y).abs().max().item() <= allowed(4 * ROWS, scale) for x, y in zip(*found, strict=True))


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


class Seen(nn.Linear):
    """An encoder that notes the dtype of its products."""

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:  # type: ignore[override]
        x = super().forward(features["x"])
        self.dtypes = [*getattr(self, "dtypes", ()), (x.dtype, torch.is_grad_enabled())]
        return {"sentence_embedding": x}


@pytest.mark.parametrize("around", ["forward", "both"])
def test_both_passes_of_the_cached_loss_have_the_autocast_of_the_first(around: str) -> None:
    _, ours = libraries()
    seen = Seen(DIMENSION, DIMENSION)
    loss = ours.CachedMultipleNegativesRankingLoss(nn.Sequential(seen), mini_batch_size=3)
    x = torch.randn(2, ROWS, DIMENSION, generator=torch.Generator().manual_seed(3))
    with torch.autocast("cpu", torch.bfloat16):
        value = loss([{"x": each} for each in x], torch.empty(0))
        if around == "both":
            value.backward()
    if around == "forward":
        value.backward()
    passes = [(torch.bfloat16, again) for again in (False, True) for _ in range(2 * -(-ROWS // 3))]
    assert seen.dtypes == passes
    assert seen.weight.grad is not None
    assert seen.weight.grad.abs().min() > 0


class Shifted(nn.Module):
    """A guide's embeddings of a model's: positive similarities, some of them larger than a positive's."""

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**features, "sentence_embedding": 1.0 + features["sentence_embedding"].flip(1)}


@pytest.mark.parametrize("name", ["GISTEmbedLoss", "CachedGISTEmbedLoss"])
@pytest.mark.parametrize("choice", [*itertools.product((False, True), (False, True), (2, 3))])
def test_gist_is_the_library_s(tmp_path: Path, name: str, choice: tuple[bool, bool, int]) -> None:
    losses, ours = libraries()
    anchors, positives, many = choice
    again = anchors == positives
    model = tiny_models.sentences(tmp_path)
    guide = tiny_models.sentences(tmp_path / "guide", string.ascii_lowercase[::-1] if again else string.ascii_lowercase)
    guide.append(Shifted())
    how: dict[str, Any] = {"temperature": 1 / SCALE, "contrast_anchors": anchors, "contrast_positives": positives}
    how |= {"mini_batch_size": 3} if name.startswith("Cached") else {}
    drawn = random.Random(many)
    texts = [" ".join(drawn.choices(string.ascii_lowercase, k=1 + i % 5)) for i in range(many * ROWS)]
    found = []
    for library, margin in ((losses, 0.02 * many), (ours, 0.02 * many), (losses, -10.0)):
        made = getattr(library, name)(model, guide, margin=margin, margin_strategy=STRATEGIES[anchors], **how)
        assert made.must_retokenize == again
        model.zero_grad()
        # the library's wrapper gives the same features at every width
        loss = losses.MatryoshkaLoss(model, made, [8, 4])
        value = loss([model.preprocess(texts[i * ROWS : (i + 1) * ROWS]) for i in range(many)], None)
        value.backward()
        found.append([value.detach(), *(x.grad for name, x in model.named_parameters() if "pooler" not in name)])
    for x, y in zip(*found[:2], strict=True):
        assert (x - y).abs().max().item() <= 1e-12 * (1 + x.abs().max().item())
    # with a margin below all similarities the guide leaves nothing out
    assert abs(found[2][0] - found[0][0]) > 1e-3
