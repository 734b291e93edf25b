"""Write a drawing as SVG or PNG; for PNG a program or package that can paint SVG is looked for."""

import importlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from launch.model.errors import UsageError
from launch.system.output_file import write_whole
from launch.system.program_path import find_program
from lms.errors import pip_install
from lmsrun.draw.plan import drawing_size

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SCALE = 2
"""Pixels of a PNG for each one of the drawing."""
_LIMIT_S = 60
_QUIET = (
    *("--headless", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
MISSING = (
    "cannot make a PNG: there is no program that paints SVG; install librsvg2-bin or chromium, or "
    f"{pip_install('png')}, or take --svg"
)


def write_drawing(svg: str, path: str, origin: str) -> None:
    """Write a drawing as SVG.

    Raises:
        UsageError: If it cannot be written.
    """
    try:
        write_whole(path, svg + "\n")
    except OSError as error:
        raise _refused(path, origin, error) from None


def write_png(svg: str, path: str, origin: str, environ: Mapping[str, str]) -> None:
    """Write a drawing as PNG.

    Raises:
        UsageError: If it cannot be written, or nothing here paints SVG.
    """
    searched = environ.get("PATH")
    try:
        with tempfile.TemporaryDirectory(prefix="lmsrun-png-") as folder:
            drawn, painted = Path(folder, "drawing.svg"), Path(folder, "drawing.png")
            drawn.write_text(svg, encoding="utf-8")
            if program := find_program("rsvg-convert", searched):
                _run([program, f"--zoom={SCALE}", "-o", str(painted), str(drawn)], painted)
            elif browser := next(filter(None, (find_program(name, searched) for name in BROWSERS)), None):
                _browse(browser, svg, drawn, painted, Path(folder))
            else:
                _paint_by_package(svg, painted)
            shutil.copyfile(painted, path)
    except OSError as error:
        raise _refused(path, origin, error) from None


def _browse(browser: str, svg: str, drawn: Path, painted: Path, folder: Path) -> None:
    width, height = drawing_size(svg)
    size = f"--window-size={width:.0f},{height:.0f}"
    own = f"--user-data-dir={folder / 'browser'}"
    scale, shot = f"--force-device-scale-factor={SCALE}", f"--screenshot={painted}"
    as_root = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium's sandbox refuses root.
    _run([browser, *_QUIET, *as_root, own, scale, size, shot, drawn.as_uri()], painted)


def _run(argv: list[str], painted: Path) -> None:
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise UsageError(f"{argv[0]} took more than {_LIMIT_S} s to paint a PNG; take --svg") from None
    if done.returncode or not painted.is_file():
        said = done.stderr.decode(errors="replace").strip().rpartition("\n")[2][-200:]
        raise UsageError(f"{argv[0]} could not paint a PNG ({said or 'it says nothing'}); take --svg")


def _paint_by_package(svg: str, painted: Path) -> None:
    try:
        cairosvg = importlib.import_module("cairosvg")
    except (ImportError, OSError):  # The latter without the C library.
        raise UsageError(MISSING) from None
    cairosvg.svg2png(bytestring=svg.encode(), write_to=os.fspath(painted), scale=SCALE)


def _refused(path: str, origin: str, error: OSError) -> UsageError:
    return UsageError(f"cannot write {path}: {error.strerror}; choose another {origin}")
