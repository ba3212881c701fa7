"""``contrastile verify``: selection, exit codes, JSON, and the command that reruns a failure."""

import json
import os
import shlex

import pytest

from contrastile.backends import registry
from contrastile.cli import main
from contrastile.verify import cases, options
from contrastile.verify.distributed import DISTRIBUTED
from contrastile.verify.properties import PROPERTIES

QUICK = ["verify", "--backend", "numpy", "--case", "one-row", "--property", "value", "--dtype", "float64"]
BROKEN = "ill_backends:broken"


def test_a_sound_backend_exits_0_and_json_holds_the_rows_of_every_case_of_a_name(tmp_path, capsys):
    path = tmp_path / "out.json"
    assert main([*QUICK[:4], "ids-target", "one-row", *QUICK[5:], "--json", str(path)]) == 0
    assert "PASS: 2 passed" in capsys.readouterr().out
    report = json.loads(path.read_text(encoding="utf-8"))
    assert report["verdict"] == "pass"
    assert [row["case"] for row in report["rows"]] == ["one-row", "ids-target@far"]
    for row in report["rows"]:
        assert (row["backend"], row["property"], row["dtype"]) == ("numpy", "value", "float64")
        assert 0 <= row["ratio"] < 1


@pytest.mark.parametrize(("case", "prop"), [("ragged", "shift"), ("drawn", "drawn")])
def test_the_rerun_command_reproduces_the_failure_and_leaves_no_file(capsys, case, prop, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["verify", "--backend", BROKEN, "--dtype", "float32", "--seed", "7", "--examples", "20", "--quiet"]
    assert main([*words, "--case", case, "--property", prop]) == 1
    first = capsys.readouterr().out
    (command,) = [line.partition("rerun: ")[2] for line in first.splitlines() if "rerun: " in line]
    assert main([*shlex.split(command)[1:], "--quiet"]) == 1
    second = capsys.readouterr().out
    assert "error" in first.splitlines()[2]
    # the header of a drawn failure names the shrunk case instead of "drawn"
    assert second.splitlines()[2:4] == first.splitlines()[2:4]
    assert list(tmp_path.iterdir()) == []


def test_two_processes_give_the_rows_of_one_in_order_and_fail_fast_stops_at_the_first_failure(tmp_path):
    words = f"verify --backend {BROKEN} numpy --case one-row ragged smoke --dtype float64 --property value gradients"
    rows_of_runs = []
    for option in ("--jobs=1", "--jobs=2", "--fail-fast"):
        path = tmp_path / f"{option}.json"
        assert main([*words.split(), "--quiet", option, "--json", str(path)]) == 1
        rows_of_runs.append(json.loads(path.read_text(encoding="utf-8"))["rows"])
    assert rows_of_runs[0] == rows_of_runs[1]
    assert len(rows_of_runs[0]) == 12
    first = [row["status"] for row in rows_of_runs[0]].index("fail")
    assert rows_of_runs[2] == rows_of_runs[0][: first + 1]
    assert first < 11


def test_quick_skips_unselected_checks_and_says_so(capsys):
    assert main(["verify", "--quick", "--backend", "numpy", "--property", "value", "--jobs", "1"]) == 0
    out = capsys.readouterr().out
    count = len([name for name in options.QUICK_CASES if name in cases.CASES])
    assert f"PASS: {count} passed, 0 failed, 0 skipped in " in out
    assert "cases, float16, float64 (--quick)" in out
    assert main([*QUICK, "--quick", "--examples", "3"]) == 0
    assert "--quick" not in capsys.readouterr().out


WITHOUT_TORCH = """
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *package: None if name == "torch" else find(name, *package)
"""


@pytest.mark.slow
def test_an_absent_backend_is_skipped_unless_named(monkeypatch, capsys, tmp_path):
    # this file hides torch in the processes that load backends
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_TORCH, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    path = tmp_path / "out.json"
    words = [word for word in QUICK if word not in ("--backend", "numpy")]
    assert main([*words, "--json", str(path)]) == 0
    assert "pip install 'contrastile[torch]'" in " ".join(capsys.readouterr().out.split())
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    # the test does not depend on whether Triton and CuPy are installed
    rows_of_host = [row for row in rows if row["backend"] not in ("triton", "cupy")]
    assert [(row["backend"], row["status"], row["property"]) for row in rows_of_host] == [
        ("torch", "skip", "all"),
        ("numpy", "pass", "value"),
    ]
    assert main(["verify", "--backend", "torch"]) == 2


def test_list_names_everything_and_runs_nothing(capsys):
    assert main(["verify", "--list"]) == 0
    out = capsys.readouterr().out
    for name in (*registry.names(), *cases.CASES, *PROPERTIES, *DISTRIBUTED, "float32", "drawn"):
        assert f"  {name}" in out
