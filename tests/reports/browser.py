"""Headless Chromium: renders a page and returns its elements, console complaints, pixels and sizes."""

import html
import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from matplotlib.image import imread

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_QUIET = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--hide-scrollbars",
    "--disable-background-networking",
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--enable-logging=stderr",
    "--v=0",
    "--virtual-time-budget=2000",
)
# What the page's console says, and what the page asks for. Chromium itself also complains about missing services.
_COMPLAINT = re.compile(r":CONSOLE[:(]|Content.Security.Policy|net::ERR|Refused to")


class Rendered(NamedTuple):
    """What a reader gets.

    Attributes:
      dom: the document after rendering, as HTML.
      complaints: lines of the console, and of what could not be loaded.
      pixels: float32[height, width, 3], 0 to 1.
    """

    dom: str
    complaints: list
    pixels: np.ndarray


# A window has a least width, a frame in it has none. What stands where is told to it as JSON.
_FRAME = """<!DOCTYPE html><title></title>
<iframe src="copy.html" width="{width}" height="5000" style="border: 0"></iframe>
<script>addEventListener("message", (event) => {{ document.title = event.data; }});</script>"""
_MEASURE = """<script>
const within = (a, b) =>
  a.left >= b.left - 1 && a.right <= b.right + 1 && a.top >= b.top - 1 && a.bottom <= b.bottom + 1;
// Whether a label is cut off shows once its picture is a part of the page.
const pictures = [...document.querySelectorAll("figure > img")].map((image) => {
  const box = image.getBoundingClientRect();
  return {figure: image.parentElement.id, width: box.width, height: box.height};
});
const pageWidth = document.documentElement.scrollWidth;
const labels = [...document.querySelectorAll("figure > img")].flatMap((image) => {
  const bytes = Uint8Array.from(atob(image.src.split(",")[1]), (letter) => letter.charCodeAt(0));
  const holder = document.createElement("div");
  holder.innerHTML = new TextDecoder().decode(bytes);
  image.replaceWith(holder);
  return [...holder.querySelectorAll("text")].map((label) => [label, holder.firstElementChild]);
});
parent.postMessage(JSON.stringify({
  pictures,
  num_labels: labels.length,
  clipped: labels.filter(([label, svg]) => !within(label.getBoundingClientRect(), svg.getBoundingClientRect())).map(
    ([label, svg]) => label.textContent),
  page_width: pageWidth,
}), "*");
</script>"""


def render(page, *, width=1280, height=5000, is_dark=False):
    """Opens a file in a browser; skips the test where there is none."""
    with tempfile.TemporaryDirectory() as scratch:
        picture = Path(scratch, "page.png")
        runs = [
            _browse(page, scratch, each, width=width, height=height, is_dark=is_dark)
            for each in ("--dump-dom", f"--screenshot={picture}")
        ]
        complaints = [line for run in runs for line in run.stderr.splitlines() if _COMPLAINT.search(line)]
        return Rendered(runs[0].stdout, complaints, imread(picture)[..., :3])


def measured(page, *, width=1280):
    """Sizes in pixels of what a browser shows of a file, by a script in a copy of it, whose policy would refuse it."""
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch, "copy.html")
        unguarded, num_policies = re.subn(r"<meta http-equiv=[^>]*>", "", page.read_text())
        assert num_policies == 1
        copy.write_text(unguarded.replace("</body>", f"{_MEASURE}</body>"))
        frame = Path(scratch, "frame.html")
        frame.write_text(_FRAME.format(width=width))
        dom = _browse(frame, scratch, "--dump-dom", width=width, height=5000).stdout
        return json.loads(html.unescape(re.search("<title>(.*?)</title>", dom, re.DOTALL)[1]))


def _browse(page, scratch, *options, width, height, is_dark=False):
    browser = next(filter(None, map(shutil.which, _NAMES)), None)
    if browser is None:
        pytest.skip(f"there is no browser: none of {', '.join(_NAMES)} is installed")
    command = [browser, *_QUIET, f"--user-data-dir={scratch}/profile", f"--window-size={width},{height}", *options]
    command += ["--blink-settings=preferredColorScheme=0"] if is_dark else []
    return subprocess.run([*command, page.as_uri()], capture_output=True, text=True, timeout=60, check=True)


def num_pixels_of(pixels, hex_code):
    """How many pixels have a colour such as `#2a6ebb`, up to rounding."""
    colour = np.array([int(hex_code[k : k + 2], 16) for k in (1, 3, 5)]) / 255
    return int((np.abs(pixels - colour).max(axis=-1) < 0.02).sum())
