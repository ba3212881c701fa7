"""This package's public losses as losses under test: each loss by each of its interfaces, on one backend."""

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
from contrastile.verify.losses.modules import ROWS, Target, captioned, module, of_temperature, taught
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
"""The properties that may depend on the dtype. The others hold in every dtype if they hold in float32."""


@dataclass(frozen=True, slots=True)
class Interface:
    """One way to call a public loss.

    Attributes:
        make: (public loss, settings) -> the callable under test.
        properties: its properties beyond the value and every gradient of every case.
        claims: the claims that differ from those of ``of_interface``.
        objectives: the objectives that have the interface; None for all.
        block: see ``Loss.block``.
        plain: whether it has an arithmetic of its own, which is held to the bounds of a plain computation.
        any_dtype: whether it treats all dtypes alike, so that float32 alone is tested.
        apart: whether it is called only if a case names it, because its package takes seconds to import.
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
    value_and_grad = evaluation.value_and_grad(loss, **settings)

    @functools.wraps(loss)
    def target(*args: Any, **kwargs: Any) -> Any:
        for x in args:
            if hasattr(x, "requires_grad_") and x.is_floating_point():
                x.requires_grad_()
        value, gradients = value_and_grad(*args, **kwargs)
        assert not any(getattr(x, "requires_grad", False) for x in (value, *gradients))
        return value, *gradients

    return target


def keys(loss: Target, settings: dict[str, Any]) -> Target:
    """``sup_con`` with keys, which equals ``info_nce`` where ids define the positives."""

    def target(query: Array, key: Array, scale: Any, **options: Any) -> Any:
        import torch

        if options.get("ids_are") != "positives" or {"label_smoothing", "share_negatives"} & set(options):
            return loss(query, key, scale, **options, **settings)
        labels, key_labels, *_ = map(options.pop, ("row_ids", "column_ids", "ids_are"))
        all_keys = torch.cat([key, *options.pop("negatives", ())])
        return losses.sup_con(query, labels, scale, keys=all_keys, key_labels=key_labels, **options, **settings)

    return target


def blocked(make: Callable[..., Target], loss: Target, settings: dict[str, Any]) -> Target:
    return make(loss, {**settings, "block": _BLOCK})


def functional(loss: Target, settings: dict[str, Any]) -> Target:
    """``torch.func.grad_and_value``; without keywords also ``jacrev`` of two losses by the last argument."""

    def target(*args: Any, **keywords: Any) -> Any:
        import torch

        configured = partial(loss, **settings, **keywords)
        argnums = tuple(i for i, x in enumerate(args) if x.is_floating_point())
        gradients, value = torch.func.grad_and_value(configured, argnums)(*args)
        if not keywords:
            _, last = torch.func.jacrev(lambda *xs: torch.stack([0.0 * (x := configured(*xs)), x]), argnums[-1])(*args)
            gradients = *gradients[:-1], last
        return value, *gradients

    return target


def dispatched(loss: Target, settings: dict[str, Any]) -> Target:
    """Under a dispatch mode, which must see the operators. Fake kernels must give the metadata of the results."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from contrastile.autograd import operators

    names: list[str] = []

    def meta(tensors: Any) -> list[Any]:
        return [(x.shape, x.stride(), x.dtype) if hasattr(x, "shape") else meta(x) for x in tensors]

    class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            # Without this override torch imports its compiler, which takes seconds.
            return False

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            if function.namespace == "contrastile":
                names.append(function.__name__)
                fake = vars(operators)["_fake_" + function.__name__.partition(".")[0]](*args)
                assert meta(fake) == meta(result), f"of {names[-1]} a tracer is told {meta(fake)}, got {meta(result)}"
            return result

    def target(*args: Any, **keywords: Any) -> Any:
        names.clear()
        with Recorder():  # type: ignore[no-untyped-call]
            result = _with_gradients(partial(loss, **settings, **keywords), args)
            if loss is losses.clip_loss:
                losses.statistics(*args[:3], **settings)
            loss(*args[:2], args[2].detach().requires_grad_(), *args[3:], **settings, **keywords).backward()
        if names[:2] != ["loss.default", "gradients.default"]:
            raise RuntimeError(f"a dispatch mode must see the loss and its gradients, got {names}")
        return result

    return target


def _with_gradients(call: Target, args: Any) -> tuple[Array, ...]:
    """The value, and autograd's gradients of every floating-point tensor among the arguments."""
    import torch

    is_float = [isinstance(x, torch.Tensor) and x.is_floating_point() for x in args]
    leaves = [torch.nn.Parameter(x.detach().clone()) if y else x for x, y in zip(args, is_float, strict=True)]
    value = call(*leaves)
    if value.requires_grad:
        value.backward()
    return value.detach(), *(x.grad for x, y in zip(leaves, is_float, strict=True) if y)


def cached(step: Callable[..., Array], loss: Target, settings: dict[str, Any]) -> Target:
    """A step of the gradient cache. The features are the towers' parameters: input i encodes to features[i]."""
    count = 1 if loss is losses.sup_con else 2

    def target(*args: Any, **keywords: Any) -> Array:
        import torch

        labels = [x for x in args[count : count + 1] if count == 1]
        # Distinct index ranges make a tower fail on another tower's input.
        towers = tuple(lambda index, x=x, n=n: x[index - n * len(x)] for n, x in enumerate(args[:count]))
        inputs = tuple(torch.arange(n * len(x), (n + 1) * len(x), device=x.device) for n, x in enumerate(args[:count]))

        def loss_of_embeddings(*tensors: Array) -> Any:
            return loss(*tensors[:count], *labels, *tensors[count:], **settings, **keywords)

        return step(towers, inputs, loss_of_embeddings, args[count + len(labels) :])

    return target


def _cached_step(towers: Any, inputs: Any, loss: Target, numbers: Any) -> Any:
    """``training.cached_step`` with numbers that have a graph."""
    from contrastile import training

    return training.cached_step(towers, inputs, loss, scale=tuple(x.clone() for x in numbers), chunk=_CHUNK)


def _streamed(towers: Any, inputs: Any, loss: Target, numbers: Any) -> Any:
    """``training.cached_step`` over a stream of dicts of tensors, cut by a budget of elements."""
    from contrastile import training

    budget = training.Budget(3 * _CHUNK)
    batches = [{"index": x, "nested": (None, x[:, None].expand(-1, 3).clone())} for x in inputs]
    chunks = tuple(training.stream(x, budget, inputs[0].device) for x in batches)
    index_towers = tuple(lambda chunk, tower=tower: tower(chunk["nested"][1][:, 0]) for tower in towers)
    return training.cached_step(index_towers, chunks, loss, scale=numbers, offload=inputs[0].device.type == "cpu")


def _embedded(towers: Any, inputs: Any, loss: Target, numbers: Any) -> Any:
    """``training.embed`` with one callable for all inputs, which also returns the numbers."""
    from contrastile import training

    def encode(*chunks: Array) -> tuple[Array, ...]:
        return *(tower(chunk) for tower, chunk in zip(towers, chunks, strict=True)), *numbers

    outputs, replay = training.embed(encode, inputs, _CHUNK)
    value = loss(*outputs)
    value.backward()
    replay([x.grad for x in outputs])
    return value.detach()


def _chunked_model(towers: Any, inputs: Any, loss: Target, numbers: Any) -> Any:
    """The model as open_clip's training loop calls it."""
    import torch

    from contrastile.integrations.open_clip import ChunkedModel

    class Model(torch.nn.Module):
        def forward(self, y: Array, x: Array, a: Array) -> dict[str, Array]:
            features = [tower(chunk) for tower, chunk in zip(towers, (y, x), strict=True)]
            return dict(zip("dcba", (*features, *map(torch.as_tensor, numbers)), strict=False))

    model = ChunkedModel(Model(), _CHUNK)
    # The model must forget an earlier batch.
    keywords = {"x": inputs[1], "a": inputs[1].flip(0)}
    model(inputs[0].flip(0), **keywords)
    outputs = model(inputs[0], **keywords)
    return loss(*(outputs[name] for name in "dcba"[: len(outputs)]))


def stepped(make: Callable[..., Target], loss: Target, settings: dict[str, Any]) -> Target:
    """Another interface, whose call may run the backward pass itself. The target returns the resulting gradients."""
    target = make(loss, settings)
    return lambda *args, **keywords: _with_gradients(partial(target, **keywords), args)


def _cached(towers: Any, inputs: Any, loss: Target, numbers: Any) -> Any:
    """``training.Cached`` after an earlier call with another batch."""
    from contrastile import training

    cached_loss = training.Cached(loss, towers, _CHUNK)
    cached_loss(*inputs[:-1], inputs[-1].flip(0), scale=numbers)
    return cached_loss(*inputs, scale=numbers)


def features(loss: Target, settings: dict[str, Any]) -> Target:
    """A transformers model whose parameters are the features. The scale is the exponential of its ``logit_scale``."""
    import torch

    from contrastile.integrations.transformers import ImageTextFeatures

    def target(image: Array, text: Array, scale: Array, *bias: Array) -> Any:
        model = torch.nn.Module()
        # Keywords that are no tensors must reach the model too.
        model.get_image_features = lambda pixel_values, first: image[pixel_values + first]  # type: ignore[assignment]
        model.get_text_features = lambda token_type_ids, **keywords: text[token_type_ids]  # type: ignore[assignment]
        # Assign plain tensors, because a tensor with a graph cannot be a parameter.
        model.logit_scale = torch.as_tensor(scale).log()
        if bias:
            model.logit_bias = torch.as_tensor(bias[0])
        index = torch.arange(len(image), device=image.device)
        wrapper = ImageTextFeatures(model)
        model.text_model, saved = torch.nn.LayerNorm(1), dict[str, Any]()
        model.save_pretrained = lambda folder, state_dict: saved.update(state_dict)  # type: ignore[assignment]
        wrapper.save_pretrained("", state_dict=wrapper.state_dict())
        assert saved.keys() == model.state_dict().keys(), "what is saved must have the model's own names"
        wrapper.load_state_dict(saved)
        # A rank may have no samples.
        no_samples, samples = (dict.fromkeys(_TEXTS, x) for x in (index[:0], index))
        assert not any(map(len, wrapper(pixel_values=index[:0], first=-1, **no_samples)[:2])), "of no samples"
        return loss(*wrapper(pixel_values=index - 1, first=1, **samples), **settings)

    return target


def ranking(loss: Target, settings: Any) -> Target:
    """sentence-transformers' loss, in one direction or in both."""
    options: dict[str, Any] = {}
    if loss is losses.clip_loss:
        options = {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"}

    def target(query: Array, key: Array, scale: Any, *, negatives: Any = ()) -> Any:
        import torch

        # Import it only when it is called, because the import takes seconds.
        from contrastile.integrations.sentence_transformers import MultipleNegativesRankingLoss

        criterion = MultipleNegativesRankingLoss(torch.nn.Module(), scale=float(scale), settings=settings, **options)
        blocks = list(negatives) if isinstance(negatives, list | tuple) else [negatives]
        return criterion.compute_loss_from_embeddings([query, key, *blocks])

    return target


def cached_ranking(loss: Target, settings: Any) -> Target:
    def target(query: Array, key: Array, scale: Any) -> Any:
        import torch

        from contrastile.integrations.sentence_transformers import CachedMultipleNegativesRankingLoss

        model = torch.nn.Sequential(torch.nn.Identity())
        criterion = CachedMultipleNegativesRankingLoss(model, scale=float(scale), settings=settings)
        return criterion.calculate_loss([x.split(_CHUNK) for x in (query, key)], with_backward=True)

    return target


def distance(loss: Target, settings: dict[str, Any], *, learns: bool = False) -> Target:
    """A deep distance that is the dot product, in ragged tiles; if ``learns``, the scale is a parameter of ``phi``."""
    import torch

    from contrastile import training

    class Phi(torch.nn.Module):
        def __init__(self, factor: torch.nn.Parameter) -> None:
            super().__init__()
            self.factor = factor

        def forward(self, f: Array, g: Array) -> Array:
            return self.factor * (f @ g.T)

    def target(query: Array, key: Array, scale: Any, *, negatives: Any = ()) -> Any:
        blocks = negatives if isinstance(negatives, list | tuple) else (negatives,)
        factor, numbers = (scale, ()) if learns else (torch.nn.Parameter(query.new_ones(())), (scale,))
        return training.deep_distance(Phi(factor), _BLOCK)(query, torch.cat([key, *blocks]), *numbers)

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
_plain = partial(Interface, plain=True)
_plain_of_any_dtype = partial(_plain, any_dtype=True)

OF_ARRAYS = (
    Interface("value_and_grad", both, ("autocast", *_ARRAYS), _RETURNED),
    Interface("the function", function, (), _VALUE, any_dtype=True),
)
"""The interfaces that take arrays of any library."""

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
    _plain_of_any_dtype("nn of a temperature", of_temperature, ("leaves", "interleaved"), _TALL, SELF),
    Interface("CoCaLoss", captioned, (), (), ("clip_loss",), any_dtype=True),
    _plain_of_any_dtype("a teacher", taught, ("leaves", "interleaved"), (*_NO_COLUMNS, *_BARE), ("clip_loss", *_ONE)),
)
"""The interfaces that take torch tensors only."""

OF_OTHERS = (
    replace(OF_TENSORS[0], properties=_CONVERTED, any_dtype=True),
    *(replace(x, properties=()) for x in OF_TENSORS if x.make is dispatched),
)
"""The interfaces of torch tensors for a backend of other arrays. The torch backend covers the code above it."""

_CHUNKS = (*_RETURNED, *_NO_COLUMNS)

OF_TRAINING = (
    _plain("cached_step", partial(stepped, partial(cached, _cached_step)), (), _CHUNKS),
    _plain_of_any_dtype("stream", partial(stepped, partial(cached, _streamed)), (), _CHUNKS),
    _plain_of_any_dtype("embed", partial(stepped, partial(cached, _embedded)), (), _CHUNKS),
    _plain("Cached", partial(cached, _cached), _STEP, (("retains", False), *_NO_COLUMNS)),
    _plain("deep_distance", distance, (*_STEP, "numbers", "threads"), (("positives", False), *_BARE), _ONE),
    _plain("deep_distance that learns", partial(stepped, partial(distance, learns=True)), (), (*_CHUNKS, *_BARE), _ONE),
)
"""The interfaces of ``contrastile.training``."""

OF_INTEGRATIONS = (
    _plain("ChunkedModel", partial(cached, _chunked_model), _STEP, (("retains", False), *_NO_COLUMNS), _PAIRS),
    _plain("ImageTextFeatures", features, ("leaves",), _UNIT, _PAIRS),
    _plain_of_any_dtype(
        "MultipleNegativesRankingLoss",
        *(ranking, (), (*_FIXED, ("positives", False)), ("clip_loss", *_ONE)),
        apart=True,
    ),
    _plain_of_any_dtype(
        "CachedMultipleNegativesRankingLoss",
        *(partial(stepped, cached_ranking), (), (*_FIXED, *_CHUNKS), _ONE),
        apart=True,
    ),
)
"""The interfaces of ``contrastile.integrations``."""


_ARRAYS_OF = {"numpy": "NumPy arrays", "torch": "torch tensors"}


def interfaces(subject: Subject, objective: str) -> Iterator[tuple[Interface, Loss, tuple[str, ...]]]:
    """The interfaces of a public loss, each with its loss under test and the names of its properties."""
    library, is_float32 = subject.backend.arrays.name, subject.label == "float32"
    groups: list[tuple[str, Sequence[Interface]]] = [(library, OF_ARRAYS)]
    if library != "numpy" and subject.device == "cpu" and is_float32:
        groups.append(("numpy", OF_ARRAYS))
    if library != "torch" and importlib.util.find_spec("torch") is not None:
        groups.append(("torch", OF_OTHERS))
    if library == "torch":
        groups.append((library, OF_TENSORS))
        if subject.label in ("float32", "float64"):
            has_rankings = importlib.util.find_spec("sentence_transformers") is not None
            integrations = [x for x in OF_INTEGRATIONS if has_rankings or not x.name.endswith("RankingLoss")]
            groups.insert(0, (library, (*OF_TRAINING, *integrations)))
    # Skip the costly properties of NumPy arrays: they are slow, and only test code that other backends use too.
    once: tuple[str, ...] = () if library == "numpy" else _ONCE
    for array_library, group in reversed(groups):
        for interface in group:
            if interface.objectives is not None and objective not in interface.objectives:
                continue
            if interface.any_dtype and not is_float32:
                continue
            # Only the function by autograd has the costly properties, or else value_and_grad.
            costly = bool(interface.properties) and array_library == library
            # A dict removes properties that occur in two groups.
            chosen, once = dict.fromkeys((*interface.properties, *(once if costly else ()))), () if costly else once
            name = interface.name if array_library == library else f"{interface.name} of {_ARRAYS_OF[array_library]}"
            # Chunks and blocks are new arrays in every dtype.
            dtype_dependent = _EVERY_DTYPE[: 2 if interface.plain or interface.block else None]
            names = tuple(x for x in chosen if is_float32 or x in dtype_dependent)
            yield interface, of_interface(interface, objective, subject, array_library, name), names


def of_interface(interface: Interface, objective: str, subject: Subject, library: str, name: str, **more: Any) -> Loss:
    """A public loss by one interface, as a loss under test; ``more`` are further settings."""
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
    if interface.plain:
        claims["state"] = "float64" if subject.dtype == "float64" else "float32"
    if interface.plain or interface.block is not None:
        # More rows would only add chunks, or blocks, of the same kind.
        claims["largest_batch"] = ROWS
    target = interface.make(getattr(losses, objective), settings)
    facts = None if interface.plain else subject.accuracy
    return Loss(name, target, Claims(**(claims | dict(interface.claims))), facts, interface.block)
