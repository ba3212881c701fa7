"""Small float64 models of transformers with random weights, and their inputs."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

PAIRS = 11


def clip(dropout: float = 0.0) -> Any:
    from transformers import CLIPConfig, CLIPModel

    return _random_model(CLIPModel, CLIPConfig, dropout, projection_dim=8)


def siglip(dropout: float = 0.0) -> Any:
    from transformers import SiglipConfig, SiglipModel

    return _random_model(SiglipModel, SiglipConfig, dropout)


def clap() -> tuple[Any, dict[str, Tensor]]:
    """A ClapModel without dropout, whose two scales differ, and its inputs."""
    from transformers import ClapConfig, ClapModel

    no_dropout: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    text = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2, **no_dropout}
    audio = {"spec_size": 32, "num_mel_bins": 8, "window_size": 2, "depths": [1, 1], "num_attention_heads": [1, 1]}
    audio |= {"patch_embeds_hidden_size": 8, "hidden_size": 16, "drop_path_rate": 0.0}
    torch.manual_seed(0)
    towers = {"text_config": {**text, "vocab_size": 20}, "audio_config": {**audio, **no_dropout}}
    model = ClapModel(ClapConfig(**towers, projection_dim=8)).double()
    model.logit_scale_t.data.fill_(1.2)
    spectrograms = torch.randn(PAIRS, 1, 128, 8, dtype=torch.float64)
    return model, {"input_features": spectrograms, **{n: x for n, x in inputs().items() if n != "pixel_values"}}


def bert(words: int) -> Any:
    """A BertModel without dropout, in float32."""
    from transformers import BertConfig, BertModel

    no_dropout: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    return BertModel(BertConfig(vocab_size=words, max_position_embeddings=12, **sizes, **no_dropout))


def sentences(folder: Path, letters: str = string.ascii_lowercase) -> Any:
    """A SentenceTransformer without dropout, whose tokenizer numbers letters in this order."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    from transformers import BertTokenizer

    words = "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters
    folder.mkdir(exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(words))
    BertTokenizer(vocab=str(folder / "vocab.txt")).save_pretrained(folder)
    bert(len(words)).save_pretrained(folder)
    return SentenceTransformer(modules=[Transformer(str(folder)), Pooling(8)], device="cpu").double().eval()


def _random_model(cls: Any, config: Any, dropout: float, **settings: Any) -> Any:
    tower = {
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "attention_dropout": dropout,
    }
    text = {**tower, "vocab_size": 20, "max_position_embeddings": 6, "eos_token_id": 1, "bos_token_id": 0}
    torch.manual_seed(0)
    model = cls(config(text_config=text, vision_config={**tower, "image_size": 8, "patch_size": 4}, **settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith("logit_"):
                parameter.fill_({"logit_scale": 2.1, "logit_bias": -3.3}[name])
    return model.double().train()


def inputs(pairs: int = PAIRS) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(2, 20, (pairs, 6), generator=generator)
    tokens[:, -1] = 1
    lengths = torch.randint(2, 6, (pairs, 1), generator=generator)
    return {
        "pixel_values": torch.randn(pairs, 3, 8, 8, dtype=torch.float64, generator=generator),
        "input_ids": tokens,
        "attention_mask": ((torch.arange(6) < lengths) | (torch.arange(6) == 5)).long(),
    }
