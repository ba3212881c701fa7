"""The measured numbers in docs/benchmarks/cpu.md are those of the files beside it."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_committed_page_is_what_the_files_say(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import make_bench_page

    assert make_bench_page.PAGE.read_text(encoding="utf-8") == make_bench_page.page()
    sys.modules.pop("make_bench_page")
