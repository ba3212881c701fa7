"""Times an optimizer step of a MiniLM at a large batch: ``training.cached_step`` beside the gradient caches of others.

All train the same encoder on the same random tokens, encode under the encoder's own autocast, compute InfoNCE from
queries to keys under the same autocast, and take the same AdamW step. sentence-transformers and GradCache are optional:
one that cannot be imported, or fails, is recorded with the reason.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import math
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402, N812
from harness import Ranks, facts, write  # noqa: E402
from torch import Tensor, nn  # noqa: E402

import contrastile  # noqa: E402
from contrastile import training  # noqa: E402
from contrastile.bench.plain import info_nce  # noqa: E402
from contrastile.bench.sweep import seconds  # noqa: E402
from contrastile.reporting import one_line  # noqa: E402

PACKAGES = ("transformers", "sentence-transformers", "gradcache")
PARTS = ("loss", "chunks", "steps", "memory")
Row = dict[str, Any]
SCALE = 20.0
VOCABULARY, FIRST_WORD = 30522, 1000  # ids below are marks, padding among them
MINILM = {"num_hidden_layers": 6, "hidden_size": 384, "num_attention_heads": 12, "intermediate_size": 1536}
Inputs = tuple[Tensor, Tensor]
Step = Callable[[Inputs, int], Tensor]
"""(queries, keys), samples of a chunk -> the loss; adds to every parameter's ``.grad``."""


class Encoder(nn.Module):
    """Token ids to embeddings: hidden states under autocast, their mean over the tokens, unit length.

    Args:
        tiny: a linear map of each word in place of a BERT of MiniLM's shape. Both have random weights of a fixed seed,
            and no dropout.
    """

    def __init__(self, *, tiny: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.width = 16 if tiny else MINILM["hidden_size"]
        if tiny:
            self.hidden: Any = nn.Sequential(nn.Embedding(VOCABULARY, self.width), nn.Linear(self.width, self.width))
        else:
            transformers = importlib.import_module("transformers")
            more = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "pad_token_id": None}
            config = transformers.BertConfig(vocab_size=VOCABULARY, **MINILM, **more)
            self.hidden = transformers.BertModel(config, add_pooling_layer=False)

    @property
    def device(self) -> torch.device:
        """Of the parameters."""
        return next(self.parameters()).device

    def cast(self) -> Any:
        """Autocast to bfloat16."""
        return torch.autocast(self.device.type, torch.bfloat16)

    def forward(self, ids: Tensor) -> Tensor:
        """(samples, tokens) ids -> (samples, width) float32."""
        with self.cast():
            found = self.hidden(ids)
        hidden = getattr(found, "last_hidden_state", found)
        return F.normalize(hidden.float().mean(dim=1), dim=1)


class Features(nn.Module):
    """The encoder as a module of sentence-transformers."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, features: dict[str, Any], **_: Any) -> dict[str, Any]:
        """The features and their embedding."""
        return {**features, "sentence_embedding": self.encoder(features["input_ids"])}


def ours(encoder: Encoder) -> Step:
    """``cached_step`` under autocast."""

    def step(inputs: Inputs, chunk: int) -> Tensor:
        towers = encoder, encoder
        with encoder.cast():
            found: Tensor = training.cached_step(towers, inputs, contrastile.info_nce, scale=SCALE, chunk=chunk)
        return found

    return step


def sentence_transformers(encoder: Encoder) -> Step:
    """Its CachedMultipleNegativesRankingLoss, under autocast as its trainer has it."""
    package = importlib.import_module("sentence_transformers")
    losses = importlib.import_module("sentence_transformers.sentence_transformer.losses")
    model = package.SentenceTransformer(modules=[Features(encoder)], device=str(encoder.device))

    def step(inputs: Inputs, chunk: int) -> Tensor:
        criterion = losses.CachedMultipleNegativesRankingLoss(model, scale=SCALE, mini_batch_size=chunk)
        with encoder.cast():
            loss = criterion([{"input_ids": ids} for ids in inputs], None)
        loss.backward()
        found: Tensor = loss.detach()
        return found

    return step


def grad_cache(encoder: Encoder) -> Step:
    """The GradCache package, which leaves the loss to its caller: the matrix of logits, as its own loss has it."""
    # its files import each other as grad_cache, and are installed as gradcache
    sys.modules.setdefault("grad_cache", importlib.import_module("gradcache"))
    package = importlib.import_module("gradcache.grad_cache")

    def loss(query: Tensor, key: Tensor) -> Tensor:
        with encoder.cast():
            found: Tensor = info_nce(query, key, SCALE)
        return found

    return lambda inputs, chunk: package.GradCache([encoder, encoder], chunk, loss)(*inputs)


def plain(encoder: Encoder) -> Step:
    """No cache: the activations of the whole batch, whatever the chunk."""

    def step(inputs: Inputs, chunk: int) -> Tensor:
        features = [encoder(ids) for ids in inputs]
        with encoder.cast():
            loss = info_nce(features[0], features[1], SCALE)
        loss.backward()
        return loss.detach()

    return step


OURS, PLAIN = "contrastile, cached_step", "PyTorch, no cache"
CACHES: dict[str, Callable[[Encoder], Step]] = {
    OURS: ours,
    "sentence-transformers, CachedMultipleNegativesRankingLoss": sentence_transformers,
    "GradCache": grad_cache,
}
"""Makes a step of an encoder; raises what the import of the package raises."""


class Run:
    """One machine's measurements; ``data`` is the record."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given, self.ranks = given, Ranks.join(given.device)
        self.encoder = Encoder(tiny=given.smoke).to(self.ranks.device)
        # a rate of 0 is the same work, and leaves everybody the same weights
        self.optimiser = torch.optim.AdamW(self.encoder.parameters(), lr=0.0)
        shape, generator = (2, given.batch, given.tokens), torch.Generator().manual_seed(1)
        self.ids = torch.randint(FIRST_WORD, VOCABULARY, shape, generator=generator).to(self.ranks.device)
        settings = {name: value for name, value in vars(given).items() if name not in ("out", "commit", "device")}
        settings |= {"scale": SCALE, "autocast": "bfloat16"}
        environment = facts(self.ranks, given.commit, PACKAGES)
        self.data: dict[str, Any] = {"environment": environment, "settings": settings, **{part: [] for part in PARTS}}

    def keep(self, part: str, row: Row) -> None:
        """Print a row, add it, and write the file."""
        print(f"{part}: {row}", flush=True)
        self.data[part].append(row)
        write(self.given.out, self.data)

    def once(self, step: Step, b: int, chunk: int) -> Row:
        """Seconds, peak memory and loss of one optimizer step of the first b pairs; or why there are none."""
        cuda, losses = self.ranks.kind == "cuda", []

        def call() -> None:
            losses.append(step((self.ids[0, :b], self.ids[1, :b]), chunk))
            self.optimiser.step()
            self.optimiser.zero_grad()

        row: Row = {"b": b, "chunk": chunk}
        gc.collect()
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        try:
            row |= {"status": "measured", "s": seconds(call, self.ranks.kind), "loss": losses[0].item()}
            return row | {"peak_bytes": torch.cuda.max_memory_allocated() if cuda else None}
        except Exception as error:  # other people's code may raise anything
            row |= {"status": "skip", "reason": one_line(error)[:200]}
        self.optimiser.zero_grad()
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()
        return row

    def loss_alone(self, b: int) -> None:
        """``info_nce`` forward and backward on features of the batch."""
        random = torch.randn(2, b, self.encoder.width, device=self.ranks.device)
        leaves = [F.normalize(x, dim=1).requires_grad_() for x in random]

        def call() -> Any:
            with self.encoder.cast():
                return torch.autograd.grad(contrastile.info_nce(leaves[0], leaves[1], SCALE), leaves)

        # the first ones compile, and are captured in a graph
        taken = [seconds(call, self.ranks.kind) for _ in range(8)][3:]
        self.keep("loss", {"b": b, "d": self.encoder.width, "s": statistics.median(taken)})

    def best_chunk(self, name: str, step: Step) -> Row:
        """The step of the smallest chunk within 2 % of the fastest, at an eighth of the batch; or a skip."""
        chunks = self.given.chunks
        b = max(self.given.batch // 8, max(chunks))
        self.once(step, b, max(chunks))  # compiles, loads, allocates
        rows = [self.once(step, b, chunk) for chunk in chunks]
        for row in rows:
            self.keep("chunks", {"name": name, **row})
        good = [row for row in rows if row["status"] == "measured"]
        fastest = min((row["s"] for row in good), default=0.0)
        return next((row for row in good if row["s"] <= 1.02 * fastest), rows[0])

    def all(self) -> None:
        """Everything; competitors take turns."""
        batch, smallest = self.given.batch, min(self.given.chunks)
        self.loss_alone(batch)
        steps, rows = dict[str, Step](), dict[str, Row]()
        for name, make in CACHES.items():
            try:
                steps[name] = make(self.encoder)
                rows[name] = self.best_chunk(name, steps[name])
            except Exception as error:  # other people's modules may raise anything on import
                rows[name] = {"status": "skip", "reason": one_line(error)[:200]}
        samples: dict[str, list[float]] = {name: [] for name, row in rows.items() if row["status"] == "measured"}
        for _ in range(self.given.rounds):
            for name, taken in samples.items():
                row = self.once(steps[name], batch, rows[name]["chunk"])
                if row["status"] == "measured":
                    taken.append(row["s"])
                    middle = statistics.median(taken)
                    row |= {"s": middle, "pairs_per_second": batch / middle, "samples": taken}
                if row["status"] == "measured" or not taken:
                    rows[name] = row
        # without a cache, at the largest size that fits
        b, step = min(self.given.plain, batch), plain(self.encoder)
        while self.once(step, b, b)["status"] == "skip" and b > 1:
            b //= 2
        row = self.once(step, b, b)
        rows[PLAIN] = row | {"pairs_per_second": b / row.get("s", math.inf)}
        for name, row in rows.items():
            self.keep("steps", {"name": name, **row})
        # ours over the batch, all in chunks of one size
        while batch >= smallest:
            self.keep("memory", self.once(ours(self.encoder), batch, smallest))
            batch //= 4


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--batch", type=int, default=65536, help="pairs of the optimizer step (%(default)s)")
    add("--tokens", type=int, default=32, help="of each text (%(default)s)")
    add("--chunks", type=int, nargs="+", default=[1024, 2048, 4096, 8192], help="of which each takes its best")
    add("--plain", type=int, default=8192, help="pairs without a cache, or half as many, ... (%(default)s)")
    add("--rounds", type=int, default=3, help="optimizer steps of each (%(default)s)")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--smoke", action="store_true", help="a tiny encoder, 64 pairs, chunks of 8 and 16: the numbers mean nothing")
    add("--commit", help="what is measured, where there is no checkout")
    add("--out", type=Path, help="the JSON that it writes")
    given = parser.parse_args()
    if given.smoke:
        given.batch, given.chunks, given.rounds = 64, [8, 16], 2
    Run(given).all()
    return 0


if __name__ == "__main__":
    sys.exit(main())
