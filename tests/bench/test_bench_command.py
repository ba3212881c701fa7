import argparse
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from contrastile.bench import command, report, sweep
from contrastile.bench.command import add_arguments, main
from contrastile.bench.results import Measurement, Sweep, SweepSettings, quartiles
from contrastile.bench.workloads import Workload

FACTS = {"cpu": "a processor", "cores": 2, "device": "cpu", "torch": None, "numpy": "2"}


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(words)


def settings(**changes: Any) -> SweepSettings:
    values: dict[str, Any] = {
        "backends": ("numpy", "torch"),
        "batches": (65, 33),
        "widths": (16,),
        "variants": ("aligned", "ragged", "ids"),
        "repeat": 3,
        "memory": False,
    }
    return SweepSettings(**{**values, **changes})


@pytest.fixture(scope="module")
def found() -> Sweep:
    return sweep.run(settings(), lambda what, steps: None)


def test_everything_asked_for_is_measured_smallest_first(found: Sweep) -> None:
    assert [(row.workload.batch, row.workload.variant, row.implementation) for row in found.rows] == [
        (batch, variant, name)
        for batch in (33, 65)
        for variant in ("aligned", "ragged", "ids")
        for name in ("numpy", "torch", "plain")
    ]
    for row in found.rows:
        assert len(row.seconds) == len(row.matmul) == 3
        assert min(row.seconds) > 0
        assert min(row.matmul) > 0


def test_samples_are_interleaved(found: Sweep) -> None:
    one_size = found.order[: 3 * 9]
    rounds = [one_size[i : i + 9] for i in (0, 9, 18)]
    for number, each in enumerate(rounds):
        assert len(set(each)) == 9
        # each round starts with another one
        assert each == rounds[0][number:] + rounds[0][:number]


def test_ratios_are_within_the_run(found: Sweep) -> None:
    for row in found.rows:
        plain, aligned = found.plain_of(row), found.aligned_of(row)
        assert plain is not None
        assert plain.workload == row.workload
        assert aligned is not None
        assert (aligned.implementation, aligned.workload.variant) == (row.implementation, "aligned")
        if row.implementation == "plain":
            assert row.times_of(plain) == 1


def test_figures_follow_from_the_samples() -> None:
    workload = Workload("ragged", 11, 8)
    assert workload.flops == 8 * 10 * 10 * 5
    one, two = (
        Measurement("a", workload, seconds=[1.0, 2.0, 4.0], matmul=[8000.0] * 3),
        Measurement("b", workload, seconds=[2.0, 2.0, 2.0]),
    )
    assert one.rate == 2000
    assert one.share == 0.25
    assert one.times_of(two) == 1
    assert one.times_of(Measurement("c", workload)) is None
    one.peak_bytes, two.peak_bytes = 10, 40
    assert one.bytes_of(two) == 0.25
    assert quartiles([5.0]) == (5, 5, 5)
    assert quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == (2, 3, 4)


def test_the_command_writes_table_json_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, picture = tmp_path / "bench.json", tmp_path / "bench.png"
    words = ["--backend", "torch", "--batch", "64", "--width", "16", "--repeat", "2", "--threads", "1", "--json"]
    assert main(parsed(*words, str(data), "--plot", str(picture))) == 0
    read = json.loads(data.read_text())
    assert {row["implementation"]: row["status"] for row in read["rows"]} == {"torch": "measured", "plain": "measured"}
    ours, plain = read["rows"]
    assert ours["memory_over_plain"] == ours["peak_extra_bytes"] / plain["peak_extra_bytes"]
    assert plain["time_over_plain"] == 1
    assert len(ours["seconds"]["samples"]) == 2
    assert read["environment"]["threads"] == 1
    assert all(each["agrees"] for each in read["agreements"])
    assert picture.read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    assert "aligned, b = 64, d = 16" in out
    assert "of matmul" not in out
    assert main(parsed(*words[:-1], "--no-memory", "--wide")) == 0
    assert "of matmul" in capsys.readouterr().out


def lines(*rows: Measurement) -> list[str]:
    found = Sweep(settings(), {}, rows=list(rows))
    return [report._line(found, row) for row in rows]


def test_a_line_says_how_much_faster_and_smaller_than_plain() -> None:
    workload = Workload("aligned", 64, 16)
    plain = Measurement("plain", workload, seconds=[0.325], peak_bytes=65 << 20)
    ours = Measurement("torch", workload, seconds=[0.203], peak_bytes=10 << 20)
    assert lines(ours, plain) == [
        "0.203 s, 10 MiB: 1.6 x faster, 6.5 x less memory than plain",
        "0.325 s, 65 MiB",
    ]
    slow = Measurement("torch", workload, seconds=[0.65], peak_bytes=65 << 20)
    assert lines(slow, plain)[0] == "0.650 s, 65 MiB: 2 x slower, as much memory as plain"
    assert lines(Measurement("torch", workload, seconds=[1234.5], peak_bytes=2**31))[0] == "1,234 s, 2,048 MiB"
    # time alone, and nothing to compare it with
    assert lines(Measurement("torch", workload, seconds=[3.25e-5])) == ["32.5 us"]
    assert lines(Measurement("torch", workload, reason="no room")) == ["skipped: no room"]


def test_the_float64_backend_is_no_default_where_there_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "numpy" not in command.settings(parsed()).backends
    monkeypatch.setattr(command, "available", lambda: {"numpy": None, "torch": "missing"})
    assert command.settings(parsed()).backends == ("numpy",)


def test_auto_is_the_gpu_where_torch_sees_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(command, "torch_sees_a_gpu", lambda: True)
    monkeypatch.setattr(sweep, "run", lambda chosen, advance: asked.append(chosen.device) or Sweep(chosen, FACTS))
    for words in ([], ["--device", "cpu"], ["--device", "cuda"]):
        main(parsed("--backend", "torch", *words))
    assert asked == ["cuda", "cpu", "cuda"]


def test_what_does_not_fit_is_skipped_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "available_bytes", lambda device: 10**6)
    found = sweep.run(settings(backends=("torch",), batches=(600,), variants=("aligned",)), lambda what, steps: None)
    ours, plain = found.rows
    assert ours.seconds
    assert not plain.seconds
    assert "GiB are available" in str(plain.reason)
    assert ours.times_of(found.plain_of(ours)) is None


def test_what_would_take_too_long_is_skipped_with_the_reason() -> None:
    found = sweep.run(settings(backends=("torch",), batches=(32,), budget=0.0), lambda what, steps: None)
    assert not any(row.seconds for row in found.rows)
    assert all("raise --budget" in str(row.reason) for row in found.rows)


def test_a_memory_run_that_dies_is_a_reason_not_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*args: object, **kwargs: object) -> None:
        raise sweep.child.MemoryMeasurementError("killed by signal 9")

    monkeypatch.setattr(sweep.child, "measure_in_a_child", killed)
    found = sweep.run(settings(batches=(32,), memory=True), lambda what, steps: None)
    assert {row.reason for row in found.rows} == {"killed by signal 9"}


def test_no_speed_of_what_disagrees(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(
        "contrastile.bench.peers.plain_loss", lambda image, text, scale, ids: (image * text).sum() * scale
    )
    data = tmp_path / "bench.json"
    words = ["--backend", "torch", "--batch", "32", "--width", "8", "--repeat", "1", "--no-memory", "--json"]
    assert main(parsed(*words, str(data))) == 1
    rows = {row["implementation"]: row for row in json.loads(data.read_text())["rows"]}
    plain = rows["plain"]
    assert rows["torch"]["status"] == "measured"
    assert plain["status"] == "skip"
    assert "seconds" not in plain
    assert "disagrees with the oracle" in plain["reason"]


def test_steps_reported_are_the_steps_promised() -> None:
    done = []
    chosen = settings(batches=(32,), repeat=2)
    sweep.run(chosen, lambda what, steps: done.append(steps))
    assert sum(done) == sweep.steps(chosen)


def test_a_picture_without_matplotlib_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(parsed("--plot", "x.png")) == 2
    assert capsys.readouterr().err.rstrip().endswith("pip install 'contrastile[verify]'")


def test_an_unknown_backend_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(parsed("--backend", "nobody")) == 2
    assert "'nobody'" in capsys.readouterr().err


def test_a_gpu_that_is_not_there_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "torch_sees_a_gpu", lambda: False)
    assert main(parsed("--device", "cuda")) == 2
    assert "contrastile doctor" in capsys.readouterr().err


def test_a_picture_without_memory_has_times_alone(tmp_path: Path) -> None:
    picture = tmp_path / "bench.png"
    words = ["--backend", "torch", "--batch", "32", "--width", "8", "--repeat", "1", "--no-memory", "--plot"]
    assert main(parsed(*words, str(picture))) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_a_file_that_can_no_longer_be_written_is_said_after_the_table(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], found: Sweep
) -> None:
    there = tmp_path / "there"
    there.mkdir()
    monkeypatch.setattr(sweep, "run", lambda chosen, advance: there.rmdir() or found)
    assert main(parsed(option, str(there / "file"))) == 2
    said = capsys.readouterr()
    assert "aligned, b = 33" in said.out
    assert said.err == f"contrastile bench: cannot write {there}/file: No such file or directory\n"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("raise SystemExit(0)", "SystemExit: 0"),
        ("raise ValueError('two\\nlines')", "ValueError: two lines"),
    ],
)
def test_a_backend_whose_import_raises_is_one_line(
    source: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "raises_on_import.py").write_text(source + "\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert main(parsed("--backend", "raises_on_import:backend")) == 2
    assert capsys.readouterr().err == f"contrastile bench: backend 'raises_on_import:backend' raised {said}\n"


def test_what_raises_in_its_check_is_skipped_with_what_it_said(monkeypatch: pytest.MonkeyPatch) -> None:
    check = sweep.check

    def raising(implementation: Any, *args: Any) -> Any:
        if implementation.name == "torch":
            raise RuntimeError("two\nlines")
        return check(implementation, *args)

    monkeypatch.setattr(sweep, "check", raising)
    found = sweep.run(settings(batches=(32,), variants=("aligned",), repeat=1), lambda what, steps: None)
    assert {row.implementation: row.reason for row in found.rows} == {
        "numpy": None,
        "torch": "raised RuntimeError: two lines",
        "plain": None,
    }


@pytest.mark.parametrize("calls", [0, 3, 20, 31, 40, 60])
def test_what_was_measured_before_an_interruption_is_shown(
    calls: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The interruption comes in one of the timed calls: while speeds are felt out, in a warm-up, in any round."""
    seconds, left = sweep._seconds, calls

    def interrupted(call: Any, device: str) -> float:
        nonlocal left
        if left == 0:
            raise KeyboardInterrupt
        left -= 1
        return seconds(call, device)

    monkeypatch.setattr(sweep, "_seconds", interrupted)
    data, picture = tmp_path / "bench.json", tmp_path / "bench.png"
    words = ["--backend", "torch", "--batch", "32", "48", "--width", "8", "--repeat", "9", "--no-memory"]
    assert main(parsed(*words, "--json", str(data), "--plot", str(picture))) == 2
    assert capsys.readouterr().err.endswith("contrastile bench: interrupted; this is what was found until then\n")
    read = json.loads(data.read_text())
    assert read["interrupted"]
    samples = [len(row["seconds"]["samples"]) if row["status"] == "measured" else 0 for row in read["rows"]]
    # both implementations of a size have the same rounds
    assert samples[::2] == samples[1::2] or len(samples) == 1
    assert sum(samples) == len(read["order"])
    assert (sum(samples) > 0) == (calls >= 20) == picture.exists()
    assert {row["reason"] for row in read["rows"] if row["status"] == "skip"} <= {"interrupted"}


def test_quick_fills_in_only_what_was_not_given() -> None:
    assert command.settings(parsed("--quick", "--width", "7")).widths == (7,)
    assert command.settings(parsed("--quick")).batches == (256, 512)
    assert command.settings(parsed()).batches == (4096, 8192)


@pytest.mark.parametrize("words", [("--batch", "0"), ("--repeat", "-1"), ("--variant", "odd")])
def test_bad_arguments_are_refused(words: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as refused:
        parsed(*words)
    assert refused.value.code == 2


def test_the_matrix_product_costs_at_most_half_of_the_sample() -> None:
    assert sweep.matmul_side(Workload("aligned", 8192, 512).flops, "cpu") == 4096
    assert sweep.matmul_side(Workload("aligned", 4096, 512).flops, "cpu") == 2048
    assert sweep.matmul_side(1, "cpu") == 256
