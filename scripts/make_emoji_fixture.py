"""Make tests/examples/share: a few dozen emoji of the Debian packages, small, for the tests of examples/emoji.py.

    apt-get install fonts-noto-color-emoji unicode-cldr-core
    python scripts/make_emoji_fixture.py

Needs fonttools and pillow. The licences are in tests/examples/share/LICENSES.md.
"""

from __future__ import annotations

import argparse
import io
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from fontTools import subset
from fontTools.ttLib import TTFont
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples"))
from emoji import CLDR, FONT, VARIATION, glyphs, read_annotations  # noqa: E402

OUTPUT = ROOT / "tests" / "examples" / "share"
SEQUENCES = [*"😀😂🤖👻👍🐶🐱🐻🐧🐙🐠🍎🍌🍇🍕🎂🍺⚽🎸🚀🚗🚲🏠🌙⭐🔥🌈🎁💧🔑", "❤️", "👍🏿", "👍🏻", "👩‍🚀", "🇯🇵", "🇩🇪"]
LOCALES = ["de", "en", "ja"]
SIDE = 20


def small(blob: bytes) -> bytes:
    """A bitmap of SIDE pixels at most, in 32 colours."""
    picture = Image.open(io.BytesIO(blob)).convert("RGBA")
    picture.thumbnail((SIDE, SIDE), Image.Resampling.BOX)
    saved = io.BytesIO()
    picture.quantize(32).save(saved, "PNG", optimize=True)
    return saved.getvalue()


def make_font(source: Path, target: Path) -> None:
    """The font with the glyphs of SEQUENCES alone."""
    font = TTFont(source, recalcTimestamp=False)
    _, characters, ligatures = glyphs(font)
    wanted: set[Any] = set()
    for sequence in SEQUENCES:
        parts = tuple(characters[ord(x)] for x in sequence if ord(x) in characters)
        wanted |= {*parts, ligatures.get(parts, parts[0])}
    options = subset.Options(layout_features=["*"], layout_closure=False, notdef_outline=True, recalc_timestamp=False)
    subsetter = subset.Subsetter(options)
    subsetter.populate(glyphs=wanted, unicodes=[ord(x) for sequence in SEQUENCES for x in sequence])
    subsetter.subset(font)
    for bitmap in font["CBDT"].strikeData[0].values():
        bitmap.imageData = small(bitmap.imageData)
    target.parent.mkdir(parents=True, exist_ok=True)
    font.save(target)


def make_annotations(source: Path, target: Path) -> None:
    """Their names and keywords, a file per locale."""
    found = list(read_annotations(source, LOCALES))
    for locale in LOCALES:
        root = ElementTree.Element("ldml")
        entries = ElementTree.SubElement(root, "annotations")
        for sequence, text, where, is_name in found:
            if where == locale and sequence in {*SEQUENCES, *(x.replace(VARIATION, "") for x in SEQUENCES)}:
                entry = ElementTree.SubElement(entries, "annotation", cp=sequence, **{"type": "tts"} if is_name else {})
                entry.text = text if is_name else text.replace(", ", " | ")
        ElementTree.indent(root)
        (target / "annotations").mkdir(parents=True, exist_ok=True)
        ElementTree.ElementTree(root).write(target / "annotations" / f"{locale}.xml", "utf-8", xml_declaration=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--share", type=Path, default=Path("/usr/share"), help="where the two packages' files are")
    options = parser.parse_args()
    make_font(options.share / FONT, OUTPUT / FONT)
    make_annotations(options.share / CLDR, OUTPUT / CLDR)


if __name__ == "__main__":
    main()
