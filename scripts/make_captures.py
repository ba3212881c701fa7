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
import fcntl
import io
import os
import pty
import re
import shlex
import socket
import struct
import subprocess
import sys
import tempfile
import termios
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
_COLORS = (
    ((20, 25, 47), (214, 219, 235)),
    (
        (60, 66, 92),
        (255, 107, 107),
        (105, 219, 124),
        (255, 200, 87),
        (143, 176, 255),
        (230, 153, 255),
        (94, 234, 212),
        (240, 242, 250),
    ),
)
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
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    environment = {name: x for name, x in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS")}
    environment |= {"TERM": "xterm-256color", "COLORTERM": ""}
    words = [sys.executable, "-m", *shlex.split(command)]
    with tempfile.TemporaryFile() as errors:
        # its progress bar is for the standard error of a terminal, and a picture does not move
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=its, stderr=errors, env=environment)
        os.close(its)
        found = bytearray()
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:  # Linux's way to say that the other end is closed
                break
            if not part:
                break
            found += part
        os.close(ours)
        if process.wait():
            errors.seek(0)
            raise RuntimeError(f"{command} ended with {process.returncode}: {errors.read().decode()[-500:]}")
    return found.decode().replace("\r\n", "\n")


def refuse(text: str) -> None:
    """Raise ValueError where a text names this machine."""
    places = {str(Path.home()), str(Path.cwd()), str(ROOT), sys.prefix, tempfile.gettempdir(), socket.gethostname()}
    for place in places - {"/", "", "localhost"}:
        if re.search(rf"(?<!\w){re.escape(place)}", text):
            raise ValueError(f"a capture must not name this machine, got {place!r}; change what the command prints")


def draw(name: str, command: str, printed: str) -> str:
    """The SVG of a prompt, the command and what it printed; a long command is broken at its options."""
    (paper, ink), normal = _COLORS
    theme = TerminalTheme(paper, ink, list(normal), list(normal))
    prompt = re.sub(r"(.{1,74})(?: (?=--)|$)", r"\1 \\\n      ", command)[: -len(" \\\n      ")]
    body = "\n".join(line.rstrip() for line in printed.strip("\n").splitlines())
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text.assemble(("$ ", "bold yellow"), (prompt, "bold")), soft_wrap=True)
    console.print(Text.from_ansi(body), end="\n\n", soft_wrap=True)
    text = console.export_svg(title="", theme=theme, code_format=_FORMAT, unique_id=f"terminal-{name}")
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Make the captures that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CAPTURES)} ({', '.join(ANYWHERE)})")
    parser.add_argument("--out", type=Path, default=ASSETS, metavar="DIR", help="where they go")
    given = parser.parse_args(arguments)
    if unknown := set(given.names) - set(CAPTURES):
        parser.error(f"NAME must be of {', '.join(CAPTURES)}, got {', '.join(sorted(unknown))}")
    for name in given.names or ANYWHERE:
        printed = run(CAPTURES[name])
        refuse(printed)
        path = given.out / f"terminal-{name}.svg"
        path.write_text(draw(name, CAPTURES[name], printed), encoding="utf-8")
        print(path.name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
