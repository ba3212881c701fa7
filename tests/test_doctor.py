import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from contrastile import cli, doctor, environment
from contrastile.backends.contract import BackendUnavailableError
from contrastile.backends.registry import BUILT_IN, Known
from contrastile.bench.agreement import Agreement


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
        ("numpy", SystemExit(0), "broken", "SystemExit: 0", None),
        ("numpy", ZeroDivisionError("division by zero"), "broken", "ZeroDivisionError: division by zero", None),
        # where the packages are installed the remedy is another
        ("cupy", unavailable("CuPy finds no GPU; use one"), "no device", "CuPy finds no GPU", "use one"),
        ("cupy", unavailable("so; mend it", OSError("no libcudart")), "broken", "so", "mend it"),
    ],
)
def test_a_backend_that_raises_is_said_to_and_the_report_goes_on(
    name: str, raised: BaseException, state: str, detail: str, remedy: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raising(name: str) -> Any:
        raise raised

    monkeypatch.setattr(doctor.peers, "ours", raising)
    found = only(monkeypatch, BUILT_IN[name])
    assert (found.state, found.detail) == (state, detail)
    assert remedy in (None, found.remedy)
    if name == "torch":
        # nothing works any more: that is the one failure
        assert run() == 1


def test_what_was_found_before_an_interruption_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted() -> Iterator[doctor.Finding]:
        yield doctor.Finding("backend", "it", "ok", "fast")
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "examine", interrupted)
    assert run("--json", str(tmp_path / "doctor.json")) == 130
    found = json.loads((tmp_path / "doctor.json").read_text())
    assert (found["verdict"], [each["name"] for each in found["findings"]]) == ("interrupted", ["it"])
    said = capsys.readouterr()
    assert "works here: it" in said.out
    assert said.err == "contrastile doctor: interrupted; findings until then: 1\n"


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
        doctor.show({}, found, works=False)
        assert capsys.readouterr().out.count(cupy) == nvidia
