"""Real embeddings that ship with the package, so that verification needs no download.

`load_wordnet_pairs` gives 1021 (example sentence, gloss) pairs from all-MiniLM-L6-v2 on WordNet 3.0,
some of which share a gloss. Files load without pickle and are checked on every load.
Sources and licences: LICENSES.md beside this file.
"""

from contrastile.data.wordnet import WordNetPairs, load_wordnet_pairs

__all__ = ["WordNetPairs", "load_wordnet_pairs"]
