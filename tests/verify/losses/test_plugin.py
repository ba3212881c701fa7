"""The pytest plugin: three lines find a planted defect, skips have reasons, and other projects import nothing."""

import os
import re
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[3]
KERNELS = Path(__file__).with_name("numpy_losses.py").read_text(encoding="utf-8")
CONFTEST = """
from kernels import defect, right

contrastile_losses = [right, defect]
"""


def run(folder, *words, exit_code=0, **files):
    """Run pytest in a project of these files, in another process and without the settings of this project."""
    for name, text in {"kernels": KERNELS, **files}.items():
        (folder / (name if "." in name else f"{name}.py")).write_text(text, encoding="utf-8")
    (folder / "pytest.ini").write_text(
        "[pytest]\nfilterwarnings = error\naddopts = --strict-markers\n", encoding="utf-8"
    )
    paths = os.pathsep.join([str(PACKAGE), str(PACKAGE / "tests"), str(folder)])
    environment = {**os.environ, "PYTHONPATH": paths, "PYTEST_ADDOPTS": "", "PYTHONDONTWRITEBYTECODE": "1"}
    # -p loads the plugin once, also where the package is installed, because the entry point has the same name
    command = [
        sys.executable,
        *["-m", "pytest", "-q", "-rsf", "-p", "pytest_contrastile", "-p", "no:cacheprovider"],
        *words,
    ]
    completed = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=1200)
    assert completed.returncode == exit_code, completed.stdout + completed.stderr
    return completed.stdout


def test_three_lines_find_a_planted_defect(tmp_path):
    assert len([line for line in CONFTEST.splitlines() if line]) <= 3
    out = run(tmp_path, "-k", "ragged or smoke or one-pair", exit_code=1, conftest=CONFTEST)
    failures = set(re.findall(r"^FAILED conftest\.py::(\S+)", out, re.M))
    assert failures == {f"defect/ragged/{name}/float32" for name in ("value", "gradients", "scale-gradient")}
    assert "kernels:defect, gradients: dimage[" in out or "kernels:defect, gradients: dtext[" in out
    assert "error / bound = " in out


def test_one_loss_needs_no_list(tmp_path):
    for loss in ("right", "'kernels:right'"):
        conftest = f"from kernels import right\ncontrastile_losses = {loss}\n"
        assert "1 passed" in run(tmp_path, "-k", "smoke and value", conftest=conftest)


def test_listed_and_unclaimed_checks_are_skipped_with_the_reason(tmp_path):
    conftest = CONFTEST + "contrastile_skips = {'defect/ragged/*': 'an odd pair is left out'}\n"
    out = run(tmp_path, "-k", "ragged or float16", conftest=conftest)
    assert "an odd pair is left out" in out
    assert "not claimed: float16 features" in out


def test_a_skip_that_matches_nothing_is_an_error(tmp_path):
    conftest = CONFTEST + "contrastile_skips = {'defect/raged/*': 'misspelt'}\n"
    out = run(tmp_path, "--collect-only", exit_code=2, conftest=conftest)
    assert "no test has a name that matches defect/raged/*" in out


def test_the_checks_of_a_backend_are_tests(tmp_path):
    words = "--pyargs", "contrastile.verify", "--backend", "numpy", "kernels:right", "--dtype", "float64"
    out = run(tmp_path, *words, "-k", "one-row and value", exit_code=2)
    assert "backend must be" in out or "must be a contrastile.backends.contract.Backend" in out
    words = "--pyargs", "contrastile.verify", "--backend", "numpy", "ill_backends:at_a_row", "--dtype", "float64"
    out = run(tmp_path, *words, "-k", "one- and value and not limits", "-n", "1", "-p", "xdist", exit_code=1)
    # a crash fails one test, and a new worker replaces the old one
    assert "5 passed" in out
    assert "1 failed" in out
    assert re.search(r"FAILED .*::ill_backends:at_a_row/one-row/value/float64 - worker .* crashed", out)


def test_a_project_without_losses_imports_nothing_of_the_package_and_may_define_the_same_options(tmp_path):
    conftest = """
def pytest_addoption(parser):
    parser.addoption("--backend")
"""
    test = """
import sys

def test_it(pytestconfig):
    assert pytestconfig.getoption("backend") == "theirs"
    assert not [name for name in sys.modules if name.partition(".")[0] in ("contrastile", "numpy", "torch")]
"""
    assert "1 passed" in run(tmp_path, "--backend", "theirs", conftest=conftest, test_it=test)
