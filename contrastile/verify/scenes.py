"""What ``calls.txt`` asks in several steps, a function for each; one that returns a bool says whether all is right.

Wrappers are asked without the libraries that they wrap: a stand-in has what our class takes from its library, and no
more. Truth is a full matrix, written here.
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
# what a cosine is multiplied by at most
_MOST = _SCALE + _HARDNESS


def raised(call: Callable[..., Any], *args: Any, **more: Any) -> BaseException | None:
    """What a call raises; None where it returns."""
    try:
        call(*args, **more)
    except BaseException as error:
        return error
    return None


def _names(file: str, **libraries: Any) -> dict[str, Any]:
    """The names of a module of ours, with stand-ins for the libraries that it imports."""
    with mock.patch.dict(sys.modules, libraries):
        return runpy.run_path(str(Path(contrastile.__file__).parent / file))


def _rounding(features: Sequence[Tensor]) -> float:
    """How far float64 may move two computations of a loss of cosines, and its gradients, from each other.

    Norms and a dot product of d features leave a cosine off by (2 d + 6) u, and it is multiplied by at most ``_MOST``.
    Probabilities err by twice what their logits do, sums of up to 5 m terms by 5 m u, and a gradient multiplies their
    sum, 2 at most, by ``_MOST`` over the feature's norm. Both computations err.
    """
    (m, width), u = features[0].shape, UNIT["float64"]
    least = min(float(x.detach().norm(dim=1).min()) for x in features)
    cosine = (2 * width + 6) * u
    return 2 * 2 * _MOST / min(1.0, least) * (2 * _MOST * cosine + cosine + 5 * m * u)


def _near(found: Tensor, expected: Tensor, leaves: Sequence[Tensor]) -> bool:
    """Whether two losses, and their gradients, are equal but for rounding."""
    both = [(x, *torch.autograd.grad(x, leaves, retain_graph=True)) for x in (found, expected)]
    return all(x.allclose(y, rtol=0.0, atol=_rounding(leaves)) for x, y in zip(*both, strict=True))


def _learnt(*features: Tensor) -> list[Tensor]:
    return [x.detach().double().requires_grad_() for x in features]


def sentence_transformers() -> dict[str, Any]:
    """The names of our module for sentence-transformers, of a hollow package: to import it takes seconds."""
    kinds = (f"{x}{y}Loss" for x in ("", "Cached") for y in ("MultipleNegativesRanking", "GISTEmbed"))
    hollow = mock.Mock(losses=mock.Mock(**dict.fromkeys(kinds, nn.Module)))
    names = "base.losses.merged_forward", "sentence_transformer", "util"
    return _names("integrations/sentence_transformers.py", **{f"sentence_transformers.{x}": hollow for x in names})


def ranking(of: dict[str, Any], **settings: Any) -> Any:
    """The library's default loss with these settings."""
    loss = object.__new__(of["MultipleNegativesRankingLoss"])
    given = {"similarity_fct": of["cos_sim"], "directions": ("query_to_doc",), "partition_mode": "joint"}
    given |= {"scale": _SCALE, "hardness_mode": None, "hardness_strength": _HARDNESS, "gather_across_devices": False}
    vars(loss).update({"settings": {}, "mask_duplicates": False, "texts": [], **given, **settings})
    return loss


def _entropy(*logits: Tensor) -> Tensor:
    """Of cosines times ``_SCALE``; row i's own is the i-th of the first matrix."""
    return cross_entropy(_SCALE * torch.cat(logits, 1), torch.arange(len(logits[0])))


def _others(x: Tensor) -> Tensor:
    return x.masked_fill(torch.eye(len(x)).bool(), -torch.inf)


def _harder(x: Tensor, added: tuple[int, int]) -> Tensor:
    """Cosines to which hardness adds: to their own, and to the rest."""
    eye = torch.eye(len(x), dtype=x.dtype)
    return x + _HARDNESS / _SCALE * x.detach() * (eye * added[0] + (1 - eye) * added[1])


def ranking_loss(query: Tensor, document: Tensor, negative: Tensor) -> bool:
    """Value and gradients of ``MultipleNegativesRankingLoss`` in every direction, partition and hardness."""
    of, leaves = sentence_transformers(), _learnt(query, document, negative)
    q, a, b = (normalize(x, dim=1) for x in leaves)
    forth, own, back = (q @ a.T, q @ b.T), _others(q @ q.T), a @ q.T
    documents = _others(a @ a.T), _others(a @ b.T)
    others = "query_to_query", "doc_to_query", "doc_to_doc"
    directions = {others[:1]: (own,), others[1:2]: (back,), others[2:]: documents, others: (own, back, *documents)}
    # to which cosines of documents, and of negatives, hardness adds: to a row's own, and to the rest
    hardness = {"in_batch": ((0, 1), (0, 1)), "hard": ((0, 0), (1, 0)), "all": ((0, 1), (1, 1))}
    cases: list[tuple[dict[str, Any], Tensor]] = [
        ({}, _entropy(*forth)),
        ({"similarity_fct": of["dot_score"], "scale": 1.0}, _entropy(*(leaves[0] @ x.T / _SCALE for x in leaves[1:]))),
        (
            {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"},
            (_entropy(*forth) + _entropy(back)) / 2,
        ),
        *(({"directions": ("query_to_doc", *x)}, _entropy(*forth, *more)) for x, more in directions.items()),
        *(({"hardness_mode": f"{x}_negatives"}, _entropy(*map(_harder, forth, y))) for x, y in hardness.items()),
    ]

    losses = ((ranking(of, **settings).compute_loss_from_embeddings(leaves), expected) for settings, expected in cases)
    return all(_near(*both, leaves) for both in losses)


def ranking_loss_masks_duplicates(query: Tensor, document: Tensor, negative: Tensor, texts: Tensor) -> bool:
    """Documents with the text of a query's own are no negatives of it."""
    more, of = texts.flip(0), sentence_transformers()
    leaves = _learnt(query, document, negative)
    q, a, b = (normalize(x, dim=1) for x in leaves)
    same = texts[:, None] == texts
    documents = (q @ a.T).masked_fill(same & ~torch.eye(len(q)).bool(), -torch.inf)
    expected = _entropy(documents, (q @ b.T).masked_fill(texts[:, None] == more, -torch.inf))
    loss = ranking(of, mask_duplicates=True, texts=[texts, more])
    return _near(loss.compute_loss_from_embeddings(leaves), expected, leaves)


def ranking_loss_over_ranks(features: Tensor) -> bool:
    """On two ranks, of nine samples and of the rest, each has the loss of all."""
    of, parts, (whole,) = sentence_transformers(), (slice(9), slice(9, None)), _learnt(features)

    def computed(settings: dict[str, Any], group: Any = None) -> Tensor:
        at = slice(None) if group is None else parts[group.rank]
        columns = [x[at] for x in (whole, whole.roll(1, 0), whole.flip(0))]
        found: Tensor = ranking(of, group=group, **settings).compute_loss_from_embeddings(columns)
        return found

    cases: list[dict[str, Any]] = [{}, {"directions": ("query_to_doc", "query_to_query", "doc_to_doc")}]
    cases += [{"hardness_mode": f"{x}_negatives"} for x in ("in_batch", "hard", "all")]
    stands_in = {
        "dist": mock.Mock(get_rank=lambda: int(threading.current_thread().name[5:])),
        "_shared": lambda loss: loss.group,
        "_with_group": lambda loss: {"group": loss.group},
    }
    with mock.patch.dict(of["_beside"].__globals__, stands_in):
        return all(
            x.allclose(computed(case), rtol=0.0, atol=_rounding([whole]))
            for case in cases
            for x in InProcessGroup[Tensor](2).run(partial(computed, case))
        )


def gist_loss(columns: Sequence[Tensor], guides: Sequence[Tensor]) -> bool:
    """``GISTEmbedLoss`` with anchors and positives contrasted or not; columns: anchors, positives, negatives."""
    of, leaves, guided = sentence_transformers(), _learnt(*columns), [x.double() for x in guides]

    def cosines(each: Iterable[Tensor], anchors: bool, positives: bool) -> Tensor:
        a, p, n = (normalize(x, dim=1) for x in each)
        return torch.cat([a @ p.T, *[a @ a.T] * anchors, *[p @ p.T] * positives, a @ n.T], 1)

    def right(*contrasted: bool) -> bool:
        loss, guide = of["GISTEmbedLoss"](), cosines(guided, *contrasted)
        loss.contrast_anchors, loss.contrast_positives = contrasted
        loss.margin, loss.margin_strategy, loss.temperature = _MARGIN, "absolute", _TEMPERATURE
        loss.gather_across_devices = False
        false = (guide > guide.diagonal()[:, None] - _MARGIN) & ~torch.eye(*guide.shape).bool()
        logits = (cosines(leaves, *contrasted) / _TEMPERATURE).masked_fill(false, -torch.inf)
        return _near(loss._of(leaves, guided), cross_entropy(logits, torch.arange(len(logits))), leaves)

    return all(right(anchors, positives) for anchors in (False, True) for positives in (False, True))


class _Graphs:
    """Graphs that compute again, and that take from steps that were captured later what these have left."""

    def __init__(self) -> None:
        self.left: list[bool] = []

    def record(self, where: Any, actions: Sequence[Callable[[], Any]], pool: Any) -> tuple[list[Any], list[Any]]:
        """As ``replay.record`` does: the graphs, and what they write to."""
        places = [[x.clone() for x in action()] for action in actions]
        self.left.append(False)
        turns = enumerate(zip(actions, places, strict=True))
        step = len(self.left) - 1
        return [mock.Mock(replay=partial(self._replay, step, number == 0, *turn)) for number, turn in turns], places

    def _replay(self, step: int, forward: bool, action: Callable[[], Any], places: Sequence[Tensor]) -> None:
        self.left[step] |= forward
        self.left[step + 1 :] = [False] * (len(self.left) - step - 1)
        for place, x in zip(places, torch.enable_grad()(action)(), strict=True):
            place.copy_(x if self.left[step] else x * torch.nan)


def steps_from_graphs(*features: Tensor) -> bool:
    """Losses of two steps whose graphs share memory, and their gradients, whatever the order of both."""
    from contrastile.autograd import steps
    from contrastile.backends.replay import Pool

    pairs = [[x.clone().requires_grad_() for x in pair] for pair in permutations(features, 2)]
    pool, upstream = Pool(), torch.tensor(3.0)
    scaled = [lambda of, scale=scale: contrastile.clip_loss(of[0], of[1], scale) for scale in (2.0, 5.0)]
    with mock.patch.object(steps, "record", _Graphs().record):
        both = [steps.Step((0, 0), pool, pairs[0], [True, True], loss) for loss in scaled]
    right = True
    for one, other, *order in product((0, 1), repeat=5):
        turns = [(one, pairs[1]), (other, pairs[2])]
        found = [torch.no_grad()(both[i].loss)(pair) for i, pair in turns]
        expected = [scaled[i](pair) for i, pair in turns]
        right = right and all(map(torch.equal, [value for value, _ in found], expected))
        for k in order:
            (i, pair), (_, number) = turns[k], found[k]
            gradients = torch.no_grad()(both[i].gradients)(number, pair, upstream)
            wanted = torch.autograd.grad(expected[k], pair, upstream, retain_graph=True)
            right = right and all(x is not None and x.equal(y) for x, y in zip(gradients, wanted, strict=True))
    return right


def operator_from_graphs(*features: Tensor) -> bool:
    """What an operator gives from its graph, which stays what it is in later calls."""
    from contrastile.autograd import operators
    from contrastile.autograd.arguments import Call
    from contrastile.backends.replay import Pool

    def launch(x: Tensor, y: Tensor) -> list[Tensor]:
        return [x @ y.T, x.sum()]

    calls = [Call(pair, {}, grad=False) for pair in permutations(features, 2)]
    with mock.patch.object(operators, "record", _Graphs().record):
        graph = operators.Operation((0, 0), Pool(), calls[0], launch)
    found = [graph.results(call.tensors) for call in calls]
    return all(all(map(torch.equal, each, launch(*call.args))) for call, each in zip(calls, found, strict=True))


def reductions(module: nn.Module, step: Callable[[Any], Any], **settings: Any) -> int:
    """How many buckets DDP reduces in a step of this module, in a world of one."""
    reduced: list[Any] = []

    def counted(bucket: Any) -> Any:
        reduced.append(bucket)
        done: Any = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    parallel = nn.parallel.DistributedDataParallel(module, **settings)
    parallel.register_comm_hook(None, lambda _, bucket: counted(bucket))
    step(parallel)
    return len(reduced)


class Partly(nn.Module):
    """Learns its weight, or its bias, in chunks of these lengths alone."""

    def __init__(self, weight: Sequence[int], bias: Sequence[int]) -> None:
        super().__init__()
        self.weight, self.bias = (nn.Parameter(torch.rand(shape)) for shape in ((5, 5), (5,)))
        self._lengths = weight, bias

    def forward(self, x: Tensor) -> Tensor:
        each = zip((self.weight, self.bias), self._lengths, strict=True)
        weight, bias = (p if len(x) in lengths else p.detach() for p, lengths in each)
        return x @ weight + bias


def mpi_messages(length: int) -> tuple[list[list[Any]], str, list[int], int]:
    """What ``MPIChannel`` posts, what a wait raises where so many bytes came, what it holds before and after, frees."""
    of, comm = _names("comm/mpi.py", mpi4py=mock.MagicMock()), mock.Mock()
    of["MPI"].Status.return_value.Get_count.configure_mock(return_value=length)
    channel = of["MPIChannel"](comm)
    pending = channel.post({1: [np.zeros(3, "u1")]}, {1: [np.zeros(4, "u1")]}, 7, lambda: 1.0)
    held, said = [len(channel._under_way)], type(raised(pending.wait)).__name__
    held.append(len(channel._under_way))
    channel.close()
    of["MPI"].configure_mock(COMM_NULL=comm)
    channel.close()
    sent = [[x[0], len(x.args[0][0]), *x.args[1:]] for x in comm.mock_calls if x[0] in ("Irecv", "Isend")]
    return sent, said, held, comm.Free.call_count


def mpi_connection(met: Any) -> tuple[bool, str, int, int]:
    """Whether a connection is over a copy of the communicator, and what it raises, frees, and makes return errors."""
    of, own, made = _names("comm/mpi.py", mpi4py=mock.MagicMock()), mock.Mock(), mock.Mock()
    comm = mock.Mock(Get_rank=lambda: 0, Get_size=lambda: 2, Idup=lambda: (own, mock.Mock()))
    with mock.patch.dict(of["_connect"].__globals__, PointToPoint=made, met=mock.Mock(side_effect=met)):
        said = type(raised(of["_connect"], comm, 5.0)).__name__
    own.Get_group().Translate_ranks.assert_called_once_with([0, 1], of["MPI"].COMM_WORLD.Get_group())
    right = made.call_args.args[3].comm is own and made.call_args.args[-1] is own.Get_group().Translate_ranks()
    return right, said, own.Free.call_count, own.Set_errhandler.call_count


def mpi_group() -> tuple[float, int, bool, str]:
    """A connected group's deadline, given another; how often it is closed when freed; if it is kept; a freed one."""
    of, found, null = _names("comm/mpi.py", mpi4py=mock.MagicMock()), mock.Mock(), mock.Mock()
    of["MPI"].configure_mock(Intracomm=mock.Mock, COMM_NULL=null)
    new = mock.Mock(Get_attr=lambda key: None, Get_rank=lambda: 0, Get_size=lambda: 1)
    kept = [of["of"](new)] == [x.args[1] for x in new.Set_attr.mock_calls]
    of["of"](mock.Mock(Get_attr=lambda key: found), 7.0)
    of["MPI"].Comm.Create_keyval.call_args.kwargs["delete_fn"](None, 0, found)
    return found.deadline, found.close.call_count, kept, type(raised(of["of"], null)).__name__


def mpi_unanswered() -> Any:
    """Whom a rank blames that waits for the first rank and for the second, of whom the second has answered."""
    of = _names("comm/mpi.py", mpi4py=mock.MagicMock())
    of["MPI"].Request.Testall.return_value = False
    comm = mock.Mock(Irecv=lambda buffer, rank, tag: mock.Mock(Test=lambda: rank == 2))
    incoming = {rank: [np.zeros(3, "u1")] for rank in (1, 2)}
    return vars(raised(of["MPIChannel"](comm).post({}, incoming, 7, lambda: 0.0).wait))["ranks"]


def mpi_failed(kind: str) -> str:
    """What a wait raises where MPI has an error of this kind."""
    of, error = _names("comm/mpi.py", mpi4py=mock.MagicMock()), type("Error", (Exception,), {"Get_error_string": str})
    of["MPI"].configure_mock(Exception=error, Get_error_class=lambda code: getattr(of["MPI"], kind))
    of["MPI"].Request.Testall.side_effect = error
    channel = of["MPIChannel"](mock.Mock())
    return type(raised(channel.post({}, {1: [np.zeros(3, "u1")]}, 7, lambda: 0.0).wait)).__name__


def mpi_abort() -> bool:
    """A rank that has lost another tells the others, hears them, and ends the world as its process ends, not before."""
    of, at_exit = _names("comm/mpi.py", mpi4py=mock.MagicMock()), list[Any]()
    comm = mock.Mock(Get_rank=lambda: 0, Get_size=lambda: 2)
    comm.Recv = lambda buffer, *_: buffer[0].__setitem__(slice(4), b"0|at")
    of["MPI"].Status.return_value.configure_mock(Get_source=lambda: 1, Get_count=lambda kind: 4)
    of["MPI"].Is_finalized.configure_mock(return_value=False)
    with mock.patch("atexit.register", at_exit.append):
        heard = of["MPIChannel"](comm).abort(AbortNotice((1,), ""), 9.0)
    told, early = [x.args[1] for x in comm.Isend.mock_calls], comm.Abort.called
    at_exit[0]()
    return (heard, told, early, comm.Abort.call_args.args) == ({1: AbortNotice((0,), "at")}, [1], False, (1,))
