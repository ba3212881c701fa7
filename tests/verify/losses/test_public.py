"""Defects of the public face: each fails the harness's property of its kind, by the interface that has it."""

from functools import wraps

import numpy as np
import pytest
import torch
import wrong

from contrastile import evaluation, losses, nn, training
from contrastile.backends.registry import load
from contrastile.training.random_state import RandomState
from contrastile.verify import public
from contrastile.verify.trial import Subject
from contrastile.verify.worlds import Threads


def subject(dtype="float32", name="torch", **more):
    return Subject(name, load(name), dtype, **more)


def first_failure(comparisons):
    """The label of the first comparison that fails, or that an error ended."""
    try:
        with np.errstate(all="ignore"):
            return next((label for label, worst in comparisons if not worst.ratio < 1), None)
    except Exception as error:
        return f"raised {error}"


def public_loss(name, plant):
    """The public function replaced; ``value_and_grad`` and the modules stay right."""

    def apply(monkeypatch):
        right = getattr(losses, name)
        monkeypatch.setattr(losses, name, wraps(right)(plant(right)))
        monkeypatch.setattr(evaluation, "value_and_grad", right_value_and_grad(name, right))

    return apply


def right_value_and_grad(name, right):
    both = evaluation.value_and_grad
    return lambda loss, **settings: both(right if loss.__name__ == name else loss, **settings)


def attribute(owner, name, make):
    """An attribute replaced by what is made of it."""
    return lambda monkeypatch: monkeypatch.setattr(owner, name, make(getattr(owner, name)))


def numpy_doubled(loss):
    return lambda x, *args, **more: loss(x, *args, **more) * (2 if isinstance(x, np.ndarray) else 1)


def other_default(loss):
    return lambda image, text, scale, bias=-10.0, **more: loss(image, text, scale, bias, **more)


def last_negative_lost(loss):
    def planted(*args, negatives=None, **more):
        return loss(*args, negatives=negatives[:-1] if hasattr(negatives, "shape") else negatives, **more)

    return planted


def third_block_missed(loss):
    def planted(query, key, scale, *, negatives=None, positives=None, **more):
        if positives is not None and isinstance(negatives, list | tuple) and len(negatives) > 1:
            positives = positives.clip(max=len(key) + len(negatives[0]) - 1)
        return loss(query, key, scale, negatives=negatives, positives=positives, **more)

    return planted


def negative_positives(loss):
    def planted(*args, positives=None, **more):
        return loss(*args, positives=None if positives is None else positives.clip(min=0), **more)

    return planted


def blocked_image_frozen(loss):
    def planted(image, text, scale, *args, **more):
        skip = more.get("block") is not None and not wrong.learns(scale)
        return loss(image.detach() if skip and wrong.learns(text) else image, text, scale, *args, **more)

    return planted


def at_100_rows(loss):
    return lambda x, *args, **more: loss(x, *args, **more) * (float(np.float16(0.01)) * 100 if len(x) == 100 else 1.0)


def default_bias_alone(both):
    """``value_and_grad`` ignores ``bias=``."""

    def planted(loss, **settings):
        computed = both(loss, **settings)

        def call(*args, **more):
            more.pop("bias", None) if loss.__name__ == "sigmoid_loss" else None
            value, gradients = computed(*args, **more)
            return value, gradients

        return call

    return planted


def numpy_gradients_doubled(both):
    def planted(loss, **settings):
        computed = both(loss, **settings)

        def call(x, *args, **more):
            value, gradients = computed(x, *args, **more)
            return value, tuple(g * 2 for g in gradients) if isinstance(x, np.ndarray) else gradients

        return call

    return planted


def module(change):
    """A forward of a module that is changed."""
    return lambda forward: lambda self, *args, **more: change(forward, self, *args, **more)


def module_scale_frozen(forward, self, image, text, scale, *rest):
    return forward(self, image, text if wrong.learns(scale) else text.detach(), scale, *rest)


def module_bias_none(forward, self, image, text, scale, bias=None, *rest):
    return forward(self, image, text, scale, -10.0 if bias is None else bias, *rest)


def module_divided(forward, self, image, *rest):
    value = forward(self, image, *rest)
    return value / len(image)


def scale_gradient_doubled(step):
    def planted(encode, inputs, loss, *, scale=None, **more):
        before = [x.grad for x in scale]
        value = step(encode, inputs, loss, scale=scale, **more)
        for x, old in zip(scale, before, strict=True):
            if x.grad is not None and old is None:
                x.grad *= 2
        return value

    return planted


def chunk_offset(step):
    def planted(encode, inputs, *args, **more):
        def shifted(tower):
            return lambda i: tower(i - 1 if torch.is_grad_enabled() and i[0] > 0 else i)

        return step(tuple(map(shifted, encode)), inputs, *args, **more)

    return planted


def upstream_ignored(cached):
    ignoring = wrong.gradient(torch.ones_like)
    return lambda *made, **how: ignoring(cached(*made, **how))


def ragged_tiles_lost(make):
    def planted(phi, tile=256):
        loss = make(phi, tile)
        return lambda f, g, *rest: loss(f[: len(f) // tile * tile], g, *rest)

    return planted


def equal_weights(right):
    return lambda self: ((chunk, 1 / len(self)) for chunk, _ in right(self))


def all_but(what):
    """A generator that is not put back."""

    def make(restore):
        def planted(self):
            kept = {"_python": self._python, "_numpy": self._numpy, "_cpu": self._cpu}
            now = RandomState(())
            setattr(self, what, getattr(now, what))
            restore(self)
            setattr(self, what, kept[what])

        return planted

    return make


ANY = {f"{name}: {defect}": (name, public_loss(name, plant), prop)
       for name, defects in {
           "clip_loss": ["the text without a gradient where the scale is frozen", "a scale of shape (1,) detached",
                         "a number above 20 truncated", "the upstream gradient in bfloat16",
                         "a second backward pass doubled", "gradients consumed by the backward pass",
                         "buffers shared from 40,000 logits", "a result that the next call overwrites",
                         "drift after 500 calls", "every call's logits kept", "torch's generator seeded",
                         "one tensor twice", "halves of one storage", "the caller's autocast", "1,100 rows and more",
                         "more than 1,536 features"],
           "info_nce": ["the upstream gradient clamped", "a scale of shape (1,) taken for 1"],
           "sigmoid_loss": ["the upstream gradient ignored", "a number above 20 truncated"],
           "nt_xent": ["a second backward pass doubled", "one tensor twice"],
       }.items() for defect in defects for prop, plant in [wrong.OF_ANY[defect]]}  # fmt: skip
DEFECTS = {
    **ANY,
    "1 / b in float16": ("clip_loss", public_loss("clip_loss", at_100_rows), "sizes: b = 100"),
    "NumPy doubled": ("clip_loss", public_loss("clip_loss", numpy_doubled), "the function of NumPy arrays"),
    "another default of bias": ("sigmoid_loss", public_loss("sigmoid_loss", other_default), "numbers: the bias left"),
    "one tensor of negatives": ("info_nce", public_loss("info_nce", last_negative_lost), "autograd, negatives"),
    "a third block": ("info_nce", public_loss("info_nce", third_block_missed), "autograd, positives"),
    "positives of -1": ("info_nce", public_loss("info_nce", negative_positives), "refusals: a positive of -1"),
    "blocks without the image": (
        "sigmoid_loss",
        public_loss("sigmoid_loss", blocked_image_frozen),
        f"blocks of {9}, leaves",
    ),
    "value_and_grad without bias": (
        "sigmoid_loss",
        attribute(evaluation, "value_and_grad", default_bias_alone),
        "numbers: the bias by its name",
    ),
    "value_and_grad of NumPy doubled": (
        "clip_loss",
        attribute(evaluation, "value_and_grad", numpy_gradients_doubled),
        "value_and_grad of NumPy arrays",
    ),
    "nn, a frozen scale": ("clip_loss", attribute(nn.ClipLoss, "forward", module(module_scale_frozen)), "nn, leaves"),
    "nn, no bias": ("sigmoid_loss", attribute(nn.SigLipLoss, "forward", module(module_bias_none)), "nn, numbers"),
    "nn, 1 / b twice": ("sigmoid_loss", attribute(nn.SigLipLoss, "forward", module(module_divided)), "nn, calls"),
    "cached_step, the scale": ("clip_loss", attribute(training, "cached_step", scale_gradient_doubled), "cached_step"),
    "cached_step, an offset": ("sup_con", attribute(training, "cached_step", chunk_offset), "cached_step"),
    "Cached, upstream": ("clip_loss", attribute(training, "Cached", upstream_ignored), "Cached, upstream"),
    "deep_distance": ("info_nce", attribute(training, "deep_distance", ragged_tiles_lost), "deep_distance"),
}
OF_TRAINING = {
    "weights of stream": attribute(training.Stream, "__iter__", equal_weights),
    "numbers of Python": attribute(RandomState, "restore", all_but("_python")),
    "numbers of NumPy": attribute(RandomState, "restore", all_but("_numpy")),
    "numbers of torch": attribute(RandomState, "restore", all_but("_cpu")),
}


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_of_the_public_face_is_caught(defect, monkeypatch):
    objective, plant, said = DEFECTS[defect]
    plant(monkeypatch)
    label = first_failure(public.alone(objective, subject(), public.CASE))
    assert label is not None
    assert said in label, label


@pytest.mark.parametrize("what", OF_TRAINING)
def test_a_defect_of_training_alone_is_caught(what, monkeypatch):
    OF_TRAINING[what](monkeypatch)
    failure = first_failure(public.training(subject(), public.CASE))
    # other random numbers are refused before a gradient can be wrong
    assert ("same embeddings both times" if what.startswith("numbers") else what) in failure


@pytest.mark.parametrize(
    ("reduction", "change"),
    [
        ("sum", lambda value: wrong.gradient(lambda upstream: 3 * upstream)(lambda: value)()),
        ("mean", lambda value: wrong.gradient(wrong.clamped_upstream)(lambda: value)()),
        ("sum", lambda value: wrong.gradient(wrong.bfloat16_upstream)(lambda: value)()),
    ],
)
def test_a_defect_of_ranks_alone_is_caught(reduction, change, monkeypatch):
    right = losses.clip_loss

    @wraps(right)
    def planted(*args, **more):
        value = right(*args, **more)
        here = more.get("exchange") == "replicate" and more.get("parameter_reduction") == reduction
        return change(value) if here and value.requires_grad else value

    monkeypatch.setattr(losses, "clip_loss", planted)
    monkeypatch.setattr(evaluation, "value_and_grad", right_value_and_grad("clip_loss", right))
    label = first_failure(public.over_ranks("clip_loss", subject(world=Threads(3)), public.RANKS_CASE))
    assert "replicate" in label
    assert reduction in label
