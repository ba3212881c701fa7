"""What the front door refuses, in which words, and what it does not refuse."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from contextlib import nullcontext
from fractions import Fraction
from types import ModuleType

import numpy as np
import pytest
import torch
from provocations import PROVOCATIONS, Provocation, namespace

import contrastile
from contrastile import evaluation, plan, problems, validation
from contrastile.backends import registry
from contrastile.backends.arrays import library_of

ALL = [each for group in PROVOCATIONS.values() for each in group]
EVERYWHERE = [pytest.param(each, library, id=f"{library}-{each.call}") for each in ALL for library in each.libraries]


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


@pytest.mark.parametrize(
    "module", [validation, problems, plan, evaluation, registry], ids=lambda module: module.__name__
)
def test_no_check_goes_unprovoked(module: ModuleType) -> None:
    """A new ``raise`` brings its own line in provocations.txt."""
    said = [(each.error.__name__, each.message(each.libraries[0])) for each in ALL]
    raised = raised_in(module)
    assert raised
    for error, pattern in raised:
        assert any(error == name and re.fullmatch(pattern, message) for name, message in said), (error, pattern)


def test_tensors_that_require_gradients_may_be_given_to_value_and_grad_by_name() -> None:
    image, text = (namespace("torch")[name].requires_grad_() for name in ("image", "text"))
    both = contrastile.value_and_grad(contrastile.clip_loss)
    by_name, by_place = both(image=image, text=text, scale=14.0), both(image, text, 14.0)
    for found, expected in zip((by_name[0], *by_name[1]), (by_place[0], *by_place[1]), strict=True):
        assert torch.equal(found, expected)
        assert not found.requires_grad


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_a_scale_may_be_as_large_as_the_dtype_it_is_used_in_holds_and_no_larger(dtype: str) -> None:
    largest = float(np.finfo("float64" if dtype == "float64" else "float32").max)
    beyond = [] if dtype == "float64" else [2 * largest, np.float64(2 * largest)]
    image, text = (namespace("numpy")[name].astype(dtype) for name in ("image", "text"))
    for scale in (-largest, largest, *beyond, 10**400, Fraction(10**400), -(10**400)):
        for put in (np.asarray, torch.as_tensor):
            given = put(image), put(text), scale
            if abs(scale) <= largest:
                contrastile.clip_loss(*given)
                continue
            with pytest.raises(ValueError, match=r"^scale must be finite in float(32|64), got "):
                contrastile.clip_loss(*given)
    if dtype != "float64":
        with pytest.raises(ValueError, match=r"^bias must be finite in float32, got 1e\+39;"):
            contrastile.sigmoid_loss(image, text, 1.0, np.asarray(1e39))


def test_numpy_arrays_that_torch_cannot_share_are_copied_without_a_word_and_no_others() -> None:
    image, text = (namespace("numpy")[name] for name in ("image", "text"))
    expected = contrastile.clip_loss(image, text, 14.0, backend="torch")
    image.flags.writeable = False
    assert contrastile.clip_loss(image, text, 14.0, backend="torch") == expected
    backwards = np.ascontiguousarray(text[::-1])[::-1]
    assert contrastile.clip_loss(image, backwards, 14.0, backend="torch") == expected
    assert library_of(torch.zeros(2)).from_numpy(text).data_ptr() == text.ctypes.data


def test_tensors_without_values_give_the_shape_of_the_loss_whatever_its_arguments() -> None:
    for where, place in ((nullcontext(), "meta"), (torch._subclasses.FakeTensorMode(), "cpu")):
        with where:
            image, key = torch.empty(6, 5, device=place), torch.empty(11, 5, device=place)
            positives = torch.zeros(6, dtype=torch.int64, device=place)
            scale = torch.tensor(14.0) if place == "cpu" else 14.0
            loss = contrastile.info_nce(image, key, scale, positives=positives)
        assert (loss.device.type, loss.shape, loss.dtype) == (place, (), torch.float32)


def test_a_loss_of_the_same_name_from_elsewhere_is_not_one_of_ours() -> None:
    def clip_loss() -> None: ...

    for each in (clip_loss, contrastile.statistics):
        with pytest.raises(ValueError, match="loss must be one of"):
            contrastile.value_and_grad(each)


def test_without_torch_the_modules_say_how_to_get_it() -> None:
    code = "import sys; sys.modules['torch'] = None; import contrastile.nn"
    code = code.replace("= None;", "= None; import importlib.util as u; u.find_spec = lambda name, *_: None;")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=1200)
    assert done.returncode == 1
    last = done.stderr.rstrip().splitlines()[-1]
    assert last.endswith(
        "BackendUnavailableError: contrastile.nn is not available: torch cannot be imported; "
        "run: pip install 'contrastile[torch]'"
    )


def test_a_tile_may_be_numpy_s_integer() -> None:
    for tile in (np.int64(3), np.uint8(3)):
        assert validation.options(tile) == validation.options(3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_numpy_arrays_of_16_bits_are_what_torch_s_tensors_of_them_are(dtype: str) -> None:
    kind = getattr(pytest.importorskip("ml_dtypes"), dtype, None) or np.dtype(dtype)
    given = [namespace("numpy")[name].astype(kind) for name in ("image", "text")]
    both = contrastile.value_and_grad(contrastile.clip_loss, backend="torch")
    value, gradients = both(*given, 3.0)
    tensors = [torch.from_numpy(x.astype(np.float32)).to(getattr(torch, dtype)) for x in given]
    expected, theirs = both(*tensors, 3.0)
    assert float(value) == float(expected)
    for got, right in zip(gradients[:2], theirs[:2], strict=True):
        assert got.dtype == kind
        assert np.array_equal(got.astype(np.float32), right.float().numpy())
