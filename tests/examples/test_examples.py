"""The WordNet example with tiny data and a tiny model: it reads its data and learns."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import pytest
import torch
from pages import blocks, read

import contrastile

pytest.importorskip("transformers")
import wordnet

pytestmark = pytest.mark.slow
COLOURS = ["red", "blue", "green", "black", "white", "brown", "grey", "pink", "gold", "violet", "azure", "beige"]
THINGS = ["cat", "dog", "cup", "car", "hat", "key", "map", "pen", "box", "fan", "jar", "net"]
PARTS = [*COLOURS, *THINGS]


def tiny_dictionary(folder: Path) -> Path:
    """The files of WordNet, with words of two translated parts, so that a model can infer held-out words."""
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


def test_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"wordnet": tiny_dictionary(tmp_path / "dictionary"), "model": tiny_minilm(tmp_path / "model")}
    options |= {"held-out": 20, "chunk": 800, "batch": 48, "lr": 3e-2, "samples": 2400, "device": "cpu"}
    words = [f"--{name}={value}" for name, value in options.items()]
    monkeypatch.setattr(sys, "argv", ["wordnet.py", *words])
    # the ids that the loss receives: the pairs of one gloss share an id
    ids_of_calls: list[torch.Tensor] = []
    clip_loss = contrastile.clip_loss
    monkeypatch.setattr(contrastile, "clip_loss", lambda *x, ids: ids_of_calls.append(ids) or clip_loss(*x, ids=ids))
    first, *_, last = wordnet.main()
    assert all(len(ids) == 48 for ids in ids_of_calls)
    assert min(len(ids.unique()) for ids in ids_of_calls) < 48
    # the 20 glosses of the test share no pair with training
    assert first["recall@1"] < 0.2
    assert last["recall@1"] > 0.8
    assert last["samples"] == 2400
    assert "loss's share of the time 0." in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["wordnet.py", "--wordnet", str(tmp_path / "nowhere")])
    with pytest.raises(SystemExit, match="apt-get install"):
        wordnet.main()


def test_the_page_shows_the_step_of_the_example() -> None:
    (step,) = blocks(read("docs/tutorials/examples.md"))
    source = [line for line in inspect.getsource(wordnet.step).splitlines() if '"""' not in line]
    assert step.splitlines() == source
