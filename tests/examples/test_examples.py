"""The example on real data in a tiny setting: it reads its data and learns."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import contrastile

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "tutorials" / "examples.md").read_text(encoding="utf-8")
COLOURS = ["red", "blue", "green", "black", "white", "brown", "grey", "pink", "gold", "violet", "azure", "beige"]
THINGS = ["cat", "dog", "cup", "car", "hat", "key", "map", "pen", "box", "fan", "jar", "net"]
PARTS = [*COLOURS, *THINGS]


@pytest.fixture(autouse=True)
def scripts_that_import_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    monkeypatch.syspath_prepend(ROOT / "examples")


def module(name: str) -> Any:
    return importlib.import_module(name)


def tiny_dictionary(folder: Path) -> Path:
    """WordNet's files, with words of two parts each of which is translated: what is held out can be inferred."""
    folder.mkdir()
    lines = ["  1 a licence"]
    for i, colour in enumerate(COLOURS):
        for j, thing in enumerate(THINGS):
            gloss = f'a {thing[::-1]} that is {colour[::-1]}; "see the {colour} {thing}"'
            lines.append(f"{i * 100 + j:08d} 05 n 02 {colour}_{thing} 0 {thing}_{colour}(p) 0 000 | {gloss}  ")
    (folder / "data.noun").write_text("\n".join(lines))
    for name in ("data.verb", "data.adj", "data.adv"):
        (folder / name).write_text("  1 a licence\n")
    return folder


def tiny_minilm(folder: Path) -> Path:
    """A BERT with random weights, and its tokenizer."""
    from transformers import BertConfig, BertModel, BertTokenizerFast

    folder.mkdir()
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "that", "is", "see", "the"]
    words += [*PARTS, *(part[::-1] for part in PARTS)]
    (folder / "vocab.txt").write_text("\n".join(words))
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    sizes = {"vocab_size": len(words), "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    torch.manual_seed(5)
    config = BertConfig(**sizes, num_hidden_layers=1, max_position_embeddings=40, initializer_range=0.1)
    model = BertModel(config, add_pooling_layer=False)
    # words differ more than positions
    model.embeddings.word_embeddings.weight.data.mul_(10)
    model.save_pretrained(folder)
    return folder


def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *more: str) -> list[dict[str, float]]:
    """The program in this process; returns what it printed."""
    given = {"wordnet": tiny_dictionary(tmp_path / "dictionary"), "model": tiny_minilm(tmp_path / "model")}
    given |= {"held-out": 20, "chunk": 800, "batch": 48, "lr": 3e-2, "samples": 2400, "device": "cpu"}
    words = [f"--{name}={value}" for name, value in given.items()]
    monkeypatch.setattr(sys, "argv", ["wordnet.py", *words, *more])
    curve: list[dict[str, float]] = module("wordnet").main()
    return curve


@pytest.mark.slow
def test_it_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    first, *_, last = run(tmp_path, monkeypatch)
    # of 20 glosses that share no training pair with it
    assert first["recall@1"] < 0.2
    assert last["recall@1"] > 0.8
    assert last["samples"] == 2400
    assert "loss's share of the time 0." in capsys.readouterr().out


@pytest.mark.slow
def test_the_pairs_of_one_gloss_share_an_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks: list[Any] = []
    monkeypatch.setattr(module("wordnet"), "train", lambda task, options: tasks.append(task) or [])
    run(tmp_path, monkeypatch)
    (task,) = tasks
    (_, glosses), ids = task.batch(torch.arange(task.pairs))
    shown = torch.cat([chunk for chunk, _ in glosses])
    same = (shown[:, None] == shown).all(dim=2)
    assert same.sum() > 2 * task.pairs
    assert torch.equal(same, ids[:, None] == ids)
    # and the loss gets them
    seen: list[torch.Tensor] = []
    right = contrastile.clip_loss
    monkeypatch.setattr(contrastile, "clip_loss", lambda *x, ids: seen.append(ids) or right(*x, ids=ids))
    module("shared").step(task, torch.arange(7), torch.device("cpu"))
    assert torch.equal(seen[0], ids[:7])


@pytest.mark.slow
def test_missing_data_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="apt-get install"):
        run(tmp_path, monkeypatch, "--wordnet", str(tmp_path / "nowhere"))


@pytest.mark.slow
def test_lemmas_and_examples_lead_to_their_gloss(tmp_path: Path) -> None:
    pairs, glosses = module("wordnet").read_pairs(tiny_dictionary(tmp_path / "dictionary"))
    assert len(glosses) == len(COLOURS) * len(THINGS)
    assert [(query, glosses[number]) for query, number in pairs[:3]] == [
        ("red cat", "a tac that is der"),
        ("cat red", "a tac that is der"),
        ("see the red cat", "a tac that is der"),
    ]


@pytest.mark.slow
def test_texts_that_are_too_long_keep_their_end_mark(tmp_path: Path) -> None:
    wordnet = module("wordnet")
    tokenizer = wordnet.AutoTokenizer.from_pretrained(tiny_minilm(tmp_path / "model"))
    assert wordnet.tokens(["a red cat", "is"], 4, tokenizer).tolist() == [[2, 5, 10, 3], [2, 7, 3, 0]]


def test_batches_of_any_size_read_the_same_shuffled_epochs() -> None:
    rows_of = module("shared").rows_of
    pairs, samples = 30, 120
    orders = [torch.cat([rows_of(i, b, pairs) for i in range(0, samples, b)]) for b in (1, 8, 40, 120)]
    assert all(torch.equal(order, orders[0]) for order in orders)
    epochs = orders[0].view(-1, pairs)
    assert torch.equal(epochs.sort(dim=1).values, torch.arange(pairs).expand(4, -1))
    assert len({tuple(epoch.tolist()) for epoch in epochs}) == 4


def test_recall_counts_ties_against_the_query() -> None:
    key = torch.eye(12)
    key[3] = key[2]
    query = key[[0, 1, 2, 3]]
    own = torch.tensor([0, 5, 2, 3])  # right; as far as all others; tied; tied
    for tile in (1, 3, 4):
        assert module("shared").recall(query, key, own, tile=tile) == {"recall@1": 0.25, "recall@10": 0.75}


def test_the_page_shows_the_step_of_the_examples() -> None:
    (step,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
    _, *body = step.splitlines()
    source = inspect.getsource(module("shared").step).splitlines()
    assert len(body) > 6
    assert [line for line in source if line in body] == body
