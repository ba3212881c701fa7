"""The command line where it meets the system: pipes, full disks, packages and MPI.

contrastile/verify/calls.txt tests the other output and exit codes of the commands.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from contrastile import cli, doctor
from contrastile.backends.registry import BUILT_IN
from contrastile.bench.agreement import Agreement
from contrastile.reporting import why_not_writable

COMMAND = [sys.executable, "-m", "contrastile"]


def test_a_reader_that_leaves_causes_no_traceback():
    listing = subprocess.Popen([*COMMAND, "verify", "--list"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    listing.stdout.close()
    with listing.stderr:
        errors = listing.stderr.read()
    assert (listing.wait(), errors) == (2, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux's")
def test_an_output_that_cannot_be_written_is_reported_in_one_line():
    command = [*COMMAND, "plan", "--batch", "9", "--dim", "5", "--device", "cpu"]
    with open("/dev/full", "w") as full:
        first = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert "the standard output cannot be written: No space left" in first.stderr
    second = subprocess.run(["sh", "-c", '"$@" >&-', "sh", *command], stderr=subprocess.PIPE, text=True, check=False)
    for completed in (first, second):
        assert (completed.returncode, len(completed.stderr.splitlines())) == (2, 1), completed.stderr


def test_a_check_of_paths_changes_no_file_and_names_the_path_that_cannot_be_written(tmp_path: Path) -> None:
    old, new, pipe = (tmp_path / name for name in ("old", "new", "pipe"))
    old.write_text("kept")
    # a check that opened a pipe would wait for its reader, or end the reader's input
    os.mkfifo(pipe)
    assert why_not_writable(None, old, new, pipe) is None
    assert (old.read_text(), new.exists()) == ("kept", False)
    for path, reason in ((tmp_path, "Is a directory"), (new / "x", "No such file or directory"), (old / "x", "Not a")):
        assert (why_not_writable(new, path) or "").startswith(f"cannot write {path}: {reason}")


def run_doctor(*words: str) -> int:
    return cli.main(["doctor", *words])


def test_doctor_finds_what_works_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_doctor("--json", str(tmp_path / "doctor.json")) == 0
    report = json.loads((tmp_path / "doctor.json").read_text())
    assert report["verdict"] == "pass"
    assert list(report["findings"][0]) == ["kind", "name", "state", "detail", "remedy"]
    states = {finding["name"]: finding["state"] for finding in report["findings"] if finding["kind"] == "backend"}
    assert states["numpy"] == states["torch"] == "ok"
    assert report["environment"]["torch_blas"] != "unknown"
    output = capsys.readouterr().out
    assert "works here: numpy" in output
    for finding in report["findings"]:
        assert finding["name"] in output, finding


def test_doctor_says_that_mpi4py_finds_no_mpi() -> None:
    """``pip install mpi4py`` on a machine without MPI has this effect, and lightning.Trainer() then raises."""
    program = "from contrastile import doctor; doctor.known = dict; print(*doctor.examine())"
    env = os.environ | {"MPI4PY_LIBMPI": "/nowhere/libmpi.so", "TRITON_INTERPRET": "0"}
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=env).stdout
    assert "state='broken', detail='" in output
    assert ": cannot load MPI library', remedy='pip install mpich, or" in output


def test_no_command_is_imported_before_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli.importlib, "import_module", None)
    assert cli.main([]) == 2


def test_doctor_reports_a_wrong_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.agreement, "check", lambda *_, **options: Agreement("torch", 7.0, 67, "loss: error 1"))
    finding = doctor._examine_backend("torch", BUILT_IN["torch"], None)
    assert (finding.state, finding.remedy) == ("wrong", "contrastile verify --backend torch")
    assert finding.detail.endswith("; loss: error 1")
