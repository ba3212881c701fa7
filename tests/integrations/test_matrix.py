"""The table of docs/how-to/integrations.md: each library's loop with our losses is as near to the truth as its own.

    pytest tests/integrations/test_matrix.py --record docs/results/integrations.json    # with every package installed

A step of ours may have four times the error of the library's own loss of the whole batch in one process, in the same
precision: two bits. A wrong factor, or a missing chunk, costs all of them.
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
KEPT = ROOT / "docs" / "results" / "integrations.json"
SHARDED = ("FSDP2", "ZeRO 1", "ZeRO 2")
NEEDS = {"sentence-transformers": "datasets", "open_clip": "open_clip", "DeepSpeed": "deepspeed"}
NEEDS |= {"Tevatron": "tevatron", "FlagEmbedding": "FlagEmbedding", "NeMo Automodel": "nemo_automodel"}
NEEDS |= {"GradCache": "gradcache"}
OF_WAYS = {"LoRA": "peft", "ZeRO 1": "deepspeed", "ZeRO 2": "deepspeed"}
LIBRARIES = ("PyTorch", "transformers, CLIP", "transformers, SigLIP", "Lightning", "accelerate", *NEEDS)
PACKAGES = ("transformers", "sentence-transformers", "open_clip_torch", "lightning", "accelerate", "deepspeed", "peft")
PACKAGES += ("tevatron", "FlagEmbedding", "nemo-automodel", "GradCache")


def installed(what: str) -> bool:
    """Whether the package is there that a library, or a way to train, needs."""
    return importlib.util.find_spec({**NEEDS, **OF_WAYS}.get(what, "torch")) is not None


def record(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"rows": []}
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_has_the_gradients_of_the_whole_batch(ranks: int, request: pytest.FixtureRequest) -> None:
    path = request.config.getoption("--record")
    libraries = {name for name in LIBRARIES if installed(name)}
    if path is None:
        # CLIP's recipe with another loss; and two ranks take the recipe of one, but for Lightning's
        libraries = {"Lightning"} if ranks == 1 else libraries - {"transformers, SigLIP"}
    # in one launch: imports take longer than steps. TRITON_INTERPRET: or open_clip's stand-ins would say there is a GPU
    ended = launch("torch", PROGRAM, *sorted(libraries), ranks=ranks, seconds=1200, TRITON_INTERPRET="0")
    assert ended.code == 0, ended.output
    assert ended.orphans == 0
    rows: list[dict[str, Any]] = list(map(json.loads, ended.said(0)))
    for row in rows:
        if "error" in row:
            assert row["error"] <= 4 * row["own"], row
            # by DDP, which shards nothing; GradCache calls its model for queries and for passages
            once = {"DeepSpeed": 0, "GradCache": 2}.get(row["library"], int(row["way"] not in SHARDED))
            assert ranks == 1 or row["reductions"] == once, row
    if path is not None:
        kept = [row for row in record(path)["rows"] if row["ranks"] != ranks or row["library"] not in libraries]
        facts = measurement_environment() | {"packages": {name: installed_version(name) for name in PACKAGES}}
        path.write_text(json.dumps({"environment": facts, "rows": [*kept, *rows]}, indent=1) + "\n", encoding="utf-8")
    assert {row["library"] for row in rows} == libraries
    measured = {(row["library"], row["ranks"], row["way"]) for row in record(KEPT)["rows"] if "error" in row}
    for row in rows:
        assert not installed(row["way"]) or ("error" in row) == ((row["library"], ranks, row["way"]) in measured), row
