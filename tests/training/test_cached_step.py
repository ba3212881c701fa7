"""Cached gradients are the uncached ones: bit for bit in one chunk, within the bound of a reordered sum in several."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from chunked_graphs import gamma, graphs_kept, taken, worst
from paper_bounds import agrees
from paper_towers import TANH, ball_step
from small_towers import DOUBLE, B, D, every_parameter, log_scale, rows, setting, skins, tower
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import contrastile
from contrastile import training
from contrastile.oracle.papers import gradcache
from contrastile.oracle.papers.gradcache import Tower


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


LOSSES: list[tuple[Callable[..., Tensor], tuple[int, ...]]] = [
    (contrastile.clip_loss, (B, B)),
    (functools.partial(contrastile.clip_loss, backend="numpy", tile=5), (B, B)),
    (contrastile.info_nce, (B, B)),
    (contrastile.nt_xent, (B, B)),
    (alone, (B,)),
    (trimodal, (B, B, B)),
    (hard_negatives, (B, B, 3 * B + 1)),
    (in_words, (B, B)),
]


@pytest.mark.parametrize("skin", skins())
@pytest.mark.parametrize("chunk", [1, 5, 17, 40])
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


class Both(nn.Module):
    """Both towers and the scale in one module, as DDP and FSDP2 want it."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text, self.log_scale = tower(4, 0), tower(5, 1), log_scale()
        self.calls = 0

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self.calls += 1
        return self.image(image), self.text(text), self.log_scale.exp()


def test_one_callable_for_all_towers_whose_scale_comes_out_of_its_forward() -> None:
    model = Both()
    inputs = rows(B, 4), rows(B, 5)
    parameters = [*model.image.parameters(), *model.text.parameters(), model.log_scale]
    for dropout, chunk in ((0.5, B), (0.0, 5)):
        model.image[2].p = model.text[2].p = dropout
        towers = [model.image, model.text]
        expected = graphs_kept(
            towers, [x.split(chunk) for x in inputs], contrastile.clip_loss, [model.log_scale.exp], parameters
        )
        torch.manual_seed(0)
        model.calls = 0
        training.cached_step(model, inputs, contrastile.clip_loss, chunk=chunk)
        assert model.calls == 2 * -(-B // chunk)
        found = taken(parameters)
        # in each chunk's forward, and from the last one's alone
        assert torch.equal(found[-1], expected.gradients[-1])
        assert worst(found[:-1], graphs_without_last(expected)) <= 1


def test_against_the_whole_batch_in_one_go() -> None:
    """Few-bit weights and inputs: features are exact, cut or whole, so that u has the same bits; then Eq. 8 and 9."""
    generator = torch.Generator().manual_seed(3)

    def few_bits(*shape: int) -> Tensor:
        return torch.randint(-16, 17, shape, generator=generator).to(DOUBLE) / 32

    nets = [nn.Sequential(nn.Linear(5, 7, bias=False), nn.ReLU(), nn.Linear(7, D, bias=False)) for _ in range(2)]
    inputs = [few_bits(B, 5), few_bits(B, 5)]
    for net in nets:
        net.double()
        for p in net.parameters():
            p.data = few_bits(*p.shape)
    features = [net(x) for net, x in zip(nets, inputs, strict=True)]
    value = contrastile.clip_loss(*features, 10.0)
    us = torch.autograd.grad(value, features, retain_graph=True)
    value.backward()
    whole = taken(every_parameter(*nets))
    assert torch.equal(training.cached_step(nets, inputs, contrastile.clip_loss, scale=10.0, chunk=4), value.detach())
    cached = iter(zip(taken(every_parameter(*nets)), whole, strict=True))
    for net, x, u in zip(nets, inputs, us, strict=True):
        w2 = net[2].weight.detach().abs()
        h = net[0](x).relu().detach()
        # each row of u W2 is D products; each parameter a sum over the B rows, in any order
        inner = (u.abs() @ w2) * (h > 0)
        first = (gamma(D, DOUBLE) + gamma(B + 1, DOUBLE) * (1 + gamma(D, DOUBLE))) * inner.T @ x.abs()
        second = gamma(B + 1, DOUBLE) * u.abs().T @ h
        for bound in (first, second):
            ours, theirs = next(cached)
            assert ((ours - theirs).abs() <= 2 * bound).all()


def test_it_is_the_oracle_s_step() -> None:
    """GradCache Sec. 3.3, in NumPy, with its rounding."""
    rng = np.random.default_rng(7)
    tau = 0.4
    sizes = (5, 5, 3)
    f, g = (Tower(TANH, rng.standard_normal((4, D)), rng.standard_normal((13, 4)), sizes, (0, 1, 2)) for _ in range(2))
    balls = ball_step(f, g, np.arange(13), tau)
    parameters = [torch.tensor(tower.parameters, requires_grad=True) for tower in (f, g)]
    encoders = [lambda x, p=p: torch.tanh(x @ p) for p in parameters]
    inputs = tuple(torch.tensor(tower.inputs) for tower in (f, g))
    value = training.cached_step(encoders, inputs, contrastile.info_nce, scale=1 / tau, chunk=5)
    for found, oracle, ball in zip(
        (value, *taken(parameters)), gradcache.step(f, g, np.arange(13), tau), balls, strict=True
    ):
        assert agrees(oracle, ball)
        assert agrees(found.numpy(), ball)


def test_chunks_of_dicts_tuples_and_lists() -> None:
    net = nn.Embedding(11, D, dtype=DOUBLE)
    other = tower(4, 1)
    ids = torch.arange(B * 3).reshape(B, 3) % 11
    mask = (ids != 4).to(DOUBLE)

    def words(batch: dict[str, Any]) -> Tensor:
        assert batch["name"] == "words"
        weight = batch["mask"][..., None]
        return (net(batch["ids"]) * weight).sum(dim=1)

    def pair(batch: tuple[Tensor, list[Tensor]]) -> Tensor:
        return other(batch[0] + batch[1][0])

    x = rows(B, 4)
    parameters = every_parameter(net, other)
    pieces = [{"ids": i, "mask": m, "name": "words"} for i, m in zip(ids.split(5), mask.split(5), strict=True)]
    both = [(a, [a]) for a in x.split(5)]
    expected = graphs_kept([words, pair], [pieces, both], contrastile.clip_loss, [lambda: 3.0], parameters)
    torch.manual_seed(0)
    inputs = {"ids": ids, "mask": mask, "name": "words"}, (x, [x])
    training.cached_step((words, pair), inputs, contrastile.clip_loss, scale=3.0, chunk=5)
    assert worst(taken(parameters), expected) <= 1


def test_a_splitter_of_the_callers() -> None:
    towers, inputs = setting((B, B))
    parameters = every_parameter(*towers)
    expected = graphs_kept(towers, [x.split(5) for x in inputs], contrastile.clip_loss, [lambda: 3.0], parameters)
    words = [[f"{i} {j}" for j in range(B)] for i in range(2)]

    def split(names: list[str], size: int) -> list[list[str]]:
        return [names[low : low + size] for low in range(0, B, size)]

    def read(names: list[str]) -> Tensor:
        i = int(names[0][0])
        return towers[i](inputs[i][[int(name.split()[1]) for name in names]])

    torch.manual_seed(0)
    training.cached_step((read, read), tuple(words), contrastile.clip_loss, scale=3.0, chunk=5, split=split, sync=None)
    assert worst(taken(parameters), expected) <= 1


def test_an_encoder_may_take_its_chunk_to_pieces() -> None:
    towers, inputs = setting((B, B))
    parameters = every_parameter(*towers)
    expected = graphs_kept(towers, [x.split(5) for x in inputs], contrastile.clip_loss, [lambda: 3.0], parameters)

    def split(x: Tensor, size: int) -> list[dict[str, Tensor]]:
        return [{"x": part} for part in x.split(size)]

    def reader(net: nn.Module) -> Callable[[dict[str, Tensor]], Tensor]:
        return lambda chunk: net(chunk.pop("x"))

    torch.manual_seed(0)
    training.cached_step(
        list(map(reader, towers)), tuple(inputs), contrastile.clip_loss, scale=3.0, chunk=5, split=split
    )
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


@pytest.mark.parametrize("skin", skins())
def test_autocast_inside_the_encoders(skin: str) -> None:
    towers, inputs = setting((B, B), torch.float32)
    number = log_scale(torch.float32)
    encoders = [functools.partial(narrow, net) for net in towers]
    parameters = [*every_parameter(*towers), number]
    expected = graphs_kept(encoders, [x.split(5) for x in inputs], contrastile.clip_loss, [number.exp], parameters)
    torch.manual_seed(0)
    value = skins()[skin](encoders, tuple(inputs), contrastile.clip_loss, scale=number.exp, chunk=5)
    assert torch.equal(value, expected.loss)
    found = taken(parameters)
    assert worst(found[:-1], graphs_without_last(expected)) <= 1
    assert torch.equal(found[-1], expected.gradients[-1])


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


@pytest.mark.parametrize("upstream", [2.0**16, 0.25])
def test_what_multiplies_the_loss_multiplies_every_gradient(upstream: float) -> None:
    """A GradScaler, accumulation, a trainer: by ``Cached``, or by the caller's own backward."""
    towers, inputs = setting((B, B), torch.float32)
    number = log_scale(torch.float32)
    parameters = [*every_parameter(*towers), number]
    torch.manual_seed(0)
    training.cached_step(towers, tuple(inputs), contrastile.clip_loss, scale=number.exp, chunk=5)
    expected = taken(parameters)
    torch.manual_seed(0)
    (upstream * training.Cached(contrastile.clip_loss, towers, 5)(*inputs, scale=number.exp)).backward()
    by_loss = taken(parameters)
    torch.manual_seed(0)
    calls = []

    def backward(surrogate: Tensor) -> None:
        calls.append(surrogate)
        (upstream * surrogate).backward()

    training.cached_step(towers, tuple(inputs), contrastile.clip_loss, scale=number.exp, chunk=5, backward=backward)
    # eight chunks, and the scale
    assert len(calls) == 9
    # powers of two multiply exactly
    for x, y, z in zip(expected, by_loss, taken(parameters), strict=True):
        assert torch.equal(upstream * x, y)
        assert torch.equal(upstream * x, z)


def test_steps_accumulate() -> None:
    towers, inputs = setting((B, B))
    parameters = every_parameter(*towers)
    once = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        training.cached_step(towers, tuple(inputs), contrastile.clip_loss, scale=2.0, chunk=B)
        once.append(taken(parameters))
    for seed in (1, 2):
        torch.manual_seed(seed)
        training.cached_step(towers, tuple(inputs), contrastile.clip_loss, scale=2.0, chunk=B)
    assert all(torch.equal(x + y, z) for x, y, z in zip(*once, taken(parameters), strict=True))


class Margin(nn.Module):
    """A loss with parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(rows(D, D))
        self.log_scale = log_scale()

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return contrastile.clip_loss(a @ self.weight, b, self.log_scale.exp())


def test_parameters_of_the_loss_learn_too_and_are_scaled_alike() -> None:
    towers, inputs = setting((B, B))
    loss = Margin()
    parameters = [*every_parameter(*towers), *loss.parameters()]
    expected = graphs_kept(towers, [x.split(5) for x in inputs], loss, [], parameters)
    torch.manual_seed(0)
    (4.0 * training.Cached(loss, towers, 5)(*inputs)).backward()
    found = taken(parameters)
    assert worst(found[:-2], type(expected)(expected.loss, expected.gradients[:-2], expected.bounds[:-2]), 4.0) <= 1
    assert all(torch.equal(x, 4.0 * y) for x, y in zip(found[-2:], expected.gradients[-2:], strict=True))


def test_no_grad_gives_the_loss_alone() -> None:
    towers, inputs = setting((B, B))
    wrapped = training.Cached(contrastile.clip_loss, towers, 5)
    torch.manual_seed(0)
    with torch.no_grad():
        value = wrapped(*inputs, scale=2.0)
    torch.manual_seed(0)
    assert torch.equal(value, wrapped(*inputs, scale=2.0).detach())
    assert not value.requires_grad


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
