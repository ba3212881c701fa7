"""The site in a browser, on a laptop and on a phone: nothing scrolls sideways, breaks or is missing; its captures."""

from __future__ import annotations

import http.server
import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parent.parent
WIDTHS = (1400, 390)

# opens every page in a frame, one after another, and gives it every width: a window has a smallest width, a frame none
DRIVER = """<!doctype html><link rel="icon" href="data:,"><title>driver</title><body><script>
const WIDTHS = %s, PAGES = %s, found = [];
function visit(page, ...rest) {
  const frame = document.createElement("iframe");
  frame.style = `border: 0; width: ${WIDTHS[0]}px; height: 900px`;
  frame.onload = () => {
    for (const width of WIDTHS) {
      frame.style.width = `${width}px`;
      found.push(look(page, frame.contentWindow));
    }
    frame.remove();
    rest.length ? visit(...rest) : fetch("/found", {method: "POST", body: JSON.stringify(found)});
  };
  frame.src = page;
  document.body.append(frame);
}
function look(page, frame) {
  const all = (selector) => [...frame.document.querySelectorAll(selector)];
  return {
    page: page, inner: frame.innerWidth, scroll: frame.document.documentElement.scrollWidth,
    images: all("img").map(x => [x.src, x.complete && x.naturalWidth > 0]),
    tables: all(".md-typeset__scrollwrap").filter(x => x.scrollWidth > x.clientWidth + 1).map(x => x.innerText),
  };
}
visit(...PAGES);
</script>"""


@pytest.fixture
def make_captures(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script of the captures."""
    pytest.importorskip("rich")
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("make_captures")


class Server(http.server.ThreadingHTTPServer):
    """Serves a site and a driver at /driver; what the driver found, and whatever was asked for and is not there."""

    daemon_threads = True

    def __init__(self, site: Path, driver: str) -> None:
        super().__init__(("127.0.0.1", 0), partial(Handler, directory=str(site)))
        self.driver, self.absent = driver, list[str]()
        self.found: list[dict[str, Any]] | None = None
        self.done = threading.Event()


class Handler(http.server.SimpleHTTPRequestHandler):
    """One request."""

    server: Server

    def do_GET(self) -> None:
        if self.path != "/driver":
            super().do_GET()
            return
        body = self.server.driver.encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.server.found = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(204)
        self.end_headers()
        self.server.done.set()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        self.server.absent.append(self.path)
        super().send_error(code, message, explain)

    def log_message(self, format: str, *args: object) -> None:
        pass


def build(config: Path, site: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-f", str(config), "-d", str(site)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False, env=environment)
    assert ended.returncode == 0, ended.stderr


def browse(chromium: str, site: Path, profile: Path) -> list[str]:
    """What is wrong with a site, a line each."""
    pages = sorted(str(path.relative_to(site).parent / "x")[:-1] for path in site.rglob("index.html"))
    pages = ["/" + ("" if page == "./" else page) for page in (p.replace(os.sep, "/") for p in pages)]
    with Server(site, DRIVER % (json.dumps(WIDTHS), json.dumps(pages))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        origin = f"http://127.0.0.1:{server.server_port}"
        command = [chromium, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        command += ["--window-size=1500,1000", f"--user-data-dir={profile}", "--enable-logging=stderr"]
        command += [f"{origin}/driver"]
        with (profile.parent / "log").open("w+", encoding="utf-8") as log:
            browser = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log)
            ended = server.done.wait(1200)
            browser.terminate()
            browser.wait(1200)
            log.seek(0)
            said = log.read()
        server.shutdown()
    assert ended, said[-2000:]
    assert server.found is not None
    assert len(server.found) == len(pages) * len(WIDTHS)
    wrong = [f"console: {line}" for line in said.splitlines() if "CONSOLE" in line]
    wrong += [f"not there: {path}" for path in server.absent]
    for entry in server.found:
        wrong += [f"{entry['page']} at {entry['inner']}: {words}" for words in complaints(entry)]
    return list(dict.fromkeys(wrong))


def complaints(entry: dict[str, Any]) -> Iterator[str]:
    """What is wrong with a page; where its links lead, the strict build has asked."""
    if entry["scroll"] > entry["inner"]:
        yield f"the page is {entry['scroll']} wide"
    if entry["inner"] == max(WIDTHS):
        yield from (f"a table scrolls sideways: {' '.join(text.split())[:80]}" for text in entry["tables"])
    yield from (f"no picture {source}" for source, there in entry["images"] if not there)


def test_a_capture_is_of_a_terminal_in_its_colours_and_fetches_nothing(make_captures: ModuleType) -> None:
    help_ = make_captures.run("contrastile --help", columns=60)
    assert max(map(len, help_.splitlines())) <= 60
    assert "verify" in help_
    text = make_captures.draw("x", "contrastile plan --batch 8 --dim 4", "a \033[1;32mfits\033[0m <b>\n")
    root = ElementTree.fromstring(text)
    words = [(element.text, element.get("class")) for element in root.findall(".//{*}text")]
    (green,) = (kind for word, kind in words if word == "fits")
    assert f".{green} {{ fill: #69db7c;font-weight: bold }}" in text
    assert "://" not in text.replace("http://www.w3.org/2000/svg", "")
    with pytest.raises(RuntimeError, match=r"ended with 2: [^$]*nope"):
        make_captures.run("contrastile nope")


def test_a_capture_that_names_this_machine_is_refused(make_captures: ModuleType) -> None:
    make_captures.refuse("torch 2.13.0, /absolute/path")
    with pytest.raises(ValueError, match="must not name this machine"):
        make_captures.refuse(f"found in {sys.prefix}/lib")


def test_the_committed_captures_are_of_today_s_commands_and_name_no_machine(make_captures: ModuleType) -> None:
    found = {path.stem.removeprefix("terminal-"): path for path in make_captures.ASSETS.glob("terminal-*.svg")}
    assert {"verify", "doctor", "plan"} <= set(found) <= set(make_captures.CAPTURES)
    for name, path in found.items():
        root = ElementTree.parse(path).getroot()
        text = " ".join(element.text or "" for element in root.findall(".//{*}text")).replace("\xa0", " ")
        assert set(make_captures.CAPTURES[name].split()) <= set(text.split())
        assert not re.search(r"/(home|root|tmp|Users|opt|usr)\b", text)


PLANTED = """<!doctype html><title>x</title><link rel="icon" href="data:,"><style>body { margin: 0 }</style>
<p>text</p>
%s"""
DEFECTS = {
    '<div style="width: 500px">wide</div>': "/ at 390: the page is 500 wide",
    "<script>console.error('planted')</script>": "planted",
    "<script>undefined_name()</script>": "undefined_name is not defined",
    '<img src="/absent.png">': "/ at 1400: no picture {origin}/absent.png",
    '<link rel="stylesheet" href="/absent.css">': "not there: /absent.css",
    '<div class="md-typeset__scrollwrap" style="overflow: auto"><p style="width: 3000px">table</div>': (
        "/ at 1400: a table scrolls sideways: table"
    ),
}


@pytest.mark.slow
def test_what_is_wrong_with_a_page_is_found(tmp_path: Path, chromium: str) -> None:
    site = tmp_path / "site"
    (site / "b").mkdir(parents=True)
    (site / "b" / "index.html").write_text(PLANTED % "", encoding="utf-8")
    (site / "index.html").write_text(PLANTED % "", encoding="utf-8")
    assert browse(chromium, site, tmp_path / "profile") == []
    (site / "index.html").write_text(PLANTED % "".join(DEFECTS), encoding="utf-8")
    found = "\n".join(browse(chromium, site, tmp_path / "profile"))
    for said in DEFECTS.values():
        assert said.partition("{origin}")[0] in found
        assert said.partition("{origin}")[2] in found


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("mkdocs"), reason="needs MkDocs: pip install 'contrastile[docs]'")
def test_the_site_in_a_browser(tmp_path: Path, chromium: str) -> None:
    build(ROOT / "mkdocs.yml", tmp_path / "site")
    assert browse(chromium, tmp_path / "site", tmp_path / "profile") == []
