"""The command line where it meets the system: pipes, full disks, packages and MPI.

What the commands say and return otherwise, with tables and progress: contrastile/verify/calls.txt.
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
        said = listing.stderr.read()
    assert (listing.wait(), said) == (2, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux's")
def test_an_output_that_cannot_be_written_is_said_in_one_line():
    command = [*COMMAND, "plan", "--batch", "9", "--dim", "5", "--device", "cpu"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert "the standard output cannot be written: No space left" in done.stderr
    closed = subprocess.run(["sh", "-c", '"$@" >&-', "sh", *command], stderr=subprocess.PIPE, text=True, check=False)
    for each in (done, closed):
        assert (each.returncode, len(each.stderr.splitlines())) == (2, 1), each.stderr


def test_what_can_be_written_is_left_as_it_was_and_what_cannot_is_named(tmp_path: Path) -> None:
    old, new, pipe = (tmp_path / name for name in ("old", "new", "pipe"))
    old.write_text("kept")
    # to open a pipe would wait for a reader, or end what the reader gets
    os.mkfifo(pipe)
    assert why_not_writable(None, old, new, pipe) is None
    assert (old.read_text(), new.exists()) == ("kept", False)
    for path, why in ((tmp_path, "Is a directory"), (new / "x", "No such file or directory"), (old / "x", "Not a")):
        assert (why_not_writable(new, path) or "").startswith(f"cannot write {path}: {why}")


def run(*words: str) -> int:
    return cli.main(["doctor", *words])


def test_it_finds_what_works_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--json", str(tmp_path / "doctor.json")) == 0
    found = json.loads((tmp_path / "doctor.json").read_text())
    assert found["verdict"] == "pass"
    assert list(found["findings"][0]) == ["kind", "name", "state", "detail", "remedy"]
    states = {each["name"]: each["state"] for each in found["findings"] if each["kind"] == "backend"}
    assert states["numpy"] == states["torch"] == "ok"
    assert found["environment"]["torch_blas"] != "unknown"
    shown = capsys.readouterr().out
    assert "works here: numpy" in shown
    # every kind of finding is shown
    for each in found["findings"]:
        assert each["name"] in shown, each


def test_doctor_says_that_mpi4py_finds_no_mpi() -> None:
    """As after ``pip install mpi4py`` on a machine without MPI, where lightning.Trainer() raises."""
    program = "from contrastile import doctor; doctor.known = dict; print(*doctor.examine())"
    given = os.environ | {"MPI4PY_LIBMPI": "/nowhere/libmpi.so", "TRITON_INTERPRET": "0"}
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=given).stdout
    assert "state='broken', detail='" in said
    assert ": cannot load MPI library', remedy='pip install mpich, or" in said


def test_no_command_is_imported_before_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli.importlib, "import_module", None)
    assert cli.main([]) == 2


def test_a_backend_that_is_wrong_is_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.agreement, "check", lambda *_, **how: Agreement("torch", 7.0, 67, "loss: error 1"))
    found = doctor._backend("torch", BUILT_IN["torch"], None)
    assert (found.state, found.remedy) == ("wrong", "contrastile verify --backend torch")
    assert found.detail.endswith("; loss: error 1")
