"""What the author of a loss claims for it: only that is tested, and what is not claimed is listed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from numbers import Integral
from typing import Any

from contrastile.backends.arrays import FLOATS
from contrastile.backends.contract import PRECISIONS

OBJECTIVES = ("clip_loss", "info_nce", "sigmoid_loss", "nt_xent", "sup_con", "maxsim")
"""What a loss may compute: the losses of the front door, whose positional arguments it takes, and ``oracle.late``'s."""

KEYWORDS = {
    "ids": ("clip_loss", "info_nce", "sigmoid_loss"),
    "negatives": ("info_nce",),
    "positives": ("info_nce",),
    "masks": ("maxsim",),
    "options": OBJECTIVES,
}
"""The claims of keyword arguments, and the objectives that have them."""

LARGEST = 4096
"""The rows and features of the largest case that is made for a loss."""

INTEGERS = ("int64", "int32", "int16", "int8", "uint8", "uint16", "uint32")
LIBRARIES = ("torch", "numpy", "cupy")
DEVICES = ("cpu", "cuda")


@dataclass(frozen=True, slots=True, kw_only=True)
class Claims:
    """What a loss claims. A mapping of these names, as a loss's attribute ``claims``, says the same.

    Attributes:
        objective: one of ``OBJECTIVES``. "info_nce" is one direction, and "maxsim" too, of features (b, tokens, d).
        library: whose arrays it takes, "torch", "numpy" or "cupy".
        returns_gradients: whether it returns ``(loss, gradients...)``, one gradient for each differentiable argument in
            their order, None for one that is not claimed. Of torch tensors it returns the loss alone where False, and
            autograd gives the gradients; losses on NumPy and CuPy arrays always return them.
        dtypes: of the features.
        devices: kinds of device.
        state: dtype of its logits and sums; None for the features' own. The bounds are those of a plain computation in
            this dtype.
        precision: how float32 products are computed, one of ``contract.PRECISIONS``.
        feature_gradients: whether the gradients of the features are claimed.
        scale_gradient: whether those of the scale, and of the sigmoid loss's bias, are. Otherwise both are numbers.
        numbers: whether the scale, and the bias, may be Python's or NumPy's numbers and tensors of shape (1,) too.
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
        largest_logit: the largest |logit| that it is made for.
        smallest_batch: rows, at least.
        batch_multiple: of which the number of rows must be a multiple.
        largest_batch: rows, at most.
        smallest_width: features, at least.
        width_multiple: of which the number of features must be a multiple.
        largest_width: features, at most.
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
            given = getattr(self, name)
            object.__setattr__(self, name, (given,) if isinstance(given, str | int) else tuple(given))
        _one_of("objective", (self.objective,), OBJECTIVES)
        _one_of("library", (self.library,), LIBRARIES)
        _one_of("dtypes", self.dtypes, FLOATS)
        _one_of("devices", self.devices, DEVICES)
        _one_of("integers", self.integers, INTEGERS)
        _one_of("state", () if self.state is None else (self.state,), FLOATS)
        _one_of("precision", (self.precision,), PRECISIONS)
        for name in ("batch", "width"):
            for each in (f"smallest_{name}", f"{name}_multiple", f"largest_{name}"):
                size = getattr(self, each)
                if size is not None and (isinstance(size, bool) or not isinstance(size, Integral) or size < 1):
                    raise ValueError(f"claims: {each} must be a positive integer, got {size!r}")
            least, most = getattr(self, f"smallest_{name}"), getattr(self, f"largest_{name}")
            fitted = getattr(self, name)(1)
            if fitted is None:
                multiple = getattr(self, f"{name}_multiple")
                raise ValueError(
                    f"claims: some {name} must be claimed, got multiples of {multiple} in {least} to {most}"
                )
            if fitted > LARGEST:
                raise ValueError(
                    f"claims: some {name} of at most {LARGEST:,} must be claimed, since the cases hold whole matrices, "
                    f"got {fitted:,} at least; test a smaller instance"
                )
        for name, objectives in KEYWORDS.items():
            if getattr(self, name) and self.objective not in objectives:
                raise ValueError(f"claims: {name} must be False for {self.objective}, which takes none, got True")
        if any(n < 2 for n in self.ranks):
            raise ValueError(f"claims: ranks must be numbers of at least 2, got {self.ranks}; leave 1 out")

    @property
    def by_autograd(self) -> bool:
        """Whether autograd gives the gradients."""
        return self.library == "torch" and not self.returns_gradients

    @staticmethod
    def of(given: Claims | Mapping[str, Any] | None, **more: Any) -> Claims:
        """Claims from what a loss has as its attribute ``claims``; ``more`` replaces what is not None.

        Raises:
            TypeError: it is neither Claims nor a mapping, or names something that nobody can claim.
            ValueError: a value is none that can be claimed.
        """
        names = [each.name for each in fields(Claims)]
        if isinstance(given, Claims):
            stated = {name: getattr(given, name) for name in names}
        elif given is None or isinstance(given, Mapping):
            stated = dict(given or {})
        else:
            raise TypeError(f"claims must be Claims or a mapping, got {type(given).__name__}")
        stated |= {name: value for name, value in more.items() if value is not None}
        unknown = [name for name in stated if name not in names]
        if unknown:
            raise TypeError(f"claims must name {', '.join(names)}, got {unknown[0]!r}")
        return Claims(**stated)

    def batch(self, wished: int) -> int | None:
        """The smallest claimed number of rows that is at least ``wished``; None where there is none."""
        return _fitting(wished, self.smallest_batch, self.batch_multiple, self.largest_batch)

    def width(self, wished: int) -> int | None:
        """The smallest claimed width that is at least ``wished``; None where there is none."""
        return _fitting(wished, self.smallest_width, self.width_multiple, self.largest_width)


def _fitting(wished: int, least: int, multiple: int, most: int | None) -> int | None:
    size = -(-max(wished, least) // multiple) * multiple
    if most is not None and size > most:
        # a smaller one serves as well
        size = most // multiple * multiple
    return size if size >= max(1, least) else None


def _one_of(name: str, given: tuple[str, ...], known: tuple[str, ...]) -> None:
    for each in given:
        if each not in known:
            raise ValueError(f"claims: {name} must be of {', '.join(known)}, got {each!r}")
