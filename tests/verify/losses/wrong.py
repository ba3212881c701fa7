"""Defects as wrappers of any right loss of torch tensors: what each changes, and nothing else."""

import torch


def gradient(change):
    """A loss whose upstream gradient is changed on its way in: ``change(upstream)``."""

    class Changed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            return value.clone()

        @staticmethod
        def backward(ctx, upstream):
            return change(upstream)

    def wrap(loss):
        return lambda *args, **more: Changed.apply(loss(*args, **more))

    return wrap


def learns(x):
    return isinstance(x, torch.Tensor) and x.requires_grad


def frozen_scale_freezes_text(loss):
    """The text has no gradient where the image learns and the scale does not."""

    def wrong(image, text, scale, *more, **named):
        return loss(image, text.detach() if learns(image) and not learns(scale) else text, scale, *more, **named)

    return wrong


def one_element_detached(loss):
    """A scale of shape (1,) gets no gradient."""

    def wrong(image, text, scale, *more, **named):
        detached = learns(scale) and scale.shape == (1,)
        value = loss(image, text, scale.detach() if detached else scale, *more, **named)
        return value + 0 * scale.sum() if detached else value

    return wrong


def truncated_above_20(loss):
    """A Python number above 20 becomes an integer."""

    def wrong(image, text, scale, *more, **named):
        return loss(image, text, int(scale) if isinstance(scale, float) and scale > 20 else scale, *more, **named)

    return wrong


def one_element_is_1(loss):
    """A tensor of shape (1,) counts as 1."""

    def wrong(image, text, scale, *more, **named):
        return loss(image, text, 1.0 if getattr(scale, "shape", ()) == (1,) else scale, *more, **named)

    return wrong


def each_backward(factor):
    """The n-th backward pass of a graph has factor(n) times the gradient."""

    class Counted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            ctx.passes = 0
            return value.clone()

        @staticmethod
        def backward(ctx, upstream):
            ctx.passes += 1
            return upstream * factor(ctx.passes)

    return lambda loss: lambda *args, **more: Counted.apply(loss(*args, **more))


def shared_from_40000(loss):
    """From 40,000 logits on, all graphs have one buffer."""
    buffer = {}

    class Shared(torch.autograd.Function):
        @staticmethod
        def forward(ctx, large, image, value):
            ctx.shape, ctx.large = image.shape, large
            if large:
                buffer[image.shape] = value.detach().clone()
                ctx.own = value.detach().clone()
            return value.clone()

        @staticmethod
        def backward(ctx, upstream):
            right = not ctx.large or torch.equal(buffer[ctx.shape], ctx.own)
            return None, None, upstream if right else 2 * upstream

    def wrong(image, *args, **more):
        return Shared.apply(len(image) ** 2 > 40000, image.detach(), loss(image, *args, **more))

    return wrong


def static_result(loss):
    """The result is overwritten by the next call."""
    buffer = {}

    def wrong(*args, **more):
        value = loss(*args, **more)
        held = buffer.setdefault(value.dtype, torch.zeros((), dtype=value.dtype))
        held.copy_(value.detach())
        # its gradient is the loss's, its memory the buffer
        value.data = held
        return value

    return wrong


def drifting(loss):
    """From the 500th call on it is wrong."""
    calls = []

    def wrong(*args, **more):
        calls.append(None)
        return loss(*args, **more) * (1.5 if len(calls) > 500 else 1.0)

    return wrong


def hoarding(loss):
    """Every call's logits are kept."""
    kept = []

    def wrong(image, text, *args, **more):
        kept.append(image.detach() @ text.detach().T)
        return loss(image, text, *args, **more)

    return wrong


def reseeding(loss):
    """Torch's generator is seeded."""

    def wrong(*args, **more):
        torch.manual_seed(0)
        return loss(*args, **more)

    return wrong


def same_tensor(loss):
    """Where the text is the image, one of them gets no gradient."""

    def wrong(image, text, *args, **more):
        return loss(image, text.detach() if text is image else text, *args, **more)

    return wrong


def same_storage(loss):
    """Features of one storage are taken for the same."""

    def wrong(image, text, *args, **more):
        shared = image.untyped_storage().data_ptr() == text.untyped_storage().data_ptr()
        return loss(image, image if shared else text, *args, **more)

    return wrong


def sharing_detached(loss):
    """Features of one address count double."""

    def wrong(image, text, *args, **more):
        return loss(image, text, *args, **more) * (2.0 if image.data_ptr() == text.data_ptr() else 1.0)

    return wrong


def doubled_in_autocast(loss):
    """The caller's autocast doubles it."""

    def wrong(*args, **more):
        return loss(*args, **more) * (2.0 if torch.is_autocast_enabled("cpu") else 1.0)

    return wrong


def where(holds, factor=1.01):
    """A loss that is off by a factor for some features."""

    def wrap(loss):
        return lambda x, *args, **more: loss(x, *args, **more) * (factor if holds(x) else 1.0)

    return wrap


def clamped_upstream(upstream):
    return upstream.clamp(-1, 1)


def bfloat16_upstream(upstream):
    return upstream.bfloat16().to(upstream.dtype)


OF_ANY = {
    "the text without a gradient where the scale is frozen": ("leaves", frozen_scale_freezes_text),
    "a scale of shape (1,) detached": ("numbers", one_element_detached),
    "a scale of shape (1,) taken for 1": ("numbers", one_element_is_1),
    "a number above 20 truncated": ("numbers", truncated_above_20),
    "the upstream gradient in bfloat16": ("upstream", gradient(bfloat16_upstream)),
    "the upstream gradient clamped": ("upstream", gradient(clamped_upstream)),
    "the upstream gradient ignored": ("upstream", gradient(torch.ones_like)),
    "a second backward pass doubled": ("retained", each_backward(lambda n: n)),
    "gradients consumed by the backward pass": ("retained", each_backward(lambda n: float(n == 1))),
    "buffers shared from 40,000 logits": ("interleaved", shared_from_40000),
    "a result that the next call overwrites": ("interleaved", static_result),
    "drift after 500 calls": ("repeats", drifting),
    "every call's logits kept": ("leaks", hoarding),
    "torch's generator seeded": ("settings", reseeding),
    "one tensor twice": ("aliases", same_tensor),
    "halves of one storage": ("aliases", same_storage),
    "features of one address": ("aliases", sharing_detached),
    "the caller's autocast": ("autocast", doubled_in_autocast),
    "1,100 rows and more": ("sizes", where(lambda x: len(x) >= 1100)),
    "1,000 rows": ("sizes", where(lambda x: len(x) == 1000)),
    "more than 1,536 features": ("sizes", where(lambda x: x.shape[1] > 1536)),
}
"""Defects of any loss: the property that catches each, and what plants it."""
