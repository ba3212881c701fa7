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
    """Batches for a library's own loop, which also reads attributes of the list."""


def epoch(model: Any, batches: Any, pairs: int, loss: Any, optimizer: Any, parts: int = 1, **options: Any) -> None:
    """One step of open_clip's ``train_one_epoch`` over so many pairs; ``parts`` batches make a step."""
    loader: Any = Batches(batches)
    loader.num_batches, loader.num_samples = len(loader), pairs
    args: dict[str, Any] = dict.fromkeys(("distill", "horovod", "wandb", "grad_clip_norm")) | {"skip_scheduler": True}
    args |= {"accum_freq": parts, "batch_size": pairs // parts, "world_size": 1, "rank": 0, "local_rank": 0}
    args |= {"log_every_n_steps": 1, **options}
    data = {"train": SimpleNamespace(set_epoch=id, dataloader=loader)}
    train_module = importlib.import_module("open_clip_train.train")
    train_module.train_one_epoch(model, data, loss, 0, optimizer, None, None, None, SimpleNamespace(**args))


@contextmanager
def time_block(seconds: list[float]) -> Iterator[None]:
    """Append the seconds of the block; reset the peak of memory at its start."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    yield
    torch.cuda.synchronize()
    seconds.append(time.perf_counter() - start)


def pairs(b: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random images and texts."""
    generator = torch.Generator("cuda").manual_seed(seed)
    images = torch.randn(b, 3, 224, 224, device="cuda", dtype=torch.bfloat16, generator=generator)
    return images, torch.randint(1, 49408, (b, 77), device="cuda", generator=generator)


def open_clip(way: str, b: int, steps: int, chunk: int) -> dict[str, Any]:
    """Seconds of a step (the first one excluded), peak memory, and the losses, of so many steps of b pairs."""
    library = importlib.import_module("open_clip")
    torch.manual_seed(0)
    model = library.create_model("ViT-B-32", precision="amp_bf16", device="cuda", output_dict=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    wrapped = ChunkedModel(model, chunk) if way.endswith("ChunkedModel") else model
    loss = nn.ClipLoss() if way.startswith("contrastile") else library.ClipLoss()
    parts = b // chunk if way.endswith("freq") else 1
    seconds, losses = list[float](), []

    def recorded_loss(**outputs: Any) -> Any:
        loss_terms = loss(**outputs)
        losses.append(loss_terms["contrastive_loss"].detach())
        return loss_terms

    for step in range(steps):
        images, texts = pairs(b, step % 4)
        batches = zip(images.chunk(parts), texts.chunk(parts), strict=True)
        with time_block(seconds):
            epoch(wrapped, batches, b, recorded_loss, optimizer, parts, device="cuda", precision="amp_bf16")
    peak = torch.cuda.max_memory_allocated() - images.nbytes - texts.nbytes
    record = {"seconds": round(statistics.median(seconds[1:]), 3), "peak GiB beside the images": round(peak / 2**30, 2)}
    return record | {"losses": [round(float(x), 5) for x in losses[::parts]]}


def sentence_transformers(way: str, b: int, steps: int, chunk: int) -> dict[str, Any]:
    """The same for pairs of texts of 32 words that share half of their words."""
    library, transformers = map(importlib.import_module, ("sentence_transformers", "transformers"))
    modules = importlib.import_module("sentence_transformers.sentence_transformer.modules")
    is_ours = way.startswith("contrastile")
    library_module = "sentence_transformers.sentence_transformer.losses"
    losses = importlib.import_module("contrastile.integrations.sentence_transformers" if is_ours else library_module)
    words, generator = [f"w{i}" for i in range(20000)], random.Random(0)
    samples = [generator.choices(words, k=48) for _ in range(b)]
    texts = {"anchor": [" ".join(x[:32]) for x in samples], "positive": [" ".join(x[16:]) for x in samples]}
    end_times: list[float] = []

    class Clock(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            torch.cuda.synchronize()
            end_times.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]))
        transformers.BertTokenizerFast(vocab=f"{folder}/vocab.txt").save_pretrained(folder)
        torch.manual_seed(0)
        config = transformers.BertConfig(vocab_size=len(words) + 5, **MINILM)
        transformers.BertModel(config).save_pretrained(folder)
        pooling = modules.Pooling(MINILM["hidden_size"])
        model = library.SentenceTransformer(modules=[modules.Transformer(folder), pooling], device="cuda")
        options = {"mini_batch_size": chunk} if "Cached" in way else {}
        loss = getattr(losses, way.rpartition(" ")[2])(model, **options)
        args = library.SentenceTransformerTrainingArguments(
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
        # give a fingerprint, because datasets would pickle the table for one, which some versions of pyarrow refuse
        table = importlib.import_module("pyarrow").table(texts)
        data = importlib.import_module("datasets").Dataset(table, fingerprint="pairs")
        trainer = library.SentenceTransformerTrainer(model, args, train_dataset=data, loss=loss, callbacks=[Clock()])
        torch.cuda.reset_peak_memory_stats()
        trainer.train()
    seconds = [after - before for before, after in pairwise(end_times)]
    record = {"seconds": round(statistics.median(seconds), 3)}
    record["peak GiB"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    return record | {"losses": [round(x["loss"], 5) for x in trainer.state.log_history if "loss" in x]}


def autocast(x: Tensor) -> Any:
    """Autocast to bfloat16."""
    return torch.autocast(x.device.type, torch.bfloat16)


class Mean(torch.nn.Module):
    """The mean over the tokens of a BERT's hidden states under its own autocast, of unit length."""

    def __init__(self, bert: torch.nn.Module) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, ids: Tensor) -> Tensor:
        """(samples, tokens) ids -> (samples, width) float32."""
        with autocast(ids):
            hidden = self.bert(ids).last_hidden_state
        return torch.nn.functional.normalize(hidden.float().mean(dim=1), dim=1)


def add_gradients(way: str, encoder: torch.nn.Module, chunk: int, pair: Tensor) -> Tensor:
    """Add the gradients of InfoNCE under autocast by one of the caches; ``pair`` has the ids of queries and keys.

    Raises:
        ImportError: the cache's package is not installed.
    """

    def matrix(query: Tensor, key: Tensor) -> Any:
        # GradCache leaves the loss to its caller; like its own loss, this one forms the matrix of logits
        with autocast(query):
            return plain.info_nce(query, key, SCALE)

    if way == "GradCache":
        # the package is installed as gradcache, but its files import each other as grad_cache
        sys.modules.setdefault("grad_cache", importlib.import_module("gradcache"))
        cache = importlib.import_module("gradcache.grad_cache").GradCache([encoder, encoder], chunk, matrix)
        value: Tensor = cache(*pair)
        return value
    if way.startswith("sentence-transformers"):
        module: Any = torch.nn.Module()
        module.encoder = encoder
        module.forward = lambda features, **_: {**features, "sentence_embedding": encoder(features["input_ids"])}
        library = importlib.import_module("sentence_transformers")
        model = library.SentenceTransformer(modules=[module], device=str(pair.device))
        losses = importlib.import_module("sentence_transformers.sentence_transformer.losses")
        criterion = losses.CachedMultipleNegativesRankingLoss(model, scale=SCALE, mini_batch_size=chunk)
        with autocast(pair):
            loss: Tensor = criterion([{"input_ids": ids} for ids in pair], None)
    elif way.startswith("PyTorch"):
        loss = matrix(*map(encoder, pair))
    else:
        with autocast(pair):
            loss = training.Cached(info_nce, (encoder, encoder), chunk)(*pair, scale=SCALE)
    loss.backward()
    return loss.detach()


def caches(way: str, b: int, steps: int, chunk: int) -> dict[str, Any]:
    """The same for pairs of texts of 32 random words."""
    transformers = importlib.import_module("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=VOCABULARY, pad_token_id=None, **MINILM)
    encoder = Mean(transformers.BertModel(config, add_pooling_layer=False)).cuda()
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=1e-4)
    seconds, losses = list[float](), list[Tensor]()
    for step in range(steps):
        generator = torch.Generator("cuda").manual_seed(step % 4)
        pair = torch.randint(FIRST_WORD, VOCABULARY, (2, b, 32), device="cuda", generator=generator)
        with time_block(seconds):
            optimizer.zero_grad()
            losses.append(add_gradients(way, encoder, chunk, pair))
            optimizer.step()
    record = {"seconds": round(statistics.median(seconds[1:]), 3)}
    record["peak GiB"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    return record | {"losses": [round(float(x), 5) for x in losses]}


Train = Callable[[str, int, int, int], dict[str, Any]]
LIBRARIES: dict[str, tuple[Train, str, tuple[int, ...], int, tuple[str, ...]]] = {
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
"""By name: the function that trains, the model, the batches, the pairs of a chunk, and the ways."""


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", choices=LIBRARIES)
    parser.add_argument("--out", type=Path, required=True, help="where the record goes, as JSON")
    parser.add_argument("--batches", type=int, nargs="+", metavar="B")
    parser.add_argument("--chunk", type=int, metavar="N", help="pairs that are encoded at a time")
    args = parser.parse_args()
    train, model, batches, chunk, ways = LIBRARIES[args.library]
    install()
    rows: list[dict[str, Any]] = []
    facts = {**measurement_environment("cuda"), "model": model, "rows": rows}
    # first the curves of all ways, then every batch that fits
    for b, steps in ((CURVE, 16), *((b, 4) for b in args.batches or batches)):
        for way in ways:
            row = {"way": way, "pairs": b, "chunk": min(args.chunk or chunk, b // 4)}
            try:
                row |= train(way, b, steps, row["chunk"])
            except (ImportError, torch.OutOfMemoryError) as error:
                row["skipped"] = one_line(error)[:200]
            rows.append(row)
            print(row, flush=True)
            torch.cuda.empty_cache()
            write_json(args.out, facts)


if __name__ == "__main__":
    main()
