"""Runs commands in a terminal of 80 columns and draws what they print, as docs/assets/terminal-*.svg.

python scripts/make_captures.py                              all but those of a GPU
python scripts/make_captures.py verify plan                  these
python scripts/make_captures.py doctor-gpu bench-gpu --out DIR   on a machine with a GPU

Needs a Unix system and rich. What a command prints is refused where it names this machine: its host, its user's home,
the current folder or Python's own.
Times are those of the machine at that moment: keep it idle.
"""

from __future__ import annotations

import argparse
import io
import os
import pty
import re
import shlex
import socket
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

ROOT = Path(__file__).resolve().parent.parent
ASSETS = ROOT / "docs" / "assets"
COLUMNS = 80
CAPTURES = {
    "verify": "contrastile verify --quick",
    "bench": "contrastile bench",
    "doctor": "contrastile doctor",
    "plan": (
        "contrastile plan --batch 32768 --dim 512 --gpus 8 --encoder-mib-per-sample 20 --model-gib 10 --memory-gib 80"
    ),
    "doctor-gpu": "contrastile doctor",
    "bench-gpu": "contrastile bench --batch 8192 32768 --dtype bfloat16",
}
ANYWHERE = [name for name in CAPTURES if not name.endswith("-gpu")]
# background, text, then black, red, green, yellow, blue, magenta, cyan, white
_COLORS = "14192f d6dbeb 3c425c ff6b6b 69db7c ffc857 8fb0ff e699ff 5eead4 f0f2fa"
# rich's own fetches a font
_FORMAT = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">
<style>
.{unique_id}-matrix {{ font: {char_height}px ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace }}
.{unique_id}-title {{ font: 18px system-ui, sans-serif }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal"><rect width="{terminal_width}" height="{terminal_height}"/></clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def run(command: str, columns: int = COLUMNS) -> str:
    """What a command prints to a terminal of this width, escape sequences included.

    Raises:
        RuntimeError: it failed.
    """
    found = bytearray()

    def read(terminal: int) -> bytes:
        found.extend(part := os.read(terminal, 65536))
        return part

    setting = {"TERM": "xterm-256color", "COLORTERM": "", "COLUMNS": str(columns), "PYTHONPATH": str(ROOT)}
    words = ["env", "-u", "NO_COLOR", "-u", "FORCE_COLOR", *(f"{name}={x}" for name, x in setting.items())]
    words += [sys.executable, "-m", *shlex.split(command)]
    with tempfile.NamedTemporaryFile("r") as errors:
        # the progress bar of the standard error is no part of a picture
        ended = pty.spawn(["sh", "-c", f"{shlex.join(words)} 2>{errors.name} </dev/null"], read)
        if ended:
            raise RuntimeError(f"{command} ended with {os.waitstatus_to_exitcode(ended)}: {errors.read()[-500:]}")
    return found.decode().replace("\r\n", "\n")


def refuse(text: str) -> None:
    """Raise ValueError where a text names this machine."""
    places = {str(Path.home()), str(Path.cwd()), str(ROOT), sys.prefix, tempfile.gettempdir(), socket.gethostname()}
    for place in places - {"/", "", "localhost"}:
        if re.search(rf"(?<!\w){re.escape(place)}", text):
            raise ValueError(f"a capture must not name this machine, got {place!r}; change what the command prints")


def draw(name: str, command: str, printed: str) -> str:
    """The SVG of a prompt, the command and what it printed; a long command is broken at its options."""
    paper, ink, *normal = ((each[0], each[1], each[2]) for each in map(bytes.fromhex, _COLORS.split()))
    theme = TerminalTheme(paper, ink, normal, normal)
    prompt = re.sub(r"(.{1,74})(?: (?=--)|$)", r"\1 \\\n      ", command)[: -len(" \\\n      ")]
    body = "\n".join(line.rstrip() for line in printed.strip("\n").splitlines())
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text.assemble(("$ ", "bold yellow"), (prompt, "bold")), soft_wrap=True)
    console.print(Text.from_ansi(body), end="\n\n", soft_wrap=True)
    text = console.export_svg(title="", theme=theme, code_format=_FORMAT, unique_id=f"terminal-{name}")
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


def main() -> None:
    """Make the captures that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", default=ANYWHERE, help=f"of {', '.join(CAPTURES)}")
    parser.add_argument("--out", type=Path, default=ASSETS, metavar="DIR", help="where they go")
    given = parser.parse_args()
    for name in given.names:
        printed = run(CAPTURES[name])
        refuse(printed)
        path = given.out / f"terminal-{name}.svg"
        path.write_text(draw(name, CAPTURES[name], printed), encoding="utf-8")
        print(path.name)


if __name__ == "__main__":
    main()
