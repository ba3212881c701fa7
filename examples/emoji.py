"""Train a small CLIP from scratch on emoji: pictures, their names and their keywords in many languages.

    apt-get install fonts-noto-color-emoji unicode-cldr-core   # without root: apt-get download, dpkg -x, --share FOLDER
    pip install 'contrastile[torch,triton,verify]'
    python examples/emoji.py --batch 16384
    python examples/emoji.py --batch 1024 --samples 262144 --locales en --size 32 --width 16    # on a CPU

docs/tutorials/examples.md shows what comes out.
"""

from __future__ import annotations

import argparse
import functools
import io
import itertools
import math
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import numpy as np
import torch
from fontTools.ttLib import TTFont
from numpy.typing import NDArray
from PIL import Image
from shared import embed, options, recall, train
from torch import Tensor, nn
from torch.nn.functional import affine_grid, gelu, grid_sample, normalize

from contrastile import training

FONT = "fonts/truetype/noto/NotoColorEmoji.ttf"
CLDR = "unicode/cldr/common"
VARIATION = "\ufe0f"  # asks for the coloured picture; fonts leave it out of their ligatures
SKIN_TONES = "\U0001f3fb-\U0001f3ff"
GRAMS = 64  # of a text: words and parts of words
BUCKETS = 2**16


class Text(NamedTuple):
    """What a picture is called in a locale: its name, or its keywords."""

    text: str
    picture: int
    locale: str
    is_name: bool


@dataclass(frozen=True)
class Emoji:
    """n pictures and their texts.

    Attributes:
        sequences: the characters of each picture.
        bitmaps: each picture as a PNG file.
        texts: the numbers of their pictures are below n.
    """

    sequences: list[str]
    bitmaps: list[bytes]
    texts: list[Text]


def read_annotations(folder: Path, locales: list[str]) -> Iterator[tuple[str, str, str, bool]]:
    """Characters, text, locale and whether it is a name: all of CLDR's annotations."""
    for path in sorted(folder.glob("annotations*/*.xml")):
        if locales and path.stem not in locales:
            continue
        for entry in ElementTree.parse(path).iter("annotation"):
            if entry.text and "↑" not in entry.text:  # ↑↑↑: as in the parent locale
                text = entry.text.replace(" | ", ", ")
                yield entry.attrib["cp"], text, path.stem, entry.get("type") == "tts"


def glyphs(font: Any) -> tuple[dict[str, Any], dict[int, str], dict[tuple[str, ...], str]]:
    """A font's bitmaps by glyph, its glyphs by character, and the glyphs that stand for several."""
    ligatures: dict[tuple[str, ...], str] = {}
    for lookup in font["GSUB"].table.LookupList.Lookup:
        for table in lookup.SubTable:
            for first, found in getattr(table, "ligatures", {}).items():
                ligatures |= {(first, *x.Component): x.LigGlyph for x in found}
    return font["CBDT"].strikeData[0], font.getBestCmap(), ligatures


def read_emoji(share: Path, locales: list[str]) -> Emoji:
    """Every picture of the font that has a text in one of the locales; in any, where none is given."""
    bitmaps, characters, ligatures = glyphs(TTFont(share / FONT))
    numbers: dict[str, int] = {}
    sequences, texts = [], []
    for sequence, text, locale, is_name in read_annotations(share / CLDR, locales):
        parts = tuple(characters.get(ord(x), "") for x in sequence if x != VARIATION)
        glyph = parts[0] if len(parts) == 1 else ligatures.get(parts, "")
        if glyph not in bitmaps:
            continue
        if glyph not in numbers:
            numbers[glyph] = len(numbers)
            sequences.append(sequence)
        texts.append(Text(text, numbers[glyph], locale, is_name))
    return Emoji(sequences, [bitmaps[glyph].imageData for glyph in numbers], texts)


def pixels(bitmap: bytes, size: int) -> NDArray[np.uint8]:
    """A bitmap on white: (size, size, 3)."""
    glyph = Image.open(io.BytesIO(bitmap)).convert("RGBA")
    side = max(glyph.size)
    square = Image.new("RGBA", (side, side), "white")
    square.alpha_composite(glyph, ((side - glyph.width) // 2, (side - glyph.height) // 2))
    return np.asarray(square.convert("RGB").resize((size, size), Image.Resampling.BOX))


def split(sequence: str, locale: str) -> int:
    """Of a text: 0 to train on; 1 of a picture that is held out, in every skin tone; 2 held out of a known picture."""
    family = re.sub(f"[{SKIN_TONES}{VARIATION}]", "", sequence)
    if zlib.crc32(family.encode()) % 10 == 0:
        return 1
    return 2 if zlib.crc32((family + locale).encode()) % 20 == 0 else 0


@functools.cache
def word_grams(word: str) -> tuple[list[int], ...]:
    """A word, its parts of 3 and its parts of 2 characters, hashed to 1 .. BUCKETS - 1."""
    marked = f"<{word}>"
    parts = [marked], *([marked[i : i + n] for i in range(len(marked) - n + 1)] for n in (3, 2))
    return tuple([1 + zlib.crc32(part.encode()) % (BUCKETS - 1) for part in each] for each in parts)


def grams(texts: list[str]) -> Tensor:
    """Each text's words, then their parts, as many as fit, padded with 0: (len(texts), GRAMS) int32."""
    found = np.zeros((len(texts), GRAMS), np.int32)
    for row, text in zip(found, texts, strict=True):
        words = [word_grams(word) for word in re.findall(r"\w+", text.casefold()) or [text]]
        hashed = list(dict.fromkeys(gram for kind in range(3) for word in words for gram in word[kind]))[:GRAMS]
        row[: len(hashed)] = hashed
    return torch.from_numpy(found)


class Residual(nn.Module):
    """x + f(x), for a convolution over a picture."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(8, width)  # not BatchNorm: an embedding depends on its own sample alone
        self.first, self.second = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """(samples, width, h, w) -> the same shape."""
        change: Tensor = self.second(gelu(self.first(gelu(self.norm(x)))))
        return x + change


class Towers(nn.Module):
    """A convolutional network for pictures and a bag of character n-grams for texts."""

    def __init__(self, width: int, d: int) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width]
        stages = [nn.Conv2d(3, width, 4, stride=2, padding=1), Residual(width)]
        for here, there in itertools.pairwise(widths):
            stages += [nn.Conv2d(here, there, 4, stride=2, padding=1), Residual(there)]
        self.vision = nn.Sequential(*stages, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16 * width, d))
        self.bag = nn.EmbeddingBag(BUCKETS, d, mode="mean", padding_idx=0)
        nn.init.normal_(self.bag.weight, std=0.1)
        self.text = nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * d, d))
        self.log_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def encode_pictures(self, x: Tensor) -> Tensor:
        """(samples, 3, size, size) uint8 -> (samples, d) of unit length."""
        pictures = x.float() / 127.5 - 1
        return normalize(self.vision(augmented(pictures) if self.training else pictures), dim=1)

    def encode_texts(self, x: Tensor) -> Tensor:
        """(samples, GRAMS) -> (samples, d) of unit length."""
        if self.training:
            x = x * (torch.rand(x.shape, device=x.device) > 0.3)  # a typed word is less than a list of keywords
        words = self.bag(x)
        return normalize(words + self.text(words), dim=1)


def augmented(x: Tensor) -> Tensor:
    """Each picture a little moved, turned and scaled; the second pass draws the same numbers as the first."""
    angle, scale = (amount * (torch.rand(len(x), device=x.device) * 2 - 1) for amount in (0.2, 0.15))
    shift = 0.2 * (torch.rand(len(x), 2, device=x.device) * 2 - 1)
    cos, sin = (1 + scale) * angle.cos(), (1 + scale) * angle.sin()
    rows = torch.stack([cos, -sin, shift[:, 0]], dim=1), torch.stack([sin, cos, shift[:, 1]], dim=1)
    where = affine_grid(torch.stack(rows, dim=1), list(x.shape), align_corners=False)
    return grid_sample(x, where, padding_mode="border", align_corners=False)


class Pictures:
    """Picture and text: a task of ``shared.train``."""

    def __init__(self, options: argparse.Namespace) -> None:
        share = Path(options.share)
        self.stream = lambda x: training.stream(x, options.chunk, options.device)
        self.emoji = read_emoji(share, options.locales.split())
        texts = self.emoji.texts
        if not texts:
            raise SystemExit(f"--locales must name files of {share / CLDR}/annotations, got {options.locales!r}")
        several = len({text.locale for text in texts}) > 1
        kinds = [split(self.emoji.sequences[text.picture], text.locale) for text in texts]
        # with one locale nothing would be known of a picture whose name is held out
        kind = torch.tensor(kinds if several else [k % 2 for k in kinds])
        is_name = torch.tensor([text.is_name for text in texts])
        self.training = (kind == 0).nonzero()[:, 0]
        self.new_pictures, self.new_names = ((is_name & (kind == k)).nonzero()[:, 0] for k in (1, 2))
        self.pairs = len(self.training)
        self.picture_of = torch.tensor([text.picture for text in texts])
        self.texts = grams([text.text for text in texts])
        shown = np.stack([pixels(bitmap, options.size) for bitmap in self.emoji.bitmaps])
        self.pictures = torch.from_numpy(shown).permute(0, 3, 1, 2).contiguous()
        self.model = Towers(options.width, options.dim).to(options.device)
        self.encode = self.model.encode_pictures, self.model.encode_texts

    def batch(self, rows: Tensor) -> tuple[tuple[training.Stream, training.Stream], Tensor]:
        """The texts of one picture have one id: they are no negatives of each other."""
        rows = self.training[rows]
        ids = self.picture_of[rows]
        return (self.stream(self.pictures[ids]), self.stream(self.texts[rows])), ids.to(self.model.log_scale.device)

    def evaluate(self) -> dict[str, float]:
        """Recall of pictures by name: the new pictures among themselves, and all pictures by new names."""
        pictures = embed(self.model.encode_pictures, self.stream(self.pictures))
        device = pictures.device
        numbers, own = torch.unique(self.picture_of[self.new_pictures], return_inverse=True)
        names = embed(self.model.encode_texts, self.stream(self.texts[self.new_pictures]))
        found = recall(names, pictures[numbers.to(device)], own.to(device), "new pictures")
        if len(self.new_names):
            names = embed(self.model.encode_texts, self.stream(self.texts[self.new_names]))
            found |= recall(names, pictures, self.picture_of[self.new_names].to(device), "new names")
        return found


def main() -> list[dict[str, float]]:
    """Train; see --help. Without --locales all are read. The width is that of the first convolution."""
    setting = {"share": "/usr/share", "locales": "", "size": 64, "width": 64, "dim": 256}
    given = options(batch=16384, samples=2**23, lr=5e-4, chunk=2048, **setting)
    for path in (FONT, CLDR):
        if not Path(given.share, path).exists():
            raise SystemExit(
                f"{given.share}/{path} is missing: apt-get install fonts-noto-color-emoji unicode-cldr-core, or --share"
            )
    torch.manual_seed(0)
    return train(Pictures(given), given)


if __name__ == "__main__":
    main()
