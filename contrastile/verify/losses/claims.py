"""The claims that the author of a loss makes: only claimed properties are tested; unclaimed ones are listed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from numbers import Integral
from typing import Any

from contrastile.backends.arrays import FLOATS
from contrastile.backends.contract import PRECISIONS

OBJECTIVES = ("clip_loss", "info_nce", "sigmoid_loss", "nt_xent", "sup_con", "maxsim")
"""What a loss may compute: a loss of the front door, with its positional arguments, or that of ``oracle.late``."""

KEYWORDS = {
    "ids": ("clip_loss", "info_nce", "sigmoid_loss"),
    "negatives": ("info_nce",),
    "positives": ("info_nce",),
    "masks": ("maxsim",),
    "options": OBJECTIVES,
}
"""The claims of keyword arguments, and the objectives that have them."""

LARGEST = 4096
"""The largest number of rows, and of features, of a case."""

INTEGERS = ("int64", "int32", "int16", "int8", "uint8", "uint16", "uint32")
LIBRARIES = ("torch", "numpy", "cupy")
DEVICES = ("cpu", "cuda")


@dataclass(frozen=True, slots=True, kw_only=True)
class Claims:
    """The claims of a loss. A loss may state them as its attribute ``claims``, a mapping of these names.

    Attributes:
        objective: one of ``OBJECTIVES``. "info_nce" is one direction, and "maxsim" too, of features (b, tokens, d).
        library: the library of its arrays, "torch", "numpy" or "cupy".
        returns_gradients: whether it returns ``(loss, gradients...)``, one gradient for each differentiable argument in
            their order, None for an unclaimed one. If False, a loss of torch tensors returns the loss alone, and
            autograd gives the gradients; losses on NumPy and CuPy arrays always return them.
        dtypes: of the features.
        devices: kinds of device.
        state: dtype of its logits and sums; None for that of the features. The bounds are those of a plain computation
            in this dtype.
        precision: how float32 products are computed, one of ``contract.PRECISIONS``.
        feature_gradients: whether the gradients of the features are claimed.
        scale_gradient: whether those of the scale and of the sigmoid loss's bias are. Otherwise both are numbers.
        numbers: whether scale and bias may also be Python's or NumPy's numbers and tensors of shape (1,).
        ids: whether it leaves out pairs of different rows with equal ids: a keyword ``ids``, (b,); of info_nce
            ``row_ids`` and ``column_ids``.
        negatives: whether info_nce has a keyword ``negatives``, a tensor or a sequence of them, either of which may be
            empty.
        positives: whether info_nce has a keyword ``positives``, (b,), each among the columns of key and negatives.
        masks: whether maxsim has keywords ``query_mask``, (b, q), and ``document_mask``, (b, t): integers, 1 where a
            token counts and 0 elsewhere.
        options: whether it has the other keywords of contrastile's own function: ids_are, weights, margin and the like;
            and of maxsim ``symmetric``.
        integers: dtypes of ids, positives and labels.
        normalises: whether it divides the features by their norms first. They are given with norms near 1.
        strided: whether it takes features that are not contiguous.
        deterministic: whether the same inputs give the same bits.
        retains: whether a graph that is retained may be differentiated twice.
        autocast: whether the caller's ``torch.autocast`` makes it a computation in autocast's dtype, and no other.
        linear_memory: whether its memory grows with the batch, not with its square.
        non_finite: whether a NaN feature makes the loss NaN.
        largest_logit: the largest |logit| that it supports.
        smallest_batch: the smallest number of rows.
        batch_multiple: a number that must divide the number of rows.
        largest_batch: the largest number of rows.
        smallest_width: the smallest number of features.
        width_multiple: a number that must divide the number of features.
        largest_width: the largest number of features.
        ranks: numbers of ranks of torch.distributed on which each rank passes its own rows, and the parameters'
            gradients after DDP's mean are those of the joined batch.
        equal_shards: whether all ranks must have equally many rows.
    """

    objective: str = "clip_loss"
    library: str = "torch"
    returns_gradients: bool = False
    dtypes: tuple[str, ...] = ("float32",)
    devices: tuple[str, ...] = ("cpu",)
    state: str | None = None
    precision: str = "ieee"
    feature_gradients: bool = True
    scale_gradient: bool = True
    numbers: bool = True
    ids: bool = False
    negatives: bool = False
    positives: bool = False
    masks: bool = False
    options: bool = False
    integers: tuple[str, ...] = ("int64",)
    normalises: bool = False
    strided: bool = True
    deterministic: bool = True
    retains: bool = True
    autocast: bool = True
    linear_memory: bool = False
    non_finite: bool = True
    largest_logit: float | None = None
    smallest_batch: int = 1
    batch_multiple: int = 1
    largest_batch: int | None = None
    smallest_width: int = 1
    width_multiple: int = 1
    largest_width: int | None = None
    ranks: tuple[int, ...] = ()
    equal_shards: bool = False

    def __post_init__(self) -> None:
        for name in ("dtypes", "devices", "ranks", "integers"):
            claim = getattr(self, name)
            object.__setattr__(self, name, (claim,) if isinstance(claim, str | int) else tuple(claim))
        _require_known("objective", (self.objective,), OBJECTIVES)
        _require_known("library", (self.library,), LIBRARIES)
        _require_known("dtypes", self.dtypes, FLOATS)
        _require_known("devices", self.devices, DEVICES)
        _require_known("integers", self.integers, INTEGERS)
        _require_known("state", () if self.state is None else (self.state,), FLOATS)
        _require_known("precision", (self.precision,), PRECISIONS)
        for name in ("batch", "width"):
            for field_name in (f"smallest_{name}", f"{name}_multiple", f"largest_{name}"):
                size = getattr(self, field_name)
                if size is not None and (isinstance(size, bool) or not isinstance(size, Integral) or size < 1):
                    raise ValueError(f"claims: {field_name} must be a positive integer, got {size!r}")
            least, most = getattr(self, f"smallest_{name}"), getattr(self, f"largest_{name}")
            smallest = getattr(self, name)(1)
            if smallest is None:
                multiple = getattr(self, f"{name}_multiple")
                raise ValueError(
                    f"claims: some {name} must be claimed, got multiples of {multiple} in {least} to {most}"
                )
            if smallest > LARGEST:
                raise ValueError(
                    f"claims: some {name} of at most {LARGEST:,} must be claimed, since the cases hold whole matrices, "
                    f"got {smallest:,} at least; test a smaller instance"
                )
        for name, objectives in KEYWORDS.items():
            if getattr(self, name) and self.objective not in objectives:
                raise ValueError(f"claims: {name} must be False for {self.objective}, which takes none, got True")
        if any(rank_count < 2 for rank_count in self.ranks):
            raise ValueError(f"claims: ranks must be numbers of at least 2, got {self.ranks}; leave 1 out")

    @property
    def by_autograd(self) -> bool:
        """Whether autograd gives the gradients."""
        return self.library == "torch" and not self.returns_gradients

    @staticmethod
    def of(claims: Claims | Mapping[str, Any] | None, **more: Any) -> Claims:
        """Claims from a loss's attribute ``claims``; the keywords of ``more`` that are not None replace its values.

        Raises:
            TypeError: the argument is neither Claims nor a mapping, or names an unknown claim.
            ValueError: a claim has an invalid value.
        """
        names = [field.name for field in fields(Claims)]
        if isinstance(claims, Claims):
            values = {name: getattr(claims, name) for name in names}
        elif claims is None or isinstance(claims, Mapping):
            values = dict(claims or {})
        else:
            raise TypeError(f"claims must be Claims or a mapping, got {type(claims).__name__}")
        values |= {name: value for name, value in more.items() if value is not None}
        unknown = [name for name in values if name not in names]
        if unknown:
            raise TypeError(f"claims must name {', '.join(names)}, got {unknown[0]!r}")
        return Claims(**values)

    def batch(self, requested: int) -> int | None:
        """The smallest claimed number of rows that is at least ``requested``; None where there is none."""
        return _claimed_size(requested, self.smallest_batch, self.batch_multiple, self.largest_batch)

    def width(self, requested: int) -> int | None:
        """The smallest claimed width that is at least ``requested``; None where there is none."""
        return _claimed_size(requested, self.smallest_width, self.width_multiple, self.largest_width)


def _claimed_size(requested: int, least: int, multiple: int, most: int | None) -> int | None:
    size = -(-max(requested, least) // multiple) * multiple
    if most is not None and size > most:
        # Fall back to the largest claimed size.
        size = most // multiple * multiple
    return size if size >= max(1, least) else None


def _require_known(name: str, values: tuple[str, ...], known: tuple[str, ...]) -> None:
    for value in values:
        if value not in known:
            raise ValueError(f"claims: {name} must be of {', '.join(known)}, got {value!r}")
