"""Writes docs/reference/errors.md: the errors that the public functions raise on invalid input (tests/provocations.py).

python scripts/make_errors_page.py            writes the page
"""

from __future__ import annotations

import sys
from pathlib import Path

from page_writing import escaped, table

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference" / "errors.md"

INTRODUCTION = """\
# Errors

Every message states the rule, the value that broke it and the fix. The tests run each call below and compare
its message: `make errors` writes this page from `tests/provocations.py`.

`image` and `text` are (6, 5), `key` is (11, 5), `labels` is (6,). `UnsupportedProblemError` is a `ValueError`,
`BackendUnavailableError` an `ImportError`; both are in `contrastile.backends.contract`.

Shapes, dtypes and devices are always checked. Values, such as a scale that is not finite or a positive out of range,
are checked where reading them costs nothing: on the host, in eager calls. In compiled functions, under torch.func and
on a GPU they make the loss NaN instead.
NaN and infinity in the *features* are no error: as in the oracle, the loss is NaN.
"""


def page() -> str:
    sys.path.insert(0, str(ROOT / "tests"))
    from provocations import PROVOCATIONS

    lines = [INTRODUCTION]
    for title, provocations in PROVOCATIONS.items():
        rows = []
        for each in provocations:
            call = f"`{each.call}`" + (f", {each.without} not installed" if each.without else "")
            message = each.message(each.libraries[0])
            rows.append([call, f"`{each.error.__name__}`", escaped(message)])
        lines += [f"## {title}", "", table(["call", "raises", "message"], rows, left=(0, 1, 2)), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
