"""The two ``torch.library`` operators, which compilers, tracers, modes and ``opcheck`` need.

``contrastile::loss`` and ``contrastile::gradients`` serve calls without a group. The gradients are a separate operator,
so that differentiating twice raises an error instead of treating saved tensors as constants. An operator takes typed
numbers and strings, from which it makes the plan, and always returns tensors: an empty tensor of four dimensions stands
for None. On a GPU a small call that repeats is replayed from its own CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from contrastile import compute
from contrastile.autograd.arguments import Call, find_graphs
from contrastile.backends.arrays import library_of
from contrastile.backends.contract import Options
from contrastile.backends.objectives import KEEPS_SUMS, STATISTICS
from contrastile.backends.registry import load
from contrastile.backends.replay import Captured, Pool, Signatures, Where, record
from contrastile.plan import Plan
from contrastile.schedules import local
from contrastile.schedules.problem import VECTORS, Problem

LSES = 4
"""The number of log-sum-exps in the state of a softmax loss without a group; kept exponentials come after them."""


def forward_mode() -> RuntimeError:
    """The error for a tangent, which torch would treat as 0."""
    return RuntimeError(
        "contrastile::loss must be differentiated in reverse mode, got forward mode (torch.func.jvp, jacfwd, "
        "linearize, torch.autograd.forward_ad); use backward(), torch.func.grad or vjp"
    )


def second_derivative() -> RuntimeError:
    """The error for a derivative of a gradient."""
    return RuntimeError(
        "contrastile::gradients must not be differentiated itself, got a derivative of a gradient; take gradients "
        "without create_graph, and Hessians of a loss with full logits"
    )


def one_upstream(upstream: Tensor) -> Tensor:
    """The upstream gradient; raise RuntimeError for a batch of upstream gradients of autograd's legacy vmap."""
    # a compiler never has a batch here, and cannot trace the test
    functorch = None if torch.compiler.is_compiling() else getattr(torch._C, "_functorch", None)
    if functorch is not None and functorch.is_legacy_batchedtensor(upstream):
        raise RuntimeError(
            "contrastile::gradients must be given one upstream gradient at a time, got a batch of them "
            "(is_grads_batched, vectorize=True); call autograd.grad in a loop, or torch.func.jacrev"
        )
    return upstream


def encode_none(results: compute.Arrays, like: Tensor) -> list[Tensor]:
    """The results with an empty tensor of four dimensions for None; no other result has four dimensions."""
    return [like.new_empty(0, 0, 0, 0) if x is None else x for x in results]


def decode_none(tensors: compute.Arrays) -> list[Tensor | None]:
    """The inverse of ``encode_none``."""
    return [None if x is None or x.ndim == 4 else x for x in tensors]


def select(wanted: Sequence[bool], gradients: Sequence[Tensor]) -> list[Tensor | None]:
    """The gradients for autograd: None for each unwanted gradient."""
    return [x if is_wanted else None for x, is_wanted in zip(gradients, wanted, strict=True)]


def called(plan: Plan, wanted: local.Wanted) -> tuple[Tensor, list[Tensor]]:
    """Call the operator ``loss`` with a plan."""
    problem = plan.problem
    arrays = problem.rows, problem.columns, problem.scale, problem.bias, problem.vectors
    return cast("tuple[Tensor, list[Tensor]]", loss(*arrays, *settings_of(plan), wanted.flags))


def gradients_called(plan: Plan, state: compute.Arrays, upstream: Tensor, wanted: local.Wanted) -> list[Tensor]:
    """Call the operator ``gradients`` with a plan: gradients of the rows, the scale, the bias and each column block."""
    problem = plan.problem
    tensors = encode_none(state if problem.keeps_sums else state[:LSES], problem.scale)
    arrays = problem.rows, problem.columns, problem.scale, problem.vectors
    rows, columns, scale, bias = gradients(upstream, tensors, *arrays, *settings_of(plan), wanted.flags)
    return [rows, scale, bias, *columns]


def settings_of(plan: Plan) -> tuple[Any, ...]:
    """The numbers and strings of a plan, in the operators' order; (0, 0) stands for no tile."""
    options, problem = plan.options, plan.problem
    form = problem.kind, problem.match, problem.margin, problem.smoothing, problem.depth
    return *form, plan.name, *(options.tile or (0, 0)), options.precision, options.workspace


def _plan(
    rows: Tensor,
    columns: Sequence[Tensor],
    scale: Tensor,
    bias: Tensor | None,
    vectors: Sequence[Tensor | None],
    settings: Sequence[Any],
) -> Plan:
    """The plan from its arrays and its ``settings_of``."""
    kind, match, margin, smoothing, depth, backend, tile_rows, tile_columns, precision, workspace = settings
    options_of_loss = {"kind": kind, "match": match, "margin": margin, "smoothing": smoothing, "depth": depth}
    form = Problem(rows, (), scale, None, None, **options_of_loss)
    options = Options((tile_rows, tile_columns) if tile_rows else None, precision, workspace)
    return Plan(form.with_arrays((rows, scale, bias, *vectors, *columns)), backend, options, library_of(rows))


_SETTINGS = (
    "str kind, str match, float? margin, float? smoothing, SymInt? depth, str backend, SymInt tile_rows, "
    "SymInt tile_columns, str precision, SymInt? workspace, bool[] wants"
)
_LOSS = (
    f"(Tensor rows, Tensor[] columns, Tensor scale, Tensor? bias, Tensor?[] vectors, {_SETTINGS}) -> (Tensor, Tensor[])"
)
_GRADIENTS = (
    f"(Tensor upstream, Tensor[] state, Tensor rows, Tensor[] columns, Tensor scale, Tensor?[] vectors, {_SETTINGS}) "
    "-> (Tensor, Tensor[], Tensor, Tensor)"
)


class Operation(Captured):
    """The graph of an operator's signature."""

    def __init__(self, where: Where, pool: Pool, call: Call, launch: Callable[..., Sequence[Tensor]]) -> None:
        super().__init__(where, pool, call.tensors)
        args, _ = call.with_tensors(self.places)
        (self._graph,), (self._out,) = record(where, [lambda: launch(*args)], pool)

    def results(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The operator's results for these tensors."""
        with self.pool.lock:
            self.copy(tensors)
            self._graph.replay()
            return [x.clone() for x in self._out]


OPERATIONS: Signatures[Operation] = Signatures()


def _run(prepare: Callable[..., tuple[Plan, Callable[[], compute.Arrays]]], *args: Any) -> Sequence[Tensor]:
    """The results of an operator, by launching its kernels or replaying its graph.

    Args:
        prepare: returns the plan and the function that computes the results, from the operator's arguments.
        *args: the operator's arguments; the first is a tensor on the device.
    """

    def launch(*args: Any) -> list[Tensor]:
        plan, compute_results = prepare(*args)
        # contiguous, as the fake kernels tell compilers
        return [x.contiguous() for x in encode_none(compute_results(), plan.problem.scale)]

    call = Call(args, {}, grad=False) if args[0].is_cuda else None
    if call is None or not call.is_known:
        return launch(*args)
    make_graph = lambda where, pool: Operation(where, pool, call, launch)  # noqa: E731
    graph = find_graphs(OPERATIONS, prepare, call, lambda: prepare(*args)[0], make_graph)
    return launch(*args) if graph is None else graph.results(call.tensors)


def _prepare_loss(
    rows: Tensor, columns: Sequence[Tensor], scale: Tensor, bias: Any, vectors: Any, kind: str, *others: Any
) -> tuple[Plan, Callable[[], compute.Arrays]]:
    *settings, wants = others
    plan = _plan(rows, columns, scale, bias, vectors, (kind, *settings))
    if plan.problem.keeps_sums:
        return plan, lambda: compute.loss(plan, local.Wanted.of(wants) if any(wants) else None)
    return plan, lambda: compute.loss(plan)[: 1 + LSES]


def _prepare_gradients(
    upstream: Tensor, state: Sequence[Tensor], rows: Tensor, columns: Any, scale: Tensor, vectors: Any, *others: Any
) -> tuple[Plan, Callable[[], compute.Arrays]]:
    *settings, wants = others
    plan = _plan(rows, columns, scale, None, vectors, settings)
    return plan, lambda: compute.gradients(plan, decode_none(state), upstream, local.Wanted.of(wants))


@torch.library.custom_op("contrastile::loss", mutates_args=(), schema=_LOSS)
def loss(*args: Any) -> tuple[Tensor, list[Tensor]]:
    """The loss and the state for its gradients: ``LSES`` log-sum-exps, or a sigmoid loss's sums of wanted gradients.

    No exponentials are kept: their size depends on the GPU, and a compiler must know every size.
    """
    value, *state = _run(_prepare_loss, *args)
    return value, state


@torch.library.custom_op("contrastile::gradients", mutates_args=(), schema=_GRADIENTS)
def gradients(*args: Any) -> tuple[Tensor, list[Tensor], Tensor, Tensor]:
    """Gradients of ``upstream * loss`` for the rows, each column block, the scale and the bias."""
    d_rows, d_scale, d_bias, *d_columns = _run(_prepare_gradients, *args)
    return d_rows, d_columns, d_scale, d_bias


@loss.register_fake
def _fake_loss(rows: Tensor, columns: Sequence[Tensor], scale: Tensor, *others: Any) -> tuple[Tensor, list[Tensor]]:
    _, vectors, kind, *settings, wants = others
    state: list[Tensor | None] = []
    column_count = None if vectors[2] is None else sum(x.shape[0] for x in columns)
    backend = load(settings[4])
    state_dtype = backend.state(library_of(rows).dtype(rows))
    if kind not in KEEPS_SUMS:
        pair = (2,) if backend.compensated and state_dtype == "float64" else ()
        for count in (rows.shape[0], rows.shape[0], column_count, column_count):
            state.append(None if count is None else scale.new_empty((count, *pair), dtype=torch.float64))
    elif any(wants):
        wants_rows, *wants_columns, wants_scale, _ = wants
        pairs = zip((rows, *columns), (wants_rows or wants_scale, *wants_columns), strict=True)
        sums = [x.new_empty(x.shape, dtype=getattr(torch, state_dtype)) if want else None for x, want in pairs]
        state = [scale.new_empty((), dtype=torch.float64), *sums]
    value = torch.empty_like(scale)
    if kind == STATISTICS:
        value = scale.new_empty((3, rows.shape[0] + (column_count or 0)), dtype=torch.float64)
    return value, encode_none(state, scale)


@gradients.register_fake
def _fake_gradients(
    upstream: Tensor, state: Sequence[Tensor], rows: Tensor, columns: Sequence[Tensor], scale: Tensor, *others: Any
) -> tuple[Tensor, list[Tensor], Tensor, Tensor]:
    _, kind, *_, wants = others
    # contiguous, whatever the features' strides are
    shapes = [x.shape for x in (rows, *(state[2:] if kind in KEEPS_SUMS else columns))]
    *wants_features, wants_scale, wants_bias = wants
    features = [rows.new_empty(shape) if want else None for shape, want in zip(shapes, wants_features, strict=True)]
    numbers = [torch.empty_like(scale) if want else None for want in (wants_scale, wants_bias)]
    d_rows, *d_columns, d_scale, d_bias = encode_none([*features, *numbers], scale)
    return d_rows, d_columns, d_scale, d_bias


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    """Save the state, and the problem's arrays that the gradients read."""
    rows, columns, scale, bias, vectors, *ctx.settings, _ = inputs
    problem = _plan(rows, columns, scale, bias, vectors, ctx.settings).problem.for_gradients()
    ctx.save_for_backward(*output[1], *problem.arrays())
    ctx.count = len(output[1])


def _backward(ctx: Any, upstream: Tensor, *_: Any) -> tuple[Any, ...]:
    wants = [ctx.needs_input_grad[0], *ctx.needs_input_grad[1], ctx.needs_input_grad[2], ctx.needs_input_grad[3]]
    # read once: checkpointing allows only one read
    saved = ctx.saved_tensors
    state, (rows, scale, _, *others) = saved[: ctx.count], saved[ctx.count :]
    vectors, columns = others[: len(VECTORS)], others[len(VECTORS) :]
    if ctx.settings[0] in KEEPS_SUMS and not state:
        raise RuntimeError(
            "a sigmoid loss, or one with a teacher, that is to be trained must be traced or exported with inputs that "
            "require gradients, got none that did; export it with them"
        )
    args = one_upstream(upstream), state, rows, columns, scale, vectors
    d_rows, d_columns, *numbers = gradients(*args, *ctx.settings, wants)
    grad_rows, *grad_columns, grad_scale, grad_bias = select(wants, [d_rows, *d_columns, *numbers])
    return grad_rows, grad_columns, grad_scale, grad_bias, *[None] * (2 + len(ctx.settings))


def _refuse(ctx: Any, *upstream: Any) -> Any:
    raise second_derivative()


loss.register_autograd(_backward, setup_context=_save)
gradients.register_autograd(_refuse)
