"""A saved or live file tree with ``proc/`` and ``sys/`` in it, read by relative path and never written."""

import os
import posixpath
from collections.abc import Mapping
from typing import Protocol

MAX_FILE_BYTES = 1 << 20
"""Nothing that is read here is larger: the kernel's files have a few pages at most."""
MAX_LINKS = 40
"""As many symbolic links as the kernel follows in one path."""


class Tree(Protocol):
    """What a reader of the kernel's files needs. Paths are relative: ``sys/devices/system/cpu/online``."""

    def read(self, path: str) -> str | None:
        """The text of a file, stripped; None when it is absent or unreadable."""

    def names(self, path: str) -> list[str]:
        """What a directory holds, sorted; empty when there is no such directory."""

    def real(self, path: str) -> str | None:
        """The path with every symbolic link resolved; None when it leads nowhere or out of the tree."""


class DirTree:
    """A directory of this machine; ``/`` is the live machine itself."""

    def __init__(self, root: str = "/") -> None:
        self._root = os.path.realpath(root)
        self._prefix = self._root.rstrip("/") + "/"
        self._confined = self._root != "/"

    def read(self, path: str) -> str | None:
        """The text of a file, stripped; None when it is absent, unreadable or a link out of the tree."""
        if self._confined and self.real(path) is None:
            return None
        try:
            # Without O_NONBLOCK a FIFO in a saved tree would hang the reader for ever.
            descriptor = os.open(self._prefix + path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            return None
        try:
            return _read_all(descriptor).decode("utf-8", "replace").strip()
        except OSError:
            return None
        finally:
            os.close(descriptor)

    def names(self, path: str) -> list[str]:
        """What a directory holds, sorted; empty when there is no such directory."""
        if self._confined and self.real(path) is None:
            return []
        try:
            return sorted(os.listdir(self._prefix + path))
        except OSError:
            return []

    def real(self, path: str) -> str | None:
        """The path with every link resolved; None when it does not exist or lies outside the tree."""
        try:
            resolved = os.path.realpath(self._prefix + path, strict=True)
        except OSError:
            return None
        return resolved[len(self._prefix) :] if resolved.startswith(self._prefix) else None


def _read_all(descriptor: int) -> bytes:
    """Read up to ``MAX_FILE_BYTES``; a file of the kernel may come in several pieces."""
    pieces, left = [], MAX_FILE_BYTES
    while left > 0 and (piece := os.read(descriptor, min(left, 1 << 16))):
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces)


class MemoryTree:
    """A tree held in memory, such as one read from an archive.

    Args:
        files: Content by normalised relative path.
        links: Target by path of the link; relative targets count from the link's own directory.
    """

    def __init__(self, files: Mapping[str, bytes], links: Mapping[str, str] | None = None) -> None:
        self._files = dict(files)
        self._links = dict(links or {})
        self._children: dict[str, set[str]] = {}
        for path in (*self._files, *self._links):
            self._enter(path)

    def _enter(self, path: str) -> None:
        while path:
            parent, _, name = path.rpartition("/")
            siblings = self._children.setdefault(parent, set())
            if name in siblings:
                return
            siblings.add(name)
            path = parent

    def read(self, path: str) -> str | None:
        """The text of a file, stripped; None when it is absent."""
        resolved = self.real(path)
        content = None if resolved is None else self._files.get(resolved)
        return None if content is None else content.decode("utf-8", "replace").strip()

    def names(self, path: str) -> list[str]:
        """What a directory holds, sorted; empty when there is no such directory."""
        resolved = self.real(path)
        return [] if resolved is None else sorted(self._children.get(resolved, ()))

    def real(self, path: str) -> str | None:
        """The path with every link resolved; None if that loops, leads nowhere or leads out of the tree."""
        done, todo, followed = "", [part for part in path.split("/") if part], 0
        while todo:
            step = posixpath.normpath(posixpath.join(done, todo.pop(0)))
            target = self._links.get(step)
            if target is None:
                done = step
                continue
            followed += 1
            joined = posixpath.normpath(posixpath.join(posixpath.dirname(step), target))
            if followed > MAX_LINKS or joined.startswith(("/", "..")):
                return None
            done, todo = "", joined.split("/") + todo
        return done if done in self._files or done in self._children else None
