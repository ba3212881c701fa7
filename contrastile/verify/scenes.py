"""Scenarios of several steps for ``calls.txt``, one function each; a bool that one returns says whether all is right.

Wrappers run without the libraries that they wrap: a stand-in has only the names that our class takes from its library.
The expected value is computed here from a full matrix.
"""

from __future__ import annotations

import runpy
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import permutations, product
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

import contrastile
from contrastile.comm.inprocess import InProcessGroup
from contrastile.comm.watchdog import AbortNotice
from contrastile.verify.rounding import UNIT

_SCALE, _HARDNESS, _TEMPERATURE, _MARGIN = 20.0, 3.0, 0.1, 0.2
# the largest factor of a cosine in a logit
_FACTOR = _SCALE + _HARDNESS


def raised(call: Callable[..., Any], *args: Any, **keywords: Any) -> BaseException | None:
    """The error that a call raises; None if it returns."""
    try:
        call(*args, **keywords)
    except BaseException as error:
        return error
    return None


def _names(file: str, **libraries: Any) -> dict[str, Any]:
    """The names of one of our modules, imported with stand-ins for its libraries."""
    with mock.patch.dict(sys.modules, libraries):
        return runpy.run_path(str(Path(contrastile.__file__).parent / file))


def _rounding(features: Sequence[Tensor]) -> float:
    """The largest difference in float64 of two computations of a loss of cosines, and of its gradients.

    Norms and a dot product of d features give a cosine an error of (2 d + 6) u; a logit multiplies it by ``_FACTOR`` at
    most. A probability has twice the error of its logit, and a sum of up to 5 m terms 5 m u. A gradient multiplies the
    sum of probabilities, 2 at most, by ``_FACTOR`` over the feature's norm. Both computations have these errors.
    """
    (m, width), u = features[0].shape, UNIT["float64"]
    smallest_norm = min(float(x.detach().norm(dim=1).min()) for x in features)
    cosine_error = (2 * width + 6) * u
    return 2 * 2 * _FACTOR / min(1.0, smallest_norm) * (2 * _FACTOR * cosine_error + cosine_error + 5 * m * u)


def _is_close(loss: Tensor, expected: Tensor, leaves: Sequence[Tensor]) -> bool:
    """Whether two losses and their gradients are equal up to rounding."""
    derivatives = [(x, *torch.autograd.grad(x, leaves, retain_graph=True)) for x in (loss, expected)]
    return all(x.allclose(y, rtol=0.0, atol=_rounding(leaves)) for x, y in zip(*derivatives, strict=True))


def _parameters(*features: Tensor) -> list[Tensor]:
    return [x.detach().double().requires_grad_() for x in features]


def sentence_transformers() -> dict[str, Any]:
    """The names of our module for sentence-transformers, with a stand-in: importing the library takes seconds."""
    classes = (f"{x}{y}Loss" for x in ("", "Cached") for y in ("MultipleNegativesRanking", "GISTEmbed"))
    stand_in = mock.Mock(losses=mock.Mock(**dict.fromkeys(classes, nn.Module)))
    modules = "base.losses.merged_forward", "sentence_transformer", "util"
    return _names("integrations/sentence_transformers.py", **{f"sentence_transformers.{x}": stand_in for x in modules})


def ranking(api: dict[str, Any], **settings: Any) -> Any:
    """The library's default loss with these settings."""
    loss = object.__new__(api["MultipleNegativesRankingLoss"])
    given = {"similarity_fct": api["cos_sim"], "directions": ("query_to_doc",), "partition_mode": "joint"}
    given |= {"scale": _SCALE, "hardness_mode": None, "hardness_strength": _HARDNESS, "gather_across_devices": False}
    vars(loss).update({"settings": {}, "mask_duplicates": False, "texts": [], **given, **settings})
    return loss


def _entropy(*logits: Tensor) -> Tensor:
    """Cross-entropy of cosines times ``_SCALE``; row i's positive is the i-th column of the first matrix."""
    return cross_entropy(_SCALE * torch.cat(logits, 1), torch.arange(len(logits[0])))


def _without_diagonal(x: Tensor) -> Tensor:
    return x.masked_fill(torch.eye(len(x)).bool(), -torch.inf)


def _with_hardness(x: Tensor, is_added: tuple[int, int]) -> Tensor:
    """Cosines plus hardness, if ``is_added`` to the positives, and to the other columns."""
    eye = torch.eye(len(x), dtype=x.dtype)
    return x + _HARDNESS / _SCALE * x.detach() * (eye * is_added[0] + (1 - eye) * is_added[1])


def ranking_loss(query: Tensor, document: Tensor, negative: Tensor) -> bool:
    """Value and gradients of ``MultipleNegativesRankingLoss`` in every direction, partition and hardness."""
    api, leaves = sentence_transformers(), _parameters(query, document, negative)
    q, a, b = (normalize(x, dim=1) for x in leaves)
    qd, qq, dq = (q @ a.T, q @ b.T), _without_diagonal(q @ q.T), a @ q.T
    dd = _without_diagonal(a @ a.T), _without_diagonal(a @ b.T)
    others = "query_to_query", "doc_to_query", "doc_to_doc"
    directions = {others[:1]: (qq,), others[1:2]: (dq,), others[2:]: dd, others: (qq, dq, *dd)}
    # (positives, others) of the documents, then of the negatives: whether hardness is added
    hardness = {"in_batch": ((0, 1), (0, 1)), "hard": ((0, 0), (1, 0)), "all": ((0, 1), (1, 1))}
    cases: list[tuple[dict[str, Any], Tensor]] = [
        ({}, _entropy(*qd)),
        ({"similarity_fct": api["dot_score"], "scale": 1.0}, _entropy(*(leaves[0] @ x.T / _SCALE for x in leaves[1:]))),
        (
            {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"},
            (_entropy(*qd) + _entropy(dq)) / 2,
        ),
        *(({"directions": ("query_to_doc", *x)}, _entropy(*qd, *cosines)) for x, cosines in directions.items()),
        *(({"hardness_mode": f"{x}_negatives"}, _entropy(*map(_with_hardness, qd, y))) for x, y in hardness.items()),
    ]

    pairs = ((ranking(api, **settings).compute_loss_from_embeddings(leaves), expected) for settings, expected in cases)
    return all(_is_close(*pair, leaves) for pair in pairs)


def ranking_loss_masks_duplicates(query: Tensor, document: Tensor, negative: Tensor, texts: Tensor) -> bool:
    """Documents with the text of a query's positive are not negatives of the query."""
    negative_texts, api = texts.flip(0), sentence_transformers()
    leaves = _parameters(query, document, negative)
    q, a, b = (normalize(x, dim=1) for x in leaves)
    is_duplicate = texts[:, None] == texts
    documents = (q @ a.T).masked_fill(is_duplicate & ~torch.eye(len(q)).bool(), -torch.inf)
    expected = _entropy(documents, (q @ b.T).masked_fill(texts[:, None] == negative_texts, -torch.inf))
    loss = ranking(api, mask_duplicates=True, texts=[texts, negative_texts])
    return _is_close(loss.compute_loss_from_embeddings(leaves), expected, leaves)


def ranking_loss_over_ranks(features: Tensor) -> bool:
    """Two ranks, of nine samples and of the rest, each return the loss of all samples."""
    api, parts, (whole,) = sentence_transformers(), (slice(9), slice(9, None)), _parameters(features)

    def compute(settings: dict[str, Any], group: Any = None) -> Tensor:
        part = slice(None) if group is None else parts[group.rank]
        columns = [x[part] for x in (whole, whole.roll(1, 0), whole.flip(0))]
        loss: Tensor = ranking(api, group=group, **settings).compute_loss_from_embeddings(columns)
        return loss

    cases: list[dict[str, Any]] = [{}, {"directions": ("query_to_doc", "query_to_query", "doc_to_doc")}]
    cases += [{"hardness_mode": f"{x}_negatives"} for x in ("in_batch", "hard", "all")]
    stand_ins = {
        "dist": mock.Mock(get_rank=lambda: int(threading.current_thread().name[5:])),
        "_shared": lambda loss: loss.group,
        "_with_group": lambda loss: {"group": loss.group},
    }
    with mock.patch.dict(api["_beside"].__globals__, stand_ins):
        return all(
            x.allclose(compute(case), rtol=0.0, atol=_rounding([whole]))
            for case in cases
            for x in InProcessGroup[Tensor](2).run(partial(compute, case))
        )


def gist_loss(columns: Sequence[Tensor], guides: Sequence[Tensor]) -> bool:
    """``GISTEmbedLoss``, with anchors and positives contrasted or not; columns: anchors, positives, negatives."""
    api, leaves, guide_features = sentence_transformers(), _parameters(*columns), [x.double() for x in guides]

    def cosines(features: Iterable[Tensor], anchors: bool, positives: bool) -> Tensor:
        a, p, n = (normalize(x, dim=1) for x in features)
        return torch.cat([a @ p.T, *[a @ a.T] * anchors, *[p @ p.T] * positives, a @ n.T], 1)

    def is_right(*contrasted: bool) -> bool:
        loss, guide = api["GISTEmbedLoss"](), cosines(guide_features, *contrasted)
        loss.contrast_anchors, loss.contrast_positives = contrasted
        loss.margin, loss.margin_strategy, loss.temperature = _MARGIN, "absolute", _TEMPERATURE
        loss.gather_across_devices = False
        is_false_negative = (guide > guide.diagonal()[:, None] - _MARGIN) & ~torch.eye(*guide.shape).bool()
        logits = (cosines(leaves, *contrasted) / _TEMPERATURE).masked_fill(is_false_negative, -torch.inf)
        return _is_close(loss._of(leaves, guide_features), cross_entropy(logits, torch.arange(len(logits))), leaves)

    return all(is_right(anchors, positives) for anchors in (False, True) for positives in (False, True))


class _Graphs:
    """Stand-ins for CUDA graphs in shared memory: a replay recomputes, and destroys the results of later steps."""

    def __init__(self) -> None:
        self.is_intact: list[bool] = []

    def record(self, where: Any, actions: Sequence[Callable[[], Any]], pool: Any) -> tuple[list[Any], list[Any]]:
        """Like ``replay.record``: returns the graphs and their output tensors."""
        outputs = [[x.clone() for x in action()] for action in actions]
        self.is_intact.append(False)
        pairs = enumerate(zip(actions, outputs, strict=True))
        step = len(self.is_intact) - 1
        return [mock.Mock(replay=partial(self._replay, step, number == 0, *pair)) for number, pair in pairs], outputs

    def _replay(self, step: int, forward: bool, action: Callable[[], Any], outputs: Sequence[Tensor]) -> None:
        self.is_intact[step] |= forward
        self.is_intact[step + 1 :] = [False] * (len(self.is_intact) - step - 1)
        for output, x in zip(outputs, torch.enable_grad()(action)(), strict=True):
            output.copy_(x if self.is_intact[step] else x * torch.nan)


def steps_from_graphs(*features: Tensor) -> bool:
    """Losses and gradients of two steps whose graphs share memory are right in every order."""
    from contrastile.autograd import steps
    from contrastile.backends.replay import Pool

    pairs = [[x.clone().requires_grad_() for x in pair] for pair in permutations(features, 2)]
    pool, upstream = Pool(), torch.tensor(3.0)
    losses = [lambda pair, scale=scale: contrastile.clip_loss(pair[0], pair[1], scale) for scale in (2.0, 5.0)]
    with mock.patch.object(steps, "record", _Graphs().record):
        steps_of_losses = [steps.Step((0, 0), pool, pairs[0], [True, True], loss) for loss in losses]
    is_right = True
    for first, second, *order in product((0, 1), repeat=5):
        turns = [(first, pairs[1]), (second, pairs[2])]
        computed = [torch.no_grad()(steps_of_losses[i].loss)(pair) for i, pair in turns]
        expected = [losses[i](pair) for i, pair in turns]
        is_right = is_right and all(map(torch.equal, [value for value, _ in computed], expected))
        for k in order:
            (i, pair), (_, number) = turns[k], computed[k]
            gradients = torch.no_grad()(steps_of_losses[i].gradients)(number, pair, upstream)
            exact = torch.autograd.grad(expected[k], pair, upstream, retain_graph=True)
            is_right = is_right and all(x is not None and x.equal(y) for x, y in zip(gradients, exact, strict=True))
    return is_right


def operator_from_graphs(*features: Tensor) -> bool:
    """Later calls leave the results that an operator returned from its graph unchanged."""
    from contrastile.autograd import operators
    from contrastile.autograd.arguments import Call
    from contrastile.backends.replay import Pool

    def launch(x: Tensor, y: Tensor) -> list[Tensor]:
        return [x @ y.T, x.sum()]

    calls = [Call(pair, {}, grad=False) for pair in permutations(features, 2)]
    with mock.patch.object(operators, "record", _Graphs().record):
        graph = operators.Operation((0, 0), Pool(), calls[0], launch)
    results = [graph.results(call.tensors) for call in calls]
    return all(all(map(torch.equal, result, launch(*call.args))) for call, result in zip(calls, results, strict=True))


def reductions(module: nn.Module, step: Callable[[Any], Any], **settings: Any) -> int:
    """The number of buckets that DDP reduces in a step of this module, in a world of one."""
    buckets: list[Any] = []

    def count(bucket: Any) -> Any:
        buckets.append(bucket)
        future: Any = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    parallel = nn.parallel.DistributedDataParallel(module, **settings)
    parallel.register_comm_hook(None, lambda _, bucket: count(bucket))
    step(parallel)
    return len(buckets)


class Partly(nn.Module):
    """Uses its weight as a parameter only in chunks of the given lengths, and its bias likewise."""

    def __init__(self, weight: Sequence[int], bias: Sequence[int]) -> None:
        super().__init__()
        self.weight, self.bias = (nn.Parameter(torch.rand(shape)) for shape in ((5, 5), (5,)))
        self._lengths = weight, bias

    def forward(self, x: Tensor) -> Tensor:
        parameters = zip((self.weight, self.bias), self._lengths, strict=True)
        weight, bias = (p if len(x) in lengths else p.detach() for p, lengths in parameters)
        return x @ weight + bias


class DotProducts(nn.Module):
    """A ``phi`` of ``deep_distance``: the dot product of every anchor and every target."""

    def forward(self, anchors: Tensor, targets: Tensor) -> Tensor:
        return anchors @ targets.T


class DeepSpeedEngine(nn.Linear):
    """A stand-in for DeepSpeed's engine of a linear layer; ``is_running`` inside of its own backward pass.

    ``boundaries`` has what was set as the boundary of accumulation at each backward pass, None where nothing was.
    """

    def __init__(self, stage: int = 0, steps: int = 1, is_running: bool = False) -> None:
        super().__init__(5, 5)
        self.zero_optimization_stage, self.gradient_accumulation_steps = (lambda: stage), (lambda: steps)
        self._running_engine_backward, self._backward_epilogue = is_running, mock.Mock()
        self._is_gradient_accumulation_boundary: bool | None = None
        self.boundaries: list[bool | None] = []

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        self._is_gradient_accumulation_boundary = is_boundary

    def backward(self, loss: Tensor) -> None:
        self.boundaries.append(self._is_gradient_accumulation_boundary)
        torch.autograd.backward(loss)


def mpi_messages(length: int) -> tuple[list[list[Any]], str, list[int], int]:
    """``MPIChannel``: its messages, a wait's error for ``length`` bytes, requests held before and after, frees."""
    api, comm = _names("comm/mpi.py", mpi4py=mock.MagicMock()), mock.Mock()
    api["MPI"].Status.return_value.Get_count.configure_mock(return_value=length)
    channel = api["MPIChannel"](comm)
    pending = channel.post({1: [np.zeros(3, "u1")]}, {1: [np.zeros(4, "u1")]}, 7, lambda: 1.0)
    counts, error = [len(channel._under_way)], type(raised(pending.wait)).__name__
    counts.append(len(channel._under_way))
    channel.close()
    api["MPI"].configure_mock(COMM_NULL=comm)
    channel.close()
    messages = [[x[0], len(x.args[0][0]), *x.args[1:]] for x in comm.mock_calls if x[0] in ("Irecv", "Isend")]
    return messages, error, counts, comm.Free.call_count


def mpi_connection(met: Any) -> tuple[bool, str, int, int]:
    """Whether a connection uses a duplicate communicator, its error, and counts of ``Free`` and ``Set_errhandler``."""
    api, copy, factory = _names("comm/mpi.py", mpi4py=mock.MagicMock()), mock.Mock(), mock.Mock()
    comm = mock.Mock(Get_rank=lambda: 0, Get_size=lambda: 2, Idup=lambda: (copy, mock.Mock()))
    with mock.patch.dict(api["_connect"].__globals__, PointToPoint=factory, met=mock.Mock(side_effect=met)):
        error = type(raised(api["_connect"], comm, 5.0)).__name__
    copy.Get_group().Translate_ranks.assert_called_once_with([0, 1], api["MPI"].COMM_WORLD.Get_group())
    right = factory.call_args.args[3].comm is copy and factory.call_args.args[-1] is copy.Get_group().Translate_ranks()
    return right, error, copy.Free.call_count, copy.Set_errhandler.call_count


def mpi_group() -> tuple[float, int, bool, str]:
    """A connected group's new deadline, its closes when freed, whether it is cached, and the error of a freed one."""
    api, group, null = _names("comm/mpi.py", mpi4py=mock.MagicMock()), mock.Mock(), mock.Mock()
    api["MPI"].configure_mock(Intracomm=mock.Mock, COMM_NULL=null)
    comm = mock.Mock(Get_attr=lambda key: None, Get_rank=lambda: 0, Get_size=lambda: 1)
    is_kept = [api["of"](comm)] == [x.args[1] for x in comm.Set_attr.mock_calls]
    api["of"](mock.Mock(Get_attr=lambda key: group), 7.0)
    api["MPI"].Comm.Create_keyval.call_args.kwargs["delete_fn"](None, 0, group)
    return group.deadline, group.close.call_count, is_kept, type(raised(api["of"], null)).__name__


def mpi_unanswered() -> Any:
    """The ranks that a timeout names when ranks 1 and 2 were awaited and rank 2 has answered."""
    api = _names("comm/mpi.py", mpi4py=mock.MagicMock())
    api["MPI"].Request.Testall.return_value = False
    comm = mock.Mock(Irecv=lambda buffer, rank, tag: mock.Mock(Test=lambda: rank == 2))
    incoming = {rank: [np.zeros(3, "u1")] for rank in (1, 2)}
    return vars(raised(api["MPIChannel"](comm).post({}, incoming, 7, lambda: 0.0).wait))["ranks"]


def mpi_failed(kind: str) -> str:
    """The error that a wait raises when MPI reports an error of this kind."""
    api, error = _names("comm/mpi.py", mpi4py=mock.MagicMock()), type("Error", (Exception,), {"Get_error_string": str})
    api["MPI"].configure_mock(Exception=error, Get_error_class=lambda code: getattr(api["MPI"], kind))
    api["MPI"].Request.Testall.side_effect = error
    channel = api["MPIChannel"](mock.Mock())
    return type(raised(channel.post({}, {1: [np.zeros(3, "u1")]}, 7, lambda: 0.0).wait)).__name__


def mpi_abort() -> bool:
    """A rank that has lost another notifies the others, hears them, and aborts the world only when its process ends."""
    api, at_exit = _names("comm/mpi.py", mpi4py=mock.MagicMock()), list[Any]()
    comm = mock.Mock(Get_rank=lambda: 0, Get_size=lambda: 2)
    comm.Recv = lambda buffer, *_: buffer[0].__setitem__(slice(4), b"0|at")
    api["MPI"].Status.return_value.configure_mock(Get_source=lambda: 1, Get_count=lambda kind: 4)
    api["MPI"].Is_finalized.configure_mock(return_value=False)
    with mock.patch("atexit.register", at_exit.append):
        heard = api["MPIChannel"](comm).abort(AbortNotice((1,), ""), 9.0)
    told, is_early = [x.args[1] for x in comm.Isend.mock_calls], comm.Abort.called
    at_exit[0]()
    return (heard, told, is_early, comm.Abort.call_args.args) == ({1: AbortNotice((0,), "at")}, [1], False, (1,))
