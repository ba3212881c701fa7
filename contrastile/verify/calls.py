"""Calls of the public API of which ``calls.txt`` says what comes of them: verify and the tests hold them to it.

Each line of the text is a call; one that begins with "..." goes on with it. Above the calls stands what is known of
them, the array libraries to try and, after "without", a package to hide:

* an error's name: they raise it, and it says what is below the call, if anything. Where there is ``each``, its first
  option is right, and is computed before;
* a warning's name: likewise. What is right warns of nothing;
* same: whatever option of ``each`` is taken, the results and the gradients of the features have the same bits;
* apart: where the first of two ranks, or of three, takes another option of ``each``, all raise one MismatchError;
* true: so is their value;
* signature: so a callable is written, with the defaults.

Calls see what ``namespace`` names; of one array library ``image`` and ``text`` (6, 5), ``key`` (11, 5) and ``labels``
(6,).
"""

from __future__ import annotations

import builtins
import inspect
import os
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
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
from contrastile.verify.trial import SkipError, Subject

TEXT = Path(__file__).with_suffix(".txt")
_ERRORS = {x.__name__: x for x in (BackendUnavailableError, UnsupportedProblemError, MismatchError, ExchangeError)}
SAYS = re.compile(r"(?s).*( must |is not available|refuses this problem).*(\bgot |cannot be imported|No module named)")
"""What the text of an error has: the rule, and the value."""


@dataclass(frozen=True)
class Call:
    """A call, what is known of it, the array libraries to try, a package to hide, and what its error says."""

    text: str
    known: str
    libraries: tuple[str, ...] = ()
    without: str = ""
    says: str = ""

    @cached_property
    def error(self) -> type[Exception] | None:
        """What it raises, if it does."""
        found: type[Exception] | None = _ERRORS.get(self.known) or getattr(builtins, self.known, None)
        return found

    @cached_property
    def code(self) -> Any:
        # the package imports few of its modules by itself
        for found in re.findall(r"\bcontrastile(?:\.[a-z_]+)+", self.text):
            with suppress(ImportError):
                for name in accumulate(found.split("."), "{}.{}".format):
                    import_module(name)
        return compile(self.text, str(TEXT), "eval")

    @property
    def doors(self) -> dict[str, Callable[..., Any]]:
        """The ways to call the loss that it calls, by name, beside the plain one."""
        name = self.text.removeprefix("contrastile.").partition("(")[0]
        if name not in (*BUILDERS, "statistics") or "requires_grad" in self.text or "group=" in self.text:
            return {}
        found: dict[str, Callable[..., Any]] = {} if name == "statistics" else {"value_and_grad": _both}
        # in a group there are no blocks
        return found if re.search(r"block=|device=|backend=|exchange=", self.text) else {**found, "a group": _of_one}


@dataclass
class Each:
    """Gives the option whose turn it is; ``count`` is that of the most options that it has had."""

    turn: int = 0
    count: int = field(default=1, init=False)

    def __call__(self, *options: Any) -> Any:
        self.count = max(self.count, len(options))
        return options[min(self.turn, len(options) - 1)]


class Names(dict[str, Any]):
    """What a call sees: beside its own names, Python's modules."""

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name) or find_spec(name) is None:
            raise KeyError(name)
        return import_module(name)


class _Through:
    """The package, whose losses are called through a door."""

    def __init__(self, door: Callable[..., Any]) -> None:
        self._door = door

    def __getattr__(self, name: str) -> Any:
        found = getattr(contrastile, name)
        return partial(self._door, found) if name in (*BUILDERS, "statistics") else found


def _both(loss: Any, *args: Any, **more: Any) -> Any:
    settings: Any = {name: more.pop(name) for name in DEFAULTS if name in more}
    return contrastile.value_and_grad(loss, **settings)(*args, **more)


def _of_one(loss: Any, *args: Any, **more: Any) -> Any:
    return InProcessGroup[Any](1).run(lambda group: loss(*args, **more, group=group))[0]


def _within(variables: dict[str, str], call: Callable[[], Any]) -> Any:
    """The value of a call in an environment."""
    with mock.patch.dict(os.environ, variables):
        return call()


def _alone(call: Callable[[], Any]) -> Any:
    """The value of a call in a world of torch's of this process alone."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        return call()
    finally:
        dist.destroy_process_group()


def namespace(library: str, door: Callable[..., Any] | None = None, each: Each | None = None) -> Names:
    """What a call sees, with arrays of its own."""
    rng = np.random.default_rng(5)
    arrays: dict[str, Any] = {
        name: rng.standard_normal((rows, 5)).astype("float32")
        for name, rows in (("image", 6), ("text", 6), ("key", 11))
    }
    arrays["labels"] = np.array([0, 1, 0, 2, 2, 7])
    made: Any = {"InProcessGroup": InProcessGroup, "np": np}
    made |= {"each": each or Each(), "within": _within, "alone": _alone, "mock": mock}
    if library == "torch":
        import torch

        from contrastile.verify import scenes

        arrays = {name: torch.from_numpy(x) for name, x in arrays.items()}
        made |= {"torch": torch, "scenes": scenes, "ranking": lambda call: call(scenes.sentence_transformers())}
    return Names(contrastile=contrastile if door is None else _Through(door), **made, **arrays)


def read(text: str) -> dict[str, list[Call]]:
    """The calls of a text by their titles."""
    found: dict[str, list[Call]] = {}
    title, like = "", Call("", "")
    for line in filter(None, text.splitlines()):
        if line.startswith("    ... "):
            last = found[title][-1]
            found[title][-1] = replace(last, text=f"{last.text} {line[8:].strip()}")
        elif line.startswith(8 * " "):
            found[title][-1] = replace(found[title][-1], says=line.strip())
        elif line.startswith(" "):
            found[title].append(replace(like, text=line.strip()))
        elif line.startswith("== "):
            title = line[3:]
            found[title] = []
        else:
            known, libraries, without = re.findall(r"^(\w+) \(([\w, ]+)(?:; without (\w+))?\)$", line)[0]
            like = Call("", known, tuple(libraries.split(", ")), without)
    return found


def known(subject: Subject, case: str) -> Comparisons:
    """Every call of a table is refused, or gives the same, as the table has it, by each way to make it."""
    if subject.backend.arrays.name != "torch" or subject.label != "float32" or subject.device != "cpu":
        raise SkipError("in float32 of torch tensors on the host alone")
    asked, every = case.partition(":")[2], read(TEXT.read_text(encoding="utf-8"))
    if not any(title.startswith(asked) for title in every):
        raise SkipError(f"there is no {asked!r}")
    for title, calls in every.items():
        for call in calls if title.startswith(asked) else ():
            # what is hidden, and imports that take seconds, are the tests'
            if call.without or re.search(r"nested|distributed\.tensor", call.text):
                continue
            for library in call.libraries:
                for door, way in {"": None, **call.doors}.items():
                    with _watched(call):
                        said = _judged(call, library, way)
                    label = ", ".join(filter(None, (title, call.text, library, door)))
                    yield label, NOTHING if said is None else wrong(said)


@contextmanager
def _watched(call: Call) -> Iterator[None]:
    """Warnings of the package are errors where a call is right, or warns; also those that torch gives once."""
    import torch

    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings(action="ignore"), torch.enable_grad():
            if call.error is None or issubclass(call.error, Warning):
                warnings.filterwarnings("error", module="contrastile")
            yield
    finally:
        torch.set_warn_always(before)


def _judged(call: Call, library: str, door: Callable[..., Any] | None) -> str | None:
    """What is wrong with a call, or None."""
    if call.known == "signature":
        name, _, rest = call.text.partition("(")
        shown = signature(eval(name, namespace(library)))
        return None if shown == f"({rest}" else f"it is {name}{shown}"
    each = Each()
    seen = namespace(library, door, each)
    if call.known == "apart":
        for size in (2, 3):
            told = InProcessGroup[str](size).run(partial(_of_rank, call, library))
            if not all(told) or set(told) != {(size == 3 and call.says) or told[0]}:
                return f"the ranks raised {told}"
        return None
    if call.error is None:
        try:
            first = _result(eval(call.code, seen), seen)
            if call.known == "true":
                return None if first == [repr(True)] else "it is not"
            for turn in range(1, each.count):
                each.turn = turn
                if _result(eval(call.code, seen), seen) != first:
                    return f"option {turn} gives something else"
        except Exception as error:
            return f"option {each.turn} {_refused(error)}"
        return None
    try:
        # from the third call on a signature is known
        for _ in range(3 * ("each(" in call.text)):
            eval(call.code, seen)
    except Exception as error:
        return f"what is right {_refused(error)}"
    each.turn, before = each.count, process.modes()
    try:
        eval(call.code, seen)
    except Exception as error:
        own = isinstance(error, MismatchError) or "value_and_grad(" in str(error)
        if call.says and call.says != str(error) and not (door and own):
            return f"it says {error}"
        kinds = call.error, *[MismatchError] * (door is _of_one and call.error is ValueError)
        says = type(error) in kinds and (SAYS.match(str(error)) or call.error not in (TypeError, ValueError))
        return process.changed(before, process.modes()) if says else f"raised {one_line(error)}"
    return "it was computed"


def _refused(error: Exception) -> str:
    # what no check has raised is said as other errors are
    return f"is refused: {error}" if SAYS.match(str(error)) else f"raised {one_line(error)}"


def _of_rank(call: Call, library: str, group: Communicator) -> str:
    """The text of a rank's MismatchError, "" for none."""

    def shared(loss: Any, *args: Any, **more: Any) -> Any:
        return loss(*args, **{"group": group, **more})

    seen = namespace(library, shared, Each(group.rank))
    seen["group"] = group
    try:
        eval(call.code, seen)
    except MismatchError as error:
        return str(error)
    return ""


def signature(call: Callable[..., Any]) -> str:
    """Its parameters with their defaults, without types."""
    found = inspect.signature(call)
    plain = [x.replace(annotation=inspect.Parameter.empty) for x in found.parameters.values()]
    return str(found.replace(parameters=plain, return_annotation=inspect.Signature.empty))


def _result(found: Any, seen: dict[str, Any]) -> list[Any]:
    """The bits of a result and, where there are some, of the gradients of the features of its sum."""
    flat = list(_flat(found))
    learnt = [x for x in flat if getattr(x, "requires_grad", False)]
    if learnt:
        torch, leaves = seen["torch"], [x for x in (seen["image"], seen["text"], seen["key"]) if x.requires_grad]
        flat += torch.autograd.grad(sum(x.sum() for x in learnt), leaves, allow_unused=True) if leaves else []
    return [_bits(x) for x in flat]


def _flat(x: Any) -> Iterator[Any]:
    if isinstance(x, dict):
        x = tuple(x.items())
    if isinstance(x, list | tuple):
        for each in x:
            yield from _flat(each)
    else:
        yield x


def _bits(x: Any) -> Any:
    if hasattr(x, "detach"):
        return str(x.dtype), tuple(x.shape), x.detach().tolist()
    return (x.dtype.str, x.shape, x.tobytes()) if isinstance(x, np.ndarray | np.generic) else repr(x)
