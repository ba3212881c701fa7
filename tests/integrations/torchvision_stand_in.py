"""open_clip without torchvision: names that its import asks for, and that no test uses.

torchvision has no wheel for every build of torch, and one of another build fails as soon as it is imported.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any

from torch import nn

TRANSFORMS = (
    *("Normalize", "Compose", "RandomResizedCrop", "InterpolationMode", "ToTensor"),
    *("Resize", "CenterCrop", "ColorJitter", "Grayscale"),
)


def open_clip() -> tuple[Any, Any]:
    """The packages ``open_clip`` and ``open_clip_train.train``."""
    # it asks whether there is a torchvision, once
    import transformers  # noqa: F401

    if importlib.util.find_spec("torchvision") is None:
        names = "torchvision", "torchvision.transforms", "torchvision.transforms.functional"
        made = {name: ModuleType(name) for name in (*names, "torchvision.ops", "torchvision.ops.misc")}
        for name in TRANSFORMS:
            setattr(made["torchvision.transforms"], name, type(name, (), {"BICUBIC": None, "BILINEAR": None}))
        made["torchvision.ops.misc"].FrozenBatchNorm2d = nn.Identity  # type: ignore[attr-defined]
        sys.modules.update(made)
    try:
        import open_clip
        from open_clip_train import train
    finally:
        # others ask too
        for name in [x for x in sys.modules if x.partition(".")[0] == "torchvision"]:
            if sys.modules[name].__spec__ is None:
                del sys.modules[name]
    return open_clip, train
