"""What the front door refuses of torch tensors: the second time as the first, and without a trace."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from contrastile import losses
from contrastile.backends.contract import UnsupportedProblemError
from contrastile.reporting import one_line
from contrastile.verify import process
from contrastile.verify.comparison import NOTHING, Comparisons, wrong
from contrastile.verify.trial import SkipError, Subject
from contrastile.verify.worlds import Threads

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
    for name, good, bad in (
        ("tile", 1, True),
        ("tile", 3, 3.0),
        ("tile", (1, 3), (True, 3)),
        ("keep", 1, 1.0),
        ("workspace", 1, True),
    ):
        yield f"{name}={bad!r}", partial(right, **{name: good}), partial(right, **{name: bad}), TypeError

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
    even, learnt = (torch.ones(_ROWS, device=subject.device, requires_grad=x) for x in (False, True))
    yield "weights that learn", partial(right, weights=even), partial(right, weights=learnt), ValueError
    if subject.device == "cpu":
        ones, masked = np.ones(_ROWS), np.ma.masked_equal(np.ones(_ROWS), 0)
        of_numpy = partial(clip, *(np.array(x.tolist(), np.float32) for x in pair), 10.0, **settings)
        yield "weights with a mask", partial(of_numpy, weights=ones), partial(of_numpy, weights=masked), TypeError
    given: dict[str, Any] = {"negatives": pair[1], "guide": (pair[0].detach(), torch.cat([pair[1].detach()] * 2))}
    nce: Any = losses.info_nce
    alone = partial(nce, *pair, 10.0, in_batch=False, **settings)
    yield "a guide of negatives alone", partial(alone, negatives=pair[1]), partial(alone, **given), ValueError
    ids = torch.arange(_ROWS, device=subject.device)
    several = partial(nce, *pair, 10.0, label_smoothing=0.1, **settings)
    beside: list[dict[str, Any]] = [{"row_ids": ids, "column_ids": ids}, {"margin": 0.1}, {"threshold": 0.1}]
    for more in beside:
        yield f"label smoothing with {', '.join(more)}", several, partial(several, **more), ValueError
    yield "blocks of ranks", right, lambda: Threads(1).run(lambda group: right(group=group, block=2)), ValueError
    for unknown in sorted({"split", "tf32", "ieee"} - subject.backend.precisions)[:1]:
        yield "another precision", right, partial(right, precision=unknown), UnsupportedProblemError
    refusing = partial(right, backend=f"contrastile.verify.wrapped:refusing@{subject.name}")
    yield "what the backend refuses", right, refusing, UnsupportedProblemError
