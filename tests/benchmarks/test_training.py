"""A training step beside other gradient caches: what the script records, and the table of its record."""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

import pages
import pytest
import torch
from harness import caches, tables

# tests/training is a folder of the same name
training: Any = importlib.import_module("training")
BY_HAND = "fifteen lines around info_nce"


def broken(*_: Any) -> Any:
    raise RuntimeError("out of\nwhatever")


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of a smoke run with one competitor that cannot be imported and one that fails."""
    out = tmp_path_factory.mktemp("out") / "new" / "training.json"
    ours = {name: caches.CACHES[name] for name in (training.OURS, BY_HAND)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "CACHES", {"GradCache": broken, "fails": lambda encoder: broken, **ours})
        patch.setattr(sys, "argv", f"training.py --device cpu --smoke --commit c --out {out}".split())
        assert training.main() == 0
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return found


def test_a_smoke_run_measures_everything_and_goes_on_after_a_failure(record: dict[str, Any]) -> None:
    steps = {row["name"]: row for row in record["steps"]}
    for name in ("GradCache", "fails"):
        assert (steps[name]["status"], steps[name]["reason"]) == ("skip", "RuntimeError: out of whatever")
    for name in (training.OURS, BY_HAND):
        assert (steps[name]["b"], len(steps[name]["samples"])) == (64, 2)
        assert steps[name]["pairs_per_second"] > 0
    # the weights stay as they are: all see the same embeddings, in bfloat16
    eps = torch.finfo(torch.bfloat16).eps
    assert steps[BY_HAND]["loss"] == steps[training.OURS]["loss"]
    assert steps[training.PLAIN]["loss"] == pytest.approx(steps[training.OURS]["loss"], abs=2 * eps * caches.SCALE)
    assert [row["b"] for row in record["memory"]] == [64, 16]
    assert record["environment"]["commit"] == "c"


def test_the_gradients_agree_with_those_of_the_plain_step(record: dict[str, Any]) -> None:
    errors = {(row["name"], row["autocast"]): row["error"] for row in record["agreement"]}
    # sums of 64 terms in float32
    assert errors[training.OURS, False] < 64 * torch.finfo(torch.float32).eps
    assert errors[training.OURS, False] < errors[training.OURS, True] < 1


def test_the_page_shows_every_step_and_every_failure(record: dict[str, Any]) -> None:
    ours = {"name": training.OURS, "b": 65536, "chunk": 4096, "status": "measured", "s": 3.0, "peak_bytes": 3 << 30}
    ours |= {"pairs_per_second": 65536 / 3}
    other = ours | {"name": "other", "s": 8.5, "chunk": 2048, "pairs_per_second": 65536 / 8.5}
    plain = ours | {"name": training.PLAIN, "b": 8192, "chunk": 8192, "s": 0.5}
    skipped = {"name": "GradCache", "b": 65536, "chunk": 1024, "status": "skip", "reason": "OutOfMemoryError: so"}
    memory = [{"b": b, "chunk": 1024, "status": "measured", "peak_bytes": b << 14} for b in (65536, 1024)]
    loss = [{"b": 65536, "d": 384, "s": 0.03}]
    found = record | {"steps": [ours, other, plain, skipped], "memory": memory, "loss": loss}
    text = tables.training(found)
    assert "| contrastile, cached_step | 65,536 | 4,096 | 3.00 | 21,845 | 3.00 | - |" in text
    assert "| other | 65,536 | 2,048 | 8.50 | 7,710 | 3.00 | 2.83 x |" in text
    assert "| PyTorch, no cache | 8,192 | - | 0.500 | 21,845 | 3.00 | - |" in text
    assert "| GradCache | - | - | OutOfMemoryError: so | - | - | - |" in text
    assert "`info_nce` alone takes 30.0 ms forward and backward, 1.0 % of contrastile's step." in text
    assert tables.training_memory(found).splitlines()[2:] == ["| 1,024 | 16.00 |", "| 65,536 | 1,024 |"]
    page = pages.steps({"training": {"training_some": found}}, pages.ROOT)
    assert page.startswith("## Measured")
    assert text in page
    assert "[The record](../results/training_some.json)" in page
    # a record of a CPU knows no peaks
    assert not tables.training_memory(record)
    assert tables.training(record)
    assert pages.steps({"training": {}}, pages.ROOT).startswith("<!--")


@pytest.mark.slow
@pytest.mark.parametrize("package", ["sentence_transformers", "gradcache"])
def test_an_installed_competitor_takes_the_same_step(package: str) -> None:
    pytest.importorskip(package)
    (name,) = (name for name in caches.CACHES if name.lower().replace("-", "_").startswith(package))
    encoder = caches.Encoder(tiny=True)
    encoder.autocast = False
    ids = torch.randint(caches.VOCABULARY, (2, 24, 6))

    def gradients(step: caches.Step) -> list[torch.Tensor]:
        encoder.zero_grad()
        step((ids[0], ids[1]), 7)
        return [p.grad.clone() for p in encoder.parameters() if p.grad is not None]

    right = gradients(caches.plain(encoder))
    for found, wanted in zip(gradients(caches.CACHES[name](encoder)), right, strict=True):
        torch.testing.assert_close(found, wanted)
