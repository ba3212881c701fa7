"""The public face of this package as losses under test: each public loss by each of its interfaces, on one backend."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from contrastile import evaluation, losses
from contrastile.backends.contract import Array
from contrastile.verify.losses.arguments import SELF
from contrastile.verify.losses.claims import INTEGERS, KEYWORDS, Claims
from contrastile.verify.losses.modules import ROWS, Target, captioned, distilled, module, of_temperature
from contrastile.verify.losses.subject import Loss
from contrastile.verify.trial import Subject

_BLOCK, _CHUNK = 9, 5
_TEXTS = "input_ids", "attention_mask", "position_ids", "token_type_ids"

_ARRAYS = (
    *("numbers", "interleaved", "rewritten", "aliases", "inputs-kept", "strided", "integers", "refusals"),
    *("settings", "queues", "threads"),
)
_AUTOGRAD = ("value", "upstream", "leaves", "retained", "autocast", "settings")
_CONVERTED = ("value", "upstream", "retained", "interleaved", "rewritten", "aliases", "inputs-kept", "strided", "leaks")
_ONCE = ("repeats", "leaks", "sizes")
_EVERY_DTYPE = ("value", "upstream", "autocast", "numbers", "inputs-kept", "strided", "interleaved", "aliases")
"""The properties that a dtype may change; the others hold in float32, and then in every dtype."""


@dataclass(frozen=True, slots=True)
class Interface:
    """One way to call a public loss.

    Attributes:
        make: (public loss, settings) -> what is called.
        properties: beside the value and every gradient of every case.
        claims: that are not those of ``_claims``.
        objectives: that have it; None for all.
        block: see ``Loss.block``.
        plain: whether its own arithmetic allows no more than the bounds of a plain computation.
        any_dtype: whether it passes any dtype on: it is called in float32 alone.
        apart: whether it is called only where a case names it, since its package takes seconds to import.
    """

    name: str
    make: Callable[[Target, dict[str, Any]], Target]
    properties: tuple[str, ...] = ()
    claims: tuple[tuple[str, Any], ...] = ()
    objectives: tuple[str, ...] | None = None
    block: int | None = None
    plain: bool = False
    any_dtype: bool = False
    apart: bool = False


def function(loss: Target, settings: dict[str, Any]) -> Target:
    return partial(loss, **settings)


def both(loss: Target, settings: dict[str, Any]) -> Target:
    """``value_and_grad``."""
    computed = evaluation.value_and_grad(loss, **settings)

    @functools.wraps(loss)
    def target(*args: Any, **kwargs: Any) -> Any:
        for x in args:
            if hasattr(x, "requires_grad_") and x.is_floating_point():
                x.requires_grad_()
        value, gradients = computed(*args, **kwargs)
        assert not any(getattr(x, "requires_grad", False) for x in (value, *gradients))
        return value, *gradients

    return target


def keys(loss: Target, settings: dict[str, Any]) -> Target:
    """``sup_con`` of keys, where ids give the positives of ``info_nce``."""

    def target(query: Array, key: Array, scale: Any, **more: Any) -> Any:
        import torch

        if more.get("ids_are") != "positives" or {"label_smoothing", "share_negatives"} & set(more):
            return loss(query, key, scale, **more, **settings)
        labels, of_keys, *_ = map(more.pop, ("row_ids", "column_ids", "ids_are"))
        every = torch.cat([key, *more.pop("negatives", ())])
        return losses.sup_con(query, labels, scale, keys=every, key_labels=of_keys, **more, **settings)

    return target


def blocked(way: Callable[..., Target], loss: Target, settings: dict[str, Any]) -> Target:
    return way(loss, {**settings, "block": _BLOCK})


def functional(loss: Target, settings: dict[str, Any]) -> Target:
    """``torch.func.grad_and_value``; without keywords ``jacrev`` of the last argument alone, and of two losses."""

    def target(*args: Any, **keywords: Any) -> Any:
        import torch

        made = partial(loss, **settings, **keywords)
        places = tuple(i for i, x in enumerate(args) if x.is_floating_point())
        gradients, value = torch.func.grad_and_value(made, places)(*args)
        if not keywords:
            _, last = torch.func.jacrev(lambda *given: torch.stack([0.0 * (x := made(*given)), x]), places[-1])(*args)
            gradients = *gradients[:-1], last
        return value, *gradients

    return target


def dispatched(loss: Target, settings: dict[str, Any]) -> Target:
    """Under a mode that must see operators, whose results have the shapes, strides and dtypes that a tracer is told."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from contrastile.autograd import operators

    seen: list[str] = []

    def kinds(found: Any) -> list[Any]:
        return [(x.shape, x.stride(), x.dtype) if hasattr(x, "shape") else kinds(x) for x in found]

    class Seen(TorchDispatchMode):  # type: ignore[no-untyped-call]
        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            # to be skipped, torch imports its compiler, for seconds
            return False

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = function(*args, **(kwargs or {}))
            if function.namespace == "contrastile":
                seen.append(function.__name__)
                told = vars(operators)["_fake_" + function.__name__.partition(".")[0]](*args)
                assert kinds(told) == kinds(found), f"of {seen[-1]} a tracer is told {kinds(told)}, got {kinds(found)}"
            return found

    def target(*args: Any, **keywords: Any) -> Any:
        seen.clear()
        with Seen():  # type: ignore[no-untyped-call]
            found = _with_gradients(partial(loss, **settings, **keywords), args)
            if loss is losses.clip_loss:
                losses.statistics(*args[:3], **settings)
            loss(*args[:2], args[2].detach().requires_grad_(), *args[3:], **settings, **keywords).backward()
        if seen[:2] != ["loss.default", "gradients.default"]:
            raise RuntimeError(f"a dispatch mode must see the loss and its gradients, got {seen}")
        return found

    return target


def _with_gradients(call: Target, args: Any) -> tuple[Array, ...]:
    """The value, and autograd's gradients of every tensor of floats among the arguments."""
    import torch

    floats = [isinstance(x, torch.Tensor) and x.is_floating_point() for x in args]
    given = [torch.nn.Parameter(x.detach().clone()) if y else x for x, y in zip(args, floats, strict=True)]
    value = call(*given)
    if value.requires_grad:
        value.backward()
    return value.detach(), *(x.grad for x, y in zip(given, floats, strict=True) if y)


def cached(step: Callable[..., Array], loss: Target, settings: dict[str, Any]) -> Target:
    """A step of the gradient cache whose towers' parameters are the features: row i encodes to features[i]."""
    count = 1 if loss is losses.sup_con else 2

    def target(*args: Any, **keywords: Any) -> Array:
        import torch

        labels = [x for x in args[count : count + 1] if count == 1]
        # no tower can take another's input
        towers = tuple(lambda index, x=x, n=n: x[index - n * len(x)] for n, x in enumerate(args[:count]))
        inputs = tuple(torch.arange(n * len(x), (n + 1) * len(x), device=x.device) for n, x in enumerate(args[:count]))

        def of_embeddings(*given: Array) -> Any:
            return loss(*given[:count], *labels, *given[count:], **settings, **keywords)

        return step(towers, inputs, of_embeddings, args[count + len(labels) :])

    return target


def _cached_step(towers: Any, inputs: Any, loss: Target, numbers: Any) -> Any:
    """Of numbers that have a graph."""
    from contrastile import training

    return training.cached_step(towers, inputs, loss, scale=tuple(x.clone() for x in numbers), chunk=_CHUNK)


def _streamed(towers: Any, inputs: Any, loss: Target, numbers: Any) -> Any:
    """Of dicts of tensors, by a budget of their elements."""
    from contrastile import training

    budget = training.Budget(3 * _CHUNK)
    batches = [{"index": x, "nested": (None, x[:, None].expand(-1, 3).clone())} for x in inputs]
    chunks = tuple(training.stream(x, budget, inputs[0].device) for x in batches)
    taken = tuple(lambda chunk, tower=tower: tower(chunk["nested"][1][:, 0]) for tower in towers)
    return training.cached_step(taken, chunks, loss, scale=numbers, offload=inputs[0].device.type == "cpu")


def _embedded(towers: Any, inputs: Any, loss: Target, numbers: Any) -> Any:
    """Of one callable for all inputs, which returns the numbers, too."""
    from contrastile import training

    def encode(*chunks: Array) -> tuple[Array, ...]:
        return *(tower(chunk) for tower, chunk in zip(towers, chunks, strict=True)), *numbers

    outputs, replay = training.embed(encode, inputs, _CHUNK)
    value = loss(*outputs)
    value.backward()
    replay([x.grad for x in outputs])
    return value.detach()


def _chunked_model(towers: Any, inputs: Any, loss: Target, numbers: Any) -> Any:
    """The model of open_clip's loop."""
    import torch

    from contrastile.integrations.open_clip import ChunkedModel

    class Model(torch.nn.Module):
        def forward(self, y: Array, x: Array, a: Array) -> dict[str, Array]:
            features = [tower(chunk) for tower, chunk in zip(towers, (y, x), strict=True)]
            return dict(zip("dcba", (*features, *map(torch.as_tensor, numbers)), strict=False))

    model = ChunkedModel(Model(), _CHUNK)
    # another batch first
    named = {"x": inputs[1], "a": inputs[1].flip(0)}
    model(inputs[0].flip(0), **named)
    outputs = model(inputs[0], **named)
    return loss(*(outputs[name] for name in "dcba"[: len(outputs)]))


def stepped(way: Callable[..., Target], loss: Target, settings: dict[str, Any]) -> Target:
    """Another way, whose call goes back itself, or may: it returns the gradients that are left."""
    target = way(loss, settings)
    return lambda *args, **keywords: _with_gradients(partial(target, **keywords), args)


def _cached(towers: Any, inputs: Any, loss: Target, numbers: Any) -> Any:
    """``training.Cached``, which has had another batch before."""
    from contrastile import training

    made = training.Cached(loss, towers, _CHUNK)
    made(*inputs[:-1], inputs[-1].flip(0), scale=numbers)
    return made(*inputs, scale=numbers)


def features(loss: Target, settings: dict[str, Any]) -> Target:
    """The features of transformers' models, whose parameters they are; the scale is the exponential of one."""
    import torch

    from contrastile.integrations.transformers import ImageTextFeatures

    def target(image: Array, text: Array, scale: Array, *bias: Array) -> Any:
        model = torch.nn.Module()
        # what is no tensor reaches the model too
        model.get_image_features = lambda pixel_values, first: image[pixel_values + first]  # type: ignore[assignment]
        model.get_text_features = lambda token_type_ids, **more: text[token_type_ids]  # type: ignore[assignment]
        # views: what has a graph is no parameter
        model.logit_scale = torch.as_tensor(scale).log()
        if bias:
            model.logit_bias = torch.as_tensor(bias[0])
        index = torch.arange(len(image), device=image.device)
        made = ImageTextFeatures(model)
        model.text_model, saved = torch.nn.LayerNorm(1), dict[str, Any]()
        model.save_pretrained = lambda folder, state_dict: saved.update(state_dict)  # type: ignore[assignment]
        made.save_pretrained("", state_dict=made.state_dict())
        assert saved.keys() == model.state_dict().keys(), "what is saved must have the model's own names"
        made.load_state_dict(saved)
        # a rank may have no samples
        nothing, texts = (dict.fromkeys(_TEXTS, x) for x in (index[:0], index))
        assert not any(map(len, made(pixel_values=index[:0], first=-1, **nothing)[:2])), "of no samples"
        return loss(*made(pixel_values=index - 1, first=1, **texts), **settings)

    return target


def ranking(loss: Target, settings: Any) -> Target:
    """sentence-transformers' loss, of one direction, or of both."""
    how: dict[str, Any] = {}
    if loss is losses.clip_loss:
        how = {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"}

    def target(query: Array, key: Array, scale: Any, *, negatives: Any = ()) -> Any:
        import torch

        # when it is called, for that takes seconds
        from contrastile.integrations.sentence_transformers import MultipleNegativesRankingLoss

        made = MultipleNegativesRankingLoss(torch.nn.Module(), scale=float(scale), settings=settings, **how)
        more = list(negatives) if isinstance(negatives, list | tuple) else [negatives]
        return made.compute_loss_from_embeddings([query, key, *more])

    return target


def cached_ranking(loss: Target, settings: Any) -> Target:
    def target(query: Array, key: Array, scale: Any) -> Any:
        import torch

        from contrastile.integrations.sentence_transformers import CachedMultipleNegativesRankingLoss

        model = torch.nn.Sequential(torch.nn.Identity())
        made = CachedMultipleNegativesRankingLoss(model, scale=float(scale), settings=settings)
        return made.calculate_loss([x.split(_CHUNK) for x in (query, key)], with_backward=True)

    return target


def distance(loss: Target, settings: dict[str, Any], *, learns: bool = False) -> Target:
    """A deep distance that is the dot product, in ragged tiles; if it learns, the scale is its phi's parameter."""
    import torch

    from contrastile import training

    class Phi(torch.nn.Module):
        def __init__(self, factor: torch.nn.Parameter) -> None:
            super().__init__()
            self.factor = factor

        def forward(self, f: Array, g: Array) -> Array:
            return self.factor * (f @ g.T)

    def target(query: Array, key: Array, scale: Any, *, negatives: Any = ()) -> Any:
        more = negatives if isinstance(negatives, list | tuple) else (negatives,)
        factor, numbers = (scale, ()) if learns else (torch.nn.Parameter(query.new_ones(())), (scale,))
        return training.deep_distance(Phi(factor), _BLOCK)(query, torch.cat([key, *more]), *numbers)

    return target


_STEP = ("value", "upstream", "leaves", "interleaved", "settings")
_VALUE = (("feature_gradients", False), ("scale_gradient", False))
_RETURNED = (("returns_gradients", True),)
_NO_COLUMNS = (("negatives", False), ("positives", False))
_BARE = (("ids", False), ("options", False))
_UNIT = (("normalises", True), *_BARE)
_FIXED = (*_UNIT, ("scale_gradient", False))
_TALL = (*_FIXED, ("largest_batch", None))
_PAIRS, _ONE = ("clip_loss", "sigmoid_loss"), ("info_nce",)
_own = partial(Interface, plain=True)
_of_any_dtype = partial(_own, any_dtype=True)

OF_ARRAYS = (
    Interface("value_and_grad", both, ("autocast", *_ARRAYS), _RETURNED),
    Interface("the function", function, (), _VALUE, any_dtype=True),
)
"""Of arrays of any library."""

OF_TENSORS = (
    Interface("autograd", function, (*_AUTOGRAD, *_ARRAYS)),
    Interface(
        f"values in blocks of {_BLOCK}",
        *(partial(blocked, both), ("interleaved",), _RETURNED, None, _BLOCK),
        any_dtype=True,
    ),
    Interface(f"blocks of {_BLOCK}", partial(blocked, function), (*_AUTOGRAD, "interleaved", "sizes"), block=_BLOCK),
    Interface("torch.func.grad", functional, ("refusals",), (*_RETURNED, ("negatives", False)), any_dtype=True),
    Interface("sup_con of keys", keys, (), (), _ONE, any_dtype=True),
    Interface("a dispatch mode", dispatched, ("leaks",), _RETURNED, any_dtype=True),
    Interface("nn", module, (*_AUTOGRAD, "numbers", "interleaved", "threads"), (), _PAIRS),
    Interface("nn in evaluation", partial(module, trains=False), ("leaves",), (), _PAIRS, any_dtype=True),
    _of_any_dtype("nn of a temperature", of_temperature, ("leaves", "interleaved"), _TALL, SELF),
    Interface("CoCaLoss", captioned, (), (), ("clip_loss",), any_dtype=True),
    _of_any_dtype("DistillClipLoss", distilled, (), _BARE, ("clip_loss",)),
)
"""Of torch tensors alone."""

OF_OTHERS = (
    replace(OF_TENSORS[0], properties=_CONVERTED, any_dtype=True),
    *(replace(x, properties=()) for x in OF_TENSORS if x.make is dispatched),
)
"""Of torch tensors, of a backend on other arrays: what is above the backend is held with torch's own."""

_CHUNKS = (*_RETURNED, *_NO_COLUMNS)

OF_TRAINING = (
    _own("cached_step", partial(stepped, partial(cached, _cached_step)), (), _CHUNKS),
    _of_any_dtype("stream", partial(stepped, partial(cached, _streamed)), (), _CHUNKS),
    _of_any_dtype("embed", partial(stepped, partial(cached, _embedded)), (), _CHUNKS),
    _own("Cached", partial(cached, _cached), _STEP, (("retains", False), *_NO_COLUMNS)),
    _own("deep_distance", distance, (*_STEP, "numbers", "threads"), (("positives", False), *_BARE), _ONE),
    _own("deep_distance that learns", partial(stepped, partial(distance, learns=True)), (), (*_CHUNKS, *_BARE), _ONE),
)
"""Of ``contrastile.training``."""

OF_INTEGRATIONS = (
    _own("ChunkedModel", partial(cached, _chunked_model), _STEP, (("retains", False), *_NO_COLUMNS), _PAIRS),
    _own("ImageTextFeatures", features, ("leaves",), _UNIT, _PAIRS),
    _of_any_dtype(
        "MultipleNegativesRankingLoss",
        *(ranking, (), (*_FIXED, ("positives", False)), ("clip_loss", *_ONE)),
        apart=True,
    ),
    _of_any_dtype(
        "CachedMultipleNegativesRankingLoss",
        *(partial(stepped, cached_ranking), (), (*_FIXED, *_CHUNKS), _ONE),
        apart=True,
    ),
)
"""Of ``contrastile.integrations``."""


_ARRAYS_OF = {"numpy": "NumPy arrays", "torch": "torch tensors"}


def interfaces(subject: Subject, objective: str) -> Iterator[tuple[Interface, Loss, tuple[str, ...]]]:
    """The interfaces of a public loss, as losses with the properties that each is held to."""
    library, whole = subject.backend.arrays.name, subject.label == "float32"
    groups: list[tuple[str, Sequence[Interface]]] = [(library, OF_ARRAYS)]
    if library != "numpy" and subject.device == "cpu" and whole:
        groups.append(("numpy", OF_ARRAYS))
    if library != "torch" and importlib.util.find_spec("torch") is not None:
        groups.append(("torch", OF_OTHERS))
    if library == "torch":
        groups.append((library, OF_TENSORS))
        if subject.label in ("float32", "float64"):
            rankings = importlib.util.find_spec("sentence_transformers") is not None
            there = [x for x in OF_INTEGRATIONS if rankings or not x.name.endswith("RankingLoss")]
            groups.insert(0, (library, (*OF_TRAINING, *there)))
    # those of NumPy arrays are slow, and nothing above the backend is theirs alone
    once: tuple[str, ...] = () if library == "numpy" else _ONCE
    for of, group in reversed(groups):
        for each in group:
            if each.objectives is not None and objective not in each.objectives:
                continue
            if each.any_dtype and not whole:
                continue
            # the function by autograd has what is costly, or value_and_grad where there is no autograd
            costly = bool(each.properties) and of == library
            # some have a property in two of their groups
            held, once = dict.fromkeys((*each.properties, *(once if costly else ()))), () if costly else once
            name = each.name if of == library else f"{each.name} of {_ARRAYS_OF[of]}"
            # chunks and blocks are arrays of their own in every dtype
            every = _EVERY_DTYPE[: 2 if each.plain or each.block else None]
            names = tuple(x for x in held if whole or x in every)
            yield each, of_interface(each, objective, subject, of, name), names


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
    if each.plain or each.block is not None:
        # more rows are more chunks, or blocks, of which each is as it is elsewhere
        claims["largest_batch"] = ROWS
    target = each.make(getattr(losses, objective), settings)
    facts = None if each.plain else subject.accuracy
    return Loss(name, target, Claims(**(claims | dict(each.claims))), facts, each.block)
