"""Whole steps of two libraries' own training loops under bfloat16, with their losses or ours.

    python benchmarks/training_steps.py open_clip --out docs/results/open_clip_DEVICE.json
    python benchmarks/training_steps.py sentence_transformers --out docs/results/sentence_transformers_DEVICE.json

``open_clip``              its ``train_one_epoch`` and a ViT-B-32; needs open_clip_torch
``sentence_transformers``  its trainer and a BERT of MiniLM's shape; needs sentence-transformers and datasets

Both need a GPU. Weights, images and texts are random: time and memory do not depend on them. The losses say that the
ways train alike.
"""

from __future__ import annotations

import argparse
import importlib
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from peers.caches import MINILM
from peers.stubs import install

from contrastile import nn
from contrastile.environment import measurement_environment
from contrastile.integrations.open_clip import ChunkedModel
from contrastile.reporting import write_json

CURVE = 1024
"""Pairs of the steps whose losses are compared."""


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
    seconds, values = [], []

    def watched(**outputs: Any) -> Any:
        found = loss(**outputs)
        values.append(found["contrastive_loss"].detach())
        return found

    for step in range(steps):
        images, texts = pairs(b, step % 4)
        batches = zip(images.chunk(parts), texts.chunk(parts), strict=True)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        epoch(called, batches, b, watched, optimiser, parts, device="cuda", precision="amp_bf16")
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
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
        no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        torch.manual_seed(0)
        config = transformers.BertConfig(vocab_size=len(words) + 5, **MINILM, **no_dropout)
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
}
"""By name: what trains, the model, batches, pairs of a chunk, and the ways."""


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", choices=LIBRARIES)
    parser.add_argument("--out", type=Path, required=True, help="where the record goes, as JSON")
    parser.add_argument("--batches", type=int, nargs="+", metavar="B")
    given = parser.parse_args()
    trained, model, batches, chunk, ways = LIBRARIES[given.library]
    install()
    rows: list[dict[str, Any]] = []
    facts = {**measurement_environment("cuda"), "model": model, "rows": rows}
    # the curves of all ways, and then what fits
    for b, steps in ((CURVE, 16), *((b, 4) for b in given.batches or batches)):
        for way in ways:
            row = {"way": way, "pairs": b, "chunk": min(chunk, b // 4)}
            try:
                row |= trained(way, b, steps, row["chunk"])
            except torch.OutOfMemoryError:
                row["skipped"] = "out of memory"
            rows.append(row)
            print(row, flush=True)
            torch.cuda.empty_cache()
            write_json(given.out, facts)


if __name__ == "__main__":
    main()
