"""Builds the site and takes its pictures with Chromium: docs/assets/screenshot-{light,dark,phone}.png and social.png.

python scripts/make_screenshots.py

Needs the extra ``docs``, Pillow and Chromium (apt-get install chromium).
"""

from __future__ import annotations

import argparse
import functools
import http.server
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ASSETS = ROOT / "docs" / "assets"
LARGEST = 200_000
"""Bytes of a picture."""

# a window has a smallest width, and a frame none; at twice the size, as phones draw
PHONE = """<!doctype html><title>phone</title><style>body {{ margin: 0; overflow: hidden }}
iframe {{ border: 0; width: 390px; height: 844px; transform: scale(2); transform-origin: 0 0 }}</style>
<iframe src="{address}"></iframe>"""
# what a link to the site looks like where it is shared
SOCIAL = """<!doctype html><meta charset="utf-8"><title>card</title><style>
body {{ margin: 0; width: 1200px; height: 630px; background: #181f3f; color: #fff; overflow: hidden;
  display: grid; grid-template-columns: 300px 1fr; gap: 60px; align-items: center; padding: 0 90px;
  box-sizing: border-box; font: 36px/1.4 system-ui, sans-serif }}
h1 {{ margin: 0 0 16px; font-size: 84px; letter-spacing: -0.03em }} img {{ width: 300px }}
p {{ margin: 0; color: #c9d2f5 }}
</style><img src="{address}assets/logo.svg"><div><h1>contrastile</h1><p>{about}</p></div>"""
ABOUT = "Contrastive losses at any batch size: exact, memory linear in the batch, held to a float64 oracle."


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


def shoot(chromium: str, address: str, path: Path, size: tuple[int, int], *, dark: bool = False) -> None:
    """Write what a window of this size shows, as a PNG of 256 colours.

    Raises:
        RuntimeError: there is no picture, or it is too large.
    """
    with tempfile.TemporaryDirectory() as profile:
        command = [chromium, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        command += [f"--window-size={size[0]},{size[1]}", f"--user-data-dir={profile}", f"--screenshot={path}"]
        command += ["--virtual-time-budget=5000", *(["--blink-settings=preferredColorScheme=0"] if dark else [])]
        ended = subprocess.run([*command, address], capture_output=True, text=True, timeout=120, check=False)
    if ended.returncode or not path.exists():
        raise RuntimeError(f"{chromium} took no picture of {address}: {ended.stderr[-500:]}")
    from PIL import Image

    with Image.open(path) as image:
        image.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
    if path.stat().st_size > LARGEST:
        raise RuntimeError(f"a picture must have at most {LARGEST:,} bytes, {path.name} has {path.stat().st_size:,}")
    print(path.relative_to(ROOT))


def main() -> int:
    """Take all pictures; 2 where there is no Chromium."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        print("make_screenshots.py needs Chromium; run: apt-get install chromium", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", folder]
        subprocess.run(command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, check=True)
        handler = functools.partial(_Quiet, directory=folder)
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            address = f"http://127.0.0.1:{server.server_port}/"
            for name, text in (("phone", PHONE), ("social", SOCIAL)):
                page = text.format(address=address, about=ABOUT)
                Path(folder, f"{name}.html").write_text(page, encoding="utf-8")
            shoot(chromium, address, ASSETS / "screenshot-light.png", (1400, 900))
            shoot(chromium, address, ASSETS / "screenshot-dark.png", (1400, 900), dark=True)
            shoot(chromium, f"{address}phone.html", ASSETS / "screenshot-phone.png", (780, 1688))
            shoot(chromium, f"{address}social.html", ASSETS / "social.png", (1200, 630))
            server.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
