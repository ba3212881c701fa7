"""What the front door refuses of torch tensors: the second time as the first, and without a trace."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from contrastile import losses
from contrastile.backends.contract import UnsupportedProblemError
from contrastile.reporting import one_line
from contrastile.verify import process
from contrastile.verify.comparison import NOTHING, Comparisons, wrong
from contrastile.verify.trial import SkipError, Subject

_ROWS, _WIDTH = 7, 5


def refusals(subject: Subject, case: str) -> Comparisons:
    """A call that nothing is right for is an error, after right calls of its shapes too, and changes no setting."""
    if subject.backend.arrays.name != "torch" or subject.label != "float32":
        raise SkipError("in float32 of torch tensors alone")
    import torch

    draw = torch.Generator().manual_seed(0)
    pair = [torch.randn(_ROWS, _WIDTH, generator=draw).to(subject.device).requires_grad_() for _ in range(2)]
    for label, right, bad, expected in _calls(subject, pair):
        for _ in range(3):
            right()
        before = process.modes() | process.state()
        try:
            found = bad()
        except Exception as error:
            changed = process.changed(before, process.modes() | process.state())
            if type(error) is not expected:
                changed = f"raised {one_line(error)}"
            yield label, NOTHING if changed is None else wrong(changed)
            continue
        finally:
            torch.set_grad_enabled(True)
        # where values are not read, NaN says it
        unread = subject.device != "cpu" and label.startswith("a scale") and bool(found.isnan())
        yield label, NOTHING if unread else wrong("it was computed")


def _calls(subject: Subject, pair: Any) -> Iterator[tuple[str, Callable[[], Any], Callable[[], Any], type[Exception]]]:
    """Calls that are right, one that is not, and the error that says so."""
    import torch
    from torch.autograd import forward_ad

    settings: dict[str, Any] = {"backend": subject.name, **subject.settings}
    clip: Any = losses.clip_loss
    right = partial(clip, *pair, 10.0, **settings)
    ten, *others = (torch.tensor(x, device=subject.device) for x in (10.0, torch.nan, torch.inf))
    scaled = partial(clip, *pair, **settings)
    for x in others:
        yield f"a scale of {x:g}", partial(scaled, ten), partial(scaled, x), ValueError

    def forward_mode(at: int) -> Any:
        # of what torch imports for the first dual tensor of a process
        with warnings.catch_warnings(action="ignore"), forward_ad.dual_level():
            make: Any = forward_ad.make_dual
            given = [make(x.detach(), torch.ones_like(x)) if i == at else x.detach() for i, x in enumerate(learning)]
            return clip(*given, **settings)

    learning = *pair, ten
    for at, name in enumerate(("image", "text", "scale")):
        yield f"a derivative by the {name} in forward mode", right, partial(forward_mode, at), RuntimeError

    def gradient() -> Any:
        return torch.autograd.grad(right(), pair[0], create_graph=True)[0]

    def penalised() -> Any:
        return torch.autograd.grad(right() + gradient().square().sum(), pair)

    yield "a penalty of a gradient", gradient, penalised, RuntimeError
    for unknown in sorted({"split", "tf32", "ieee"} - subject.backend.precisions)[:1]:
        yield "another precision", right, partial(right, precision=unknown), UnsupportedProblemError
    refusing = partial(right, backend=f"contrastile.verify.wrapped:refusing@{subject.name}")
    yield "what the backend refuses", right, refusing, UnsupportedProblemError
