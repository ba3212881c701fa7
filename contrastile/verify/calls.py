"""Calls of the public API and their expected results, as ``calls.txt`` states them: verify and the tests check them.

Each line of the text is a call, or begins a script, which lines of "..." continue: statements, and then the call. The
line above a group of calls gives the expected result, the array libraries to try and, after "without", a package to
hide. Expected results:

* an error's name: each call raises it, with the text below the call, if there is one. If the call uses ``each``, the
  call with the first option must succeed, and runs before;
* a warning's name: likewise, for a warning. The call with the first option must not warn;
* same: every option of ``each`` gives the same bits of the results and of the gradients of the features;
* apart: if the first of two or three ranks takes another option of ``each``, all raise the same MismatchError;
* true: the call returns True;
* signature: the line is the callable's signature, with the defaults.

Calls see the names of ``namespace``, and arrays of one library: ``image`` and ``text`` (6, 5), ``key`` (11, 5) and
``labels`` (6,).
"""

from __future__ import annotations

import ast
import builtins
import inspect
import os
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from importlib import import_module
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import contrastile
from contrastile.backends.contract import BackendUnavailableError, UnsupportedProblemError
from contrastile.comm.communicator import Communicator, ExchangeError, MismatchError
from contrastile.comm.inprocess import InProcessGroup
from contrastile.plan import DEFAULTS
from contrastile.problems import BUILDERS
from contrastile.reporting import one_line
from contrastile.verify import process
from contrastile.verify.comparison import NOTHING, Comparisons, wrong
from contrastile.verify.trial import SkipError, Subject, asked

TEXT = Path(__file__).with_suffix(".txt")
_ERRORS = {x.__name__: x for x in (BackendUnavailableError, UnsupportedProblemError, MismatchError, ExchangeError)}
SAYS = re.compile(r"(?s).*( must |is not available|refuses this problem).*(\bgot |cannot be imported|No module named)")
"""The text of an error must state the rule and the value."""


@dataclass(frozen=True)
class Call:
    """A call, its expected result, the array libraries to try, a package to hide, and the text of its error."""

    text: str
    known: str
    libraries: tuple[str, ...] = ()
    without: str = ""
    says: str = ""

    @cached_property
    def error(self) -> type[Exception] | None:
        """The error or warning that the call must raise, if any."""
        error: type[Exception] | None = _ERRORS.get(self.known) or getattr(builtins, self.known, None)
        return error

    @cached_property
    def line(self) -> str:
        """The text in one line."""
        return " ".join(self.text.split())

    @cached_property
    def code(self) -> tuple[Any, Any]:
        """The statements of the text, compiled, and its last expression."""
        # import every module that the text names: the package imports few of them by itself
        for module in re.findall(r"\bcontrastile(?:\.[a-z_]+)+", self.text):
            with suppress(ImportError):
                for prefix in accumulate(module.split("."), "{}.{}".format):
                    import_module(prefix)
        *statements, last = ast.parse(self.text).body
        if not isinstance(last, ast.Expr):
            raise ValueError(f"the last line of a call must be an expression, got {ast.unparse(last)!r}")
        body = compile(ast.Module(statements, []), str(TEXT), "exec")
        return body, compile(ast.Expression(last.value), str(TEXT), "eval")

    def evaluate(self, names: dict[str, Any]) -> Any:
        """The value of the last expression of the text, after the statements before it."""
        body, last = self.code
        exec(body, names)
        return eval(last, names)

    @property
    def doors(self) -> dict[str, Callable[..., Any]]:
        """Other ways to call the loss in the text, by name, beside the plain call."""
        name = self.text.removeprefix("contrastile.").partition("(")[0]
        if name not in (*BUILDERS, "statistics") or "requires_grad" in self.text or "group=" in self.text:
            return {}
        doors: dict[str, Callable[..., Any]] = {} if name == "statistics" else {"value_and_grad": _value_and_grad}
        # a group takes no blocks
        return doors if re.search(r"block=|device=|backend=|exchange=", self.text) else {**doors, "a group": _in_group}


@dataclass
class Each:
    """Returns the option number ``turn``; ``count`` is the largest number of options seen so far."""

    turn: int = 0
    count: int = field(default=1, init=False)

    def __call__(self, *options: Any) -> Any:
        self.count = max(self.count, len(options))
        return options[min(self.turn, len(options) - 1)]


class Names(dict[str, Any]):
    """The names that a call sees; any other name is imported as a module."""

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name) or find_spec(name) is None:
            raise KeyError(name)
        return import_module(name)


class _PackageThroughDoor:
    """The package, whose losses are called through a door."""

    def __init__(self, door: Callable[..., Any]) -> None:
        self._door = door

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(contrastile, name)
        return partial(self._door, attribute) if name in (*BUILDERS, "statistics") else attribute


def _value_and_grad(loss: Any, *args: Any, **keywords: Any) -> Any:
    settings: Any = {name: keywords.pop(name) for name in DEFAULTS if name in keywords}
    return contrastile.value_and_grad(loss, **settings)(*args, **keywords)


def _in_group(loss: Any, *args: Any, **keywords: Any) -> Any:
    return InProcessGroup[Any](1).run(lambda group: loss(*args, **keywords, group=group))[0]


def _in_environment(variables: dict[str, str], call: Callable[[], Any]) -> Any:
    """The value of a call with these environment variables."""
    with mock.patch.dict(os.environ, variables):
        return call()


def _in_torch_world(call: Callable[[], Any]) -> Any:
    """The value of a call in a torch.distributed world of one process."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        return call()
    finally:
        dist.destroy_process_group()


def namespace(library: str, door: Callable[..., Any] | None = None, each: Each | None = None) -> Names:
    """The names that a call sees, with fresh arrays."""
    rng = np.random.default_rng(5)
    arrays: dict[str, Any] = {
        name: rng.standard_normal((rows, 5)).astype("float32")
        for name, rows in (("image", 6), ("text", 6), ("key", 11))
    }
    arrays["labels"] = np.array([0, 1, 0, 2, 2, 7])
    names: Any = {"InProcessGroup": InProcessGroup, "np": np}
    names |= {"each": each or Each(), "within": _in_environment, "alone": _in_torch_world, "mock": mock}
    if library == "torch":
        import torch

        from contrastile.verify import scenes

        arrays = {name: torch.from_numpy(x) for name, x in arrays.items()}
        names |= {"torch": torch, "scenes": scenes}
    return Names(contrastile=contrastile if door is None else _PackageThroughDoor(door), **names, **arrays)


def read(text: str) -> dict[str, list[Call]]:
    """The calls of a text by their titles."""
    calls_by_title: dict[str, list[Call]] = {}
    title, template = "", Call("", "")
    for line in filter(None, text.splitlines()):
        if line.startswith("    ... "):
            call = calls_by_title[title][-1]
            calls_by_title[title][-1] = replace(call, text=f"{call.text}\n{line[8:].rstrip()}")
        elif line.startswith(8 * " "):
            calls_by_title[title][-1] = replace(calls_by_title[title][-1], says=line.strip())
        elif line.startswith(" "):
            calls_by_title[title].append(replace(template, text=line.strip()))
        elif line.startswith("== "):
            title = line[3:]
            calls_by_title[title] = []
        else:
            known, libraries, without = re.findall(r"^(\w+) \(([\w, ]+)(?:; without (\w+))?\)$", line)[0]
            template = Call("", known, tuple(libraries.split(", ")), without)
    return calls_by_title


@cache
def labelled() -> list[tuple[str, Call]]:
    """The calls of the package's text with their labels: the title, and the call in one line."""
    calls_by_title = read(TEXT.read_text(encoding="utf-8"))
    return [(f"{title}, {call.line}", call) for title, calls in calls_by_title.items() for call in calls]


def known(subject: Subject, case: str) -> Comparisons:
    """Every call of a table is refused, or gives the same, as the table has it, by each way to make it."""
    if subject.backend.arrays.name != "torch" or subject.label != "float32" or subject.device != "cpu":
        raise SkipError("in float32 of torch tensors on the host alone")
    selected = [(label, call) for label, call in labelled() if asked(case, label)]
    if not selected:
        raise SkipError(f"there is no {case.partition(':')[2]!r}")
    for label, call in selected:
        # the tests run calls that hide a package, or that import for seconds
        if call.without or re.search(r"nested|distributed\.tensor", call.text):
            continue
        for library in call.libraries:
            for name, door in {"": None, **call.doors}.items():
                with _watched(call):
                    fault = _find_fault(call, library, door)
                yield ", ".join(filter(None, (label, library, name))), NOTHING if fault is None else wrong(fault)


@contextmanager
def _watched(call: Call) -> Iterator[None]:
    """Make the package's warnings errors, unless the call must raise an error; torch repeats its one-time warnings."""
    import torch

    was_always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings(action="ignore"), torch.enable_grad():
            if call.error is None or issubclass(call.error, Warning):
                warnings.filterwarnings("error", module="contrastile")
            yield
    finally:
        torch.set_warn_always(was_always)


def _find_fault(call: Call, library: str, door: Callable[..., Any] | None) -> str | None:
    """The reason why a call fails its expectation, or None."""
    if call.known == "signature":
        name, _, parameters = call.text.partition("(")
        actual = signature(eval(name, namespace(library)))
        return None if actual == f"({parameters}" else f"it is {name}{actual}"
    each = Each()
    names = namespace(library, door, each)
    if call.known == "apart":
        for size in (2, 3):
            messages = InProcessGroup[str](size).run(partial(_mismatch_of_rank, call, library))
            if not all(messages) or set(messages) != {(size == 3 and call.says) or messages[0]}:
                return f"the ranks raised {messages}"
        return None
    if call.error is None:
        try:
            expected = _result(call.evaluate(names), names)
            if call.known == "true":
                return None if expected == [repr(True)] else "it is not"
            for turn in range(1, each.count):
                each.turn = turn
                if _result(call.evaluate(names), names) != expected:
                    return f"option {turn} gives something else"
        except Exception as error:
            return f"option {each.turn} {_describe_error(error)}"
        return None
    try:
        # from its third call on a signature is cached
        for _ in range(3 * ("each(" in call.text)):
            call.evaluate(names)
    except Exception as error:
        return f"what is right {_describe_error(error)}"
    each.turn, modes_before = each.count, process.modes()
    try:
        call.evaluate(names)
    except Exception as error:
        is_of_door = isinstance(error, MismatchError) or "value_and_grad(" in str(error)
        if call.says and call.says != str(error) and not (door and is_of_door):
            return f"it says {error}"
        allowed = call.error, *[MismatchError] * (door is _in_group and call.error is ValueError)
        is_right = type(error) in allowed and (SAYS.match(str(error)) or call.error not in (TypeError, ValueError))
        return process.changed(modes_before, process.modes()) if is_right else f"raised {one_line(error)}"
    return "it was computed"


def _describe_error(error: Exception) -> str:
    # an error without our wording comes from no check of arguments
    return f"is refused: {error}" if SAYS.match(str(error)) else f"raised {one_line(error)}"


def _mismatch_of_rank(call: Call, library: str, group: Communicator) -> str:
    """The text of a rank's MismatchError, "" for none."""

    def with_group(loss: Any, *args: Any, **keywords: Any) -> Any:
        return loss(*args, **{"group": group, **keywords})

    names = namespace(library, with_group, Each(group.rank))
    names["group"] = group
    try:
        call.evaluate(names)
    except MismatchError as error:
        return str(error)
    return ""


def signature(call: Callable[..., Any]) -> str:
    """A callable's parameters with their defaults, without types."""
    full = inspect.signature(call)
    untyped = [x.replace(annotation=inspect.Parameter.empty) for x in full.parameters.values()]
    return str(full.replace(parameters=untyped, return_annotation=inspect.Signature.empty))


def _result(value: Any, names: dict[str, Any]) -> list[Any]:
    """The bits of a result, and of the gradients of its sum with respect to the features that require them."""
    values = list(_flatten(value))
    learnt = [x for x in values if getattr(x, "requires_grad", False)]
    if learnt:
        torch, features = names["torch"], [x for x in (names["image"], names["text"], names["key"]) if x.requires_grad]
        values += torch.autograd.grad(sum(x.sum() for x in learnt), features, allow_unused=True) if features else []
    return [_bits(x) for x in values]


def _flatten(x: Any) -> Iterator[Any]:
    if isinstance(x, dict):
        x = tuple(x.items())
    if isinstance(x, list | tuple):
        for item in x:
            yield from _flatten(item)
    else:
        yield x


def _bits(x: Any) -> Any:
    if hasattr(x, "detach"):
        return str(x.dtype), tuple(x.shape), x.detach().tolist()
    return (x.dtype.str, x.shape, x.tobytes()) if isinstance(x, np.ndarray | np.generic) else repr(x)
