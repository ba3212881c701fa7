"""Whole training steps under bfloat16: of two libraries' own loops, with their losses or ours, and of gradient caches.

    python benchmarks/training_steps.py open_clip --out docs/results/open_clip_DEVICE.json
    python benchmarks/training_steps.py sentence_transformers --out docs/results/sentence_transformers_DEVICE.json
    python benchmarks/training_steps.py caches --out docs/results/training_DEVICE.json

``open_clip``              its ``train_one_epoch`` and a ViT-B-32; needs open_clip_torch
``sentence_transformers``  its trainer and a BERT of MiniLM's shape; needs sentence-transformers and datasets
``caches``                 the same BERT in a loop of one's own; needs transformers, and the caches that are there

All need a GPU. Weights, images and texts are random: time and memory do not depend on them. The losses say that the
ways train alike.
"""

from __future__ import annotations

import argparse
import importlib
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from peers.stubs import install
from torch import Tensor

from contrastile import info_nce, nn, training
from contrastile.bench import plain
from contrastile.environment import measurement_environment
from contrastile.integrations.open_clip import ChunkedModel
from contrastile.reporting import one_line, write_json

CURVE = 1024
"""Pairs of the steps whose losses are compared."""
MINILM: dict[str, Any] = {"hidden_size": 384, "num_attention_heads": 12, "intermediate_size": 1536}
MINILM |= {"num_hidden_layers": 6, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SCALE, FIRST_WORD, VOCABULARY = 20.0, 1000, 30522  # ids below the first word's are marks, padding among them


class Batches(list[Any]):
    """Batches that a library's own loop takes as they are, and reads attributes of."""


def epoch(model: Any, batches: Any, pairs: int, loss: Any, optimiser: Any, parts: int = 1, **options: Any) -> None:
    """One step of open_clip's ``train_one_epoch`` over so many pairs, in batches of which ``parts`` are one step's."""
    loader: Any = Batches(batches)
    loader.num_batches, loader.num_samples = len(loader), pairs
    given: dict[str, Any] = dict.fromkeys(("distill", "horovod", "wandb", "grad_clip_norm")) | {"skip_scheduler": True}
    given |= {"accum_freq": parts, "batch_size": pairs // parts, "world_size": 1, "rank": 0, "local_rank": 0}
    given |= {"log_every_n_steps": 1, **options}
    data = {"train": SimpleNamespace(set_epoch=id, dataloader=loader)}
    loop = importlib.import_module("open_clip_train.train")
    loop.train_one_epoch(model, data, loss, 0, optimiser, None, None, None, SimpleNamespace(**given))


@contextmanager
def timed(seconds: list[float]) -> Iterator[None]:
    """Note how long what is inside takes; the peak of memory is its own."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    yield
    torch.cuda.synchronize()
    seconds.append(time.perf_counter() - begin)


def pairs(b: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random images and texts."""
    draw = torch.Generator("cuda").manual_seed(seed)
    images = torch.randn(b, 3, 224, 224, device="cuda", dtype=torch.bfloat16, generator=draw)
    return images, torch.randint(1, 49408, (b, 77), device="cuda", generator=draw)


def open_clip(way: str, b: int, steps: int, chunk: int) -> dict[str, Any]:
    """Seconds a step, the first one apart, peak memory, and the losses of so many steps of b pairs."""
    library = importlib.import_module("open_clip")
    torch.manual_seed(0)
    model = library.create_model("ViT-B-32", precision="amp_bf16", device="cuda", output_dict=True)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4)
    called = ChunkedModel(model, chunk) if way.endswith("ChunkedModel") else model
    loss = nn.ClipLoss() if way.startswith("contrastile") else library.ClipLoss()
    parts = b // chunk if way.endswith("freq") else 1
    seconds, values = list[float](), []

    def watched(**outputs: Any) -> Any:
        found = loss(**outputs)
        values.append(found["contrastive_loss"].detach())
        return found

    for step in range(steps):
        images, texts = pairs(b, step % 4)
        batches = zip(images.chunk(parts), texts.chunk(parts), strict=True)
        with timed(seconds):
            epoch(called, batches, b, watched, optimiser, parts, device="cuda", precision="amp_bf16")
    rest = torch.cuda.max_memory_allocated() - images.nbytes - texts.nbytes
    found = {"seconds": round(statistics.median(seconds[1:]), 3), "peak GiB beside the images": round(rest / 2**30, 2)}
    return found | {"losses": [round(float(x), 5) for x in values[::parts]]}


def sentence_transformers(way: str, b: int, steps: int, chunk: int) -> dict[str, Any]:
    """The same, of pairs of 32 words, half of which they share."""
    library, transformers = map(importlib.import_module, ("sentence_transformers", "transformers"))
    parts = importlib.import_module("sentence_transformers.sentence_transformer.modules")
    ours = way.startswith("contrastile")
    theirs = "sentence_transformers.sentence_transformer.losses"
    losses = importlib.import_module("contrastile.integrations.sentence_transformers" if ours else theirs)
    words, draw = [f"w{i}" for i in range(20000)], random.Random(0)
    drawn = [draw.choices(words, k=48) for _ in range(b)]
    texts = {"anchor": [" ".join(x[:32]) for x in drawn], "positive": [" ".join(x[16:]) for x in drawn]}
    ends: list[float] = []

    class Clock(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_end(self, *given: Any, **more: Any) -> None:
            torch.cuda.synchronize()
            ends.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]))
        transformers.BertTokenizerFast(vocab=f"{folder}/vocab.txt").save_pretrained(folder)
        torch.manual_seed(0)
        config = transformers.BertConfig(vocab_size=len(words) + 5, **MINILM)
        transformers.BertModel(config).save_pretrained(folder)
        width = parts.Pooling(MINILM["hidden_size"])
        model = library.SentenceTransformer(modules=[parts.Transformer(folder), width], device="cuda")
        cached = {"mini_batch_size": chunk} if "Cached" in way else {}
        loss = getattr(losses, way.rpartition(" ")[2])(model, **cached)
        given = library.SentenceTransformerTrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=b,
            max_steps=steps,
            learning_rate=2e-4,
            bf16=True,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        # named: to make a name it pickles the table, which some versions of pyarrow refuse
        table = importlib.import_module("pyarrow").table(texts)
        data = importlib.import_module("datasets").Dataset(table, fingerprint="pairs")
        trainer = library.SentenceTransformerTrainer(model, given, train_dataset=data, loss=loss, callbacks=[Clock()])
        torch.cuda.reset_peak_memory_stats()
        trainer.train()
    seconds = [after - before for before, after in pairwise(ends)]
    found = {"seconds": round(statistics.median(seconds), 3)}
    found["peak GiB"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    return found | {"losses": [round(x["loss"], 5) for x in trainer.state.log_history if "loss" in x]}


def cast(x: Tensor) -> Any:
    """Autocast to bfloat16."""
    return torch.autocast(x.device.type, torch.bfloat16)


class Mean(torch.nn.Module):
    """A BERT's hidden states under its own autocast, their mean over the tokens, unit length."""

    def __init__(self, bert: torch.nn.Module) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, ids: Tensor) -> Tensor:
        """(samples, tokens) ids -> (samples, width) float32."""
        with cast(ids):
            hidden = self.bert(ids).last_hidden_state
        return torch.nn.functional.normalize(hidden.float().mean(dim=1), dim=1)


def cached(way: str, encoder: torch.nn.Module, chunk: int, pair: Tensor) -> Tensor:
    """Add the gradients of InfoNCE under autocast by one of the caches; (queries, keys) ids -> the loss.

    Raises:
        ImportError: the cache's package is not installed.
    """

    def matrix(query: Tensor, key: Tensor) -> Any:
        # GradCache leaves the loss to its caller: by the matrix of logits, as its own loss has it
        with cast(query):
            return plain.info_nce(query, key, SCALE)

    if way == "GradCache":
        # its files import each other as grad_cache, and are installed as gradcache
        sys.modules.setdefault("grad_cache", importlib.import_module("gradcache"))
        made = importlib.import_module("gradcache.grad_cache").GradCache([encoder, encoder], chunk, matrix)
        found: Tensor = made(*pair)
        return found
    if way.startswith("sentence-transformers"):
        module: Any = torch.nn.Module()
        module.encoder = encoder
        module.forward = lambda features, **_: {**features, "sentence_embedding": encoder(features["input_ids"])}
        library = importlib.import_module("sentence_transformers")
        model = library.SentenceTransformer(modules=[module], device=str(pair.device))
        losses = importlib.import_module("sentence_transformers.sentence_transformer.losses")
        criterion = losses.CachedMultipleNegativesRankingLoss(model, scale=SCALE, mini_batch_size=chunk)
        with cast(pair):
            loss: Tensor = criterion([{"input_ids": ids} for ids in pair], None)
    elif way.startswith("PyTorch"):
        loss = matrix(*map(encoder, pair))
    else:
        with cast(pair):
            loss = training.Cached(info_nce, (encoder, encoder), chunk)(*pair, scale=SCALE)
    loss.backward()
    return loss.detach()


def caches(way: str, b: int, steps: int, chunk: int) -> dict[str, Any]:
    """The same, of pairs of 32 random words."""
    transformers = importlib.import_module("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=VOCABULARY, pad_token_id=None, **MINILM)
    encoder = Mean(transformers.BertModel(config, add_pooling_layer=False)).cuda()
    optimiser = torch.optim.AdamW(encoder.parameters(), lr=1e-4)
    seconds, losses = list[float](), list[Tensor]()
    for step in range(steps):
        draw = torch.Generator("cuda").manual_seed(step % 4)
        pair = torch.randint(FIRST_WORD, VOCABULARY, (2, b, 32), device="cuda", generator=draw)
        with timed(seconds):
            optimiser.zero_grad()
            losses.append(cached(way, encoder, chunk, pair))
            optimiser.step()
    found = {"seconds": round(statistics.median(seconds[1:]), 3)}
    found["peak GiB"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    return found | {"losses": [round(float(x), 5) for x in losses]}


Trained = Callable[[str, int, int, int], dict[str, Any]]
LIBRARIES: dict[str, tuple[Trained, str, tuple[int, ...], int, tuple[str, ...]]] = {
    "open_clip": (
        open_clip,
        "ViT-B-32, amp_bf16, AdamW",
        (2048, 16384, 65536),
        512,
        ("open_clip", "open_clip, --accum-freq", "contrastile, ClipLoss", "contrastile, ClipLoss and ChunkedModel"),
    ),
    "sentence_transformers": (
        sentence_transformers,
        "BERT of 6 layers and 384 dimensions, its trainer with bf16",
        (4096, 16384, 65536),
        1024,
        (
            "sentence-transformers, MultipleNegativesRankingLoss",
            "sentence-transformers, CachedMultipleNegativesRankingLoss",
            "contrastile, MultipleNegativesRankingLoss",
            "contrastile, CachedMultipleNegativesRankingLoss",
        ),
    ),
    "caches": (
        caches,
        "BERT of 6 layers and 384 dimensions under autocast, AdamW",
        (8192, 65536),
        8192,
        (
            "contrastile, Cached",
            "sentence-transformers, CachedMultipleNegativesRankingLoss",
            "GradCache",
            "PyTorch, no cache",
        ),
    ),
}
"""By name: what trains, the model, batches, pairs of a chunk, and the ways."""


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", choices=LIBRARIES)
    parser.add_argument("--out", type=Path, required=True, help="where the record goes, as JSON")
    parser.add_argument("--batches", type=int, nargs="+", metavar="B")
    parser.add_argument("--chunk", type=int, metavar="N", help="pairs that are encoded at a time")
    given = parser.parse_args()
    trained, model, batches, chunk, ways = LIBRARIES[given.library]
    install()
    rows: list[dict[str, Any]] = []
    facts = {**measurement_environment("cuda"), "model": model, "rows": rows}
    # the curves of all ways, and then what fits
    for b, steps in ((CURVE, 16), *((b, 4) for b in given.batches or batches)):
        for way in ways:
            row = {"way": way, "pairs": b, "chunk": min(given.chunk or chunk, b // 4)}
            try:
                row |= trained(way, b, steps, row["chunk"])
            except (ImportError, torch.OutOfMemoryError) as error:
                row["skipped"] = one_line(error)[:200]
            rows.append(row)
            print(row, flush=True)
            torch.cuda.empty_cache()
            write_json(given.out, facts)


if __name__ == "__main__":
    main()
