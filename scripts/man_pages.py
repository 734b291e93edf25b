"""Write the man pages in ``docs/man`` from the declared options; what is the same keeps its date."""

import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "man"
sys.path.insert(0, str(ROOT))

from lmsrun.manual.man import SECTION, page_names, render_man  # noqa: E402 - behind the path


def stale_pages(folder: Path, date: str) -> dict[Path, str]:
    """Find the pages of a folder that are not as they would be made, with what they should hold."""
    found = {}
    for name in page_names():
        path = folder / f"{name}.{SECTION}"
        old = path.read_text(encoding="utf-8") if path.exists() else ""
        kept = next((line[4:] for line in old.splitlines() if line.startswith(".Dd ")), date)
        if old != render_man(name, kept):
            found[path] = render_man(name, date)
    return found


def main() -> int:
    """Write what is stale, and remove pages of subcommands that are no more."""
    now = time.gmtime()
    stale = stale_pages(FOLDER, time.strftime(f"%B {now.tm_mday}, %Y", now))
    FOLDER.mkdir(exist_ok=True)
    for path, text in stale.items():
        path.write_text(text, encoding="utf-8")
        print(f"man: wrote {path.relative_to(ROOT)}")
    for path in set(FOLDER.iterdir()) - {FOLDER / f"{name}.{SECTION}" for name in page_names()}:
        path.unlink()
        print(f"man: removed {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
