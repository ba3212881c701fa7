"""The errors of the public functions: calls.txt provokes each, and each states the rule, the value and the fix."""

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
def errors() -> list[tuple[str, str]]:
    """The name and message of each error of calls.txt, also of errors that need a missing package."""
    errors = []
    for call in (call for calls in PROVOCATIONS.values() for call in calls):
        for library in call.libraries:
            errors.append((call.known, message(call, library)))
            assert call.says in ("", errors[-1][1])
    return errors


def test_bad_input_raises_with_rule_value_and_fix(errors: list[tuple[str, str]]) -> None:
    assert [text for _, text in errors if not SAYS.match(text) or not re.search("; [a-z]", text)] == []


def raised_errors(module: ModuleType) -> list[tuple[str, str]]:
    """The name of the error of each ``raise Error(f"...")`` in a module, and a pattern that its messages match."""
    errors = []
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            argument = node.exc.args[0]
            parts = argument.values if isinstance(argument, ast.JoinedStr) else [argument]
            pattern = "".join(re.escape(part.value) if isinstance(part, ast.Constant) else ".*" for part in parts)
            errors.append((ast.unparse(node.exc.func), pattern))
    return errors


@pytest.mark.parametrize(
    "module", [validation, problems, plan, evaluation, forms, registry], ids=lambda module: module.__name__
)
def test_every_raise_is_provoked(module: ModuleType, errors: list[tuple[str, str]]) -> None:
    """A new ``raise`` needs a line in calls.txt."""
    raised = raised_errors(module)
    assert raised
    for error, pattern in raised:
        assert any(error == name and re.fullmatch(pattern, text) for name, text in errors), (error, pattern)


def test_every_public_callable_has_a_call_of_its_signature() -> None:
    called = {call.text.partition("(")[0] for calls in CALLS.values() for call in calls if call.known == "signature"}
    for module in (contrastile, contrastile.nn, contrastile.training, contrastile.retrieval):
        local_names = [name for name, x in vars(module).items() if getattr(x, "__module__", "") == module.__name__]
        names = [name for name in getattr(module, "__all__", local_names) if name[0] != "_" and name in dir(module)]
        assert {f"{module.__name__}.{name}" for name in names} <= called


def test_without_torch_the_modules_say_how_to_get_it() -> None:
    code = "import sys; sys.modules['torch'] = None; import contrastile.nn"
    code = code.replace("= None;", "= None; import importlib.util as u; u.find_spec = lambda name, *_: None;")
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=1200)
    assert completed.returncode == 1
    last_line = completed.stderr.rstrip().splitlines()[-1]
    assert last_line.endswith(
        "BackendUnavailableError: contrastile.nn is not available: torch cannot be imported; "
        "run: pip install 'contrastile[torch]'"
    )
