"""The block contract: what a backend receives, what it returns, and how large its errors may be.

A *block* is some rows against some columns. Its logits are ``x_ij = scale <row_i, column_j> + bias``. A backend
computes three primitives over a block and nothing else:

* ``lse``        row and column log-sum-exps, over the negatives and over the positives, and sums of positive logits;
* ``gradients``  adds the block's part of the gradients of the rows and of the columns;
* ``sigmoid``    the additive sigmoid loss, value and gradients in one pass.

Log-sum-exps merge and gradients add, so every schedule (tiles, chunks, column blocks, shards on a ring) is written
once, above the primitives, and never per backend.

Invariants that every backend keeps:

* no array of m x n elements is held, beyond one tile;
* inside a tile, state has the state dtype: float64 for float64 features, float32 for all others; statistics are merged
  and sent in float64, because there are only O(m + n) of them;
* ``lse`` and ``gradients`` compute the same bits of a logit: a fused multiply-add in only one of them is an error of
  half an ulp of the logit, which leaves no correct digit of a gradient where logits are large;
* padding is masked with -inf *before* the max; merging (-inf, -inf) gives -inf, never NaN;
* offsets are 64-bit: rows x width passes 2^31 early;
* the same inputs give the same bits: no float atomics whose order can change a result;
* NaN or inf in the features gives NaN, as in the oracle: never a hang, never a number;
* arrays of any stride are accepted, or made contiguous once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from contrastile.backends.arrays import ArrayLibrary

Array = Any
Match = Literal["drop", "target"]
ColumnForm = Literal["sums", "gradient"]
"""The form of the columns' result of ``finished``: sums, to which a schedule may add others, or the gradient."""

PRECISIONS = ("ieee", "tf32", "split")
"""How products of float32 features are computed: "ieee" in float32; "tf32" with factors rounded to nearest to the 11
bits of tf32 at least; "split" with float32's accuracy, from parts of the factors that tensor cores multiply."""

CONTRACT = 2
"""The version of this contract: ``docs/how-to/write-backend.md`` lists what each version changed."""


class BackendUnavailableError(ImportError):
    """The named backend cannot run here; the message ends with the command that installs what is missing."""


class UnsupportedProblemError(ValueError):
    """A backend refuses a problem; the message gives its reason. Nothing falls back silently."""


@dataclass(frozen=True, slots=True)
class Pairs:
    """Which pairs of a block count, from vectors of length m and n: never from an m x n mask.

    A pair is *positive* when ``positives[i] == j`` or, with ``match="target"``, when its ids are equal. A pair is
    *admitted* to the log-sum-exps unless, with ``match="drop"``, its ids are equal and it is not positive (a false
    negative). An excluded pair is neither positive nor admitted (a sample against itself).

    Each row and each column has its own limit. A pair that is not positive and whose logit exceeds the row's limit
    counts neither in the row's sum nor in the row's part of G; likewise for the column. ``lse`` and ``gradients``
    compare the same bits, so the same pairs count in both. A NaN logit or limit leaves no pair out. The sigmoid loss
    has no limits.

    With a guide, limits are compared with the dot product of the guide's features, which another model computed for
    the same pair, and not with the logit. That dot product is formed in the same tile, and has no gradient.

    Attributes:
        positives: (m,) int64 column of each row's positive; a value outside 0..n-1 means "not in this block". None
            with ``match="target"``, where ids name the positives.
        excluded: (m,) int64 column that the row never sees (itself); outside 0..n-1 means "not in this block".
        row_ids: (m,) int64, given together with column_ids.
        column_ids: (n,) int64.
        match: what equal ids mean, "drop" or "target".
        row_limits: (m,) logits, state dtype.
        column_limits: (n,) logits, state dtype; not read where the columns' statistics are not requested.
        row_guide: (m, e) the guide's features of the rows, in the features' dtype; None where there is no guide, or
            there are no limits.
        column_guide: (n, e) the guide's features of the columns, given together with row_guide.
        rising: whether both ids rise, or rise within each rank: then few tiles hold equal ids.
    """

    positives: Array | None = None
    excluded: Array | None = None
    row_ids: Array | None = None
    column_ids: Array | None = None
    match: Match = "drop"
    row_limits: Array | None = None
    column_limits: Array | None = None
    row_guide: Array | None = None
    column_guide: Array | None = None
    rising: bool = False

    @property
    def of_ids(self) -> Match | None:
        """What equal ids mean; None without ids."""
        return None if self.row_ids is None or self.column_ids is None else self.match

    @property
    def limited(self) -> bool:
        """Whether the rows or the columns have limits."""
        return self.row_limits is not None or self.column_limits is not None


@dataclass(frozen=True, slots=True)
class Block:
    """Some rows against some columns.

    Attributes:
        rows: (m, d) features, any strides, m may be 0.
        columns: (n, d) features of the same dtype and device, n may be 0.
        scale: 0-d array in the state dtype on the same device.
        bias: 0-d array likewise, or None for 0; of a sigmoid loss always an array.
        pairs: which pairs count; indices are local to this block's columns.
        symmetric: whether the columns are the rows, and a column's log-sum-exp is that of its row: then x_ij should be
            x_ji to the last bit. Equal or shared memory does not imply it.
        values: of the rows, (m, c), and of the columns, (n, c), in the features' dtype. ``gradients`` multiplies G by
            them instead of by the features, and its sums are (m, c) and (n, c). Other primitives never receive them.
    """

    rows: Array
    columns: Array
    scale: Array
    bias: Array | None = None
    pairs: Pairs = field(default_factory=Pairs)
    symmetric: bool = False
    values: tuple[Array, Array] | None = None


class SideStatistics(NamedTuple):
    """What ``lse`` computes for the rows, or the columns, in float64. An empty log-sum-exp is -inf, an empty sum 0.

    Negatives and positives have separate log-sum-exps. With ``L = log(exp N + exp P)``, the loss of a row that is
    certain of its one positive is ``L - P = log1p(exp(N - P))``, which no float32 and no float64 ``L`` could hold. Over
    blocks and ranks N and P merge as log-sum-exps, S as a sum.

    A backend with ``compensated`` returns each as (m, 2) where its state is float64: a number, and its rounding error.
    A float64 N is rounded by up to ``|N| 2^-53``, and so is every exp(x - N), relative to itself; a computation that
    subtracts a maximum has no such error. A float32 state has larger errors of its own. ``gradients`` receives N and P
    in the form in which ``lse`` returns them; ``backends.pairs`` has the arithmetic.

    Attributes:
        negative_lse: (m,) ``N_i``, the log-sum-exp of x_ij over admitted pairs that are not positive.
        positive_lse: (m,) ``P_i``, the log-sum-exp of x_ij over positive pairs. That of a single positive is exactly
            its logit, to the last bit that ``gradients`` computes.
        positive_sum: (m,) ``S_i``, the sum of x_ij over positive pairs.
    """

    negative_lse: Array
    positive_lse: Array
    positive_sum: Array


@dataclass(frozen=True, slots=True)
class Statistics:
    """What ``lse`` returns.

    Attributes:
        rows: statistics of the rows, over the columns.
        columns: statistics of the columns, over the rows: (n,) each; None when they were not requested.
        kept: what ``keeping`` stores for the gradients, one array that only the backend can read, or None.
    """

    rows: SideStatistics
    columns: SideStatistics | None = None
    kept: Array | None = None


class Bars(NamedTuple):
    """Derivatives of the whole loss by the statistics of its rows, or of its columns, float64, (m,) each, any sign.

    Ranks exchange S, because it merges as a sum. A loss is a function of ``D = P - t S``, the excess of P over the mean
    of the positive logits, formed in float64: D of a single positive is exactly 0. A bar of 0 silences its term
    whatever the log-sum-exps are.

    Attributes:
        negative: the derivative by N.
        positive: the derivative by P at constant D.
        spread: the derivative by D.
    """

    negative: Array
    positive: Array
    spread: Array


class SideWeights(NamedTuple):
    """What ``gradients`` needs to know of the whole loss, for the rows or for the columns.

    The rows' part of G, with ``q_ij = exp(x_ij - P_i)``, is

    * ``Nbar_i exp(x_ij - N_i)`` where the pair is admitted and not positive;
    * ``Pbar_i q_ij + Dbar_i (q_ij - t_i)`` where it is positive. A single positive has q_ij exactly 1, and nothing
      cancels. This entry must be complete before G is rounded. Where ``positives`` names a row's positive, its logit
      *is* the rows' ``positive_lse[i]``: it is read there and never computed again.

    Most losses are ``sum_i u_i (softplus(N_i - P_i) + D_i)``: ``Nbar = u sigmoid(N - P)``, ``Pbar = -Nbar`` and
    ``Dbar = u``. For them u is passed and no bars, and the kernels form the bars: then G of a pair that is not positive
    is ``u_i exp(x_ij - L_i)`` with ``L = log(exp N + exp P)``. A weight of 0 silences its row or column whatever its
    log-sum-exps are.

    Attributes:
        negative_lse: (m,) float64, N of the whole loss, not of the block; (m, 2) where ``lse`` returns pairs.
        positive_lse: (m,) float64, P of the whole loss, likewise.
        weight: (m,) u, any sign, state dtype; not read where there are bars.
        target: (m,) t, the target weight of each positive of the row, state dtype: 1 of a single positive.
        bars: the derivatives of any other loss; None for losses of the form above.
    """

    negative_lse: Array
    positive_lse: Array
    weight: Array
    target: Array
    bars: Bars | None = None

    def part(self, where: slice) -> SideWeights:
        """The weights of some of the rows or columns."""
        n, p, weight, target = (x[where] for x in self[:4])
        return SideWeights(n, p, weight, target, None if self.bars is None else Bars(*(x[where] for x in self.bars)))


@dataclass(frozen=True, slots=True)
class Weights:
    """What ``gradients`` needs to know of the whole loss. G is the sum of the rows' and the columns' part.

    Attributes:
        rows: weights of the rows.
        columns: weights of the columns, with v, M, P' and t' in (n,) each; None for a loss of one direction.
        kept: ``kept`` of the block's ``Statistics``, for ``finished`` where the backend has it, else for ``gradients``.
            They may overwrite it.
    """

    rows: SideWeights
    columns: SideWeights | None = None
    kept: Array | None = None


@dataclass(frozen=True, slots=True)
class Options:
    """How to compute a loss, the same within the bound for all options. A backend ignores those it does not use.

    Attributes:
        tile: rows x columns of logits alive at a time, at most; None lets the backend choose.
        precision: how float32 features are multiplied, one of ``PRECISIONS``; other dtypes ignore it. ``Backend.check``
            refuses one that the backend lacks; the plan replaces "auto" (``choice.settled``).
        workspace: MiB of memory that a backend may form G in, chunk by chunk; None for the deployment's default
            (``settings.workspace_bytes``).
        keep: MiB of exponentials that ``Backend.keeping`` may keep for the backward pass; None for the deployment's
            default, or else for that of the backend (``settings.kept_bytes``).
    """

    tile: tuple[int, int] | None = None
    precision: str = "ieee"
    workspace: int | None = None
    keep: int | None = None


@dataclass(frozen=True, slots=True)
class Accuracy:
    """The facts from which ``verify`` derives a backend's error bounds.

    Attributes:
        unit: unit roundoff of the state arithmetic: 2^-24 for float32, 2^-53 for float64.
        accumulate_unit: unit roundoff of one addition inside a matrix product (2^-23 where tensor cores truncate).
        input_rounding: relative rounding of the features before a product: 0 when exact, 2^-11 for tf32 rounded to
            nearest, 2^-10 for tf32 truncated; for products of parts, the sum of the omitted products.
        gradient_rounding: relative rounding of G before the second product: 0 in float32, 2^-8 bf16, 2^-11 fp16.
        gradient_underflow: absolute rounding of G, as a share of the largest |weight|; 0 for all dtypes but fp16.
        exp_ulps: error of exp and log in units of ``unit``.
        shared_reference: exponentials may be taken against one reference r for a whole tile,
            ``|r| <= |scale| max_i |row_i| max_j |column_j| + |bias|``, instead of each row's and column's own maximum;
            only while every sum of n terms is at least n x (smallest normal number) / unit, so that terms flushed to
            zero cost a sum at most one rounding, and a probability of a gradient at most 2^-100. In a gradient r may
            also be 100 powers of two above the least N: flushed terms are under 2^-26 of their row's and their
            column's negatives.
        depth: longest chain of additions in a product of k terms, as a function of k.
        tile: columns (or rows) summed in one go before a merge, as a function of their number.
    """

    unit: float
    accumulate_unit: float
    input_rounding: float = 0.0
    gradient_rounding: float = 0.0
    gradient_underflow: float = 0.0
    exp_ulps: float = 4.0
    shared_reference: bool = False
    depth: Callable[[int], int] = int
    tile: Callable[[int], int] = int


@dataclass(frozen=True, slots=True)
class Finished:
    """What ``finished`` returns: R is ``sum_j G_ij column_j`` and C is ``sum_i G_ij row_i``. Each owns its memory.

    Attributes:
        rows: (m, d) ``scale R``, rounded once to the features' dtype.
        columns: (n, d) contiguous; C in the state dtype for "sums", ``scale C`` rounded once to the features' dtype
            for "gradient", None where not requested.
        inner: 0-d float64, ``sum_i <row_i, R_i>`` of the sums before any rounding.
    """

    rows: Array
    columns: Array | None
    inner: Array


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes that the primitives hold at once over a block, beyond their arguments, their results, and sums.

    Attributes:
        lse: bytes of ``lse`` with columns.
        gradients: bytes of ``gradients`` of both sides.
        finished: bytes of ``finished`` until the columns' sums become their gradient; 0 where it is None.
        inner: bytes of ``ArrayLibrary.inner`` of the rows and their sums.
    """

    lse: int
    gradients: int
    finished: int = 0
    inner: int = 0


LseFunction = Callable[[Block, bool, Options], Statistics]
GradientsFunction = Callable[[Block, Weights, "Array | None", "Array | None", Options], None]
SigmoidFunction = Callable[[Block, Array, "Array | None", "Array | None", Options], tuple[Array, Array]]
FinishedFunction = Callable[[Block, Weights, "Array | None", "ColumnForm | None", Options], Finished]
ColumnsFunction = Callable[[Block, Weights, Array, Options], Array]


@dataclass(frozen=True, slots=True)
class Whole:
    """A small loss without options, computed in one piece, because calls of primitives would take most of its time.

    ``whole`` of ``schedules.problem.Problem`` says which problems are such losses.

    Attributes:
        takes: ``takes(problem, dtype, device, options)``: whether it computes such losses.
        loss: ``loss(problem, rows, others, scale, bias)``: the loss of these arrays, 0-d in the state dtype, and the
            state that ``gradients`` needs: one array for a sigmoid loss, else two or three. None where the schedule
            must compute the loss from the primitives. ``others`` are those of the problem, of which ``loss`` reads the
            positives and no other array.
        gradients: ``gradients(problem, rows, others, scale, state, upstream, wanted)`` of upstream x loss for the rows,
            the scale, the bias and the columns, each None where ``schedules.local.Wanted`` does not request it; the
            state is not changed. None where the schedule must start again from the primitives.
    """

    takes: Callable[[Any, str, str, Options], bool]
    loss: Callable[..., tuple[Array, Sequence[Array]] | None]
    gradients: Callable[..., Sequence[Array | None] | None]


class Search(NamedTuple):
    """The searches of ``contrastile.retrieval`` over 16-bit features, which never store the dot products.

    Attributes:
        own: ``own(block)``: each row's dot product with its positive, (m,) float32, the same bits that ``ranks``
            compares.
        ranks: ``ranks(block)``: how many columns, other than the positive and columns of the row's id, have a dot
            product that is not smaller than the positive's: (m,) int64.
        nearest: ``nearest(block, k, numbers)`` of finite dot products: the k largest of each row, float32, in falling
            order, and among equal ones the column of the least of ``numbers`` (n,), int64, first; the numbers of these
            columns; and which rows the caller must search in another way. Positives, which are numbers here, do not
            count, nor columns of the row's id or beyond its limit, a dot product; missing places hold -inf.
        most: ``most(columns)``: the largest k of ``nearest``.
    """

    own: Callable[[Block], Array]
    ranks: Callable[[Block], Array]
    nearest: Callable[[Block, int, Array], tuple[Array, Array, Array]]
    most: Callable[[Array], int]


FootprintFunction = Callable[[int, int, int, str, str, Options], Footprint]
KeepsFunction = Callable[[int, int, str, str, Options], int]


def state_dtype(dtype: str) -> str:
    """The dtype of row and column state for features of this dtype."""
    return "float64" if dtype == "float64" else "float32"


@dataclass(frozen=True, slots=True)
class Backend:
    """A record of facts and of the primitives.

    Attributes:
        name: the backend's name in ``backend=`` and ``contrastile verify --backend``.
        arrays: the array library whose arrays it takes and returns.
        dtypes: names of the feature dtypes it takes ("float16", "bfloat16", "float32", "float64").
        devices: kinds of device it runs on ("cpu", "cuda").
        accuracy: facts for the error bounds, given the feature dtype's name and the kind of device; a backend with
            several precisions, or with ``keeping``, also receives options that are not the default ones.
        lse: ``lse(block, columns, options)``; column statistics are computed only when ``columns``.
        gradients: ``gradients(block, weights, row_gradient, column_gradient, options)`` adds ``sum_j G_ij column_j``
            to row_gradient (m, d) and ``sum_i G_ij row_i`` to column_gradient (n, d), both in the state dtype and
            *without the factor scale*, so that ``dscale = sum_i <row_i, row_gradient_i>`` needs no division and is
            right at scale 0. Either may be None, where that gradient is not requested.
        sigmoid: ``sigmoid(block, row_weight, row_gradient, column_gradient, options)`` returns
            ``row_loss (m,) = sum_j softplus(-z_ij x_ij)`` (unweighted) and ``row_sum (m,) = sum_j G_ij`` with
            ``G_ij = -row_weight_i z_ij sigmoid(-z_ij x_ij)`` over admitted pairs, z = +1 on positives and -1
            elsewhere; it adds to the gradients as above.
        supports: a reason for refusing a block, or None.
        state: name of the state dtype, given the features' dtype.
        precisions: the ``PRECISIONS`` in which it computes float32 features; it refuses every other.
        auto_precision: the precision that ``precision="auto"`` stands for: the fastest one whose facts are within those
            of a plain float32 computation (``verify.facts.limits`` of "ieee").
        finished: None, or ``finished(block, weights, upstream, columns, options)``: ``gradients`` that overwrites, for
            a block with every column of its rows. No accumulators are filled with zeros, and no (m, d) sums are held.
            ``upstream``, 0-d in the state dtype or None for 1, multiplies every weight and bar; ``columns`` is the form
            of the columns' result.
        finished_columns: None, or ``finished_columns(block, weights, row_gradient, options)``: for a block with every
            row of its columns, one of several blocks with the same rows. It adds to the rows' gradient as ``gradients``
            does, and returns the columns' gradient as ``finished`` does for "gradient".
        keeping: None, or ``lse`` for a call that will request gradients: its statistics may hold ``kept``, which the
            weights pass to the gradients any number of times. They may overwrite it, but the same call must give the
            same gradients each time. A backend with ``finished`` keeps only for a block with every column of its rows,
            and only where gradients of rows and columns follow; any other backend, for each block of a problem.
        keeps: given together with ``keeping``: ``keeps(m, n, dtype, device, options)``, the most bytes that it keeps
            for a problem of m rows and n columns. If that is 0, ``lse`` is called.
        rows_alone: None, or ``rows_alone(width, dtype, options)``: whether the primitives take less time for the rows
            alone, over all pairs of rows against themselves, than for rows and columns, over half of the pairs.
        replayable: whether the primitives only queue work on the current stream of their arrays' GPU, never wait for
            it, and do nothing on the host that depends on values or on earlier calls. Then small problems of torch's
            eager calls are captured in CUDA graphs and replayed.
        footprint: None, or ``footprint(m, n, width, dtype, device, options)``, the memory that a block of m rows and n
            columns takes: what ``contrastile plan`` adds up.
        contract: the version of the contract that it is written for, 2; ``registry.load`` refuses any other.
        whole: None, or a small common loss in fewer operations: see ``Whole``.
        compensated: whether statistics are (m, 2) where the state is float64: see ``SideStatistics``.
        limits: whether it takes pairs with limits; a backend without them never receives any.
        guides: names of the dtypes for which it takes pairs with a guide, likewise.
        values: whether ``gradients`` takes blocks with values, likewise.
        search: None, or ranks and nearest columns: see ``Search``.
    """

    name: str
    arrays: ArrayLibrary
    dtypes: frozenset[str]
    devices: frozenset[str]
    accuracy: Callable[..., Accuracy]
    lse: LseFunction
    gradients: GradientsFunction
    sigmoid: SigmoidFunction
    supports: Callable[[Block], str | None] = lambda block: None
    state: Callable[[str], str] = state_dtype
    precisions: frozenset[str] = frozenset({"ieee"})
    auto_precision: str = "ieee"
    finished: FinishedFunction | None = None
    finished_columns: ColumnsFunction | None = None
    keeping: LseFunction | None = None
    keeps: KeepsFunction | None = None
    rows_alone: Callable[[int, str, Options], bool] | None = None
    replayable: bool = False
    footprint: FootprintFunction | None = None
    contract: int = 1
    whole: Whole | None = None
    compensated: bool = False
    limits: bool = False
    guides: frozenset[str] = frozenset()
    values: bool = False
    search: Search | None = None

    def check(self, block: Block, options: Options | None = None) -> None:
        """Raise UnsupportedProblemError with the reason, if this backend refuses the block or the options.

        ``check_device`` checks the device of the caller's features before they are converted.
        """
        dtype = self.arrays.dtype(block.rows)
        self.check_dtype(dtype)
        if options is not None and dtype == "float32" and options.precision not in self.precisions:
            known = " or ".join(sorted(self.precisions))
            self._refuse(f"precision must be {known} here, got {options.precision}; or name another backend")
        if block.pairs.limited and not self.limits:
            self._refuse("limits and thresholds must be None, got some; name another backend")
        if block.pairs.row_guide is not None and dtype not in self.guides:
            self._refuse(f"guide must be None with {dtype} features here, got one; name another backend")
        reason = self.supports(block)
        if reason:
            self._refuse(reason)

    def check_device(self, device: str) -> None:
        """Raise UnsupportedProblemError, if this backend does not run on this kind of device."""
        if device not in self.devices:
            places = " or ".join(sorted(self.devices))
            self._refuse(f"features must be on {places}, got {device}; move them, or name another backend")

    def check_dtype(self, dtype: str) -> None:
        """Raise UnsupportedProblemError, if this backend does not take features of this dtype."""
        if dtype not in self.dtypes:
            self._refuse(f"features must be {' or '.join(sorted(self.dtypes))}, got {dtype}; convert them")

    def _refuse(self, reason: str) -> None:
        raise UnsupportedProblemError(f"the {self.name} backend refuses this problem: {reason}")
