"""Paths that the triton backend takes for large problems only, on small problems, compared with the oracle."""

from __future__ import annotations

import pytest

from contrastile.backends.registry import available, load
from contrastile.verify.runner import Run
from contrastile.verify.selection import Selection

torch = pytest.importorskip("torch")
if not torch.cuda.is_available() or available()["triton"] is not None:
    pytest.skip("needs a GPU and Triton", allow_module_level=True)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_tiles_with_positives_are_computed_separately(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("contrastile.backends.triton.forward_pass.MANY", 0)
    cases = ["labels", "sorted-labels", "ids-target@far", "certain-labels", "certain-labels@alike", "copies@opposite"]
    backends = {"triton": load("triton")}
    selection = Selection(backends, cases, ["value", "gradients", "tiles", "determinism"], [dtype], device="cuda")
    rows = [(row["case"], row["property"], row["status"], row["reason"]) for row in Run(selection).rows()]
    assert {status for _, _, status, _ in rows} - {"skip"} == {"pass"}, rows
