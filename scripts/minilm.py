"""all-MiniLM-L6-v2 in plain torch: WordPiece, a six-layer BERT, mean pooling, unit length; all in float64.

Float64 keeps the features the same to the last float16 bit whatever the BLAS, thread count or batch.
"""

from __future__ import annotations

import json
import re
import unicodedata
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

MAX_TOKENS = 256  # the model's own max_seq_length, [CLS] and [SEP] included
MAX_WORD = 100  # a longer word is one [UNK]
BATCH = 64
_ASCII = re.compile("[a-z0-9]+|[^a-z0-9 ]")


def read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """Read the float32 tensors of a safetensors file as float64.

    Layout: header length as little-endian uint64, a JSON header of shapes and byte ranges, then the bytes.

    Raises:
        ValueError: a byte range does not fit its shape or the file.
    """
    blob = path.read_bytes()
    start = 8 + int.from_bytes(blob[:8], "little")
    header = json.loads(blob[8:start])
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__" or entry["dtype"] != "F32":
            continue
        first, last = entry["data_offsets"]
        values = np.frombuffer(blob[start + first : start + last], dtype="<f4")
        tensors[name] = torch.from_numpy(values.astype(np.float64).reshape(entry["shape"]))
    return tensors


class WordPiece:
    """The uncased BERT tokenizer: clean, lower-case, strip accents, split, then greedy longest match."""

    def __init__(self, vocabulary: Path) -> None:
        tokens = vocabulary.read_text(encoding="utf-8").splitlines()
        self.ids = {token: i for i, token in enumerate(tokens)}
        self.unknown, self.first, self.last = (self.ids[t] for t in ("[UNK]", "[CLS]", "[SEP]"))
        self._known: dict[str, list[int]] = {}

    def __call__(self, text: str) -> list[int]:
        """Token ids of `text` between [CLS] and [SEP].

        Raises:
            ValueError: the text is longer than the model reads; it is never cut silently.
        """
        # text of printable ASCII is words of letters and digits, and marks
        words = _ASCII.findall(text.lower()) if text.isascii() and text.isprintable() else _words(text)
        pieces: list[int] = []
        for word in words:
            if word not in self._known:
                self._known[word] = self._pieces(word)
            pieces += self._known[word]
        if len(pieces) + 2 > MAX_TOKENS:
            raise ValueError(f"a text must have at most {MAX_TOKENS - 2} tokens, got {len(pieces)}: shorten it")
        return [self.first, *pieces, self.last]

    def _pieces(self, word: str) -> list[int]:
        if len(word) > MAX_WORD:
            return [self.unknown]
        pieces, start = [], 0
        while start < len(word):
            prefix = "##" if start else ""
            for stop in range(len(word), start, -1):
                piece = self.ids.get(prefix + word[start:stop])
                if piece is not None:
                    break
            else:
                return [self.unknown]  # one unmatched piece makes the whole word unknown
            pieces.append(piece)
            start = stop
        return pieces


def _words(text: str) -> Iterator[str]:
    """Lower-case words, with each punctuation mark and each CJK ideograph a word of its own."""
    decomposed = unicodedata.normalize("NFD", "".join(_cleaned(text)).lower())
    word = ""
    for character in decomposed:
        if unicodedata.category(character) == "Mn":
            continue
        if not (character.isspace() or _is_a_word(character)):
            word += character
            continue
        if word:
            yield word
        word = ""
        if not character.isspace():
            yield character
    if word:
        yield word


def _cleaned(text: str) -> Iterator[str]:
    for character in text:
        if character in "\t\n\r":
            yield " "
        elif character != "\ufffd" and unicodedata.category(character)[0] != "C":
            yield character


def _is_a_word(character: str) -> bool:
    code = ord(character)
    ascii_mark = 33 <= code < 127 and not character.isalnum()
    return ascii_mark or unicodedata.category(character)[0] == "P" or _is_ideograph(code)


def _is_ideograph(code: int) -> bool:
    blocks = ((0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x2CEAF), (0x2F800, 0x2FA1F))
    return any(low <= code <= high for low, high in blocks)


class Encoder:
    """A sentence encoder read from a folder that holds config.json, vocab.txt and model.safetensors."""

    def __init__(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.layers: int = config["num_hidden_layers"]
        self.heads: int = config["num_attention_heads"]
        self.epsilon: float = config["layer_norm_eps"]
        self.weights = read_safetensors(folder / "model.safetensors")
        self.tokens = WordPiece(folder / "vocab.txt")

    def __call__(self, texts: Sequence[str]) -> torch.Tensor:
        """Unit features of the texts: (len(texts), 384) float64."""
        ids = [self.tokens(text) for text in texts]
        by_length: dict[int, list[int]] = {}
        for row, tokens in enumerate(ids):
            by_length.setdefault(len(tokens), []).append(row)
        features = torch.empty(len(ids), self.weights["embeddings.LayerNorm.bias"].numel(), dtype=torch.float64)
        # A batch holds texts of one length, so nothing is padded and attention needs no mask.
        for rows in by_length.values():
            for start in range(0, len(rows), BATCH):
                batch = rows[start : start + BATCH]
                features[batch] = self._features(torch.tensor([ids[row] for row in batch]))
        return features

    @torch.no_grad()
    def _features(self, ids: torch.Tensor) -> torch.Tensor:
        """Mean over the tokens of the last layer, scaled to unit length: (n, tokens) -> (n, 384)."""
        names = ("word_embeddings", "token_type_embeddings", "position_embeddings")
        word, kind, position = (self.weights[f"embeddings.{name}.weight"] for name in names)
        hidden = self._norm("embeddings.LayerNorm", word[ids] + kind[0] + position[: ids.shape[1]])
        for layer in range(self.layers):
            hidden = self._layer(f"encoder.layer.{layer}", hidden)
        return functional.normalize(hidden.mean(dim=1), dim=1)

    def _layer(self, name: str, hidden: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            self._split(self._linear(f"{name}.attention.self.{part}", hidden)) for part in ("query", "key", "value")
        )
        logits = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
        mixed = (logits.softmax(dim=-1) @ value).transpose(1, 2).flatten(start_dim=2)
        attended = self._linear(f"{name}.attention.output.dense", mixed)
        hidden = self._norm(f"{name}.attention.output.LayerNorm", hidden + attended)
        wide = functional.gelu(self._linear(f"{name}.intermediate.dense", hidden))
        return self._norm(f"{name}.output.LayerNorm", hidden + self._linear(f"{name}.output.dense", wide))

    def _split(self, hidden: torch.Tensor) -> torch.Tensor:
        """One head a slice: (n, tokens, width) -> (n, heads, tokens, width / heads)."""
        return hidden.reshape(*hidden.shape[:2], self.heads, -1).transpose(1, 2)

    def _linear(self, name: str, hidden: torch.Tensor) -> torch.Tensor:
        return functional.linear(hidden, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def _norm(self, name: str, hidden: torch.Tensor) -> torch.Tensor:
        weight, bias = self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]
        return functional.layer_norm(hidden, weight.shape, weight, bias, self.epsilon)
