"""Losses on ranks of torch.distributed: verify names a wrong factor, passes right losses and reports errors."""

import gathering
import pytest
import torch

import contrastile.nn
from contrastile.cli import main
from contrastile.verify.losses import check, ranks

DDP = list(ranks.DISTRIBUTED)


def rows_of(loss, claims=None):
    return [row for row in check(loss, claims, properties=DDP) if row["world"] > 1]


@pytest.mark.slow
def test_a_wrong_ddp_factor_is_found_by_the_command(capsys, monkeypatch):
    monkeypatch.chdir(ranks.Path(__file__).parent)
    words = ["--case", "smoke", "shards", "--property", "value", "gradients", *DDP, "--dtype", "float32", "--quiet"]
    assert main(["verify", "--loss", "gathering:Loss", *words]) == 1
    out = capsys.readouterr().out
    failures = [line for line in out.splitlines() if "FAILED" in line]
    assert failures == ["FAILED gathering:Loss ddp-gradients shards float32"]
    assert "2 ranks: 0.5 times what it should be: d" in out
    assert "and 1 more, likely of the same cause" in out


@pytest.mark.slow
def test_a_right_loss_passes_with_equal_and_different_shards():
    claims = {"ranks": 3, "state": "float32", "objective": "sigmoid_loss"}
    rows = rows_of(contrastile.nn.SigLipLoss, claims)
    assert {row["status"] for row in rows} == {"pass"}
    assert {(row["case"], row["property"]) for row in rows} == {(case, name) for case in ranks.SHARDS for name in DDP}


@pytest.mark.slow
def test_a_setting_of_the_process_widens_no_bound_and_a_final_rounding_is_allowed():
    claims = {"ranks": 2, "equal_shards": True}
    torch.set_float32_matmul_precision("medium")
    try:
        rows = rows_of(gathering.OffByAThousandth, claims)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert {row["status"] for row in rows if row["case"] == "shards"} == {"fail"}
    rows = rows_of(gathering.RoundedAtTheEnd, claims | {"dtypes": ("bfloat16",), "state": "float32"})
    assert {row["status"] for row in rows if row["case"] == "shards"} == {"pass"}


@pytest.mark.slow
def test_an_error_of_a_rank_is_reported_for_its_world_alone():
    rows = rows_of(gathering.RaisingOnLastRank)
    assert {row["status"] for row in rows if row["world"] == 2 and row["case"] == "shards"} == {"pass"}
    assert {row["status"] for row in rows if row["case"] == "shards@uneven"} == {"unclaimed"}
    broken = [row for row in rows if row["world"] == 3 and row["case"] == "shards"]
    assert {row["status"] for row in broken} == {"fail"}
    # any rank may be the first that raises
    assert all("raised RuntimeError: rank" in row["reason"] for row in broken)
    (reason,) = {row["reason"] for row in rows_of(gathering.ExitingOnOneRank) if row["status"] == "fail"}
    assert reason == "raised RuntimeError: rank 1 ended with exit code 7"


def test_a_loss_that_other_processes_cannot_import_is_skipped():
    def inner(image, text, scale): ...

    rows = rows_of(inner, {"ranks": 2})
    assert {row["status"] for row in rows} == {"skip"}
    assert all("name it as module:attribute" in row["reason"] for row in rows)
