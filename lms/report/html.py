"""Write a document as a page, and as the file that a launcher has asked for."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lms.errors import PlaceError
from lms.page.lms_page import render_document
from lms.user_files import require_file

MOST_BYTES = 1 << 19
"""Of a document in a file: what is larger is told without its step."""


def write_html(document: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write a page.

    Raises:
        PlaceError: If it cannot be written.
    """
    if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
        raise PlaceError(
            f"found {path!r}; needed in lms.report().to_html(): the name of the file to write, such as "
            "'report.html'"
        )
    require_file(Path(path), "lms.report().to_html()")
    try:
        Path(path).write_text(render_document(document), encoding="utf-8")
    except OSError as error:
        raise PlaceError(f"cannot write {os.fspath(path)!r}: {error.strerror or error}") from error


def write_document(document: Mapping[str, Any], folder: str | os.PathLike[str]) -> None:
    """Write a document into a folder, so that a reader sees all of it or nothing.

    Raises:
        OSError: If that cannot be done.
    """
    rank = document.get("rank")
    name = "lms.json" if rank is None else f"rank-{rank}.lms.json"
    written = json.dumps(document)
    if len(written) > MOST_BYTES:
        written = json.dumps({**document, "step": None, "step_left_out": len(written)})
    draft = Path(folder, f".{name}.{os.getpid()}")
    draft.write_text(written, encoding="utf-8")
    draft.replace(Path(folder, name))
