"""SimCLR: learn the forms of waves without labels, from two noisy views of every wave.

``python simclr.py`` takes some seconds on a CPU.
"""

import math

import torch
from torch.nn.functional import normalize

import contrastile

FORMS = (
    torch.sin,
    lambda t: torch.sin(t).sign(),  # a square wave
    lambda t: t / math.pi % 2 - 1,  # a sawtooth
    lambda t: torch.asin(torch.sin(t)) * 2 / math.pi,  # a triangle
    lambda t: torch.sin(t).abs() * 2 - 1,
    lambda t: torch.sin(t) ** 5,
)


def draw(n):
    """Waves of random form, pitch and phase, (n, 128), and the forms, (n,)."""
    turns, phase = 2 + 6 * torch.rand(n, 1), torch.rand(n, 1)
    t = 2 * math.pi * (turns * torch.linspace(0, 1, 128) + phase)
    form = torch.randint(len(FORMS), (n,))
    return torch.stack([f(t) for f in FORMS])[form, torch.arange(n)], form


def view(wave):
    """A part of every wave, louder or softer, with noise: (n, 96)."""
    part = wave.gather(1, torch.randint(0, 33, (len(wave), 1)) + torch.arange(96))
    return part * (0.5 + torch.rand(len(wave), 1)) + 0.3 * torch.randn(part.shape)


def same_form():
    """The share of waves whose nearest of 500 other waves has the same form; 0.17 by chance."""
    (wave, form), (other_wave, other_form) = draw(500), draw(500)
    with torch.no_grad():
        nearest = (normalize(encoder(view(wave)), dim=1) @ normalize(encoder(view(other_wave)), dim=1).T).argmax(1)
    return (other_form[nearest] == form).float().mean().item()


torch.manual_seed(0)
first, second = torch.nn.Conv1d(1, 32, 9, stride=2), torch.nn.Conv1d(32, 64, 5, stride=2)
pool = torch.nn.AdaptiveAvgPool1d(1), torch.nn.Flatten()
encoder = torch.nn.Sequential(torch.nn.Unflatten(1, (1, 96)), first, torch.nn.ReLU(), second, torch.nn.ReLU(), *pool)
head = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32))
optimizer = torch.optim.Adam([*encoder.parameters(), *head.parameters()], lr=3e-3)
print(f"before: {same_form():.2f} of the nearest waves have the same form")
for _ in range(100):
    wave, _ = draw(256)
    views = (normalize(head(encoder(view(wave))), dim=1) for _ in range(2))
    optimizer.zero_grad()
    contrastile.nt_xent(*views, 5.0).backward()
    optimizer.step()
print(f"after:  {same_form():.2f} of the nearest waves have the same form")
