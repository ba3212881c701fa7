# pyright: reportAttributeAccessIssue=false
"""Whether anything that nobody wrote reaches a result: ``verify`` with all memory full of NaN before it is given out.

A sanitizer reports every read of memory that nobody wrote, also where a kernel loads sixteen bytes of which it uses
ten. Here the numbers are NaN (and large as integers): what is used shows in a result, and a pass says that nothing is.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from contrastile.backends.registry import available, load  # noqa: E402
from contrastile.verify.memory import poisoned  # noqa: E402
from contrastile.verify.runner import Run  # noqa: E402
from contrastile.verify.selection import DTYPES, Selection  # noqa: E402

BACKENDS = [name for name in ("torch", "triton", "cupy") if available()[name] is None]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", BACKENDS)
def test_nothing_unwritten_reaches_a_result(name: str, dtype: str) -> None:
    if dtype not in load(name).dtypes:
        pytest.skip(f"{name} takes no {dtype}")
    backend = load(name)
    with poisoned(backend.arrays):
        run = Run(Selection({name: backend}, device="cuda", dtypes=[dtype]))
        rows = list(run.rows())
    assert [f"{x.row['property']} {x.row['case']}: {x.worst}" for x in run.failures] == []
    assert "pass" in {row["status"] for row in rows}
