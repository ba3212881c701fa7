"""The table of docs/how-to/integrations.md: each library's loop with our losses is as accurate as with its own loss.

    pytest tests/integrations/test_matrix.py --record docs/results/integrations.json    # with every package installed

A step with our loss may have four times the error, or two bits more, than the library's own loss of the whole batch in
one process and in the same precision. A wrong factor or a missing chunk has a much larger error.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from launching import launch
from pages import ROOT

from contrastile.backends.registry import installed_version
from contrastile.environment import measurement_environment

pytestmark = pytest.mark.slow
PROGRAM = str(Path(__file__).parent / "programs" / "matrix.py")
RECORD = ROOT / "docs" / "results" / "integrations.json"
SHARDED = ("FSDP2", "ZeRO 1", "ZeRO 2")
NEEDS = {"sentence-transformers": "datasets", "open_clip": "open_clip", "DeepSpeed": "deepspeed"}
NEEDS |= {"Tevatron": "tevatron", "FlagEmbedding": "FlagEmbedding", "NeMo Automodel": "nemo_automodel"}
NEEDS |= {"GradCache": "gradcache"}
NEEDS_OF_WAYS = {"LoRA": "peft", "ZeRO 1": "deepspeed", "ZeRO 2": "deepspeed"}
LIBRARIES = ("PyTorch", "transformers, CLIP", "transformers, SigLIP", "Lightning", "accelerate", *NEEDS)
PACKAGES = ("transformers", "sentence-transformers", "open_clip_torch", "lightning", "accelerate", "deepspeed", "peft")
PACKAGES += ("tevatron", "FlagEmbedding", "nemo-automodel", "GradCache")


def installed(name: str) -> bool:
    """Whether the package that a library or a way of training needs is installed."""
    return importlib.util.find_spec({**NEEDS, **NEEDS_OF_WAYS}.get(name, "torch")) is not None


def record(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"rows": []}
    return content


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_has_the_gradients_of_the_whole_batch(ranks: int, request: pytest.FixtureRequest) -> None:
    path = request.config.getoption("--record")
    libraries = {name for name in LIBRARIES if installed(name)}
    if path is None:
        # SigLIP has the recipe of CLIP, and one rank has the recipes of two, except for Lightning
        libraries = {"Lightning"} if ranks == 1 else libraries - {"transformers, SigLIP"}
    # one launch, as imports take longer than steps; without TRITON_INTERPRET=0 stand-ins of open_clip would claim a GPU
    result = launch("torch", PROGRAM, *sorted(libraries), ranks=ranks, seconds=1200, TRITON_INTERPRET="0")
    assert result.code == 0, result.output
    assert result.orphans == 0
    rows: list[dict[str, Any]] = list(map(json.loads, result.lines(0)))
    for row in rows:
        if "error" in row:
            assert row["error"] <= 4 * row["own"], row
            # DDP reduces once if nothing is sharded; GradCache calls its model for queries and for passages
            reductions = {"DeepSpeed": 0, "GradCache": 2}.get(row["library"], int(row["way"] not in SHARDED))
            assert ranks == 1 or row["reductions"] == reductions, row
    if path is not None:
        kept = [row for row in record(path)["rows"] if row["ranks"] != ranks or row["library"] not in libraries]
        facts = measurement_environment() | {"packages": {name: installed_version(name) for name in PACKAGES}}
        path.write_text(json.dumps({"environment": facts, "rows": [*kept, *rows]}, indent=1) + "\n", encoding="utf-8")
    assert {row["library"] for row in rows} == libraries
    measured = {(row["library"], row["ranks"], row["way"]) for row in record(RECORD)["rows"] if "error" in row}
    for row in rows:
        assert not installed(row["way"]) or ("error" in row) == ((row["library"], ranks, row["way"]) in measured), row
