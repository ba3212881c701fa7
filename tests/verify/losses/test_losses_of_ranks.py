"""A loss on ranks of torch.distributed: a wrong factor is found and named, right ones pass, a rank's error is told."""

import gathering
import pytest

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
    found = [line for line in out.splitlines() if "FAILED" in line]
    assert found == ["FAILED gathering:Loss ddp-gradients shards float32"]
    assert "2 ranks: 0.5 times what it should be: d" in out
    assert "and 1 more, likely of the same cause" in out


@pytest.mark.slow
def test_a_right_loss_passes_with_equal_and_different_shards():
    claims = {"ranks": 3, "state": "float32", "objective": "sigmoid_loss"}
    found = rows_of(contrastile.nn.SigLipLoss, claims)
    assert {row["status"] for row in found} == {"pass"}
    assert {(row["case"], row["property"]) for row in found} == {(case, name) for case in ranks.SHARDS for name in DDP}


@pytest.mark.slow
def test_a_rank_s_error_is_told_and_concerns_its_own_world_alone():
    found = rows_of(gathering.Ending)
    assert {row["status"] for row in found if row["world"] == 2 and row["case"] == "shards"} == {"pass"}
    assert {row["status"] for row in found if row["case"] == "shards@uneven"} == {"unclaimed"}
    broken = [row for row in found if row["world"] == 3 and row["case"] == "shards"]
    assert {row["status"] for row in broken} == {"fail"}
    # which rank's error comes first is a matter of time
    assert all("raised RuntimeError: rank" in row["reason"] for row in broken)
    (reason,) = {row["reason"] for row in rows_of(gathering.Dying) if row["status"] == "fail"}
    assert reason == "raised RuntimeError: rank 1 ended with exit code 7"


def test_what_no_other_process_can_import_is_not_tested():
    def inner(image, text, scale): ...

    found = rows_of(inner, {"ranks": 2})
    assert {row["status"] for row in found} == {"skip"}
    assert all("name it as module:attribute" in row["reason"] for row in found)
