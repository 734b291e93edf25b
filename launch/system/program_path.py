"""Where a program is, as ``shutil.which`` says it, whose import takes longer than the search."""

import os

NO_FILE = "is a pipe or a device; needed a file, which every rank can read from its beginning"
"""Says what is wrong with a program that is there, and neither a file nor a folder."""


def find_program(name: str, path: str | None = None) -> str | None:
    """Find the file that exec would run; None when there is none.

    Args:
        name: A name to look up, or a path, which is taken as it is.
        path: Folders as in ``PATH``; None: ``PATH`` itself.
    """
    if os.path.dirname(name):
        folders = [""]
    else:
        folders = (os.environ.get("PATH", os.defpath) if path is None else path).split(os.pathsep)
    for file in (os.path.join(folder, name) for folder in folders):
        if os.path.isfile(file) and os.access(file, os.X_OK):
            return file
    return None
