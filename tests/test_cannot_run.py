"""A command that cannot run to its end says so before any work: one line on stderr and exit code 2."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from pages import read, sections

from contrastile.bench import command as bench
from contrastile.cli import main

ERRORS = {
    command: [line.split(" => ") for line in text.replace("HUGE", "9" * 400).split("\n") if line]
    for command, text in sections(read("tests/cannot_run.txt")).items()
}
REQUIRED = {"plan": ["--batch", "9", "--dim", "5", "--memory-gib", "1", "--backend", "torch"]}


def error_line(capsys: pytest.CaptureFixture[str], command: str, *words: str) -> str:
    """The line that a refused command prints on stderr."""
    assert main([command, *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"contrastile {command}: ")
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize(("command", "words", "error"), [(name, *row) for name, rows in ERRORS.items() for row in rows])
def test_a_command_that_cannot_run_says_why(
    command: str, words: str, error: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(bench, "torch_gpus", lambda: 0)
    assert error in error_line(capsys, command, *REQUIRED.get(command, ()), *words.split())


@pytest.mark.parametrize(
    ("missing", "words", "extra"),
    [
        ("rich", "verify --backend numpy --case drawn", "verify"),
        ("mpi4py", "verify --backend numpy --world mpi", "mpi"),
        ("matplotlib", "bench --plot x.png", "verify"),
    ],
)
def test_a_missing_package_has_its_install_command(
    missing: str, words: str, extra: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == missing else find_spec(name, *a))
    error = error_line(capsys, *words.split())
    assert missing in error
    assert error.endswith(f"pip install 'contrastile[{extra}]'\n")


@pytest.mark.parametrize("source", ["raise SystemExit(0)", "raise ValueError('two\\nlines')"])
def test_a_backend_whose_import_raises_is_named(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "raises_on_import.py").write_text(source + "\n")
    monkeypatch.syspath_prepend(tmp_path)
    reason = "SystemExit: 0" if "Exit" in source else "ValueError: two lines"
    for command in ("verify", "bench"):
        error = error_line(capsys, command, "--backend", "raises_on_import:backend")
        assert error == f"contrastile {command}: backend 'raises_on_import:backend' raised {reason}\n"


@pytest.mark.parametrize(
    ("words", "work"),
    [
        ("verify --backend numpy --json", "verify.command.Run"),
        ("verify --backend numpy --world 2 --json", "verify.command.Run"),
        ("bench --json", "bench.sweep.run"),
        ("bench --plot", "bench.sweep.run"),
        ("doctor --json", "doctor.examine"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_the_work(
    words: str, work: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(f"contrastile.{work}", None)
    error = error_line(capsys, *words.split(), str(tmp_path))
    assert error.endswith(f": cannot write {tmp_path}: Is a directory\n")
