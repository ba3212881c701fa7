"""The block contract: what a backend is given, what it gives back, and how far off it may be.

A *block* is some rows against some columns. Its logits are ``x_ij = scale <row_i, column_j> + bias``. A backend
computes three things over a block and nothing else:

* ``lse``        row and column log-sum-exps, over the negatives and over the positives, and sums of positive logits;
* ``gradients``  adds the block's part of the gradients of the rows and of the columns;
* ``sigmoid``    the additive sigmoid loss, value and gradients in one pass.

Log-sum-exps merge and gradients add, so every schedule (tiles, chunks, column blocks, shards on a ring) is written
once above these and never per backend.

Invariants that every backend keeps:

* nothing of size m x n is held at once, beyond one tile;
* inside a tile state is of the state dtype: float64 for float64 features, float32 for every other; statistics leave a
  tile, are merged and travel in float64: there are O(m + n) of them;
* logits are the same bits in ``lse`` and in ``gradients``: a fused multiply-add in one of them alone is an error of
  half an ulp of the logit, which is everything where logits are large;
* padding is masked with -inf *before* the max; merging (-inf, -inf) gives -inf, never NaN;
* offsets are 64-bit: rows x width passes 2^31 early;
* the same inputs give the same bits: no float atomics whose order can change a result;
* NaN or inf in the features gives what the oracle gives: NaN out, never a hang, never a number;
* any stride is right, or is made contiguous once.
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
"""How products of float32 features are computed: in float32; with their factors rounded to nearest to at least the 11
bits of tf32; or from parts of their factors that tensor cores multiply, with float32's accuracy."""

CONTRACT = 2
"""The version of this contract: ``docs/how-to/write-backend.md`` says what each has changed."""


class BackendUnavailableError(ImportError):
    """A backend was named that cannot run here; the message ends with the command that installs what is missing."""


class UnsupportedProblemError(ValueError):
    """A backend refuses a problem; the message gives its reason. Nothing falls back silently."""


@dataclass(frozen=True, slots=True)
class Pairs:
    """Which pairs of a block count, from vectors of length m and n: never from an m x n mask.

    A pair is *positive* when ``positives[i] == j`` or, with ``match="target"``, when its ids are equal. A pair is
    *admitted* to the log-sum-exps unless, with ``match="drop"``, its ids are equal and it is not positive (a false
    negative). An excluded pair is neither positive nor admitted (a sample against itself).

    Limits are the rows' and the columns' own: a pair that is not positive does not count in its row's sum, nor in the
    row's part of G, where its logit exceeds the row's limit, and likewise for the column. ``lse`` and ``gradients``
    compare the same bits, so the same pairs count. Of a NaN logit or limit nothing is left out. The sigmoid loss has
    none.

    With a guide it is not the logit that a limit is compared with, but the dot product of the guide's features, which
    another model gave the same pair. It is formed in the same tile, and has no gradient.

    Attributes:
        positives: (m,) int64 column of each row's positive; a value outside 0..n-1 means "not in this block". None
            with ``match="target"``: the ids say it all.
        excluded: (m,) int64 column that the row never sees (itself); outside 0..n-1 means none here.
        row_ids: (m,) int64, given together with column_ids.
        column_ids: (n,) int64.
        match: what equal ids mean, "drop" or "target".
        row_limits: (m,) logits, state dtype.
        column_limits: (n,) logits, state dtype; not read where the columns' statistics are not asked for.
        row_guide: (m, e) the guide's features of the rows, in the features' dtype; None where there is no guide, or
            there are no limits.
        column_guide: (n, e) of the columns, given with row_guide.
        rising: whether both ids come in rising order, or each rank's do: equal ones are in few tiles then.
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
        symmetric: whether the columns are the rows, and a column's log-sum-exp is its row's: then x_ij should be x_ji
            to the last bit. Equal or shared memory says nothing of the kind.
        values: of the rows, (m, c), and of the columns, (n, c), in the features' dtype: what ``gradients`` multiplies G
            by in place of the features, and then its sums are (m, c) and (n, c). No other primitive is given any.
    """

    rows: Array
    columns: Array
    scale: Array
    bias: Array | None = None
    pairs: Pairs = field(default_factory=Pairs)
    symmetric: bool = False
    values: tuple[Array, Array] | None = None


class SideStatistics(NamedTuple):
    """What ``lse`` finds of the rows, or of the columns, in float64. The identity of a log-sum-exp is -inf, of a sum 0.

    The positives stay out of the sum over the others: with ``L = log(exp N + exp P)`` the loss of a row that is certain
    of its one positive is ``L - P = log1p(exp(N - P))``, which no float32 and no float64 ``L`` could hold. Over blocks
    and ranks N and P merge as log-sum-exps, S as a sum.

    A backend with ``compensated`` gives each as (m, 2) where its state is float64: a number, and what its rounding
    leaves. A float64 N is rounded by up to ``|N| 2^-53``, and so is every exp(x - N), relative to itself; a computation
    that subtracts a maximum has no such error. A float32 state has larger ones of its own. ``gradients`` is given N and
    P in the form in which ``lse`` gives them; ``backends.pairs`` has the arithmetic.

    Attributes:
        negative_lse: (m,) ``N_i``, the log-sum-exp of x_ij over admitted pairs that are not positive.
        positive_lse: (m,) ``P_i``, the log-sum-exp of x_ij over positive pairs: of one positive exactly its logit,
            whose last bit ``gradients`` finds again.
        positive_sum: (m,) ``S_i``, the sum of x_ij over positive pairs.
    """

    negative_lse: Array
    positive_lse: Array
    positive_sum: Array


@dataclass(frozen=True, slots=True)
class Statistics:
    """What ``lse`` gives.

    Attributes:
        rows: of the rows, over the columns.
        columns: of the columns, over the rows: (n,) each; None when they were not asked for.
        kept: what ``keeping`` has left for the gradients, one array that the backend alone can read, or None.
    """

    rows: SideStatistics
    columns: SideStatistics | None = None
    kept: Array | None = None


class Bars(NamedTuple):
    """Derivatives of the whole loss by the statistics of its rows, or of its columns, float64, (m,) each, any sign.

    S travels, because it merges as a sum; a loss is a function of ``D = P - t S``, what P is above the mean of the
    positive logits, formed in float64: of lone positives it is exactly 0. A bar of 0 silences its term whatever the
    log-sum-exps are.

    Attributes:
        negative: by N.
        positive: by P, where D stays.
        spread: by D.
    """

    negative: Array
    positive: Array
    spread: Array


class SideWeights(NamedTuple):
    """What ``gradients`` needs to know of the whole loss, of the rows or of the columns.

    The rows' part of G, with ``q_ij = exp(x_ij - P_i)``, is

    * ``Nbar_i exp(x_ij - N_i)`` where the pair is admitted and not positive;
    * ``Pbar_i q_ij + Dbar_i (q_ij - t_i)`` where it is positive. Of one positive q_ij is exactly 1, and nothing
      cancels. It must be complete before G is rounded. Where ``positives`` names a row's positive, its logit *is* the
      rows' ``positive_lse[i]`` and is read there, never computed again.

    Most losses are ``sum_i u_i (softplus(N_i - P_i) + D_i)``: ``Nbar = u sigmoid(N - P)``, ``Pbar = -Nbar`` and
    ``Dbar = u``. Their bars are not passed but u, and kernels form them: then G of a pair that is not positive is
    ``u_i exp(x_ij - L_i)`` with ``L = log(exp N + exp P)``. A weight of 0 silences its row or column whatever its
    log-sum-exps are.

    Attributes:
        negative_lse: (m,) float64, N of the whole loss, not of the block; pairs where ``lse`` gives them.
        positive_lse: (m,) float64, P of the whole loss, likewise.
        weight: (m,) u, any sign, state dtype; not read where there are bars.
        target: (m,) t, the target weight of each positive of the row, state dtype: 1 of a lone one.
        bars: of any other loss; None of those above.
    """

    negative_lse: Array
    positive_lse: Array
    weight: Array
    target: Array
    bars: Bars | None = None

    def part(self, where: slice) -> SideWeights:
        """Those of some of the rows or columns."""
        n, p, weight, target = (x[where] for x in self[:4])
        return SideWeights(n, p, weight, target, None if self.bars is None else Bars(*(x[where] for x in self.bars)))


@dataclass(frozen=True, slots=True)
class Weights:
    """What ``gradients`` needs to know of the whole loss. G is the sum of the rows' and the columns' part.

    Attributes:
        rows: the rows'.
        columns: the columns', with v, M, P' and t' in (n,) each; None for a loss of one direction.
        kept: that of the block's ``Statistics``, for ``finished`` where the backend has one, else for ``gradients``.
            It may be overwritten there.
    """

    rows: SideWeights
    columns: SideWeights | None = None
    kept: Array | None = None


@dataclass(frozen=True, slots=True)
class Options:
    """How to compute, never what: every option gives the same loss within the bound.

    A backend that has no use for an option ignores it, ``precision`` excepted, which it refuses (``Backend.check``).

    Attributes:
        tile: rows x columns of logits alive at a time, at most; None lets the backend choose.
        precision: how float32 features are multiplied, one of ``PRECISIONS``; it says nothing to other dtypes. "auto"
            is replaced when a plan is made (``choice.settled``): no backend is given it.
        workspace: MiB of memory that a backend may form G in, chunk by chunk; None for the deployment's default
            (``settings.workspace_bytes``).
        keep: MiB of exponentials that ``Backend.keeping`` may keep for the backward pass; None for the deployment's
            default, or else the backend's own (``settings.kept_bytes``).
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
            nearest, 2^-10 for tf32 truncated; for products of parts, what the products left out amount to.
        gradient_rounding: relative rounding of G before the second product: 0 in float32, 2^-8 bf16, 2^-11 fp16.
        gradient_underflow: absolute rounding of G, as a share of the largest |weight|; 0 but for fp16.
        exp_ulps: error of exp and log in units of ``unit``.
        shared_reference: exponentials may be taken against one reference r for a whole tile,
            ``|r| <= |scale| max_i |row_i| max_j |column_j| + |bias|``, instead of each row's and column's own maximum;
            only while every sum of n terms is at least n x (smallest normal number) / unit, so that terms flushed to
            zero cost a sum no more than one rounding, and in a gradient a probability 2^-100. In that, r may also be
            100 powers of two above the least N: what is flushed is under 2^-26 of its row's and its column's negatives.
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
    """What ``finished`` gives, R being ``sum_j G_ij column_j`` and C ``sum_i G_ij row_i``. Each owns its memory.

    Attributes:
        rows: (m, d) ``scale R``, rounded once to the features' dtype.
        columns: (n, d) contiguous; C in the state dtype for "sums", ``scale C`` rounded once to the features' dtype
            for "gradient", None where not wanted.
        inner: 0-d float64, ``sum_i <row_i, R_i>`` of the sums before any rounding.
    """

    rows: Array
    columns: Array | None
    inner: Array


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes that the primitives hold at once over a block, beyond what they are given, their results, and sums.

    Attributes:
        lse: of ``lse`` with columns.
        gradients: of ``gradients`` of both sides.
        finished: of ``finished`` until the columns' sums become their gradient; 0 where there is none.
        inner: of ``ArrayLibrary.inner`` of the rows and their sums.
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
    """A whole loss that is small and has no options, where primitives take several times as long as their numbers.

    It is of ``schedules.problem.Problem``, whose ``whole`` says which losses are meant.

    Attributes:
        takes: ``takes(problem, dtype, device, options)``: whether it computes such losses.
        loss: ``loss(problem, rows, others, scale, bias)``: the loss of these arrays, 0-d in the state dtype, and what
            ``gradients`` needs: two or three arrays, one of a sigmoid loss. None where the schedule is to compute it
            from the primitives. ``others`` are the problem's; of the problem itself only what is no array is read, and
            positives.
        gradients: ``gradients(problem, rows, others, scale, state, upstream, wanted)`` of upstream x loss for the rows,
            the scale, the bias and the columns, each None where it is not ``schedules.local.Wanted``; the state stays
            as it is. None where the schedule is to start again from the primitives.
    """

    takes: Callable[[Any, str, str, Options], bool]
    loss: Callable[..., tuple[Array, Sequence[Array]] | None]
    gradients: Callable[..., Sequence[Array | None] | None]


class Search(NamedTuple):
    """What ``contrastile.retrieval`` asks for, of 16-bit features, without storing the dot products.

    Attributes:
        own: ``own(block)``: each row's dot product with its positive, (m,) float32, in the bits in which it is
            compared.
        ranks: ``ranks(block)``: how many columns, but the positive and those of the row's id, have a dot product that
            is not smaller than the positive's: (m,) int64.
        nearest: ``nearest(block, k, numbers)``, of finite dot products: the k largest of each row, float32, in falling
            order, and of equal ones the least of the columns' ``numbers`` (n,), int64, first; these numbers; and which
            rows are left to another way. With positives, which are numbers here, those do not count, nor columns of
            the row's id or beyond its limit, a dot product; -inf where there are fewer.
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
    """A small record of facts and the primitives.

    Attributes:
        name: what ``backend=`` and ``contrastile verify --backend`` call it.
        arrays: the array library whose arrays it takes and gives.
        dtypes: names of the feature dtypes it takes ("float16", "bfloat16", "float32", "float64").
        devices: kinds of device it runs on ("cpu", "cuda").
        accuracy: facts for the error bounds, given the feature dtype's name and the kind of device; a backend with
            several precisions, or with ``keeping``, is given the options too where they are not the default ones.
        lse: ``lse(block, columns, options)``; column state is computed only when ``columns``.
        gradients: ``gradients(block, weights, row_gradient, column_gradient, options)`` adds ``sum_j G_ij column_j``
            to row_gradient (m, d) and ``sum_i G_ij row_i`` to column_gradient (n, d), both in the state dtype and
            *without the factor scale*, so that ``dscale = sum_i <row_i, row_gradient_i>`` needs no division and is
            right at scale 0. Either may be None: that gradient is not wanted.
        sigmoid: ``sigmoid(block, row_weight, row_gradient, column_gradient, options)`` returns
            ``row_loss (m,) = sum_j softplus(-z_ij x_ij)`` (unweighted) and ``row_sum (m,) = sum_j G_ij`` with
            ``G_ij = -row_weight_i z_ij sigmoid(-z_ij x_ij)`` over admitted pairs, z = +1 on positives and -1
            elsewhere; it adds to the gradients as above.
        supports: a reason for refusing a block, or None.
        state: name of the state dtype, given the features' dtype.
        precisions: those of ``PRECISIONS`` that it computes float32 features in; every other is refused.
        auto_precision: the one that ``precision="auto"`` stands for: the fastest whose facts are within those of a
            plain float32 computation (``verify.facts.limits`` of "ieee").
        finished: None, or ``finished(block, weights, upstream, columns, options)``: ``gradients`` that overwrites, for
            a block with every column of its rows. No accumulators are filled with zeros, and no (m, d) sums are held.
            ``upstream``, 0-d in the state dtype or None for 1, multiplies every weight and bar; ``columns`` says what
            to make of the columns' side.
        finished_columns: None, or ``finished_columns(block, weights, row_gradient, options)``: for a block with every
            row of its columns, among others with the same rows. It adds to the rows' gradient as ``gradients`` does,
            and returns the columns' as ``finished`` does for "gradient".
        keeping: None, or ``lse`` for a call that will ask for gradients: its statistics may hold ``kept``, which comes
            back in the weights, any number of times. It may be overwritten there, but the same call must give the same
            gradients each time. A backend with ``finished`` is asked only for a block with every column of its rows,
            and only where gradients of rows and columns will follow; any other backend for each block of a problem.
        keeps: given together with ``keeping``: ``keeps(m, n, dtype, device, options)``, the most bytes that it keeps of
            a problem of m rows and n columns. If that is 0, ``lse`` is called.
        rows_alone: None, or ``rows_alone(width, dtype, options)``: whether the primitives take less time for the rows
            alone, over all pairs of rows against themselves, than for rows and columns, over half of the pairs.
        replayable: whether the primitives only queue work on the current stream of their arrays' GPU, never wait for
            it, and do nothing on the host that depends on values or on earlier calls. Then small problems of torch's
            eager calls are captured in CUDA graphs and replayed.
        footprint: None, or ``footprint(m, n, width, dtype, device, options)``, the memory that a block of m rows and n
            columns takes: what ``contrastile plan`` adds up.
        contract: the number of the contract that it is written for, 2; ``registry.load`` refuses any other.
        whole: None, or the whole of a small common loss in fewer operations: see ``Whole``.
        compensated: whether statistics are (m, 2) where the state is float64: see ``SideStatistics``.
        limits: whether it takes pairs with limits; any other is given none.
        guides: names of the dtypes of which it takes pairs with a guide, likewise.
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

        The device is that of the caller's features, and is checked before they are converted: see ``check_device``.
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
