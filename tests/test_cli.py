"""The command line's front: dispatch, usage errors, lazy imports."""

import subprocess
import sys
from pathlib import Path

import pytest

import contrastile
from contrastile import cli


def test_no_command_shows_the_help_and_is_no_success(capsys):
    assert cli.main([]) == 2
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in cli.COMMANDS)


def test_an_unknown_command_is_a_usage_error(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["nope"])
    assert stopped.value.code == 2
    assert "nope" in capsys.readouterr().err


def test_help_names_every_command_and_imports_none(capsys, monkeypatch):
    monkeypatch.setattr(cli.importlib, "import_module", None)
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--help"])
    assert stopped.value.code == 0
    out = capsys.readouterr().out
    assert all(name in out for name in cli.COMMANDS)


def test_it_says_its_version(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"contrastile {contrastile.__version__}\n"


def test_a_command_gets_its_arguments_and_gives_the_exit_code(monkeypatch):
    class Command:
        @staticmethod
        def add_arguments(parser):
            parser.add_argument("--code", type=int)

        @staticmethod
        def main(args):
            return args.code

    monkeypatch.setattr(cli.importlib, "import_module", lambda name: Command)
    assert cli.main(["doctor", "--code", "7"]) == 7


def test_a_command_that_cannot_be_imported_exits_2_with_one_line(monkeypatch, capsys):
    def lacking(name):
        raise ImportError("torch cannot be imported; run: pip install 'contrastile[torch]'")

    monkeypatch.setattr(cli.importlib, "import_module", lacking)
    assert cli.main(["bench"]) == 2
    expected = "contrastile bench: torch cannot be imported; run: pip install 'contrastile[torch]'\n"
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize("where", ["import", "main"])
def test_an_interruption_anywhere_is_one_line(where, monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    class Command:
        add_arguments = staticmethod(lambda parser: None)
        main = staticmethod(interrupted)

    monkeypatch.setattr(cli.importlib, "import_module", interrupted if where == "import" else lambda name: Command)
    assert cli.main(["bench"]) == 2
    assert capsys.readouterr() == ("", "contrastile bench: interrupted\n")


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_a_variable_of_the_environment_that_no_call_could_use_is_one_line(command, monkeypatch, capsys):
    monkeypatch.setenv("CONTRASTILE_KEEP_MIB", "plenty")
    assert cli.main([command, *(["--batch", "9", "--dim", "9"] if command == "plan" else [])]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith(f"contrastile {command}: CONTRASTILE_KEEP_MIB must be a whole number of MiB")


def test_module_runs_as_the_command():
    words = ["verify", "--backend", "numpy", "--case", "one-row", "--property", "value", "--dtype=float64", "--quiet"]
    done = subprocess.run([sys.executable, "-m", "contrastile", *words], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("PASS: 1 passed")
    done = subprocess.run(
        [sys.executable, "-m", "contrastile", "verify", "--backend", "nope"], capture_output=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, b"")


def test_a_reader_that_leaves_causes_no_traceback():
    listing = subprocess.Popen(
        [sys.executable, "-m", "contrastile", "verify", "--list"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    listing.stdout.close()
    with listing.stderr:
        said = listing.stderr.read()
    assert (listing.wait(), said) == (2, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux's")
@pytest.mark.parametrize("words", [["doctor"], ["verify", "--list"]])
def test_an_output_that_cannot_be_written_is_said_in_one_line(words: list[str]) -> None:
    command = [sys.executable, "-m", "contrastile", *words]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert "the standard output cannot be written: No space left" in done.stderr
    closed = subprocess.run(["sh", "-c", '"$@" >&-', "sh", *command], stderr=subprocess.PIPE, text=True, check=False)
    assert (closed.returncode, len(closed.stderr.splitlines())) == (2, 1), closed.stderr


def test_more_processes_than_a_machine_can_run_are_refused() -> None:
    command = [sys.executable, "-m", "contrastile", "verify", "--jobs", "1000000", "--case", "smoke"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--jobs must be at most" in done.stderr
