# pyright: reportAttributeAccessIssue=false
"""Whether anything that nobody wrote reaches a result: ``verify`` with all memory full of NaN before it is given out.

A sanitizer reports every read of memory that nobody wrote, also where a kernel loads sixteen bytes of which it uses
ten. Here the numbers are NaN (and large as integers): what is used shows in a result, and a pass says that nothing is.
"""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from contrastile.backends.arrays import TorchArrays  # noqa: E402
from contrastile.backends.registry import available, load  # noqa: E402
from contrastile.verify.memory import poisoned  # noqa: E402
from contrastile.verify.report import verdict  # noqa: E402
from contrastile.verify.runner import Run  # noqa: E402
from contrastile.verify.selection import DTYPES, Selection  # noqa: E402

BACKENDS = [name for name in ("torch", "triton", "cupy") if available()[name] is None]


def verify(name: str, **selection: Any) -> tuple[str, int, list[str]]:
    """Hold a backend to the oracle, its memory poisoned: the verdict, how much passed, and what failed."""
    backend = load(name)
    with poisoned(backend.arrays):
        run = Run(Selection({name: backend}, device="cuda", **selection))
        rows = list(run.rows())
    failed = [f"{x.row['property']} {x.row['case']} {x.row['dtype']}: {x.worst}" for x in run.failures]
    return verdict(rows), sum(row["status"] == "pass" for row in rows), failed


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", BACKENDS)
def test_nothing_unwritten_reaches_a_result(name: str, dtype: str) -> None:
    if dtype not in load(name).dtypes:
        pytest.skip(f"{name} takes no {dtype}")
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    said, passed, failed = verify(name, dtypes=[dtype])
    assert (said, failed) == ("pass", [])
    assert passed
    after = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    assert after == before


def test_sums_that_start_from_whatever_memory_held_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    full = TorchArrays.full

    def careless(self: Any, shape: tuple[int, ...], value: float, dtype: str, like: Any) -> Any:
        if value or len(shape) != 2:
            return full(self, shape, value, dtype, like)
        return torch.empty(shape, dtype=getattr(torch, dtype), device=like.device)

    monkeypatch.setattr(TorchArrays, "full", careless)
    chosen: dict[str, Any] = {"cases": ["smoke", "ragged"], "properties": ["value", "gradients"]}
    said, _, failed = verify("torch", dtypes=["float32"], **chosen)
    assert said == "fail"
    assert any("gradients" in line for line in failed)
