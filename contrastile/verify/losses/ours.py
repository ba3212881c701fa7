"""The public face of this package as losses under test: each public loss by each of its interfaces, on one backend."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from contrastile import evaluation, losses
from contrastile.backends.contract import Array
from contrastile.verify.losses.claims import INTEGERS, KEYWORDS, Claims
from contrastile.verify.losses.subject import Loss
from contrastile.verify.trial import Subject

Target = Callable[..., Any]
_BLOCK, _CHUNK = 9, 5

_ARRAYS = ("numbers", "interleaved", "rewritten", "aliases", "inputs-kept", "strided", "integers", "refusals")
_AUTOGRAD = ("upstream", "leaves", "retained", "autocast")
_ONCE = ("settings", "repeats", "leaks", "sizes")


@dataclass(frozen=True, slots=True)
class Interface:
    """One way to call a public loss.

    Attributes:
        name: what a failure calls it.
        make: (public loss, settings) -> what is called.
        properties: beside the value and every gradient of every case.
        claims: that are not those of ``_claims``.
        objectives: that have it; None for all.
        block: see ``Loss.block``.
        plain: whether its own arithmetic allows no more than the bounds of a plain computation.
    """

    name: str
    make: Callable[[Target, dict[str, Any]], Target]
    properties: tuple[str, ...] = ()
    claims: tuple[tuple[str, Any], ...] = ()
    objectives: tuple[str, ...] | None = None
    block: int | None = None
    plain: bool = False


def function(loss: Target, settings: dict[str, Any]) -> Target:
    """The public function itself."""
    return partial(loss, **settings)


def both(loss: Target, settings: dict[str, Any]) -> Target:
    """``value_and_grad``."""
    computed = evaluation.value_and_grad(loss, **settings)

    @functools.wraps(loss)
    def target(*args: Any, **kwargs: Any) -> Any:
        value, gradients = computed(*args, **kwargs)
        return value, *gradients

    return target


def module(loss: Target, settings: dict[str, Any]) -> Target:
    """The modules of ``contrastile.nn``."""
    from contrastile import nn

    if loss is losses.clip_loss:
        made: Any = nn.ClipLoss(**settings)
        # a bias that shifts every logit changes nothing
        return lambda image, text, scale: made(image, text, scale, image.new_zeros(1).requires_grad_(), True)
    made = nn.SigLipLoss(**settings)

    def target(image: Array, text: Array, scale: Any, bias: Any = None) -> Any:
        return made(image, text, scale, bias)

    return target


def blocked(loss: Target, settings: dict[str, Any]) -> Target:
    """In blocks."""
    return partial(loss, block=_BLOCK, **settings)


def functional(loss: Target, settings: dict[str, Any]) -> Target:
    """``torch.func.grad_and_value``."""

    def target(*args: Any, **keywords: Any) -> Any:
        import torch

        places = tuple(i for i, x in enumerate(args) if x.is_floating_point())
        gradients, value = torch.func.grad_and_value(partial(loss, **settings, **keywords), places)(*args)
        return value, *gradients

    return target


def dispatched(loss: Target, settings: dict[str, Any]) -> Target:
    """Under a mode that must see operators."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Seen(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return function(*args, **(kwargs or {}))

    def target(*args: Any, **keywords: Any) -> Any:
        with Seen():  # type: ignore[no-untyped-call]
            return _with_gradients(lambda *leaves: loss(*leaves, **settings, **keywords), args)

    return target


def _with_gradients(call: Target, args: Any) -> tuple[Array, ...]:
    """The value, and autograd's gradients of every float among the arguments."""
    given = [x.detach().clone().requires_grad_() if x.is_floating_point() else x for x in args]
    value = call(*given)
    if value.requires_grad:
        value.backward()
    return value.detach(), *(x.grad for x in given if x.is_floating_point())


def _chunked(
    step: Callable[..., Array], loss: Target, settings: dict[str, Any], args: Any, keywords: dict[str, Any]
) -> Array:
    """A step of the gradient cache whose towers' parameters are the features: row i encodes to features[i]."""
    import torch

    count = 1 if loss is losses.sup_con else 2
    labels = [x for x in args[count : count + 1] if count == 1]
    towers = tuple(lambda index, x=x: x[index] for x in args[:count])
    inputs = tuple(torch.arange(len(x), device=x.device) for x in args[:count])

    def of_embeddings(*given: Array) -> Array:
        found: Array = loss(*given[:count], *labels, *given[count:], **settings, **keywords)
        return found

    return step(towers, inputs, of_embeddings, tuple(args[count + len(labels) :]))


def _cached_step(towers: Any, inputs: Any, loss: Target, numbers: Any) -> Any:
    from contrastile import training

    return training.cached_step(towers, inputs, loss, scale=numbers, chunk=_CHUNK)


def _streamed(towers: Any, inputs: Any, loss: Target, numbers: Any) -> Any:
    from contrastile import training

    chunks = tuple(training.stream(x, _CHUNK, x.device) for x in inputs)
    return training.cached_step(towers, chunks, loss, scale=numbers, offload=True)


def stepped(step: Callable[..., Array], loss: Target, settings: dict[str, Any]) -> Target:
    """``training.cached_step``, which adds to gradients itself."""
    return lambda *args, **keywords: _with_gradients(
        lambda *leaves: _chunked(step, loss, settings, leaves, keywords), args
    )


def cached(loss: Target, settings: dict[str, Any]) -> Target:
    """``training.Cached``."""
    from contrastile import training

    def step(towers: Any, inputs: Any, loss: Target, numbers: Any) -> Any:
        return training.Cached(loss, towers, _CHUNK)(*inputs, scale=numbers)

    return lambda *args, **keywords: _chunked(step, loss, settings, args, keywords)


def _distance(factor: Any) -> Target:
    """``training.deep_distance`` whose phi is the dot product, times its parameter."""
    import torch

    from contrastile import training

    class Phi(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = torch.nn.Parameter(factor)

        def forward(self, f: Array, g: Array) -> Array:
            return self.factor * (f @ g.T)

    phi = Phi()
    return lambda *given: (training.deep_distance(phi, _CHUNK)(*given), phi.factor)


def distance(loss: Target, settings: dict[str, Any]) -> Target:
    """A deep distance that is the dot product, in ragged tiles."""
    return lambda query, key, scale: _distance(query.new_ones(()))(query, key, scale)[0]


def learnt_distance(loss: Target, settings: dict[str, Any]) -> Target:
    """The same, in which phi has the scale as its parameter."""

    def target(query: Array, key: Array, scale: Array) -> Any:
        leaves = [x.detach().clone().requires_grad_() for x in (query, key)]
        value, factor = _distance(scale.detach().clone())(*leaves)
        value.backward()
        return value.detach(), *(x.grad for x in leaves), factor.grad

    return target


_VALUE = (("feature_gradients", False), ("scale_gradient", False))
_RETURNED = (("returns_gradients", True),)
_NO_COLUMNS = (("negatives", False), ("positives", False))
_PAIRS = ("clip_loss", "sigmoid_loss")

OF_ARRAYS = (
    Interface("value_and_grad", both, _ARRAYS, _RETURNED),
    Interface("the function", function, (), _VALUE),
)
"""Of arrays of any library."""

OF_TENSORS = (
    Interface("autograd", function, (*_AUTOGRAD, *_ARRAYS)),
    Interface(f"blocks of {_BLOCK}", blocked, _AUTOGRAD, block=_BLOCK),
    Interface("torch.func.grad", functional, (), (*_RETURNED, *_NO_COLUMNS)),
    Interface("a dispatch mode", dispatched, (), _RETURNED),
    Interface("nn", module, (*_AUTOGRAD, "numbers"), (("ids", False),), _PAIRS),
)
"""Of torch tensors alone."""

OF_TRAINING = (
    Interface("cached_step", partial(stepped, _cached_step), (), (*_RETURNED, *_NO_COLUMNS), plain=True),
    Interface("stream", partial(stepped, _streamed), (), (*_RETURNED, *_NO_COLUMNS), plain=True),
    Interface("Cached", cached, ("upstream", "leaves", "interleaved"), (("retains", False), *_NO_COLUMNS), plain=True),
    Interface("deep_distance", distance, ("upstream", "leaves"), _NO_COLUMNS, ("info_nce",), plain=True),
    Interface("deep_distance that learns", learnt_distance, (), (*_RETURNED, *_NO_COLUMNS), ("info_nce",), plain=True),
)
"""Of ``contrastile.training``."""


def interfaces(subject: Subject, objective: str) -> Iterator[tuple[Interface, Loss, tuple[str, ...]]]:
    """The interfaces of a public loss, as losses with the properties that each is held to."""
    library, whole = subject.backend.arrays.name, subject.dtype == "float32" and subject.precision == "ieee"
    groups: list[tuple[str, Sequence[Interface]]] = [(library, OF_ARRAYS)]
    if library != "numpy" and subject.device == "cpu" and subject.dtype != "bfloat16":
        groups.append(("numpy", OF_ARRAYS))
    if library == "torch":
        groups.append((library, (*OF_TENSORS, *(OF_TRAINING if whole else ()))))
    once: tuple[str, ...] = _ONCE
    for of, group in reversed(groups):
        for each in group:
            if each.objectives is not None and objective not in each.objectives:
                continue
            # the function by autograd has what is costly, or value_and_grad where there is no autograd
            more: tuple[str, ...] = once if each.properties else ()
            once = () if each.properties else once
            more = more if whole else tuple(x for x in more if x == "sizes")
            name = each.name if of == library else f"{each.name} of NumPy arrays"
            yield each, of_interface(each, objective, subject, of, name), (*each.properties, *more)


def of_interface(each: Interface, objective: str, subject: Subject, library: str, name: str, **more: Any) -> Loss:
    """A public loss by one interface, with settings."""
    claims: dict[str, Any] = {
        **{keyword: objective in objectives for keyword, objectives in KEYWORDS.items()},
        "objective": objective,
        "library": library,
        "integers": INTEGERS,
        "dtypes": (subject.dtype,),
        "devices": (subject.device,),
        "precision": subject.precision,
    }
    settings = {"backend": subject.name, **subject.settings, **more}
    if each.plain:
        claims["state"] = "float64" if subject.dtype == "float64" else "float32"
    if each.make in (distance, learnt_distance):
        claims["ids"] = False
    target = each.make(getattr(losses, objective), settings)
    facts = None if each.plain else subject.accuracy
    return Loss(name, target, Claims(**(claims | dict(each.claims))), facts, each.block)
