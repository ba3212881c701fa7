"""What the front door refuses, in which words, and what it does not refuse."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from types import ModuleType

import numpy as np
import pytest
import torch
from provocations import CALLS, PROVOCATIONS, message, namespace

import contrastile
from contrastile import evaluation, forms, plan, problems, validation
from contrastile.backends import registry
from contrastile.verify.calls import Call

ALL = [each for group in PROVOCATIONS.values() for each in group]
EVERYWHERE = [pytest.param(each, library, id=f"{library}-{each.text}") for each in ALL for library in each.libraries]


@pytest.mark.parametrize(("provocation", "library"), EVERYWHERE)
def test_bad_input_raises_with_rule_value_and_fix(provocation: Call, library: str) -> None:
    said = message(provocation, library)
    assert provocation.says in ("", said)
    assert re.search(r" must | is not available|refuses this problem", said), "the rule"
    assert re.search(r"\bgot |cannot be imported|No module named", said), "the value"
    assert re.search(r"; [a-z]", said), "the fix"


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
    "module", [validation, problems, plan, evaluation, forms, registry], ids=lambda module: module.__name__
)
def test_no_check_goes_unprovoked(module: ModuleType) -> None:
    """A new ``raise`` brings its own line in calls.txt."""
    said = [(each.known, message(each, each.libraries[0])) for each in ALL]
    raised = raised_in(module)
    assert raised
    for error, pattern in raised:
        assert any(error == name and re.fullmatch(pattern, text) for name, text in said), (error, pattern)


def test_no_callable_goes_without_its_signature() -> None:
    written = {each.text.partition("(")[0] for calls in CALLS.values() for each in calls if each.known == "signature"}
    for module in (contrastile, contrastile.nn, contrastile.training, contrastile.retrieval):
        own = [name for name, x in vars(module).items() if getattr(x, "__module__", "") == module.__name__]
        names = [name for name in getattr(module, "__all__", own) if name[0] != "_" and name in dir(module)]
        assert {f"{module.__name__}.{name}" for name in names} <= written


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
