"""The command line's front: dispatch, usage errors, lazy imports."""

import subprocess
import sys
from pathlib import Path

import pytest

import contrastile
from contrastile import cli

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


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_a_variable_of_the_environment_that_no_call_could_use_is_one_line(command, monkeypatch, capsys):
    monkeypatch.setenv("CONTRASTILE_KEEP_MIB", "plenty")
    assert cli.main([command, *(["--batch", "9", "--dim", "9"] if command == "plan" else [])]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith(f"contrastile {command}: CONTRASTILE_KEEP_MIB must be a whole number of MiB")


COMMAND = [sys.executable, "-m", "contrastile"]


@pytest.mark.parametrize(
    ("words", "code", "out", "err"),
    [
        ("verify --backend numpy --case one-row --property value --dtype float64 --quiet", 0, "PASS: 1 passed", ""),
        ("verify --backend nope", 2, "", "contrastile verify: backend must be"),
    ],
)
def test_the_module_runs_as_the_command(words, code, out, err):
    done = subprocess.run([*COMMAND, *words.split()], capture_output=True, text=True, check=False)
    assert done.returncode == code
    for said, expected in ((done.stdout, out), (done.stderr, err)):
        assert said.startswith(expected)
        assert bool(said) == bool(expected)


def test_a_reader_that_leaves_causes_no_traceback():
    listing = subprocess.Popen([*COMMAND, "verify", "--list"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    listing.stdout.close()
    with listing.stderr:
        said = listing.stderr.read()
    assert (listing.wait(), said) == (2, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux's")
@pytest.mark.parametrize("words", ["plan --batch 9 --dim 5 --device cpu", "verify --list"])
def test_an_output_that_cannot_be_written_is_said_in_one_line(words):
    command = [*COMMAND, *words.split()]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert "the standard output cannot be written: No space left" in done.stderr
    closed = subprocess.run(["sh", "-c", '"$@" >&-', "sh", *command], stderr=subprocess.PIPE, text=True, check=False)
    for each in (done, closed):
        assert (each.returncode, len(each.stderr.splitlines())) == (2, 1), each.stderr
