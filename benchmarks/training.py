"""Times an optimizer step of a MiniLM at a large batch: ``training.cached_step`` beside the gradient caches of others.

All train the same encoder on the same random tokens, encode under the encoder's own autocast, compute InfoNCE from
queries to keys under the same autocast, and take the same AdamW step. sentence-transformers and GradCache are optional:
one that cannot be imported, or fails, is recorded with the reason.
"""

from __future__ import annotations

import argparse
import gc
import importlib
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
Row = dict[str, Any]
SCALE = 20.0
VOCABULARY, FIRST_WORD = 30522, 1000  # ids below are marks, padding among them
MINILM = {"num_hidden_layers": 6, "hidden_size": 384, "num_attention_heads": 12, "intermediate_size": 1536}
Inputs = tuple[Tensor, Tensor]
Step = Callable[[Inputs, int], Tensor]
"""(queries, keys), samples of a chunk -> the loss; adds to every parameter's ``.grad``."""


def cast(x: Tensor) -> Any:
    """Autocast to bfloat16."""
    return torch.autocast(x.device.type, torch.bfloat16)


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

    def forward(self, ids: Tensor) -> Tensor:
        """(samples, tokens) ids -> (samples, width) float32."""
        with cast(ids):
            found = self.hidden(ids)
        hidden = getattr(found, "last_hidden_state", found)
        return F.normalize(hidden.float().mean(dim=1), dim=1)


def ours(encoder: Encoder) -> Step:
    """``cached_step`` under autocast."""

    def step(inputs: Inputs, chunk: int) -> Tensor:
        with cast(inputs[0]):
            found: Tensor = training.cached_step(
                (encoder, encoder), inputs, contrastile.info_nce, scale=SCALE, chunk=chunk
            )
        return found

    return step


def sentence_transformers(encoder: Encoder) -> Step:
    """Its CachedMultipleNegativesRankingLoss, under autocast as its trainer has it."""
    package = importlib.import_module("sentence_transformers")
    losses = importlib.import_module("sentence_transformers.sentence_transformer.losses")
    # the encoder as one of its modules
    module = nn.Module()
    module.encoder = encoder
    module.forward = lambda features, **_: {**features, "sentence_embedding": encoder(features["input_ids"])}
    device = str(next(encoder.parameters()).device)
    model = package.SentenceTransformer(modules=[module], device=device)

    def step(inputs: Inputs, chunk: int) -> Tensor:
        criterion = losses.CachedMultipleNegativesRankingLoss(model, scale=SCALE, mini_batch_size=chunk)
        with cast(inputs[0]):
            loss: Tensor = criterion([{"input_ids": ids} for ids in inputs], None)
        loss.backward()
        return loss.detach()

    return step


def matrix(query: Tensor, key: Tensor) -> Tensor:
    """The loss by the matrix of logits."""
    with cast(query):
        found: Tensor = info_nce(query, key, SCALE)
    return found


def grad_cache(encoder: Encoder) -> Step:
    """The GradCache package, which leaves the loss to its caller: the matrix of logits, as its own loss has it."""
    # its files import each other as grad_cache, and are installed as gradcache
    sys.modules.setdefault("grad_cache", importlib.import_module("gradcache"))
    package = importlib.import_module("gradcache.grad_cache")
    return lambda inputs, chunk: package.GradCache([encoder, encoder], chunk, matrix)(*inputs)


def plain(encoder: Encoder) -> Step:
    """No cache: the activations of the whole batch, whatever the chunk."""

    def step(inputs: Inputs, chunk: int) -> Tensor:
        loss = matrix(encoder(inputs[0]), encoder(inputs[1]))
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
        self.data: dict[str, Any] = {"environment": environment, "settings": settings}

    def keep(self, part: str, row: Row) -> None:
        """Print a row, add it, and write the file."""
        print(f"{part}: {row}", flush=True)
        self.data.setdefault(part, []).append(row)
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

    def all(self) -> None:
        """Everything; competitors take turns, each with every chunk, and the chunk of its fastest step counts."""
        batch, chunks = self.given.batch, self.given.chunks
        random = torch.randn(2, batch, self.encoder.width, device=self.ranks.device)
        leaves = [F.normalize(x, dim=1).requires_grad_() for x in random]

        def alone() -> Any:
            with cast(random):
                return torch.autograd.grad(contrastile.info_nce(leaves[0], leaves[1], SCALE), leaves)

        # the first ones compile, and are captured in a graph
        taken = [seconds(alone, self.ranks.kind) for _ in range(8)][3:]
        self.keep("loss", {"b": batch, "d": self.encoder.width, "s": statistics.median(taken)})
        steps = dict[str, Step]()
        for name, make in CACHES.items():
            try:
                steps[name] = make(self.encoder)
                # compiles, loads, allocates
                self.once(steps[name], max(batch // 8, *chunks), max(chunks))
            except Exception as error:  # other people's modules may raise anything on import
                self.keep("steps", {"name": name, "status": "skip", "reason": one_line(error)[:200]})
        rows: dict[tuple[str, int], list[Row]] = {(name, chunk): [] for name in steps for chunk in chunks}
        for _ in range(self.given.rounds):
            for (name, chunk), found in rows.items():
                found.append(self.once(steps[name], batch, chunk))
        for name in steps:
            here = [found for (whose, _), found in rows.items() if whose == name]
            good = [found for found in here if all(row["status"] == "measured" for row in found)]
            timed = {statistics.median(row["s"] for row in found): found for found in good}
            s = min(timed, default=0.0)
            samples = [row["s"] for row in timed.get(s, [])]
            more = {"s": s, "pairs_per_second": batch / s, "samples": samples} if good else {}
            self.keep("steps", {"name": name, **timed.get(s, here[0])[-1], **more})
        # without a cache, at the largest size that fits
        b, step = min(self.given.plain, batch), plain(self.encoder)
        while self.once(step, b, b)["status"] == "skip" and b > 1:
            b //= 2
        row = self.once(step, b, b)
        self.keep("steps", {"name": PLAIN, **row, "pairs_per_second": b / row.get("s", float("inf"))})
        # ours over the batch, all in chunks of one size
        while batch >= min(chunks):
            self.keep("memory", self.once(ours(self.encoder), batch, min(chunks)))
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
