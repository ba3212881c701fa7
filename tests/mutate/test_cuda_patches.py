"""The patched CUDA sources compile with NVRTC, which needs neither CuPy nor a GPU."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

pytest.importorskip("cuda.bindings.nvrtc")

from contrastile.backends.cupy import build
from contrastile.backends.cupy.configs import kernel_family
from contrastile.backends.cupy.instances import (
    DROP_LIMITS,
    PLAIN,
    TARGET,
    instance,
    narrow_kernel,
    tile_kernel,
    weighted_kernel,
)
from contrastile.mutate.registry import Mutant, every

FAMILY, HOPPER = (kernel_family("float16", capability) for capability in (80, 90))
KERNELS = {
    "epilogue_forward.cuh": tile_kernel("forward", FAMILY, "float16", TARGET, safe=True),
    "epilogue_gradient.cuh": tile_kernel("gradient", FAMILY, "float16", PLAIN),
    "epilogue_sigmoid.cuh": tile_kernel("sigmoid", FAMILY, "float16", PLAIN),
    "pairs.cuh": tile_kernel("gradient", FAMILY, "float16", DROP_LIMITS),
    "pair_storage_sm90.cuh": tile_kernel("forward", HOPPER, "float16", TARGET, safe=False),
    "narrow_sm90.cuh": narrow_kernel("forward", HOPPER, "float16", TARGET),
    "narrow_gradient_sm90.cu": narrow_kernel("gradient", HOPPER, "float16", PLAIN),
    "features.cuh": instance("scale_cast", "row_dots", "float", "float"),
    "finalize_rows.cu": instance("finalize_rows", "finalize_rows", "float"),
    "fold.cu": instance("fold", "fold_sigmoid"),
    "scale_cast.cu": instance("scale_cast", "scale_cast", "float", "float"),
    "weighted_sm90.cu": weighted_kernel(HOPPER, across=True),
}
"""A kernel that includes each file; other sources have a kernel of their own name."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "mutant", [mutant for mutant in every() if mutant.component == "cupy"], ids=lambda mutant: mutant.defect
)
def test_a_patch_compiles(mutant: Mutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = Path(mutant.file)
    sources = Path(shutil.copytree(build.SOURCES, tmp_path / "cuda"))
    (sources / file.name).write_text(mutant.applied(), encoding="utf-8")
    monkeypatch.setattr(build, "SOURCES", sources)
    # compile to PTX only, because the assembler would double the time
    architecture = "compute_90a" if file.stem.endswith("sm90") else "compute_80"
    compiled = build.compile_instance(KERNELS.get(file.name) or instance(file.stem, file.stem), architecture)
    assert compiled.kernel
