"""``contrastile verify --loss``: the current directory, exit codes, what is not claimed, one line for errors."""

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
def here(tmp_path, monkeypatch):
    """The current directory, which holds kernels.py and is not searched yet."""
    shutil.copy(Path(__file__).with_name("numpy_losses.py"), tmp_path / "my_kernels.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each not in ("", str(tmp_path))])
    return tmp_path


def test_a_right_loss_passes_and_the_verdict_lists_what_is_not_claimed(here, capsys):
    assert main(["verify", "--loss", "my_kernels:right", *QUICK, "--json", "rows.json"]) == 0
    out = capsys.readouterr().out
    assert "not claimed, not tested\n  my_kernels:right: float64 features" in out
    assert out.splitlines()[-1].startswith("PASS: 2 passed, 0 failed, 0 skipped, 1 not claimed")
    rows = json.loads((here / "rows.json").read_text(encoding="utf-8"))["rows"]
    assert [row["status"] for row in rows] == ["pass", "pass", "unclaimed"]


def test_a_wrong_loss_fails_and_its_command_fails_again(here, capsys):
    words = ["verify", "--loss", "my_kernels:wrong", "my_kernels:right", *QUICK, "--quiet", "--seed", "7"]
    assert main([*words, "--json", "rows.json"]) == 1
    read = json.loads((here / "rows.json").read_text(encoding="utf-8"))
    assert (read["seed"], read["loose"]) == (7, False)
    assert read["command"].endswith("--seed 7 --json rows.json")
    out = capsys.readouterr().out
    assert "FAILED my_kernels:wrong value ragged float32" in out
    assert "my_kernels:right" not in out
    (command,) = [line.partition("rerun: ")[2] for line in out.splitlines() if "rerun: " in line]
    assert "--seed 7" in command
    assert main([*shlex.split(command)[1:], "--quiet"]) == 1
    assert capsys.readouterr().out.splitlines()[2] in out


def test_the_objective_says_what_is_computed(here):
    words = ["verify", "--loss", "my_kernels:nce", *QUICK, "--quiet"]
    assert main(words) == 1
    assert main([*words, "--objective", "info_nce"]) == 0


def test_a_backend_of_the_current_directory_is_found_by_a_console_script(here):
    (here / "my_backend.py").write_text("from contrastile.backends.numpy import backend\n", encoding="utf-8")
    # what a console script has: the folder of the script, and not the current one
    script = "import sys; sys.path[0] = '/nowhere'; from contrastile.cli import main; sys.exit(main())"
    words = ["verify", "--backend", "my_backend:backend", "--case", "one-row", "--property", "value", "--quiet"]
    package = str(Path(__file__).parents[3])
    environment = {**os.environ, "PYTHONPATH": package}
    done = subprocess.run(
        [sys.executable, "-c", script, *words], env=environment, capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stderr
