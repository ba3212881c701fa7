"""What the front door refuses, in which words, and what it does not refuse."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from types import ModuleType

import pytest
from provocations import CALLS, PROVOCATIONS, message

import contrastile
from contrastile import evaluation, forms, plan, problems, validation
from contrastile.backends import registry
from contrastile.verify.calls import SAYS


@pytest.fixture(scope="module")
def said() -> list[tuple[str, str]]:
    """Each error of calls.txt and its text, also where ``contrastile verify`` does not look: without a package."""
    found = []
    for each in (call for group in PROVOCATIONS.values() for call in group):
        for library in each.libraries:
            found.append((each.known, message(each, library)))
            assert each.says in ("", found[-1][1])
    return found


def test_bad_input_raises_with_rule_value_and_fix(said: list[tuple[str, str]]) -> None:
    assert [text for _, text in said if not SAYS.match(text) or not re.search("; [a-z]", text)] == []


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
def test_no_check_goes_unprovoked(module: ModuleType, said: list[tuple[str, str]]) -> None:
    """A new ``raise`` brings its own line in calls.txt."""
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
