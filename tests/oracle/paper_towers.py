"""Small encoders with explicit vector-Jacobian products, for arrays and for balls."""

from __future__ import annotations

import numpy as np
from balls import Ball, concatenate, contrastive

from contrastile.oracle.papers.collectives import row_slices
from contrastile.oracle.papers.gradcache import Encoder

KEPT = 0.75
EPSILON = 2.0**-10


def linear(Theta, x, state):
    return x @ Theta


def linear_vjp(Theta, x, state, u):
    return x.T @ u


def tanh(Theta, x, state):
    return np.tanh(x @ Theta)


def tanh_vjp(Theta, x, state, u):
    y = np.tanh(x @ Theta)
    return x.T @ (u * (1.0 - y * y))


def mask(shape, state):
    return (np.random.default_rng(state).random(shape) < KEPT) / KEPT


def dropout(Theta, x, state):
    y = np.tanh(x @ Theta)
    return y * mask(y.shape, state)


def dropout_vjp(Theta, x, state, u):
    y = np.tanh(x @ Theta)
    return x.T @ (u * mask(y.shape, state) * (1.0 - y * y))


def batch_norm(Theta, x, state):
    z, n = x @ Theta, max(1, len(x))
    c = z - z.sum(axis=0) / n
    return c / np.sqrt((c * c).sum(axis=0) / n + EPSILON)


def batch_norm_vjp(Theta, x, state, u):
    n = max(1, len(x))
    z = x @ Theta
    c = z - z.sum(axis=0) / n
    s = np.sqrt((c * c).sum(axis=0) / n + EPSILON)
    y = c / s
    return x.T @ ((u - u.sum(axis=0) / n - y * (u * y).sum(axis=0) / n) / s)


LINEAR = Encoder(linear, linear_vjp)
TANH = Encoder(tanh, tanh_vjp)
DROPOUT = Encoder(dropout, dropout_vjp)
BATCH_NORM = Encoder(batch_norm, batch_norm_vjp)


def bilinear(Omega, F, G):
    return np.tanh(F @ Omega @ G.T)


def bilinear_vjp(Omega, F, G, w):
    d = np.tanh(F @ Omega @ G.T)
    h = w * (1.0 - d * d)
    return F.T @ h @ G, h @ (G @ Omega.T), h.T @ (F @ Omega)


BILINEAR = Encoder(bilinear, bilinear_vjp)


def chunks(tower):
    """The sub-batches that are not empty, with their random states."""
    return [
        (rows, state)
        for rows, state in zip(row_slices(tower.sizes), tower.states, strict=True)
        if rows.stop > rows.start
    ]


def ball_forward(tower):
    """Step 1 with its rounding."""
    encode, Theta = tower.encoder.forward, Ball(tower.parameters)
    return concatenate([encode(Theta, Ball(tower.inputs[rows]), state) for rows, state in chunks(tower)])


def ball_vjp(tower, u):
    """Step 3 with its rounding."""
    vjp, Theta = tower.encoder.vjp, Ball(tower.parameters)
    parts = [vjp(Theta, Ball(tower.inputs[rows]), state, u[rows]) for rows, state in chunks(tower)]
    return concatenate([part[None] for part in parts]).sum(axis=0)


def ball_step(f, g, r, tau):
    """Steps 1-3 with their rounding: loss, dTheta, dLambda."""
    F, G = ball_forward(f), ball_forward(g)
    loss, dF, dG, _, _ = contrastive(F, G, r, Ball(1.0) / tau, len(r))
    return loss, ball_vjp(f, dF), ball_vjp(g, dG)
