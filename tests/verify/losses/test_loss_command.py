"""``contrastile verify --loss``: losses of the current directory, exit codes, and claims."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from contrastile.cli import main

QUICK = ["--dtype", "float32", "float64", "--case", "ragged", "--property", "value", "gradients"]


@pytest.fixture
def current_folder(tmp_path, monkeypatch):
    """The current directory, which has my_kernels.py and is not on the path yet."""
    shutil.copy(Path(__file__).with_name("numpy_losses.py"), tmp_path / "my_kernels.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(tmp_path))])
    return tmp_path


def test_a_right_loss_passes_and_the_report_lists_the_missing_claims(current_folder, capsys):
    assert main(["verify", "--loss", "my_kernels:right", *QUICK, "--json", "rows.json"]) == 0
    out = capsys.readouterr().out
    assert "not claimed, not tested\n  my_kernels:right: float64 features" in out
    assert out.splitlines()[-1].startswith("PASS: 2 passed, 0 failed, 0 skipped, 1 not claimed")
    rows = json.loads((current_folder / "rows.json").read_text(encoding="utf-8"))["rows"]
    assert [row["status"] for row in rows] == ["pass", "pass", "unclaimed"]


def test_a_wrong_loss_fails_and_its_command_fails_again(current_folder, capsys):
    words = ["verify", "--loss", "my_kernels:wrong", "my_kernels:right", *QUICK, "--quiet", "--seed", "7"]
    assert main([*words, "--json", "rows.json"]) == 1
    report = json.loads((current_folder / "rows.json").read_text(encoding="utf-8"))
    assert (report["seed"], report["loose"]) == (7, False)
    assert report["command"].endswith("--seed 7 --json rows.json")
    out = capsys.readouterr().out
    assert "FAILED my_kernels:wrong value ragged float32" in out
    assert "my_kernels:right" not in out
    (command,) = [line.partition("rerun: ")[2] for line in out.splitlines() if "rerun: " in line]
    assert "--seed 7" in command
    assert main([*shlex.split(command)[1:], "--quiet"]) == 1
    assert capsys.readouterr().out.splitlines()[2] in out


def test_a_loss_passes_with_its_objective_alone(current_folder):
    words = ["verify", "--loss", "my_kernels:nce", *QUICK, "--quiet"]
    assert main(words) == 1
    assert main([*words, "--objective", "info_nce"]) == 0


def test_a_backend_of_the_current_directory_is_found_by_a_console_script(current_folder):
    (current_folder / "my_backend.py").write_text("from contrastile.backends.numpy import backend\n", encoding="utf-8")
    # a console script has its own folder on the path, and not the current one
    script = "import sys; sys.path[0] = '/nowhere'; from contrastile.cli import main; sys.exit(main())"
    words = ["verify", "--backend", "my_backend:backend", "--case", "one-row", "--property", "value", "--quiet"]
    package = str(Path(__file__).parents[3])
    environment = {**os.environ, "PYTHONPATH": package}
    completed = subprocess.run(
        [sys.executable, "-c", script, *words], env=environment, capture_output=True, text=True, timeout=1200
    )
    assert completed.returncode == 0, completed.stderr
