"""The two ``torch.library`` operators, for those who must see one: compilers, tracers, modes, ``opcheck``.

``contrastile::loss`` and ``contrastile::gradients``, of a process alone. The gradients are an operator of their own, so
that differentiating twice is refused instead of taking what was saved for constants. An operator takes typed numbers
and texts, of which it makes the plan, and always gives tensors: an empty one of four dimensions for None. On a GPU a
small call that repeats is replayed from a CUDA graph of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from contrastile import compute
from contrastile.autograd.arguments import Call, graphs_of
from contrastile.backends.arrays import library_of
from contrastile.backends.contract import Options
from contrastile.backends.objectives import STATISTICS
from contrastile.backends.registry import load
from contrastile.backends.replay import Captured, Pool, Signatures, Where, record
from contrastile.plan import Plan
from contrastile.schedules import local
from contrastile.schedules.problem import VECTORS, Problem

LSES = 4
"""What a softmax loss of a process alone leaves for its gradients, beside what is kept: log-sum-exps."""


def forward_mode() -> RuntimeError:
    """The error for a tangent, which torch would take for 0."""
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
    """The upstream gradient; raise RuntimeError if it is a batch of them under torch's older, autograd's own vmap."""
    # a compiler that goes backward has no batch, and cannot ask
    known = None if torch.compiler.is_compiling() else getattr(torch._C, "_functorch", None)
    if known is not None and known.is_legacy_batchedtensor(upstream):
        raise RuntimeError(
            "contrastile::gradients must be given one upstream gradient at a time, got a batch of them "
            "(is_grads_batched, vectorize=True); call autograd.grad in a loop, or torch.func.jacrev"
        )
    return upstream


def filled(found: compute.Found, like: Tensor) -> list[Tensor]:
    """What was found, with an empty tensor of four dimensions for None: nothing else has so many."""
    return [like.new_empty(0, 0, 0, 0) if x is None else x for x in found]


def restored(found: compute.Found) -> list[Tensor | None]:
    """What ``filled`` was given."""
    return [None if x is None or x.ndim == 4 else x for x in found]


def only(wants: Sequence[bool], given: Sequence[Tensor]) -> list[Tensor | None]:
    """What autograd is to have of the gradients: None for the empty ones."""
    return [x if want else None for x, want in zip(given, wants, strict=True)]


def called(plan: Plan, wanted: local.Wanted) -> tuple[Tensor, list[Tensor]]:
    """The first operator of a plan."""
    problem = plan.problem
    given = problem.rows, problem.columns, problem.scale, problem.bias, problem.vectors
    return cast("tuple[Tensor, list[Tensor]]", loss(*given, *settings_of(plan), wanted.flags))


def gradients_called(plan: Plan, state: compute.Found, upstream: Tensor, wanted: local.Wanted) -> list[Tensor]:
    """The second one: gradients of the rows, the scale, the bias and each column block."""
    problem = plan.problem
    needed = filled(state[:LSES] if problem.kind != "sigmoid" else state, problem.scale)
    given = problem.rows, problem.columns, problem.scale, problem.vectors
    rows, columns, scale, bias = gradients(upstream, needed, *given, *settings_of(plan), wanted.flags)
    return [rows, scale, bias, *columns]


def settings_of(plan: Plan) -> tuple[Any, ...]:
    """The numbers and texts of a plan, in the operators' order; no tile is (0, 0)."""
    options, problem = plan.options, plan.problem
    form = problem.kind, problem.match, problem.margin, problem.smoothing
    return *form, plan.name, *(options.tile or (0, 0)), options.precision, options.workspace


def _plan(
    rows: Tensor,
    columns: Sequence[Tensor],
    scale: Tensor,
    bias: Tensor | None,
    vectors: Sequence[Tensor | None],
    settings: Sequence[Any],
) -> Plan:
    """The plan that a caller's ``settings_of`` came from."""
    kind, match, margin, smoothing, backend, tile_rows, tile_columns, precision, workspace = settings
    form = Problem(rows, (), scale, None, None, kind=kind, match=match, margin=margin, smoothing=smoothing)
    options = Options((tile_rows, tile_columns) if tile_rows else None, precision, workspace)
    return Plan(form.with_arrays((rows, scale, bias, *vectors, *columns)), backend, options, library_of(rows))


_SETTINGS = (
    "str kind, str match, float? margin, float? smoothing, str backend, SymInt tile_rows, SymInt tile_columns, "
    "str precision, SymInt? workspace, bool[] wants"
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
        given, _ = call.with_tensors(self.places)
        (self._graph,), (self._out,) = record(where, [lambda: launch(*given)], pool)

    def results(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """What the operator gives of these tensors."""
        with self.pool.lock:
            self.copy(tensors)
            self._graph.replay()
            self.replays += 1
            return [x.clone() for x in self._out]


OPERATIONS: Signatures[Operation] = Signatures()


def _computed(plan_of: Callable[..., tuple[Plan, Callable[[], compute.Found]]], *given: Any) -> Sequence[Tensor]:
    """What an operator gives, by kernels that are launched, or from a graph.

    Args:
        plan_of: of what the operator is given, the plan and what computes the results.
        *given: the first one is a tensor of the device.
    """

    def launched(*given: Any) -> list[Tensor]:
        plan, results = plan_of(*given)
        # as compilers are told
        return [x.contiguous() for x in filled(results(), plan.problem.scale)]

    call = Call(given, {}, grad=False) if given[0].is_cuda else None
    if call is None or not call.known:
        return launched(*given)
    make = lambda where, pool: Operation(where, pool, call, launched)  # noqa: E731
    graph = graphs_of(OPERATIONS, plan_of, call, lambda: plan_of(*given)[0], make)
    return launched(*given) if graph is None else graph.results(call.tensors)


def _to_loss(
    rows: Tensor, columns: Sequence[Tensor], scale: Tensor, bias: Any, vectors: Any, kind: str, *others: Any
) -> tuple[Plan, Callable[[], compute.Found]]:
    *settings, wants = others
    plan = _plan(rows, columns, scale, bias, vectors, (kind, *settings))
    if kind == "sigmoid":
        return plan, lambda: compute.loss(plan, local.Wanted.of(wants) if any(wants) else None)
    return plan, lambda: compute.loss(plan)[: 1 + LSES]


def _to_gradients(
    upstream: Tensor, state: Sequence[Tensor], rows: Tensor, columns: Any, scale: Tensor, vectors: Any, *others: Any
) -> tuple[Plan, Callable[[], compute.Found]]:
    *settings, wants = others
    plan = _plan(rows, columns, scale, None, vectors, settings)
    return plan, lambda: compute.gradients(plan, restored(state), upstream, local.Wanted.of(wants))


@torch.library.custom_op("contrastile::loss", mutates_args=(), schema=_LOSS)
def loss(*given: Any) -> tuple[Tensor, list[Tensor]]:
    """The loss and what its gradients need: ``LSES``, or of a sigmoid loss the sums of those that are wanted.

    Nothing is kept: how much that is depends on the GPU, and a compiler must know every size.
    """
    value, *state = _computed(_to_loss, *given)
    return value, state


@torch.library.custom_op("contrastile::gradients", mutates_args=(), schema=_GRADIENTS)
def gradients(*given: Any) -> tuple[Tensor, list[Tensor], Tensor, Tensor]:
    """Gradients of ``upstream * loss`` for the rows, each column block, the scale and the bias."""
    d_rows, d_scale, d_bias, *d_columns = _computed(_to_gradients, *given)
    return d_rows, d_columns, d_scale, d_bias


@loss.register_fake
def _fake_loss(rows: Tensor, columns: Sequence[Tensor], scale: Tensor, *others: Any) -> tuple[Tensor, list[Tensor]]:
    _, vectors, kind, *settings, wants = others
    state: list[Tensor | None] = []
    of_columns = None if vectors[2] is None else sum(x.shape[0] for x in columns)
    backend = load(settings[3])
    state_dtype = backend.state(library_of(rows).dtype(rows))
    if kind != "sigmoid":
        pairs = (2,) if backend.compensated and state_dtype == "float64" else ()
        for count in (rows.shape[0], rows.shape[0], of_columns, of_columns):
            state.append(None if count is None else scale.new_empty((count, *pairs), dtype=torch.float64))
    elif any(wants):
        first, *of_blocks, of_scale, _ = wants
        pairs_of = zip((rows, *columns), (first or of_scale, *of_blocks), strict=True)
        sums = [x.new_empty(x.shape, dtype=getattr(torch, state_dtype)) if want else None for x, want in pairs_of]
        state = [scale.new_empty((), dtype=torch.float64), *sums]
    value = torch.empty_like(scale)
    if kind == STATISTICS:
        value = scale.new_empty((3, rows.shape[0] + (of_columns or 0)), dtype=torch.float64)
    return value, filled(state, scale)


@gradients.register_fake
def _fake_gradients(
    upstream: Tensor, state: Sequence[Tensor], rows: Tensor, columns: Sequence[Tensor], scale: Tensor, *others: Any
) -> tuple[Tensor, list[Tensor], Tensor, Tensor]:
    _, kind, *_, wants = others
    # contiguous, whatever the features' strides are
    shapes = [x.shape for x in (rows, *(columns if kind != "sigmoid" else state[2:]))]
    *features, of_scale, of_bias = wants
    found = [rows.new_empty(shape) if want else None for shape, want in zip(shapes, features, strict=True)]
    numbers = [torch.empty_like(scale) if want else None for want in (of_scale, of_bias)]
    d_rows, *d_columns, d_scale, d_bias = filled([*found, *numbers], scale)
    return d_rows, d_columns, d_scale, d_bias


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    """Keep the state, and what the gradients read of the problem as it came."""
    rows, columns, scale, bias, vectors, *ctx.settings, _ = inputs
    needed = _plan(rows, columns, scale, bias, vectors, ctx.settings).problem.for_gradients()
    ctx.save_for_backward(*output[1], *needed.arrays())
    ctx.count = len(output[1])


def _backward(ctx: Any, upstream: Tensor, *_: Any) -> tuple[Any, ...]:
    wants = [ctx.needs_input_grad[0], *ctx.needs_input_grad[1], ctx.needs_input_grad[2], ctx.needs_input_grad[3]]
    # once: checkpoints give them one time
    saved = ctx.saved_tensors
    state, (rows, scale, _, *others) = saved[: ctx.count], saved[ctx.count :]
    vectors, columns = others[: len(VECTORS)], others[len(VECTORS) :]
    if ctx.settings[0] == "sigmoid" and not state:
        raise RuntimeError(
            "a sigmoid loss that is to be trained must be traced or exported with inputs that require gradients, got "
            "none that did; export it with them"
        )
    given = one_upstream(upstream), state, rows, columns, scale, vectors
    d_rows, d_columns, *numbers = gradients(*given, *ctx.settings, wants)
    of_rows, *of_columns, of_scale, of_bias = only(wants, [d_rows, *d_columns, *numbers])
    return of_rows, of_columns, of_scale, of_bias, *[None] * (2 + len(ctx.settings))


def _refused(ctx: Any, *upstream: Any) -> Any:
    raise second_derivative()


loss.register_autograd(_backward, setup_context=_save)
gradients.register_autograd(_refused)
