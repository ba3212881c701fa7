"""What a command cannot do, or to its end, is one line on stderr and exit code 2, before any work."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from contrastile.bench import command as bench
from contrastile.cli import main

HUGE = "9" * 400
SAID = {
    "verify": [
        ("--backend nope", "backend must be one of numpy, torch"),
        ("--backend no_such_module:backend", "No module named 'no_such_module'"),
        ("--backend contrastile.losses:clip_loss", "must be a contrastile.backends.contract.Backend"),
        ("--backend numpy --case nope", "no case is called 'nope'; known are smoke, "),
        ("--case certian", "no case is called 'certian'; did you mean certain?"),
        ("--backend numpy --case drawn:m=1", "as a failure prints it"),
        ("--backend numpy --property nope", "no property is called 'nope'; known are value, "),
        ("--backend numpy --examples 0", "--examples must be at least 1, got 0"),
        ("--backend numpy --jobs 0", "--jobs must be at least 1, got 0"),
        # more processes than a machine can run
        ("--backend numpy --jobs 1000000", "--jobs must be at most"),
        ("--backend numpy --seed -1", "--seed must be at least 0, got -1"),
        *((f"--backend numpy --deadline {x}", "--deadline must be a number of seconds above 0") for x in ["0", "nan"]),
        ("--backend numpy --dtype bfloat16 --case smoke", "nothing ran: takes float16"),
        ("--backend numpy --case smoke --property drawn", "nothing ran: no property has such a case"),
        ("--backend numpy --report /nowhere/a.html", "cannot write /nowhere/a.html: No such file or directory"),
        ("--property ring", "known are value, "),
        *((f"--world {x}", f"--world must be 1..8, mpi or torch, got '{x}'") for x in ("0", "9", "ring")),
        ("--world torch", "--world torch runs under torchrun; run: torchrun --nproc-per-node 4 -m contrastile"),
        ("--world 2 --property shift", "known are ring, two-level, gather,"),
        ("--world 2 --case drawn", "known are smoke,"),
        ("--world 2 --case sharded:rows=1", "as a failure prints it"),
        ("--loss contrastile.losses:nothing", "contrastile.losses:nothing"),
        ("--loss contrastile.losses", "must be named as module:attribute"),
        ("--loss nowhere:x", "No module named 'nowhere'"),
        ("--loss contrastile.reporting:COULD_NOT_RUN", "must be callable"),
        ("--loss contrastile:clip_loss --backend numpy", "without --backend"),
        ("--objective info_nce", "must be given with --loss"),
        ("--loss contrastile:clip_loss --case drawn", "no case is called 'drawn'; known are "),
        ("--loss contrastile:clip_loss --dtype float64", "nothing ran: the loss does not claim float64 features"),
    ],
    "mutate": [
        ("--mutant numpy:nope", "mutant must be one that contrastile mutate --list names, got 'numpy:nope'"),
        ("--component nope", "component must be one that contrastile mutate --list names, got 'nope'"),
        ("--jobs 0", "--jobs must be at least 1, got 0"),
        ("--deadline 0.5", "--deadline must be at least 1, got 0.5"),
        ("--json /nowhere/a.json", "cannot write /nowhere/a.json: No such file or directory"),
        ("--mutant numpy:tiles-overlap --component torch", "nothing ran: no mutant is selected"),
    ],
    "bench": [
        ("--backend nobody", "'nobody'"),
        ("--device cuda", "contrastile doctor"),
        ("--batch 64 0", "--batch must be at least 1, got 0"),
        ("--plot x.bmp", "--plot must end in .png, .pdf, .svg, got 'x.bmp'"),
        ("--repeat -1", "--repeat must be at least 1, got -1"),
    ],
    "plan": [
        ("--batch 0", "--batch must be at least 1, got 0"),
        (f"--batch {HUGE}", f"--batch must be at most 1099511627776, got {HUGE}"),
        (f"--dim -{HUGE}", f"--dim must be at least 1, got -{HUGE}"),
        ("--gpus 999999999999", "--gpus must be at most 1048576, got 999999999999"),
        ("--memory-gib 0", "--memory-gib must be at least 0.001, got 0"),
        ("--memory-gib inf", "--memory-gib must be finite, got inf"),
        ("--model-gib 1e300", "--model-gib must be at most 1e+09, got 1e+300"),
        ("--model-gib=-inf", "--model-gib must be finite, got -inf"),
        ("--encoder-mib-per-sample 1e300", "--encoder-mib-per-sample must be at most 1e+09, got 1e+300"),
        ("--encoder-mib-per-sample nan", "must be finite, got nan"),
        ("--backend numpy --device cpu --dtype float64", "numpy backend does not say"),
        ("--backend numpy --device cpu", "float32 or float64, got bfloat16; convert them"),
        ("--backend numpy", "features must be on cpu, got cuda; move them"),
        ("--backend tpu", "backend must be one of"),
    ],
}
NEEDED = {"plan": ["--batch", "9", "--dim", "5", "--memory-gib", "1", "--backend", "torch"]}


def refused(capsys: pytest.CaptureFixture[str], command: str, *words: str) -> str:
    """The one line that a command says."""
    assert main([command, *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"contrastile {command}: ")
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize(("command", "words", "said"), [(name, *row) for name, rows in SAID.items() for row in rows])
def test_what_cannot_run_says_why(
    command: str, words: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(bench, "torch_sees_a_gpu", lambda: False)
    assert said in refused(capsys, command, *NEEDED.get(command, ()), *words.split())


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
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == missing else find(name, *a))
    said = refused(capsys, *words.split())
    assert missing in said
    assert said.endswith(f"pip install 'contrastile[{extra}]'\n")


@pytest.mark.parametrize("source", ["raise SystemExit(0)", "raise ValueError('two\\nlines')"])
def test_a_backend_whose_import_raises_is_named(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "raises_on_import.py").write_text(source + "\n")
    monkeypatch.syspath_prepend(tmp_path)
    said = "SystemExit: 0" if "Exit" in source else "ValueError: two lines"
    for command in ("verify", "bench"):
        found = refused(capsys, command, "--backend", "raises_on_import:backend")
        assert found == f"contrastile {command}: backend 'raises_on_import:backend' raised {said}\n"


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
    said = refused(capsys, *words.split(), str(tmp_path))
    assert said.endswith(f": cannot write {tmp_path}: Is a directory\n")
