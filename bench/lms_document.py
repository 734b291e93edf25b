"""The one JSON document of the benchmarks of Large Model Support: each writes a part, and keeps the others'.

``results``: the largest batches and times (``lms.py``); ``edits``: what an edit takes (``lms_edit.py``);
``simulated``: slowdowns in the timed simulator (``lms_sim.py``).
"""

import json
import tempfile
from pathlib import Path
from typing import Any

SCHEMA = "lmsrun.bench-lms/2"

Document = dict[str, Any]


def read_document(path: Path) -> Document:
    """Read the document in ``path``, an empty one where there is none yet.

    Raises:
        SystemExit: If it is a document of something else.
    """
    if not path.exists():
        return {"schema": SCHEMA}
    document: Document = json.loads(path.read_text(encoding="utf-8"))
    if document.get("schema") != SCHEMA:
        raise SystemExit(f"{path} is no document of this benchmark (needed schema {SCHEMA})")
    return document


def write_part(path: Path, name: str, part: Any) -> None:
    """Write the file anew with this part."""
    write_whole(path, read_document(path) | {name: part})


def write_whole(path: Path, document: Document) -> None:
    """Write a document, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
        file.write(json.dumps(document, indent=1) + "\n")
    Path(file.name).replace(path)
