"""sentence-transformers' losses with in-batch negatives, without their matrices of similarities.

The classes are subclasses of the library's own, with its arguments, so that its trainers, ``MatryoshkaLoss``,
``SpladeLoss`` and ``CachedSpladeLoss`` take them. Whatever the library puts under one softmax is one ``info_nce`` here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
import torch.distributed as dist
from sentence_transformers.base.losses.merged_forward import embed_columns
from sentence_transformers.sentence_transformer import losses
from sentence_transformers.util import batch_to_device, cos_sim, dot_score
from torch import Tensor
from torch.nn.functional import normalize

from contrastile.losses import clip_loss, info_nce
from contrastile.plan import Settings, complete
from contrastile.training.random_state import Autocast

_LOSS_OPTIONS = (
    "scale",
    "similarity_fct",
    "gather_across_devices",
    "directions",
    "partition_mode",
    "hardness_mode",
    "hardness_strength",
)
_NO_ID = -1
_TIE = 2.0**-20
"""A guide's dot product must exceed the positive's by more than this: rounding must not decide a tie."""


class _WithTexts:
    """A loss that has the ids of its documents' texts during a forward pass, to mask duplicates."""

    def get_config_dict(self) -> dict[str, Any]:
        """The library's, with ``mask_duplicates``."""
        library: Any = super()
        return {**library.get_config_dict(), "mask_duplicates": cast(Any, getattr(self, "loss", self)).mask_duplicates}

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None) -> Tensor:
        """The loss of the tokens of queries, of documents, and of each column of hard negatives, 0-d."""
        columns, library = list(sentence_features), cast(Any, super())
        loss: Any = getattr(self, "loss", self)
        loss.texts = [_text_ids(x) for x in columns[1:]] if loss.mask_duplicates else []
        try:
            return cast(Tensor, library.forward(columns, labels))
        finally:
            loss.texts = []


class MultipleNegativesRankingLoss(_WithTexts, losses.MultipleNegativesRankingLoss):  # type: ignore[misc]
    """The library's ``MultipleNegativesRankingLoss`` in memory that is linear in the batch.

    With ``gather_across_devices`` the value is the loss of the global batch on every rank, where the library's is the
    mean over a rank's own rows; the gradients after DDP's mean are the same. Ranks may have different numbers of rows.

    Args:
        *args: the library's own.
        settings: options of the computation, such as ``{"backend": "triton"}``: see ``contrastile.plan.Settings``.
            ``gather_across_devices`` gives the group.
        mask_duplicates: whether a query's negatives exclude documents, on any rank, with the same tokens as its own
            document; for "query_to_doc" alone, without hardness.
        **kwargs: the library's own. ``similarity_fct`` must be ``util.cos_sim`` or ``util.dot_score``.

    Raises:
        TypeError: the settings are not a dict, or one is unknown; or the model has several vectors for each text.
        ValueError: the similarity is another function, the settings have a group, or duplicates cannot be masked.
    """

    def __init__(
        self, *args: Any, settings: Settings | None = None, mask_duplicates: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.mask_duplicates, self.texts = mask_duplicates, list[Tensor]()
        if mask_duplicates and (self._hardness or len(self.directions) > 1):
            raise ValueError(
                "mask_duplicates must be of query_to_doc alone, without hardness, got "
                f"{', '.join(self.directions)} and {self.hardness_mode}; leave it out"
            )
        if type(self.model).__name__ == "MultiVectorEncoder":
            raise TypeError("model must have one vector for each text, got a MultiVectorEncoder; use its own losses")
        self.settings = _checked(settings)
        if self.similarity_fct not in (cos_sim, dot_score):
            raise ValueError(
                "similarity_fct must be util.cos_sim or util.dot_score, got "
                f"{getattr(self.similarity_fct, '__name__', self.similarity_fct)!r}; use the library's own loss"
            )

    def compute_loss_from_embeddings(self, embeddings: Sequence[Tensor], labels: Tensor | None = None) -> Tensor:
        """The loss, 0-d.

        Args:
            embeddings: (b, d) of the queries, of their documents, and of each column of hard negatives.
            labels: not used.

        Raises:
            ValueError: there are fewer than two embeddings, their shapes do not fit, or duplicates are masked and the
                texts are not known.
        """
        if self.mask_duplicates and not self.texts:
            raise ValueError("mask_duplicates must be False for embeddings without their texts, got True; leave it out")
        if len(embeddings) < 2:
            raise ValueError(f"embeddings must be those of queries and documents, got {len(embeddings)}; give both")
        queries, *documents = (normalize(x, dim=-1) if self.similarity_fct is cos_sim else x for x in embeddings)
        if self.partition_mode == "joint" or "doc_to_query" not in self.directions:
            return self._softmax(queries, documents, self.directions)
        if len(documents) == 1 and not self._hardness:
            return cast(Tensor, clip_loss(queries, documents[0], self.scale, **_with_group(self)))
        doc_to_query = info_nce(documents[0], queries, self.scale, **_with_group(self))
        return cast(Tensor, (self._softmax(queries, documents) + doc_to_query) / 2)

    @property
    def _hardness(self) -> float:
        return float(self.hardness_strength) if self.hardness_mode else 0.0

    def _softmax(self, queries: Tensor, documents: Sequence[Tensor], directions: Sequence[str] = ()) -> Tensor:
        """All directions under one softmax for each query, as one ``info_nce`` of wider features.

        A row concatenates the features that its logits need: the query; its document, for the directions that start
        there; the query without gradient, for the hardness term of a logit; and the logits of its own pairs, if
        hardness treats them unlike those of other queries. A column is 0 in all dimensions but its own.

        Args:
            queries: (b, d).
            documents: (b, d) each.
            directions: the directions besides "query_to_doc".
        """
        rank = dist.get_rank() if _shared(self) else 0
        query_ids = torch.arange(len(queries), device=queries.device) + (rank << 32)
        no_ids = torch.full_like(query_ids, _NO_ID)
        strength = self._hardness / self.scale
        apart = _apart(self.hardness_mode, len(documents)) if strength else range(0)
        has_hardness_term = bool(strength) and self.hardness_mode != "hard_negatives"

        rows = {"query": queries}
        if "doc_to_query" in directions or "doc_to_doc" in directions:
            rows["document"] = documents[0]
        if has_hardness_term:
            rows["hardness"] = strength * queries.detach()
        if apart:
            rows["pairs"] = _pairs(queries, [documents[i] for i in apart], 0.0 if has_hardness_term else strength)

        # a column is no negative of a query with the same id
        columns = [
            ({"query": x, "hardness": x.detach()}, query_ids if i in apart else no_ids) for i, x in enumerate(documents)
        ]
        if "query_to_query" in directions:
            columns.append(({"query": queries}, query_ids))
        if "doc_to_query" in directions:
            columns.append(({"document": queries}, no_ids))
        if "doc_to_doc" in directions:
            columns += [({"document": x}, query_ids) for x in documents]
        blocks = [(_beside(rows, parts), ids) for parts, ids in columns]
        if apart and rank == 0:
            # these columns are the same for all ranks, so rank 0 alone adds them
            ones = torch.eye(len(apart), rows["pairs"].shape[1], dtype=queries.dtype, device=queries.device)
            pair_block = _beside(rows, {"pairs": ones}), no_ids.new_full((len(apart),), _NO_ID)
            position, joined = (0, [pair_block, blocks[0]]) if 0 in apart else (-1, [blocks[-1], pair_block])
            blocks[position] = (torch.cat([x for x, _ in joined]), torch.cat([x for _, x in joined]))
        if self.mask_duplicates:
            query_ids, blocks = self.texts[0], [(x, ids) for (x, _), ids in zip(blocks, self.texts, strict=True)]
        needs_ids = self.mask_duplicates or bool(apart) or "query_to_query" in directions or "doc_to_doc" in directions
        key, *negatives = (x for x, _ in blocks)
        value = info_nce(
            _beside(rows, rows),
            key,
            self.scale,
            negatives=negatives,
            # every query's positive is then the first pair column, which is column 0
            positives=torch.zeros_like(query_ids) if 0 in apart else None,
            row_ids=query_ids if needs_ids else None,
            column_ids=torch.cat([ids for _, ids in blocks]) if needs_ids else None,
            **_with_group(self),
        )
        return cast(Tensor, value)


class _TwoPasses:
    """A cached loss of the library, with the autocast of the encoder's first pass in its second pass."""

    def embed_minibatch(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """The library's result: embeddings, and at the end the context of their second pass, None without one."""
        library: Any = super()
        *embeddings, random_state = library.embed_minibatch(*args, **kwargs)
        context = None if random_state is None else _Again(random_state, Autocast([embeddings[0].device]))
        return *embeddings, context


class CachedMultipleNegativesRankingLoss(_WithTexts, _TwoPasses, losses.CachedMultipleNegativesRankingLoss):  # type: ignore[misc]
    """The library's ``CachedMultipleNegativesRankingLoss``, whose gradient cache is kept, with the loss in one call.

    ``mini_batch_size`` bounds the encoder's memory; the loss does not need it. The second pass of the encoder, in the
    backward pass, has the autocast of the first, wherever ``backward`` is called.

    Args:
        *args: the library's own.
        settings, mask_duplicates: see ``MultipleNegativesRankingLoss``.
        **kwargs: the library's own.

    Raises:
        TypeError, ValueError: see ``MultipleNegativesRankingLoss``.
    """

    def __init__(
        self, *args: Any, settings: Settings | None = None, mask_duplicates: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        options = {"mask_duplicates": mask_duplicates, **{name: getattr(self, name) for name in _LOSS_OPTIONS}}
        self.loss = MultipleNegativesRankingLoss(self.model, settings=settings, **options)

    def calculate_loss(
        self, reps: Sequence[Sequence[Tensor]], labels: Tensor | None = None, *, with_backward: bool = False
    ) -> Tensor:
        """The loss of all chunks, 0-d; with ``with_backward`` it is detached, after its backward pass.

        Args:
            reps: the chunks' embeddings, (., d) each, of each column.
            labels: not used.
            with_backward: whether to fill the embeddings' ``.grad``.
        """
        loss: Tensor = self.loss.compute_loss_from_embeddings([torch.cat(list(chunks)) for chunks in reps], labels)
        return _after_backward(loss) if with_backward else loss


class _WithGuide:
    """The computation that both losses with a guide share."""

    def __init__(self, *args: Any, settings: Settings | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.settings = _checked(settings)

    def _of(self: Any, embeddings: Sequence[Tensor], guide_embeddings: Sequence[Tensor]) -> Tensor:
        """The loss, 0-d, of the embeddings of each column, (b, d), and of the guide's embeddings, (b, e)."""
        if len(embeddings) < 2:
            raise ValueError(f"embeddings must be those of anchors and positives, got {len(embeddings)}; give both")
        rows, columns = self._sides(embeddings)
        row_guide, column_guide = self._sides(guide_embeddings)
        value = info_nce(
            rows,
            columns[0],
            1.0 / self.temperature,
            negatives=columns[1:],
            guide=(row_guide, torch.cat(column_guide)),
            threshold=_TIE - self.margin,
            threshold_is=self.margin_strategy,
            **_with_group(self),
        )
        return cast(Tensor, value)

    def _sides(self: Any, embeddings: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """The rows and the blocks of columns of one softmax, of the model's or guide's embeddings: see ``_softmax``."""
        anchors, positives, *negatives = (normalize(x, dim=-1) for x in embeddings)
        rows = {"query": anchors}
        columns = [{"query": positives}]
        if self.contrast_anchors:
            # the guide excludes an anchor against itself, unless its positive is as similar: a tie, which counts
            columns.append({"query": anchors})
        if self.contrast_positives:
            rows["document"] = positives
            columns.append({"document": positives})
        columns += [{"query": x} for x in negatives]
        return _beside(rows, rows), [_beside(rows, x) for x in columns]


class GISTEmbedLoss(_WithGuide, losses.GISTEmbedLoss):  # type: ignore[misc]
    """The library's ``GISTEmbedLoss`` in memory that is linear in the batch, with any number of hard negatives.

    The guide's embeddings are compared in the dtype of the model's. Two things differ from the library: with
    ``gather_across_devices`` the anchors of all ranks are contrasted, not a rank's own alone, and the value is that of
    the global batch; and where the guide finds a positive's similarity negative, a relative margin raises the limit
    instead of lowering it. Similarities of the guide that differ by less than 1e-6 are a tie, and leave nothing out.

    The arguments are the library's own and ``settings``. They, and what is raised, are as for
    ``MultipleNegativesRankingLoss``.
    """

    def forward(self, sentence_features: Iterable[dict[str, Any]], labels: Tensor | None = None) -> Tensor:
        """The loss, 0-d, of the features of anchors, of positives and of each column of hard negatives.

        ``labels`` are not used.
        """
        features = list(sentence_features)
        # copies, because a model writes into its input
        guide_features = [dict(x) for x in features]
        embeddings = embed_columns(self.model, features)
        with torch.no_grad():
            if self.must_retokenize:
                guide_features = [self._tokenized_again(x) for x in features]
            guide_embeddings = embed_columns(self.guide, guide_features)
        return self._of(embeddings, guide_embeddings)

    def _tokenized_again(self, features: Mapping[str, Any]) -> dict[str, Any]:
        """The guide's features of the texts of the model's features."""
        ids = features["input_ids"]
        if "cu_seq_lens_q" in features:
            # the texts are concatenated without padding
            ids = ids[0].split(features["cu_seq_lens_q"].diff().tolist())
        texts = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
        return cast("dict[str, Any]", batch_to_device(self.guide.preprocess(texts), self.guide.device))


class CachedGISTEmbedLoss(_WithGuide, _TwoPasses, losses.CachedGISTEmbedLoss):  # type: ignore[misc]
    """The library's ``CachedGISTEmbedLoss``, whose gradient cache is kept, with the loss in one call.

    It differs from the library as ``GISTEmbedLoss`` does. The arguments, and what is raised, are those of
    ``CachedMultipleNegativesRankingLoss``.
    """

    def calculate_loss(
        self, reps: Sequence[Sequence[Tensor]], reps_guided: Sequence[Sequence[Tensor]], *, with_backward: bool = False
    ) -> Tensor:
        """As in ``CachedMultipleNegativesRankingLoss``; ``reps_guided`` are the guide's embeddings in the same form."""
        loss = self._of(*([torch.cat(list(chunks)) for chunks in columns] for columns in (reps, reps_guided)))
        return _after_backward(loss) if with_backward else loss


class _Again:
    """A context with the random numbers and the autocast of a first pass; it may be entered several times."""

    def __init__(self, random_state: AbstractContextManager[None], autocast: Autocast) -> None:
        self._random_state, self._autocast = random_state, autocast

    def __enter__(self) -> None:
        # autocast may keep cast copies of weights that have no graph: see Replay
        torch.clear_autocast_cache()
        self._stack = self._autocast.again()
        self._stack.enter_context(self._random_state)

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)


def _after_backward(loss: Tensor) -> Tensor:
    """The loss, detached, after its backward pass."""
    torch.autograd.backward(loss)
    return loss.detach()


def _checked(settings: Any) -> Settings:
    """The settings of a loss; TypeError if they are not a dict, ValueError if they have a group."""
    if not isinstance(settings, Mapping | None):
        raise TypeError(
            f"settings must be a dict, got {type(settings).__name__}; give the loss's own, such as "
            "settings={'backend': 'triton'}"
        )
    checked_settings = cast(Settings, settings or {})
    if complete(checked_settings)["group"] is not None:
        raise ValueError("settings must have no group, got one; give gather_across_devices=True instead")
    return checked_settings


def _shared(loss: Any) -> bool:
    return bool(loss.gather_across_devices and dist.is_available() and dist.is_initialized())


def _with_group(loss: Any) -> Settings:
    return cast(Settings, {**loss.settings, "group": "world" if _shared(loss) else None})


def _text_ids(features: Mapping[str, Tensor]) -> Tensor:
    """(b,) 64-bit hashes of the tokens under the attention mask, on whichever side the padding is."""
    ids = features.get("input_ids")
    if ids is None or ids.ndim != 2:
        raise ValueError(
            "mask_duplicates must have input_ids of shape (b, length), got "
            f"{', '.join(features) if ids is None else tuple(ids.shape)}; leave it out"
        )
    mask = features.get("attention_mask", torch.ones_like(ids)).long()
    hashes = (ids.long() + (mask.cumsum(1) << 32)) * (0x9E3779B97F4A7C15 - 2**64)  # Fibonacci hashing
    return ((hashes ^ (hashes >> 29)) * 0x2545F4914F6CDD1D * mask).sum(1)


def _apart(mode: str | None, documents: int) -> range:
    """The numbers of the query's own documents that hardness treats unlike other queries' documents."""
    return {"hard_negatives": range(1, documents), "all_negatives": range(1)}.get(str(mode), range(documents))


def _pairs(queries: Tensor, documents: Sequence[Tensor], strength: float) -> Tensor:
    """(b, a multiple of 8) similarities of queries and their own documents, plus hardness, padded with zeros."""
    dtype = torch.float64 if queries.dtype == torch.float64 else torch.float32
    similarities = torch.stack([(queries.to(dtype) * x.to(dtype)).sum(1) for x in documents], dim=1)
    similarities = (similarities + strength * similarities.detach()).to(queries.dtype)
    return torch.nn.functional.pad(similarities, (0, -len(documents) % 8))


def _beside(rows: Mapping[str, Tensor], parts: Mapping[str, Tensor]) -> Tensor:
    """The parts side by side, in the dimensions of the rows; a missing part is 0."""
    n = len(next(iter(parts.values())))
    blocks = [parts[name] if name in parts else x.new_zeros(n, x.shape[1]) for name, x in rows.items()]
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=1)
