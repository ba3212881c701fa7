from collections.abc import Iterator
from functools import partial

import pytest
import torch

from contrastile.bench import sweep
from contrastile.bench.agreement import FEW_ROWS, check


@pytest.fixture(autouse=True, scope="package")
def one_thread_and_a_small_check() -> Iterator[None]:
    """Threads that wait for each other on a busy machine cost more than tiny problems do."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweep, "check", partial(check, rows=FEW_ROWS))
        yield
    torch.set_num_threads(threads)
