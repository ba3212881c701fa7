"""Cached gradients are the uncached ones: bit for bit in one chunk, within the bound of a reordered sum in several."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from chunked_graphs import graphs_kept, taken, worst
from small_towers import B, D, every_parameter, log_scale, rows, setting, skins, tower
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import contrastile
from contrastile import training


def trimodal(a: Tensor, b: Tensor, c: Tensor, scale: Any) -> Tensor:
    return (
        contrastile.clip_loss(a, b, scale) + contrastile.clip_loss(b, c, scale) + contrastile.nt_xent(a, c, scale)
    ) / 3


def hard_negatives(query: Tensor, key: Tensor, negative: Tensor, scale: Any) -> Tensor:
    return contrastile.info_nce(query, key, scale, negatives=negative)


def alone(a: Tensor, scale: Any) -> Tensor:
    return contrastile.sup_con(a, torch.arange(len(a)) % 5, scale)


def in_words(a: Tensor, b: Tensor, scale: Any) -> Tensor:
    """A loss of the caller's own."""
    return nn.functional.cross_entropy(scale * a @ b.T, torch.arange(len(a)))


# the package's own losses of two towers are held by contrastile verify
LOSSES: list[tuple[Callable[..., Tensor], tuple[int, ...]]] = [
    (alone, (B,)),
    (trimodal, (B, B, B)),
    (hard_negatives, (B, B, 3 * B + 1)),
    (in_words, (B, B)),
]


@pytest.mark.parametrize("skin", skins())
@pytest.mark.parametrize("chunk", [5, 40])
@pytest.mark.parametrize(("loss", "lengths"), LOSSES)
def test_gradients_of_any_loss_and_number_of_towers(
    loss: Callable[..., Tensor], lengths: tuple[int, ...], chunk: int, skin: str
) -> None:
    towers, inputs = setting(lengths)
    number = log_scale()
    parameters = [*every_parameter(*towers), number]
    expected = graphs_kept(towers, [x.split(chunk) for x in inputs], loss, [number.exp], parameters)
    torch.manual_seed(0)
    value = skins()[skin](towers, tuple(inputs), loss, scale=number.exp, chunk=chunk)
    found = taken(parameters)
    assert torch.equal(value, expected.loss)
    assert not value.requires_grad
    # the scale's gradient enters once, and no sum over chunks is in it
    assert torch.equal(found[-1], expected.gradients[-1])
    if all(n <= chunk for n in lengths):
        assert all(torch.equal(x, y) for x, y in zip(found, expected.gradients, strict=True))
    assert worst(found[:-1], graphs_without_last(expected)) <= 1
    assert all(x.abs().max() > 0 for x in found)


def graphs_without_last(step: Any) -> Any:
    return type(step)(step.loss, step.gradients[:-1], step.bounds[:-1])


def test_one_tower_for_both_sides() -> None:
    shared, number = tower(4, 0), log_scale()
    a, b = rows(B, 4, seed=1), rows(B, 4, seed=2)
    parameters = every_parameter(shared)
    expected = graphs_kept([shared] * 2, [a.split(5), b.split(3)], contrastile.nt_xent, [number.exp], parameters)
    torch.manual_seed(0)
    training.cached_step((shared, shared), (a, b), contrastile.nt_xent, scale=number.exp, chunk=(5, 3))
    assert worst(taken(parameters), expected) <= 1


def test_gradient_checkpointing_inside_an_encoder() -> None:
    towers, inputs = setting((B, B))
    parameters = every_parameter(*towers)
    expected = graphs_kept(towers, [x.split(5) for x in inputs], contrastile.clip_loss, [lambda: 3.0], parameters)
    for reentrant in (False, True):

        def saving(net: nn.Module, x: Tensor, again: bool = reentrant) -> Tensor:
            x = x.clone().requires_grad_()  # reentrant checkpoints need an input that does
            return checkpoint(net, x, use_reentrant=again)

        encoders = [functools.partial(saving, net) for net in towers]
        torch.manual_seed(0)
        training.cached_step(encoders, tuple(inputs), contrastile.clip_loss, scale=3.0, chunk=5)
        assert worst(taken(parameters), expected) <= 1


@pytest.mark.slow
def test_compiled_encoders() -> None:
    towers, inputs = setting((B, B))
    parameters = every_parameter(*towers)
    expected = graphs_kept(towers, [x.split(5) for x in inputs], contrastile.clip_loss, [lambda: 3.0], parameters)
    compiled = [torch.compile(net, backend="aot_eager") for net in towers]
    torch.manual_seed(0)
    training.cached_step(compiled, tuple(inputs), contrastile.clip_loss, scale=3.0, chunk=5)
    assert worst(taken(parameters), expected) <= 1


def narrow(net: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return net(x)


def test_autocast_around_the_call_is_that_inside_the_encoders_and_the_loss() -> None:
    """Also in the backward of ``Cached``, which is called outside; and no cached copy of a weight loses a gradient."""
    towers, inputs = setting((B, B), torch.float32)
    parameters = every_parameter(*towers)
    torch.manual_seed(0)
    training.cached_step(
        [functools.partial(narrow, net) for net in towers],
        tuple(inputs),
        bfloat16_clip,
        scale=3.0,
        chunk=5,
    )
    expected = taken(parameters)
    torch.manual_seed(0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        training.cached_step(towers, tuple(inputs), contrastile.clip_loss, scale=3.0, chunk=5)
    assert all(torch.equal(x, y) for x, y in zip(taken(parameters), expected, strict=True))
    torch.manual_seed(0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = training.Cached(contrastile.clip_loss, towers, 5)(*inputs, scale=3.0)
    value.backward()
    assert all(torch.equal(x, y) for x, y in zip(taken(parameters), expected, strict=True))


def test_copies_of_weights_that_autocast_made_in_the_first_pass_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Older versions of torch keep them within autocast, without a graph: pytorch issue 158232."""
    net, log = nn.Linear(4, D), []
    clear = torch.clear_autocast_cache

    def cleared() -> None:
        log.append("clear")
        clear()

    def encode(x: Tensor) -> Tensor:
        log.append("with graph" if torch.is_grad_enabled() else "without")
        return net(x)

    monkeypatch.setattr(torch, "clear_autocast_cache", cleared)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        training.cached_step((encode,), (torch.ones(2, 4),), torch.sum, chunk=1)
    assert log[:4] == ["without", "without", "clear", "with graph"]
    assert net.weight.grad is not None


def bfloat16_clip(a: Tensor, b: Tensor, scale: Any) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return contrastile.clip_loss(a, b, scale)


class Margin(nn.Module):
    """A loss with parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(rows(D, D))
        self.log_scale = log_scale()

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return contrastile.clip_loss(a @ self.weight, b, self.log_scale.exp())


def test_one_output_takes_one_gradient() -> None:
    (net,), (x,) = setting((B,))
    gradient, found = rows(B, D), []
    for given in (gradient, [gradient], None):
        torch.manual_seed(0)
        output, replay = training.embed(net, x, 5)
        output.grad = gradient
        replay(given)
        found.append(taken(every_parameter(net)))
    assert all(map(torch.equal, found[0], found[1]))
    assert all(map(torch.equal, found[1], found[2]))


def test_the_second_pass_has_a_graph_whoever_calls_it() -> None:
    towers, inputs = setting((B, B))
    parameters = every_parameter(*towers)
    found = []
    for mode in (torch.enable_grad(), torch.no_grad()):
        torch.manual_seed(0)
        outputs, replay = training.embed(towers, inputs, 5)
        gradients = torch.autograd.grad(contrastile.clip_loss(*outputs, 2.0), outputs)
        with mode:
            replay(gradients)
        found.append(taken(parameters))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("skin", ["cached_step", "Cached"])
def test_the_graph_of_a_scale_may_be_shared_by_losses(skin: str) -> None:
    """As in one sum of losses without a cache."""
    towers, inputs = setting((B, B))
    number = log_scale()
    parameters = [*every_parameter(*towers), number]
    found = []
    for shared in (False, True):
        scale = number.exp()
        torch.manual_seed(0)
        values = [
            skins()[skin](towers, tuple(inputs), loss, scale=scale if shared else number.exp, chunk=5)
            for loss in (contrastile.clip_loss, contrastile.nt_xent)
        ]
        # and by what else the caller makes of it
        (0.1 * scale).backward()
        found.append([*values, *taken(parameters)])
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))


def test_a_scale_is_any_real_number() -> None:
    towers, inputs = setting((B, B))
    found = [
        training.cached_step([net.eval() for net in towers], tuple(inputs), contrastile.clip_loss, scale=x, chunk=5)
        for x in (2, 2.0, np.float32(2), np.int64(2), torch.tensor([2]))
    ]
    assert all(torch.equal(x, found[0]) for x in found)


@pytest.mark.parametrize("skin", skins())
def test_hooks_of_parameters_run_once(skin: str) -> None:
    """Those of a scale and of a loss's parameters too, whose gradients are found before they are sent."""
    towers, inputs = setting((B, B))
    loss, number = Margin(), log_scale()

    def scaled(a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
        return scale * loss(a, b)

    parameters = [*every_parameter(*towers), *loss.parameters(), number]
    found = []
    for factor in (1.0, 4.0):
        handles = [p.register_hook(lambda gradient, by=factor: by * gradient) for p in parameters]
        torch.manual_seed(0)
        skins()[skin](towers, tuple(inputs), scaled, scale=number.exp, chunk=5)
        found.append(taken(parameters))
        for handle in handles:
            handle.remove()
    assert all(torch.equal(4.0 * x, y) for x, y in zip(*found, strict=True))
