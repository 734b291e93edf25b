"""Build the source archive, and a wheel for each architecture whose C compiler is here: ``build_wheels.py``.

Give a folder for them, or ``dist`` is taken.

What is compiled in the wheels is plain C that needs no Python, so a cross compiler is enough. Debian has them
as ``gcc-aarch64-linux-gnu`` and ``gcc-powerpc64le-linux-gnu``. The platform tag says the oldest C library
that it runs with, as read from it.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMPILERS = {
    "x86_64": "x86_64-linux-gnu-gcc",
    "aarch64": "aarch64-linux-gnu-gcc",
    "ppc64le": "powerpc64le-linux-gnu-gcc",
}
SOURCES = ("lmsrun", "launch", "lms", "docs/man", "MANIFEST.in", "pyproject.toml", "README.md", "LICENSE")
PLUGIN = "lms/optimizer/_plugin.abi3.so"
COMPILED = (PLUGIN, "lms/native/_arena.abi3.so", "lms/native/_cache.abi3.so")
OLDEST_SETUPTOOLS = 77
"""The first that reads ``license`` of ``pyproject.toml`` as a string."""
OLDEST_MINOR = 17
"""manylinux_2_17 is the oldest tag that installers of all three architectures take."""


def copy_sources(folder: Path) -> Path:
    """Copy what a package is made of, so that no build folder is left in the checkout."""
    source = folder / "source"
    source.mkdir(parents=True)
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        else:
            shutil.copy(ROOT / name, source)
    return source


def build(hook: str, source: Path, out: Path, **environ: str) -> Path:
    """Run one hook of the build back end in a process of its own."""
    code = f"import sys; from setuptools import build_meta; print(build_meta.{hook}(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(out)],
        cwd=source,
        env={**os.environ, **environ},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"build_wheels: {hook} failed:\n{done.stderr[-2000:]}")
    return out / done.stdout.splitlines()[-1]


def needed_glibc(library: bytes) -> int:
    """Minor version of the newest glibc 2 that a library names."""
    return max([OLDEST_MINOR, *(int(minor) for minor in re.findall(rb"GLIBC_2\.(\d+)", library))])


def build_wheel(arch: str, out: Path) -> Path | None:
    """Build the wheel of one architecture; None where its compiler is not here."""
    compiler = shutil.which(COMPILERS[arch])
    if compiler is None:
        print(f"build_wheels: no {COMPILERS[arch]}, so no wheel for {arch}")
        return None
    with tempfile.TemporaryDirectory() as name:
        made = build(
            "build_wheel",
            copy_sources(Path(name)),
            Path(name),
            CC=compiler,
            LDSHARED=f"{compiler} -shared",
            _PYTHON_HOST_PLATFORM=f"linux-{arch}",
        )
        with zipfile.ZipFile(made) as wheel:
            if missing := {*COMPILED} - {*wheel.namelist()}:
                names = ", ".join(sorted(missing))
                raise SystemExit(f"build_wheels: {compiler} did not compile {names}; try it by hand")
            minor = max(needed_glibc(wheel.read(name)) for name in COMPILED)
        tag = f"manylinux_2_{minor}_{arch}"
        argv = [sys.executable, "-m", "wheel", "tags", "--remove", "--platform-tag", tag, str(made)]
        tagged = subprocess.run(argv, check=True, capture_output=True, text=True).stdout.split()[-1]
        return Path(shutil.copy(Path(name) / tagged, out))


def main(argv: list[str]) -> int:
    """Build what can be built here into DIR, ``dist`` by itself."""
    found = version("setuptools") if find_spec("setuptools") else "no version"
    if not found[0].isdigit() or int(found.partition(".")[0]) < OLDEST_SETUPTOOLS:
        sys.exit(
            f"build_wheels: {found} of setuptools found; needed {OLDEST_SETUPTOOLS} or newer; "
            "try: make setup, and .venv/bin/python scripts/build_wheels.py"
        )
    out = Path(argv[0] if argv else "dist").absolute()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        print(f"build_wheels: {build('build_sdist', copy_sources(Path(name)), out).name}")
    for arch in COMPILERS:
        if wheel := build_wheel(arch, out):
            print(f"build_wheels: {wheel.name}, {wheel.stat().st_size / 1024:.0f} KiB")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
