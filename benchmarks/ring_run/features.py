"""Pairs that any rank can draw anew: chunk by chunk from a seed, so that nobody has to send the whole batch."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from contrastile.bench.workloads import COSINE

Tensor = torch.Tensor
CHUNK = 8192


def chunk(number: int, d: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Pairs ``number CHUNK`` and on: unit vectors, those of a pair with cosine COSINE, rounded to ``dtype``.

    Args:
        number: of the chunk, which is the seed too.
        d: width.
        device: where they are drawn; another kind of device draws others.
        dtype: of the features.

    Returns:
        image and text, (CHUNK, d) each.
    """
    generator = torch.Generator(device).manual_seed(number)
    normalize = torch.nn.functional.normalize
    one, noise = (normalize(torch.randn(CHUNK, d, device=device, generator=generator), dim=1) for _ in range(2))
    return one.to(dtype), normalize(COSINE * one + (1 - COSINE**2) ** 0.5 * noise, dim=1).to(dtype)


def walk(
    first: int, stop: int, d: int, device: torch.device, dtype: torch.dtype
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Pairs first..stop - 1 of the global batch, piece by piece: the number of the piece's first pair, image, text."""
    for number in range(first // CHUNK, -(-stop // CHUNK)):
        start = number * CHUNK
        part = slice(max(first - start, 0), min(stop - start, CHUNK))
        image, text = chunk(number, d, device, dtype)
        yield start + part.start, image[part], text[part]


def pairs(first: int, rows: int, d: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Pairs ``first`` to ``first + rows - 1`` of the global batch: image and text, (rows, d) each."""
    image, text = (torch.empty(rows, d, device=device, dtype=dtype) for _ in range(2))
    for at, some_image, some_text in walk(first, first + rows, d, device, dtype):
        part = slice(at - first, at - first + len(some_image))
        image[part], text[part] = some_image, some_text
    return image, text
