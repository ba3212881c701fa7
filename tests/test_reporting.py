"""What the commands share: files that are checked before the work, tables, progress."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from contrastile import reporting
from contrastile.reporting import plain_table, progress, show_table, why_not_writable


def test_what_can_be_written_is_left_as_it_was(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_text("kept")
    assert why_not_writable(None, old, new) is None
    assert old.read_text() == "kept"
    assert not new.exists()


def test_what_cannot_is_named_with_its_reason(tmp_path: Path) -> None:
    missing = tmp_path / "missing" / "file"
    assert why_not_writable(tmp_path / "fine", missing) == f"cannot write {missing}: No such file or directory"
    assert why_not_writable(tmp_path) == f"cannot write {tmp_path}: Is a directory"
    under = tmp_path / "file" / "below"
    (tmp_path / "file").touch()
    assert why_not_writable(under) == f"cannot write {under}: Not a directory"


def test_a_pipe_is_not_opened(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    # opening it would wait for a reader, or end what the reader gets
    assert why_not_writable(pipe) is None


@pytest.mark.parametrize("rich", [True, False])
def test_tables_show_every_cell_and_read_no_markup(
    rich: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reporting, "_has_rich", lambda: rich)
    show_table("Title", ("name", "n"), [("[bold]x[/bold]", "1"), ("y", "22")], right=[1])
    printed = capsys.readouterr().out
    assert "Title" in printed
    assert "[bold]x[/bold]" in printed
    assert "22" in printed


def test_a_plain_table_is_aligned() -> None:
    text = plain_table("T", ("name", "n"), [("x", "1"), ("longer", "22")], right=[1])
    assert text.splitlines() == ["T", "name     n", "----------", "x        1", "longer  22"]


@pytest.mark.parametrize("lines", [True, False])
@pytest.mark.parametrize("shown", [True, False])
def test_progress_without_a_terminal_is_a_line_each_tenth_where_asked_for(
    shown: bool, lines: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with progress(shown=shown, lines=lines) as report:
        for done in range(1, 21):
            report(done, 20, "numpy [red] smoke")
    out, err = capsys.readouterr()
    assert out == ""
    expected = [f"{done} of 20: numpy [red] smoke" for done in range(2, 21, 2)]
    assert err.splitlines() == (expected if shown and lines else [])
