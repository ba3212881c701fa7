"""Invalid input, call by call: each expression must raise. The tests run them.

docs/reference/errors.md is made from them.
Expressions see ``contrastile``, ``torch``, ``np``, ``InProcessGroup`` and, from one array library, ``image`` and
``text`` (6, 5), ``key`` (11, 5) and ``labels`` (6,).
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch

import contrastile
from contrastile.backends import registry
from contrastile.backends.contract import BackendUnavailableError, UnsupportedProblemError
from contrastile.comm.inprocess import InProcessGroup

LIBRARIES = ("torch", "numpy")


@dataclass(frozen=True)
class Provocation:
    """An expression, the error it raises, the array libraries to try, and a package to hide while it runs."""

    call: str
    error: type[Exception]
    libraries: tuple[str, ...] = ("torch",)
    without: str = ""

    def message(self, library: str = "torch") -> str:
        """The error's text. Other errors propagate; AssertionError if nothing is raised."""
        # torch has deprecated some functions in these calls
        with _world(self.without), warnings.catch_warnings(action="ignore"):
            try:
                # the expressions are the ones in this file
                eval(self.call, namespace(library))
            except self.error as error:
                if type(error) is self.error:
                    return str(error)
                raise
        raise AssertionError(f"nothing raised by {self.call}")


def namespace(library: str) -> dict[str, Any]:
    rng = np.random.default_rng(5)
    arrays = {
        name: rng.standard_normal((rows, 5)).astype("float32")
        for name, rows in (("image", 6), ("text", 6), ("key", 11))
    }
    arrays["labels"] = np.array([0, 1, 0, 2, 2, 7])
    if library == "torch":
        arrays = {name: torch.from_numpy(x) for name, x in arrays.items()}
    return {"contrastile": contrastile, "InProcessGroup": InProcessGroup, "torch": torch, "np": np, **arrays}


@contextlib.contextmanager
def _world(without: str) -> Iterator[None]:
    """No backends of other packages, and no package of this name, but all others: what is installed must not show."""
    there, points = registry._is_there, importlib.metadata.entry_points

    def is_there(name: str) -> bool:
        return name.partition(".")[0] != without if without else there(name)

    def entry_points(**which: str) -> Any:
        return () if which == {"group": registry.ENTRY_POINT_GROUP} else points(**which)

    older = SimpleNamespace(backend=replace(registry.load("numpy"), contract=1))
    registry.load.cache_clear()
    with (
        mock.patch.object(importlib.metadata, "entry_points", entry_points),
        mock.patch.object(registry, "_is_there", is_there),
    ):
        # no copy of the table is put back: what is imported meanwhile stays
        sys.modules["written_before"] = older  # type: ignore[assignment]
        yield
        del sys.modules["written_before"]
    registry.load.cache_clear()


def _each(error: type[Exception], *calls: str, libraries: tuple[str, ...] = ("torch",)) -> list[Provocation]:
    return [Provocation(call, error, libraries) for call in calls]


PROVOCATIONS: dict[str, list[Provocation]] = {
    "Features": [
        *_each(
            TypeError,
            "contrastile.clip_loss([[1.0, 0.0]], text, 14.0)",
            "contrastile.sup_con(None, labels, 14.0)",
            libraries=LIBRARIES,
        ),
        *_each(
            TypeError,
            "contrastile.clip_loss(np.ones((6, 5)), torch.ones(6, 5), 14.0)",
            "contrastile.info_nce(torch.ones(6, 5), torch.ones(6, 5), 14.0, negatives=np.ones((3, 5)))",
            "contrastile.clip_loss(image.int(), text.int(), 14.0)",
            "contrastile.clip_loss(image.to(torch.float8_e4m3fn), text, 14.0)",
            "contrastile.clip_loss(image.double(), text, 14.0)",
            "contrastile.sigmoid_loss(image, text.bfloat16(), 10.0, -10.0)",
            "contrastile.clip_loss(image.to_sparse(), text, 14.0)",
            "contrastile.clip_loss(torch.quantize_per_tensor(image, 0.1, 0, torch.qint8), text, 14.0)",
        ),
        *_each(
            TypeError,
            "contrastile.clip_loss(image.astype('int64'), text, 14.0)",
            "contrastile.nt_xent(image, text.astype('float16'), 14.0)",
            "contrastile.clip_loss(np.ma.masked_array(image, image > 1), text, 14.0)",
            libraries=("numpy",),
        ),
        *_each(
            ValueError,
            "contrastile.clip_loss(image[0], text, 14.0)",
            "contrastile.clip_loss(image, text[None], 14.0)",
            "contrastile.clip_loss(image[:0], text[:0], 14.0)",
            "contrastile.sup_con(image[:, :0], labels, 14.0)",
            "contrastile.clip_loss(image, text[:, :4], 14.0)",
            "contrastile.info_nce(image, text, 14.0, negatives=key[:, 1:])",
            "contrastile.info_nce(image, text, 14.0, negatives=[key, key[0]])",
            "contrastile.clip_loss(image, text[:5], 14.0)",
            "contrastile.info_nce(image, key, 14.0)",
            "contrastile.nt_xent(image, text[:5], 14.0)",
            "contrastile.sigmoid_loss(image, text[:5], 10.0, -10.0)",
            libraries=LIBRARIES,
        ),
        *_each(ValueError, "contrastile.clip_loss(image, text.to('meta'), 14.0)"),
    ],
    "Several processes": [
        *_each(
            ValueError,
            "contrastile.clip_loss(image, text, 14.0, exchange='star')",
            "contrastile.clip_loss(image, text, 14.0, parameter_reduction='max')",
            "contrastile.clip_loss(image, text, 14.0, exchange='ring')",
            libraries=LIBRARIES,
        ),
        *_each(TypeError, "contrastile.clip_loss(image, text, 14.0, group=3)", libraries=LIBRARIES),
        Provocation(
            "contrastile.clip_loss(image, text, 14.0, group='world')",
            BackendUnavailableError,
            ("numpy",),
            without="torch",
        ),
        *_each(
            ValueError,
            "contrastile.nn.ClipLoss(rank=4, world_size=4)",
            "contrastile.nn.ClipLoss(use_horovod=True)",
            "contrastile.nn.SigLipLoss(dist_impl='star')",
        ),
        *_each(TypeError, "contrastile.nn.ClipLoss(rank='0', world_size=4)"),
    ],
    "Scale and bias": [
        *_each(
            ValueError,
            "contrastile.clip_loss(image, text, float('nan'))",
            "contrastile.sigmoid_loss(image, text, 10.0, float('-inf'))",
            "contrastile.clip_loss(image, text, 1e39)",
            "contrastile.sup_con(image, labels, 10**400)",
            "contrastile.clip_loss(image, text, image[0])",
            libraries=LIBRARIES,
        ),
        *_each(
            ValueError,
            "contrastile.clip_loss(image, text, torch.tensor(float('inf')))",
            "contrastile.sup_con(image, labels, torch.tensor([float('nan')], requires_grad=True))",
            "contrastile.clip_loss(image, text, torch.tensor(1e39, dtype=torch.float64))",
            "contrastile.sigmoid_loss(image, text, 10.0, torch.zeros(2))",
            "contrastile.clip_loss(image, text, torch.tensor(14.0, device='meta'))",
        ),
        *_each(
            ValueError,
            "contrastile.nt_xent(image, text, np.float32('inf'))",
            "contrastile.clip_loss(image, text, np.array(1e39))",
            libraries=("numpy",),
        ),
        *_each(
            TypeError,
            "contrastile.clip_loss(image, text, '14')",
            "contrastile.info_nce(image, text, None)",
            "contrastile.sigmoid_loss(image, text, 10.0, [-10.0])",
            libraries=LIBRARIES,
        ),
        *_each(
            TypeError,
            "contrastile.clip_loss(image, text, np.array(14.0))",
            "contrastile.clip_loss(image, text, torch.tensor(14j))",
            "contrastile.clip_loss(image, text, torch.tensor([14.0]).to_sparse())",
            "contrastile.clip_loss(image, text, torch.quantize_per_tensor(torch.tensor(14.0), 0.1, 0, torch.qint8))",
        ),
        *_each(
            TypeError,
            "contrastile.clip_loss(image, text, np.array(14, dtype=object))",
            "contrastile.clip_loss(image, text, np.str_('14'))",
            "contrastile.sigmoid_loss(image, text, 10.0, np.ma.masked)",
            libraries=("numpy",),
        ),
    ],
    "Positives": [
        *_each(
            ValueError,
            "contrastile.info_nce(image, key, 14.0, positives=labels + 4)",
            "contrastile.info_nce(image, key, 14.0, positives=labels - 1)",
            "contrastile.info_nce(image, key, 14.0, negatives=key, positives=labels + 15)",
            "contrastile.info_nce(image, key, 14.0, positives=labels[:5])",
            "contrastile.info_nce(image, key, 14.0, positives=labels[:, None])",
            libraries=LIBRARIES,
        ),
        *_each(TypeError, "contrastile.info_nce(image, key, 14.0, positives=[0, 1, 2, 3, 4, 5])", libraries=LIBRARIES),
        *_each(TypeError, "contrastile.info_nce(image, key, 14.0, positives=labels.float())"),
        *_each(ValueError, "contrastile.info_nce(image, key, 14.0, positives=labels.to('meta'))"),
    ],
    "Ids and labels": [
        *_each(
            ValueError,
            "contrastile.clip_loss(image, text, 14.0, ids=labels[:5])",
            "contrastile.sigmoid_loss(image, text, 10.0, -10.0, ids=labels[None])",
            "contrastile.sup_con(image, labels[1:], 14.0)",
            "contrastile.info_nce(image, text, 14.0, row_ids=labels)",
            "contrastile.info_nce(image, text, 14.0, column_ids=labels)",
            "contrastile.info_nce(image, text, 14.0, row_ids=labels[:5], column_ids=labels)",
            "contrastile.info_nce(image, text, 14.0, negatives=key, row_ids=labels, column_ids=labels)",
            libraries=LIBRARIES,
        ),
        *_each(
            TypeError,
            "contrastile.clip_loss(image, text, 14.0, ids=['a', 'b', 'c', 'd', 'e', 'f'])",
            "contrastile.sup_con(image, labels == 0, 14.0)",
            libraries=LIBRARIES,
        ),
        *_each(
            TypeError,
            "contrastile.sup_con(image, labels.double(), 14.0)",
            "contrastile.clip_loss(image, text, 14.0, ids=labels.numpy())",
            "contrastile.clip_loss(image, text, 14.0, ids=labels.to_sparse())",
        ),
        *_each(
            TypeError,
            "contrastile.sup_con(image, np.ma.masked_equal(labels, 7), 14.0)",
            "contrastile.sup_con(image, labels.astype('uint64'), 14.0)",
            libraries=("numpy",),
        ),
        *_each(ValueError, "contrastile.clip_loss(image, text, 14.0, ids=labels.to('meta'))"),
    ],
    "Options": [
        *_each(
            ValueError,
            "contrastile.clip_loss(image, text, 14.0, ids=labels, ids_are='labels')",
            "contrastile.clip_loss(image, text, 14.0, ids_are='positives')",
            "contrastile.info_nce(image, text, 14.0, row_ids=labels, column_ids=labels, ids_are='positives', "
            "positives=labels)",
            "contrastile.sup_con(image, labels, 14.0, sum_positives='in')",
            "contrastile.clip_loss(image, text, 14.0, sum_positives='inside')",
            "contrastile.clip_loss(image, text, 14.0, label_smoothing=1.5)",
            "contrastile.clip_loss(image, text, 14.0, margin=0.1, label_smoothing=0.1)",
            "contrastile.clip_loss(image, text, 14.0, ids=labels, label_smoothing=0.1)",
            "contrastile.clip_loss(image, text, 14.0, ids=labels, ids_are='positives', sum_positives='inside', "
            "label_smoothing=0.1)",
            "contrastile.sup_con(image, labels, 14.0, keys=key)",
            "contrastile.clip_loss(image, text, 14.0, weights=image[0])",
            "contrastile.statistics(image, key, 14.0)",
            "contrastile.statistics(image, None, 14.0, column_ids=labels)",
            libraries=LIBRARIES,
        ),
        *_each(TypeError, "contrastile.clip_loss(image, text, 14.0, margin='0.1')", libraries=LIBRARIES),
        *_each(
            ValueError,
            "contrastile.clip_loss(image, text, 14.0, weights=image[:, 0].to('meta'))",
            "contrastile.clip_loss(image, text, 14.0, weights=torch.ones(6, requires_grad=True))",
        ),
        *_each(TypeError, "contrastile.clip_loss(image, text, 14.0, weights=labels)", libraries=LIBRARIES),
    ],
    "Tile": [
        *_each(
            ValueError,
            "contrastile.clip_loss(image, text, 14.0, tile=0)",
            "contrastile.clip_loss(image, text, 14.0, tile=-1)",
            "contrastile.clip_loss(image, text, 14.0, tile=(8, 0))",
            "contrastile.clip_loss(image, text, 14.0, tile=(1, 2, 3))",
            "contrastile.clip_loss(image, text, 14.0, workspace=-1)",
            "contrastile.value_and_grad(contrastile.clip_loss, keep=-1)",
            "contrastile.value_and_grad(contrastile.clip_loss, tile=0)",
            "contrastile.clip_loss(image, text, 14.0, precision='fp8')",
            libraries=LIBRARIES,
        ),
        *_each(
            TypeError,
            "contrastile.clip_loss(image, text, 14.0, tile='8')",
            "contrastile.clip_loss(image, text, 14.0, tile=8.0)",
            "contrastile.clip_loss(image, text, 14.0, tile=True)",
            "contrastile.clip_loss(image, text, 14.0, workspace=0.5)",
            "contrastile.clip_loss(image, text, 14.0, keep=True)",
            "contrastile.clip_loss(image, text, 14.0, temperature=0.07)",
            "contrastile.value_and_grad(contrastile.clip_loss, temperature=0.07)",
            libraries=LIBRARIES,
        ),
    ],
    "Device and block": [
        *_each(
            ValueError,
            "contrastile.clip_loss(image, text, 14.0, device='tpu')",
            "contrastile.clip_loss(image, text, 14.0, device='meta')",
            "contrastile.clip_loss(image, text, 14.0, device='cuda:99')",
            "contrastile.value_and_grad(contrastile.clip_loss, block=0)",
            libraries=LIBRARIES,
        ),
        *_each(
            ValueError,
            "contrastile.clip_loss(image.to('meta'), text.to('meta'), 14.0, device='cpu')",
            "InProcessGroup(1).run(lambda rank: contrastile.clip_loss(image, text, 14.0, group=rank, block=4))",
        ),
        *_each(TypeError, "contrastile.clip_loss(image, text, 14.0, block='4')", libraries=LIBRARIES),
        *_each(TypeError, "contrastile.clip_loss(image, text, 14.0, block=4)", libraries=("numpy",)),
    ],
    "Backend": [
        *_each(
            ValueError,
            "contrastile.clip_loss(image, text, 14.0, backend='tpu')",
            "contrastile.backends.load('Torch')",
            "contrastile.value_and_grad(max)",
            "contrastile.value_and_grad('clip_loss')",
            "contrastile.clip_loss(image, text, 14.0, backend=':')",
            "contrastile.clip_loss(image, text, 14.0, backend='torch|x')",
            libraries=LIBRARIES,
        ),
        *_each(
            TypeError,
            "contrastile.value_and_grad(contrastile.clip_loss)(image, text)",
            "contrastile.value_and_grad(contrastile.clip_loss)(image, text, 14.0, backend='numpy')",
            libraries=LIBRARIES,
        ),
        *_each(
            BackendUnavailableError,
            "contrastile.clip_loss(image, text, 14.0, backend='no_such_module:backend')",
            libraries=LIBRARIES,
        ),
        *[Provocation("contrastile.backends.load('torch')", BackendUnavailableError, LIBRARIES, without="torch")],
        *[Provocation("contrastile.backends.load('cupy')", BackendUnavailableError, LIBRARIES, without="cupy")],
        *_each(
            TypeError,
            "contrastile.clip_loss(image, text, 14.0, backend='contrastile.losses:clip_loss')",
            "contrastile.clip_loss(image, text, 14.0, backend=None)",
            "contrastile.clip_loss(image, text, 14.0, backend='written_before:backend')",
            "contrastile.backends.load(5)",
            libraries=LIBRARIES,
        ),
        Provocation("contrastile.backends.load('contrastile.backends.numpy:zzz')", TypeError, LIBRARIES),
        *_each(
            UnsupportedProblemError,
            "contrastile.value_and_grad(contrastile.clip_loss, backend='numpy')"
            "(image.to('meta'), text.to('meta'), 14.0)",
        ),
        *_each(
            TypeError,
            "contrastile.value_and_grad(contrastile.clip_loss)"
            "(*map(torch._subclasses.FakeTensorMode().from_tensor, (image, text)), 14.0)",
        ),
    ],
    "Derivatives and transforms": [
        *_each(
            RuntimeError,
            "torch.func.jvp(lambda x: contrastile.clip_loss(x, text, 14.0), (image,), (image,))",
            "torch.func.vmap(lambda x: contrastile.clip_loss(x, text, 14.0))(image[None])",
            "torch.func.vmap(lambda x: contrastile.clip_loss(image, text, x))(image[0])",
            "torch.func.vmap(lambda x: contrastile.sigmoid_loss(image, text, 10.0, x))(image[0])",
            "torch.autograd.functional.jacobian(lambda x: contrastile.clip_loss(x, text, 14.0), image, vectorize=True)",
            "torch.jit.trace(contrastile.clip_loss, (image, text, torch.tensor(14.0)))",
            "torch.autograd.functional.hessian(lambda x: contrastile.clip_loss(x, text, 14.0), image)",
        ),
    ],
    "Training": [
        *_each(
            ValueError,
            "contrastile.training.cached_step((abs, abs), (image,), contrastile.clip_loss, scale=14.0, chunk=2)",
            "contrastile.training.cached_step(abs, (), torch.sum, chunk=2)",
            "contrastile.training.cached_step((abs, abs), (image, text), contrastile.clip_loss, scale=14.0, chunk=0)",
            "contrastile.training.cached_step((abs, abs), (image, text), torch.add, scale=torch.ones(2), chunk=2)",
            "contrastile.training.cached_step(torch.add, (image, torch.cat([text, text])), torch.sum, chunk=2)",
            "contrastile.training.cached_step(abs, {'image': image, 'key': key}, torch.sum, chunk=2)",
            "contrastile.training.cached_step(abs, image, torch.sum, chunk=2, metrics=('recall',))",
            "contrastile.training.cached_step(abs, image, torch.sum, chunk=2, offload=True, metrics=('rank@1',))",
            "contrastile.training.Budget(0)",
            "contrastile.training.stream(image, 2, 'cpu', total=0)",
            "contrastile.training.rank_at_1(key, text)",
            "contrastile.training.cached_step(lambda x: x.detach().neg_(), image, torch.sum, chunk=2)",
            "contrastile.training.rank_at_1(text, key, tile=0)",
            "contrastile.training.deep_distance(torch.nn.Bilinear(5, 5, 1))(image, text, torch.ones(2))",
        ),
        *_each(
            TypeError,
            "contrastile.training.cached_step(abs, image, torch.sum)",
            "contrastile.training.cached_step((abs, None), (image, text), torch.add, chunk=2)",
            "contrastile.training.cached_step((), (), torch.sum, chunk=2)",
            "contrastile.training.cached_step(torch.nn.ModuleList([torch.nn.Identity()]), image, torch.sum, chunk=2)",
            "contrastile.training.cached_step(abs, image, None, chunk=2)",
            "contrastile.training.Cached((abs, abs), contrastile.clip_loss, 2)",
            "contrastile.training.cached_step(abs, image, torch.sum, chunk=2, backward=1)",
            "contrastile.training.cached_step(abs, image, torch.sum, chunk=2, split='words')",
            "contrastile.training.cached_step(abs, image, torch.sum, chunk=2, split=lambda x, size: None)",
            "contrastile.training.cached_step(abs, image, torch.sum, chunk=2, metrics=None)",
            "(lambda outputs, replay: replay(3))(*contrastile.training.embed(abs, image, 2))",
            "contrastile.training.cached_step(abs, ['a dog', 'a cat'], torch.sum, chunk=2)",
            "contrastile.training.cached_step(lambda x: {'image': x}, image, torch.sum, chunk=2)",
            "contrastile.training.cached_step(abs, image, torch.abs, chunk=2)",
            "contrastile.training.deep_distance(torch.mm)",
            "contrastile.training.deep_distance(torch.nn.Bilinear(5, 5, 1))(image, text, '14')",
            "contrastile.training.rank_at_1(image, text.double())",
        ),
        *_each(
            RuntimeError,
            "contrastile.training.cached_step(abs, image, torch.sum, chunk=2)",
            "contrastile.training.Cached(contrastile.clip_loss, (abs, abs), 2)(image, text, scale=14.0)"
            ".backward(create_graph=True)",
            "contrastile.training.cached_step(lambda x: x.view(len(x), -1), image[:0], torch.sum, chunk=2)",
            "torch.no_grad()(contrastile.training.cached_step)(abs, image, torch.sum, chunk=2)",
        ),
    ],
}
