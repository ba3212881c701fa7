from collections.abc import Iterator
from functools import partial

import pytest

from contrastile.bench import sweep
from contrastile.bench.agreement import FEW_ROWS, check


@pytest.fixture(autouse=True, scope="package")
def a_small_check() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweep, "check", partial(check, rows=FEW_ROWS))
        yield
