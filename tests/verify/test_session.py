"""A backend that exits, dies, hangs or prints fails its check, and the other checks run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from contrastile.cli import main
from contrastile.verify.session import MAX_LOST

REASONS = {
    "leaves": "raised SystemExit: 0",
    "ends": "the process ended with exit code 0",
    "dies": "the process died of SIGSEGV",
    "hangs": "the process took longer than 60 s (--deadline)",
    "prints": "printed to stdout: 'hello there'",
    "writes": "printed to stdout: 'hello there'",
}
QUICK = ["--dtype", "float64", "--quiet"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the path of modules."""
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def verify(tmp_path: Path, *words: str) -> tuple[int, list[dict[str, str]]]:
    path = tmp_path / "rows.json"
    code = main(["verify", *words, *QUICK, "--json", str(path)])
    return code, json.loads(path.read_text(encoding="utf-8"))["rows"]


@pytest.mark.parametrize("names", ["leaves ends dies prints writes", pytest.param("hangs", marks=pytest.mark.slow)])
def test_an_ill_backend_fails_its_case_and_passes_the_others(
    names: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["--case", "one-row", "smoke", "one-column", "--property", "gradients"]
    # this deadline suffices for the other checks on a busy machine
    words += ["--deadline", "60"] * (names == "hangs")
    code, rows = verify(tmp_path, "--backend", *(f"ill_backends:{name}" for name in names.split()), *words)
    assert code == 1
    out, err = capfd.readouterr()
    for name in names.split():
        backend_rows = [row for row in rows if row["backend"] == f"ill_backends:{name}"]
        assert {row["case"]: row["status"] for row in backend_rows} == {
            "smoke": "fail",
            "one-column": "pass",
            "one-row": "pass",
        }
        assert [REASONS[name] in row["reason"] for row in backend_rows if row["case"] == "smoke"] == [True]
        assert f"FAILED ill_backends:{name} gradients smoke float64" in out
    # the output of the backends is in the report, and nowhere else
    assert out.count("hello") == 2 * ("prints" in names)
    assert out.count("--case smoke") == len(names.split())
    assert err == ""


def test_a_backend_that_ends_every_process_is_given_up(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["--case", "one-row", "smoke", "--property", "value", "gradients", "tiles"]
    code, rows = verify(tmp_path, "--backend", "ill_backends:always", "numpy", *words)
    assert code == 1
    # two backends, two cases, three properties
    assert len(rows) == 12
    statuses = [row["status"] for row in rows if row["backend"] == "ill_backends:always"]
    assert statuses == ["fail"] * MAX_LOST + ["untested"] * (6 - MAX_LOST)
    assert {row["status"] for row in rows if row["backend"] == "numpy"} == {"pass"}
    assert "ill_backends:always: 3 not tested: it ended 3 processes before" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("first_line", "code", "message"),
    [
        ("import os; os._exit(0)", 2, "ended with exit code 0"),
        ("print('good morning')", 1, "printed to stdout when it was imported: 'good morning'"),
    ],
)
def test_an_import_that_exits_or_prints(
    first_line: str, code: int, message: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = f"{first_line}\nfrom contrastile.backends.numpy import backend\n"
    (folder / "odd_module.py").write_text(source, encoding="utf-8")
    words = ["verify", "--backend", "odd_module:backend", "--case", "one-row", "--property", "value", *QUICK]
    assert main(words) == code
    out, err = capfd.readouterr()
    assert message in (err if code == 2 else out)


def test_torch_is_not_loaded_to_look_for_a_gpu_that_no_backend_would_use(folder: Path) -> None:
    (folder / "torch.py").write_text("raise SystemExit('torch was imported')\n", encoding="utf-8")
    assert main(["verify", "--backend", "numpy", "--case", "one-row", "--property", "value", *QUICK]) == 0


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_ctrl_c_reports_the_finished_checks(tmp_path: Path) -> None:
    words = ["--backend", "ill_backends:stops", "--case", "smoke", "one-row", "--property", "value", *QUICK]
    words += ["--json", str(tmp_path / "rows.json")]
    hanging = tmp_path / "hanging"
    process = subprocess.Popen(
        [sys.executable, "-m", "contrastile", "verify", *words],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "HANGING": str(hanging)},
        # tests in the background ignore Ctrl-C, and their children inherit that
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    for _ in range(12000):
        if hanging.exists() or process.poll() is not None:
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=1200)
    assert process.returncode == 130
    assert err == "contrastile verify: interrupted after 1 of 2 checks\n"
    assert out.splitlines()[-1].startswith("INCOMPLETE: 1 passed, 0 failed, 1 not tested")
    report = json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))
    assert report["verdict"] == "incomplete"
    assert [row["status"] for row in report["rows"]] == ["pass", "untested"]
