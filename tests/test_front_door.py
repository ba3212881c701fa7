"""What the front door refuses, in which words, and what it does not refuse."""

from __future__ import annotations

import ast
import inspect
import re
import runpy
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from provocations import LIBRARIES, PROVOCATIONS, Provocation, namespace

import contrastile
from contrastile import evaluation, problems, validation
from contrastile.backends import registry
from contrastile.backends.arrays import library_of

PAGE = Path(__file__).parent.parent / "scripts" / "make_errors_page.py"
ALL = [each for group in PROVOCATIONS.values() for each in group]
EVERYWHERE = [pytest.param(each, library, id=f"{library}-{each.call}") for each in ALL for library in each.libraries]
LOSSES = [
    "contrastile.clip_loss(image, text, 14.0, backend=backend)",
    "contrastile.info_nce(image, text, 14.0, negatives=key, backend=backend)",
    "contrastile.nt_xent(image, text, 14.0, backend=backend)",
    "contrastile.sup_con(image, labels, 14.0, backend=backend)",
    "contrastile.sigmoid_loss(image, text, 10.0, -10.0, backend=backend)",
]


def call(expression: str, library: str, **changes: object) -> object:
    return eval(expression, {**namespace(library), **changes})


@pytest.mark.parametrize(("provocation", "library"), EVERYWHERE)
def test_bad_input_raises_with_rule_value_and_fix(provocation: Provocation, library: str) -> None:
    message = provocation.message(library)
    assert re.search(r" must | is not available|refuses this problem", message), "the rule"
    assert re.search(r"\bgot |cannot be imported|No module named", message), "the value"
    assert re.search(r"; [a-z]", message), "the fix"


@pytest.mark.parametrize("provocation", [each for each in ALL if len(each.libraries) > 1], ids=lambda each: each.call)
def test_every_library_gets_the_same_words(provocation: Provocation) -> None:
    assert len({provocation.message(library) for library in provocation.libraries}) == 1


def raised_in(module: ModuleType) -> list[tuple[str, str]]:
    """Each ``raise Error(f"...")`` of the module: the error's name, and a pattern that its messages match."""
    found = []
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            text = node.exc.args[0]
            parts = text.values if isinstance(text, ast.JoinedStr) else [text]
            pattern = "".join(re.escape(part.value) if isinstance(part, ast.Constant) else ".*" for part in parts)
            found.append((ast.unparse(node.exc.func), pattern))
    return found


@pytest.mark.parametrize("module", [validation, problems, evaluation, registry], ids=lambda module: module.__name__)
def test_no_check_goes_unprovoked(module: ModuleType) -> None:
    """A new ``raise`` brings its own line in provocations.py."""
    said = [(each.error.__name__, each.message(each.libraries[0])) for each in ALL]
    raised = raised_in(module)
    assert raised
    for error, pattern in raised:
        assert any(error == name and re.fullmatch(pattern, message) for name, message in said), (error, pattern)


def test_the_page_of_errors_is_what_the_code_says() -> None:
    module = SimpleNamespace(**runpy.run_path(str(PAGE)))
    assert module.PAGE.read_text(encoding="utf-8") == module.page(), "run: make errors"


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("expression", [*LOSSES, "contrastile.clip_loss(image, text, 14.0, ids=labels)"])
def test_good_input_is_not_refused(expression: str, library: str) -> None:
    assert np.isfinite(float(call(expression, library, backend="auto")))


@pytest.mark.parametrize("backend", ["numpy", "torch"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("expression", LOSSES)
def test_nan_and_infinite_features_follow_the_oracle_to_a_nan_loss(expression: str, value: float, backend: str) -> None:
    spoilt = namespace("torch")["image"]
    # a whole row: infinity meets both signs, so that the oracle's answer is NaN for it too
    spoilt[2, :] = value
    assert np.isnan(float(call(expression, "torch", image=spoilt, backend=backend)))


@pytest.mark.parametrize("scale", [14, 14.0, np.float64(14), True])
def test_numbers_are_scales(scale: float) -> None:
    expected = call("contrastile.clip_loss(image, text, scale)", "torch", scale=float(scale))
    assert torch.equal(call("contrastile.clip_loss(image, text, scale)", "torch", scale=scale), expected)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_one_element_scales_of_any_shape_get_a_gradient_of_that_shape(shape: tuple[int, ...]) -> None:
    scale = torch.full(shape, 14.0, requires_grad=True)
    call("contrastile.clip_loss(image, text, scale)", "torch", scale=scale).backward()
    assert scale.grad.shape == shape


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64", "uint8"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_positives_and_labels_of_any_integer_dtype_mean_the_same(dtype: str, library: str) -> None:
    for expression in (
        "contrastile.info_nce(image, key, 14.0, positives=labels)",
        "contrastile.sup_con(image, labels, 14.0)",
    ):
        labels = namespace(library)["labels"]
        narrow = labels.astype(dtype) if library == "numpy" else labels.to(getattr(torch, dtype))
        assert float(call(expression, library, labels=narrow)) == float(call(expression, library))


def test_a_bad_value_that_cannot_be_read_makes_the_loss_nan_and_waits_for_no_device() -> None:
    """On an accelerator nothing is read back: what would raise on the host is carried into the loss."""
    image, text, labels = (namespace("torch")[name] for name in ("image", "text", "labels"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(validation, "values_are_readable", lambda arrays, x: False)
        assert contrastile.clip_loss(image, text, torch.tensor(torch.nan)).isnan()
        assert contrastile.info_nce(image, text, 14.0, positives=labels).isnan()
        assert contrastile.info_nce(image, text, 14.0, positives=labels.clamp_max(5)).isfinite()


def test_meta_tensors_give_the_shape_of_the_loss() -> None:
    image, text = (namespace("torch")[name].to("meta") for name in ("image", "text"))
    loss = contrastile.clip_loss(image, text, 14.0)
    assert (loss.device.type, loss.shape, loss.dtype) == ("meta", (), torch.float32)


def test_a_loss_of_the_same_name_from_elsewhere_is_not_one_of_ours() -> None:
    def clip_loss() -> None: ...

    with pytest.raises(ValueError, match="loss must be one of"):
        contrastile.value_and_grad(clip_loss)


def test_no_array_library_is_imported_to_find_an_owner() -> None:
    assert library_of(np.zeros(2)).name == "numpy"
    assert library_of(torch.zeros(2)).name == "torch"
