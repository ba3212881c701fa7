"""Steps of open_clip's own ``train_one_epoch``, a ViT-B-32 under bfloat16: its loss and ``--accum-freq``, or ours.

``python benchmarks/open_clip_steps.py --out docs/results/open_clip_DEVICE.json`` needs a GPU and open_clip_torch.
Images and texts are random: time and memory do not depend on them. The losses say that the ways train alike.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from peers.stubs import install

from contrastile import nn
from contrastile.environment import measurement_environment
from contrastile.integrations.open_clip import ChunkedModel
from contrastile.reporting import write_json

BATCHES, CHUNK, CURVE = (2048, 16384, 65536), 512, 1024
WAYS = ("open_clip", "open_clip, --accum-freq", "contrastile, ClipLoss", "contrastile, ClipLoss and ChunkedModel")


class Batches(list[Any]):
    """What the loop reads of a loader."""

    @property
    def num_batches(self) -> int:
        """How many."""
        return len(self)

    @property
    def num_samples(self) -> int:
        """Pairs in all."""
        return sum(len(images) for images, _ in self)


def pairs(b: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random images and texts."""
    random = torch.Generator("cuda").manual_seed(seed)
    images = torch.randn(b, 3, 224, 224, device="cuda", dtype=torch.bfloat16, generator=random)
    return images, torch.randint(1, 49408, (b, 77), device="cuda", generator=random)


def trained(way: str, b: int, steps: int, chunk: int) -> dict[str, Any]:
    """Seconds a step, the first one apart, peak memory, and the losses of so many steps of b pairs."""
    library, loop = importlib.import_module("open_clip"), importlib.import_module("open_clip_train.train")
    torch.manual_seed(0)
    model = library.create_model("ViT-B-32", precision="amp_bf16", device="cuda", output_dict=True)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4)
    called = ChunkedModel(model, chunk) if way.endswith("ChunkedModel") else model
    loss = nn.ClipLoss() if way.startswith("contrastile") else library.ClipLoss()
    parts = b // chunk if way.endswith("freq") else 1
    given = SimpleNamespace(
        device="cuda",
        precision="amp_bf16",
        accum_freq=parts,
        batch_size=b // parts,
        world_size=1,
        rank=0,
        local_rank=0,
        log_every_n_steps=1,
        grad_clip_norm=None,
        skip_scheduler=True,
        **dict.fromkeys(("distill", "horovod", "wandb"), False),
    )
    seconds, values = [], []

    def watched(**outputs: Any) -> Any:
        found = loss(**outputs)
        values.append(found["contrastive_loss"].detach())
        return found

    for step in range(steps):
        images, texts = pairs(b, step % 4)
        batches = Batches(zip(images.chunk(parts), texts.chunk(parts), strict=True))
        data = {"train": SimpleNamespace(set_epoch=lambda _: None, dataloader=batches)}
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        loop.train_one_epoch(called, data, watched, 0, optimiser, None, None, None, given)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    rest = torch.cuda.max_memory_allocated() - images.nbytes - texts.nbytes
    found = {"seconds": round(statistics.median(seconds[1:]), 3), "peak GiB beside the images": round(rest / 2**30, 2)}
    return found | {"losses": [round(float(x), 5) for x in values[::parts]]}


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="where the record goes, as JSON")
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES, metavar="B")
    given = parser.parse_args()
    install()
    rows: list[dict[str, Any]] = []
    facts = {**measurement_environment("cuda"), "model": "ViT-B-32, amp_bf16, AdamW", "rows": rows}
    # the curves of both ways, and then what fits
    for b, steps in ((CURVE, 16), *((b, 4) for b in given.batches)):
        for way in WAYS:
            row = {"way": way, "pairs": b, "chunk": min(CHUNK, b // 4)}
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
