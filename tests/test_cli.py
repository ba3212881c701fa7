"""The command line's front: dispatch, usage errors, lazy imports; files, tables and progress of all commands."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import contrastile
from contrastile import cli, doctor, environment, reporting
from contrastile.backends.contract import BackendUnavailableError
from contrastile.backends.registry import BUILT_IN, Known
from contrastile.bench.agreement import Agreement
from contrastile.reporting import progress, show_table, why_not_writable

HELP = [f"  {name} " for name in cli.COMMANDS]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [([], 2, HELP), (["--help"], 0, HELP), (["nope"], 2, ["nope"]), (["--version"], 0, [contrastile.__version__])],
)
def test_without_a_command_it_says_what_there_is_and_imports_none(words, code, said, capsys, monkeypatch):
    monkeypatch.setattr(cli.importlib, "import_module", None)
    try:
        found = cli.main(words)
    except SystemExit as stopped:
        found = stopped.code
    assert found == code
    told = "".join(capsys.readouterr())
    assert all(text in told for text in said)


def test_a_command_gets_its_arguments_and_gives_the_exit_code(monkeypatch):
    class Command:
        add_arguments = staticmethod(lambda parser: parser.add_argument("--code", type=int))
        main = staticmethod(lambda args: args.code)

    monkeypatch.setattr(cli.importlib, "import_module", lambda name: Command)
    assert cli.main(["doctor", "--code", "7"]) == 7


LACKING = "torch cannot be imported; run: pip install 'contrastile[torch]'"


@pytest.mark.parametrize(
    ("where", "raised", "said", "code"),
    [
        ("import", ImportError(LACKING), LACKING, 2),
        ("import", KeyboardInterrupt(), "interrupted", 130),
        ("main", KeyboardInterrupt(), "interrupted", 130),
    ],
)
def test_what_ends_a_command_anywhere_is_one_line(where, raised, said, code, monkeypatch, capsys):
    def ending(*_):
        raise raised

    class Command:
        add_arguments = staticmethod(lambda parser: None)
        main = staticmethod(ending)

    monkeypatch.setattr(cli.importlib, "import_module", ending if where == "import" else lambda name: Command)
    assert cli.main(["bench"]) == code
    assert capsys.readouterr() == ("", f"contrastile bench: {said}\n")


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
    given = os.environ | {"MPI4PY_LIBMPI": "/nowhere/libmpi.so"}
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=given).stdout
    assert "state='broken', detail='" in said
    assert ": cannot load MPI library', remedy='pip install mpich, or" in said


def only(monkeypatch: pytest.MonkeyPatch, entry: Known, missing: str | None = None, name: str = "it") -> doctor.Finding:
    monkeypatch.setattr(doctor, "known", lambda: {name: entry})
    monkeypatch.setattr(doctor, "available", lambda: {name: missing})
    return next(doctor.examine())


def unavailable(reason: str, cause: Exception | None = None) -> BackendUnavailableError:
    error = BackendUnavailableError(f"backend 'cupy' is not available: {reason}")
    error.__cause__ = cause
    return error


LIBRARY = OSError("libsomething.so: cannot open shared object file")


@pytest.mark.parametrize(
    ("name", "raised", "state", "detail", "remedy"),
    [
        ("torch", LIBRARY, "broken", f"OSError: {LIBRARY}", "pip install 'contrastile[torch]'"),
        # where the packages are installed the remedy is another
        ("cupy", unavailable("CuPy finds no GPU; use one"), "no device", "CuPy finds no GPU", "use one"),
        ("cupy", unavailable("so; mend it", OSError("no libcudart")), "broken", "so", "mend it"),
    ],
)
def test_a_backend_that_raises_is_said_to_and_the_report_goes_on(
    name: str, raised: BaseException, state: str, detail: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raising(name: str) -> Any:
        raise raised

    monkeypatch.setattr(doctor.peers, "ours", raising)
    found = only(monkeypatch, BUILT_IN[name])
    assert (found.state, found.detail, found.remedy) == (state, detail, remedy)
    if name == "torch":
        # nothing works any more: that is the one failure
        assert run() == 1


def test_a_backend_that_is_wrong_is_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = doctor.peers.ours
    monkeypatch.setattr(doctor.peers, "ours", lambda name: ours("numpy"))
    monkeypatch.setattr(doctor.agreement, "check", lambda *args, **kwargs: Agreement("it", 7.0, 67, "loss: error 1"))
    found = only(monkeypatch, BUILT_IN["numpy"])
    assert found.state == "wrong"
    assert "loss: error 1" in found.detail
    assert found.remedy == "contrastile verify --backend it"


def test_a_version_is_found_without_importing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "explosive.py").write_text("raise RuntimeError('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert environment.version("explosive") == "of unknown version"
    assert environment.version("nowhere_to_be_found") is None
    assert environment.version("pytest") == pytest.__version__


def test_packages_for_nvidia_gpus_are_recommended_only_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cupy = "pip install 'contrastile[cupy]'"
    monkeypatch.setattr(doctor, "known", lambda: {"cupy": BUILT_IN["cupy"]})
    monkeypatch.setattr(doctor, "available", lambda: {"cupy": f"cupy cannot be imported; run: {cupy}"})
    monkeypatch.setattr(doctor, "version", lambda name: None)
    for nvidia in (True, False):
        monkeypatch.setattr(doctor, "has_a_gpu", lambda there=nvidia: there)
        found = list(doctor.examine())
        assert {each.state for each in found if each.kind != "auto"} == {"missing"}
        assert found[0].remedy == (cupy if nvidia else "")
        remedies = {each.name: each.remedy for each in found if each.kind == "package"}
        assert [name for name, remedy in remedies.items() if not remedy] == ([] if nvidia else ["triton", "cupy"])
        assert remedies["torch"] == "pip install 'contrastile[torch]'"
        doctor.show({}, found)
        assert capsys.readouterr().out.count(cupy) == nvidia
