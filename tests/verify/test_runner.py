"""The runner: its rows, skips and refusals, and the options that reach a backend."""

from dataclasses import replace

import numpy as np
import pytest

from contrastile.backends.arrays import ArrayLibrary
from contrastile.backends.contract import Options, UnsupportedProblemError
from contrastile.backends.registry import load
from contrastile.verify import cases, report
from contrastile.verify.comparison import Worst
from contrastile.verify.properties import PROPERTIES
from contrastile.verify.runner import Run
from contrastile.verify.selection import DTYPES, Selection

NUMPY = load("numpy")
FIELDS = {"backend", "property", "case", "dtype", "device", "world", "ratio", "excess", "status", "reason"}


def rows_of(**selection):
    return list(Run(Selection({"numpy": NUMPY}, **selection)).rows())


def test_there_is_one_row_for_each_combination():
    rows = rows_of(cases=["smoke", "one-row", "batch-doubling"], properties=["value", "tiles", "saved-bytes"])
    dtypes = [dtype for dtype in DTYPES if dtype in NUMPY.dtypes]
    expected = {(p, c, d) for p in ("value", "tiles") for c in ("smoke", "one-row") for d in dtypes}
    expected |= {("saved-bytes", "batch-doubling", d) for d in dtypes}
    # one row for the dtype that the backend does not take
    expected |= {("all", "all", "bfloat16")}
    assert {(row["property"], row["case"], row["dtype"]) for row in rows} == expected
    assert len(rows) == len(expected)
    assert all(set(row) == FIELDS and row["world"] == 1 and row["backend"] == "numpy" for row in rows)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda torch: torch.set_grad_enabled(False), "gradient mode"),
        (lambda torch: torch.set_default_dtype(torch.float64), "default dtype"),
        (lambda torch: torch.set_float32_matmul_precision("high"), "float32 precision"),
        (lambda torch: torch.use_deterministic_algorithms(True), "deterministic mode"),
    ],
)
def test_a_backend_that_changes_a_mode_of_the_process_has_failed(change, name):
    torch = pytest.importorskip("torch")

    def lse(*arguments):
        change(torch)
        return NUMPY.lse(*arguments)

    try:
        selection = Selection({"changing": replace(NUMPY, lse=lse)}, ["smoke", "one-row"], ["value"], ["float64"])
        first, second = Run(selection).rows()
    finally:
        torch.set_grad_enabled(True)
        torch.set_default_dtype(torch.float32)
        torch.set_float32_matmul_precision("highest")
        torch.use_deterministic_algorithms(False)
    # the second check starts in the changed mode, so it sees no change
    assert (first["status"], second["status"]) == ("fail", "pass")
    assert first["reason"] == f"torch's {name} was changed"


def test_an_unsupported_dtype_or_device_is_skipped_with_the_reason():
    skipped = {row["dtype"]: row["reason"] for row in rows_of(cases=["smoke"], properties=["value"]) if row["reason"]}
    assert skipped == {"bfloat16": "takes float16, float32, float64 only"}
    (row,) = rows_of(cases=["smoke"], properties=["value"], dtypes=["float32"], device="cuda")
    assert (row["status"], row["ratio"], row["reason"]) == ("skip", None, "runs on cpu only")


@pytest.mark.parametrize(
    ("device", "gpu", "devices"),
    [("auto", True, ["cuda", "cpu"]), ("auto", False, ["cpu", "cpu"]), ("cpu", True, ["cpu", "cpu"])],
)
def test_auto_selects_the_gpu_for_backends_that_run_on_one(device, gpu, devices):
    both = replace(NUMPY, devices=frozenset({"cpu", "cuda"}))
    checks = [*Selection({"both": both, "host": NUMPY}, ["smoke"], ["value"], ["float32"], device=device, gpu=gpu)]
    assert [check.device for check in checks] == devices
    # a rerun on the same machine must land on the same device
    assert [("--device" in check.command("smoke")) == (device != "auto") for check in checks] == [True, True]


def run_one(backend, case, prop, **selection):
    """The row of one check in float64."""
    (row,) = Run(Selection({"it": backend}, [case], [prop], ["float64"], **selection)).rows()
    return row


def refusing_below(width):
    """A backend that refuses blocks of a smaller width."""
    return replace(NUMPY, supports=lambda block: None if block.rows.shape[1] >= width else f"width must be {width}")


def refusing_most_tiles(error):
    """A backend that refuses every tile but one, for which its result has this error."""

    def lse(block, columns, options):
        if options.tile not in (None, (7, 5)):
            raise UnsupportedProblemError("tile must be 7 x 5")
        statistics = NUMPY.lse(block, columns, options)
        n = statistics.rows.negative_lse + np.array([error, 0.0])
        return replace(statistics, rows=statistics.rows._replace(negative_lse=n))

    return replace(NUMPY, lse=lse)


@pytest.mark.parametrize(
    ("backend", "check", "status", "reason"),
    [
        (refusing_below(2000), ("ragged", "value"), "refused", "width must be 2000"),
        # the backend refuses most drawn problems, and then few
        (refusing_below(20), ("drawn", "drawn"), "refused", "of 20 drawn problems refused, the last"),
        (refusing_below(2), ("drawn", "drawn"), "pass", ""),
        (refusing_most_tiles(0.0), ("smoke", "tiles"), "refused", "tile must be 7 x 5"),
        # a failure before a refusal is a failure
        (refusing_most_tiles(1.0), ("smoke", "tiles"), "fail", "tile 7 x 5: columns[0]"),
        (replace(NUMPY, lse=lambda *_: {}["ill"]), ("smoke", "value"), "fail", "raised KeyError: 'ill'"),
        (
            replace(NUMPY, state=lambda dtype: "float32"),
            ("smoke", "value"),
            "fail",
            "state must be float64 for float64",
        ),
    ],
)
def test_a_backend_that_refuses_or_raises(backend, check, status, reason):
    row = run_one(backend, *check, examples=20)
    assert row["status"] == status
    assert reason in row["reason"]
    assert (row["ratio"] is None) == (status == "refused")
    assert row["ratio"] != np.inf or row["excess"] == np.inf


@pytest.mark.parametrize(
    ("comparisons", "status"), [([], "untested"), ([("", Worst(float("nan"), "loss", (), 0.0, 0.0))], "fail")]
)
def test_a_check_without_comparisons_or_with_nan_does_not_pass(comparisons, status, monkeypatch):
    monkeypatch.setitem(PROPERTIES, "value", replace(PROPERTIES["value"], check=lambda trial: iter(comparisons)))
    assert run_one(NUMPY, "smoke", "value")["status"] == status


@pytest.mark.parametrize(
    "loose",
    [
        *({"unit": x} for x in (1.0, float("nan"))),
        *({name: 2.0**-8} for name in ("accumulate_unit", "input_rounding", "gradient_rounding", "gradient_underflow")),
        {"exp_ulps": 1e6},
        {"depth": lambda terms: 100 * terms},
    ],
    ids=lambda x: next(iter(x)),
)
def test_facts_looser_than_a_plain_computation_s_are_refused(loose):
    row = run_one(replace(NUMPY, accuracy=lambda *key: replace(NUMPY.accuracy(*key), **loose)), "smoke", "value")
    assert row["status"] == "fail"
    assert row["reason"].startswith(f"Accuracy.{next(iter(loose))}")
    assert "must be at most" in row["reason"]


@pytest.mark.parametrize(("precisions", "keeps"), [("ieee split", True), ("ieee split", False), ("ieee", False)])
def test_precision_workspace_and_keep_reach_the_backend_and_the_command(precisions, keeps):
    lse_options, accuracy_options, precisions = [], [], precisions.split()

    def accuracy(dtype, device, *options):
        accuracy_options.append(options)
        return NUMPY.accuracy(dtype, device)

    def lse(block, columns, options):
        lse_options.append(options)
        return NUMPY.lse(block, columns, options)

    changes = {"accuracy": accuracy, "lse": lse, "keeping": lse if keeps else None, "values": False}
    backend = replace(NUMPY, precisions=frozenset(precisions), **changes)
    # float32 runs in every precision that the backend names
    labels = ["float32", *["float32/split"] * (len(precisions) - 1), "float16"]
    selection = Selection({"it": backend}, ["one-row"], ["gradients"], ["float32", "float16"], workspace=3, keep=0)
    assert [(row["dtype"], row["status"]) for row in Run(selection).rows()] == [(label, "pass") for label in labels]
    expected = [Options(precision=label.partition("/")[2] or "ieee", workspace=3, keep=0) for label in labels]
    assert lse_options == expected
    # a backend that ignores the options need not accept them
    assert accuracy_options == [(x,) if keeps or len(precisions) > 1 else () for x in expected]
    for label, check in zip(labels, selection, strict=True):
        dtype, _, precision = label.partition("/")
        precision_words = f" --precision {precision or 'ieee'}" * (len(precisions) > 1 and label != "float16")
        assert f"--dtype {dtype}{precision_words} --workspace 3 --keep 0 --property gradients" in check.command("hot")
    (row,) = Run(Selection({"plain": NUMPY}, ["one-row"], ["value"], ["float32"], precisions=["tf32"])).rows()
    assert (row["status"], row["reason"]) == ("skip", "computes float32 in ieee only")


def test_memory_is_skipped_for_a_library_whose_memory_cannot_be_counted():
    arrays = ArrayLibrary(np)
    arrays.name = "other"
    other = replace(NUMPY, arrays=arrays)
    (row,) = Run(Selection({"other": other}, ["peak-memory"], None, ["float32"])).rows()
    assert (row["status"], row["reason"]) == ("skip", "nothing counts the memory of other on cpu")


def test_a_run_in_which_a_backend_refuses_most_problems_is_incomplete():
    def supports(block):
        return None if len(block.rows) == 32 else "m must be 32"

    choosy = replace(NUMPY, supports=supports)
    small = [name for name in cases.CASES if not name.startswith(("wordnet", "long", "deep"))]
    rows = list(Run(Selection({"choosy": choosy}, small, ["value"], ["float32"])).rows())
    assert {row["status"] for row in rows} == {"pass", "refused"}
    assert report.verdict(rows) == "incomplete"
    (line,) = report.gaps(rows)
    assert line.startswith(f"choosy: refused {len(small) - 1} of {len(small)} in float32")
    assert line.endswith("m must be 32")
