"""Drawn problems: what is counted as noisier than plain PyTorch, and a reference that is exact where that is not."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import certain_pairs
import drawn
import pytest
import torch
from certain_pairs import exact_terms, full_logits, outcome


def row(backend: str, **errors: float) -> dict[str, Any]:
    named = {"problem": "p", "b": 4, "dtype": "bfloat16", "backend": backend, "precision": "ieee"}
    return named | dict.fromkeys(certain_pairs.PARTS, 1e-3) | errors


def test_a_result_is_compared_with_the_plain_one_or_with_one_rounding() -> None:
    plain = row("plain", loss=1e-12, first=1e-12, second=0.2, scale=1e-5)
    mine = row("torch", loss=2.0**-23, first=2.0**-6, second=9.0, scale=math.nan)
    refused = {"backend": "cupy", "refused": "no"}
    loss, first, scale = drawn.compared([plain, mine, refused])
    assert (loss["of"], loss["times"]) == ("loss", 2.0)
    assert (first["of"], first["times"]) == ("first", 4.0)
    assert (scale["of"], math.isnan(scale["times"])) == ("scale", True)
    counted = drawn.counts([loss, first, scale])
    found = {each["of"]: (each["results"], each["beyond"], each["plain_beyond"]) for each in counted}
    assert found == {"loss": (1, 0, 0), "features": (1, 1, 0), "scale": (1, 1, 0)}


def test_the_plain_computation_can_be_the_noisier_one() -> None:
    plain = row("plain", loss=1e-3, first=1e-3, second=1e-3, scale=2.0**-22)
    mine = row("torch", loss=1e-4, first=1e-3, second=1e-9, scale=0.0)
    counted = drawn.counts(list(drawn.compared([plain, mine])))
    # gradients in bfloat16 have roundings of 2^-9
    found = {each["of"]: (each["beyond"], each["plain_beyond"]) for each in counted}
    assert found == {"loss": (0, 1), "features": (0, 0), "scale": (0, 1)}


def test_every_loss_and_kind_is_drawn_and_the_same_again() -> None:
    generators = [torch.Generator().manual_seed(3) for _ in range(2)]
    names, again = ([drawn.problem(n, g).name for n in range(150)] for g in generators)
    assert names == again
    for word in (*drawn.LOSSES, *drawn.KINDS):
        assert any(word in name for name in names), word


def test_the_command_counts_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "drawn.json"
    drawn.main(["--count", "10", "--dtype", "float32", "--backend", "torch", "numpy", "--json", str(out)])
    record = json.loads(out.read_text(encoding="utf-8"))
    assert [(each["backend"], each["of"]) for each in record["counts"]] == [
        (name, of) for name in ("torch", "numpy") for of in ("loss", "features", "scale")
    ]
    assert all(each["results"] for each in record["counts"])
    assert len(capsys.readouterr().out.splitlines()) == 6


def test_a_noisy_gradient_is_beyond(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def noisy(loss: Any, *given: Any) -> Any:
        value, first, *others = outcome(loss, *given)
        # of what is measured, neither of the reference nor of the plain computation
        return [value, 1.01 * first if getattr(loss, "__name__", "") == "ours" else first, *others]

    monkeypatch.setattr(certain_pairs, "outcome", noisy)
    drawn.main(["--count", "5", "--dtype", "float32"])
    counted = capsys.readouterr().out.splitlines()[1].split()
    assert counted[3] == "features"
    assert int(counted[4]) >= 4


def test_the_reference_has_the_positives_entry_where_it_is_below_a_rounding_of_1() -> None:
    one = torch.eye(6, 8)
    exact = partial(full_logits, terms=exact_terms)
    given = certain_pairs.Problem("p", one, one, 70.0, None, certain_pairs.as_given, one[:, :6] > 0, one[:, :6] >= 0)
    _, first, _, scale = outcome(
        lambda *x: exact(given, one=x[0], two=x[1], scale=x[2]), given, *(torch.float64,) * 2, "cpu"
    )
    o = 5 * math.exp(-70)
    assert first[0, 0].item() == pytest.approx(-70 * o / 6, rel=1e-12)
    assert first[0, 1].item() == pytest.approx(70 * o / 5 / 6, rel=1e-12)
    assert scale.item() == pytest.approx(-o, rel=1e-12)
