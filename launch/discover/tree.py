"""A saved or live file tree with ``proc/`` and ``sys/`` in it, read by relative path and never written."""

import errno
import os
import posixpath
from collections.abc import Mapping
from itertools import islice
from typing import Protocol

from launch.model.errors import TopologyLimitError
from launch.model.idset import IdParser

MAX_FILE_BYTES = 1 << 20
"""Nothing that is read here is larger: the kernel's files have a few pages at most."""
MAX_READ_BYTES = 64 << 20
"""From all files of one tree together."""
MAX_NAMES = 150_000
"""In one directory, and in an archive: one of a machine with 1000 CPUs has 60,000."""
_PIECE_BYTES = 4096
MAX_LINKS = 40
"""As many symbolic links as the kernel follows in one path."""


class Tree(Protocol):
    """What a reader of the kernel's files needs. Paths are relative: ``sys/devices/system/cpu/online``."""

    parser: IdParser
    """Parses the id sets of this tree's files, and of no other's."""

    def read(self, path: str) -> str | None:
        """Read the text of a file, stripped; None when it is absent or unreadable.

        Raises:
            TopologyLimitError: If the files of the tree hold more than a machine's.
        """

    def names(self, path: str) -> list[str]:
        """List what a directory holds, sorted; empty when there is no such directory."""

    def real(self, path: str) -> str | None:
        """Resolve every symbolic link of the path; None when it leads nowhere or out of the tree."""

    def may_use(self, path: str) -> bool | None:
        """Say whether this process may read and write a device file; ``None`` where there is none."""


class _Limited:
    """What both kinds of tree share: how much of them is read at most."""

    def __init__(self) -> None:
        self.parser = IdParser()
        self._left = MAX_READ_BYTES

    def _text(self, path: str, content: bytes) -> str:
        self._left -= len(content)
        if self._left < 0:
            raise TopologyLimitError(
                f"its files hold more than {MAX_READ_BYTES >> 20} MiB; needed the proc/ and sys/ of a machine"
            )
        # Some kernels did not trim the page that they printed to: the text ends at the first NUL, as in C.
        # What lies in proc/ (environ) may hold NULs on purpose.
        text = content.partition(b"\0")[0] if path.startswith("sys/") else content
        return text.decode("utf-8", "replace").strip()


class DirTree(_Limited):
    """A directory of this machine; ``/`` is the live machine itself."""

    def __init__(self, root: str = "/") -> None:
        super().__init__()
        self._root = os.path.realpath(root)
        self._prefix = self._root.rstrip("/") + "/"
        self._confined = self._root != "/"
        self._plain: dict[str, bool] = {"": True}

    def read(self, path: str) -> str | None:
        """Read the text of a file, stripped; None when it is absent, unreadable or a link out of the tree."""
        # Without O_NONBLOCK a FIFO in a saved tree would hang the reader for ever.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
        if self._confined:
            if self._is_plain(posixpath.dirname(path)):
                flags |= os.O_NOFOLLOW
            elif self.real(path) is None:
                return None
        try:
            descriptor = os.open(self._prefix + path, flags)
        except OSError as error:
            resolved = self.real(path) if error.errno == errno.ELOOP and self._confined else None
            return None if resolved is None else self.read(resolved)
        try:
            content = _read_all(descriptor, is_saved=self._confined)
        except OSError:
            return None
        finally:
            os.close(descriptor)
        return self._text(path, content)

    def _is_plain(self, folder: str) -> bool:
        """Whether no part of a folder's path is a link; remembered, for ``real`` asks for every part anew."""
        known = self._plain.get(folder)
        if known is None:
            parent, _, name = folder.rpartition("/")
            known = name != ".." and self._is_plain(parent) and not os.path.islink(self._prefix + folder)
            self._plain[folder] = known
        return known

    def names(self, path: str) -> list[str]:
        """List what a directory holds, sorted; empty when there is no such directory."""
        if self._confined and self.real(path) is None:
            return []
        try:
            with os.scandir(self._prefix + path) as entries:
                found = {entry.name: entry.is_symlink() for entry in islice(entries, MAX_NAMES)}
        except OSError:
            return []
        if self._confined and self._is_plain(path):
            self._plain.update((f"{path}/{name}", not is_link) for name, is_link in found.items())
        return sorted(found)

    def real(self, path: str) -> str | None:
        """Resolve every link of the path; None when it does not exist or lies outside the tree."""
        try:
            resolved = os.path.realpath(self._prefix + path, strict=True)
        except OSError:
            return None
        return resolved[len(self._prefix) :] if resolved.startswith(self._prefix) else None

    def may_use(self, path: str) -> bool | None:
        """Say whether this process may read and write a device file; a control group may deny it."""
        place = self._prefix + path
        return os.access(place, os.R_OK | os.W_OK) if os.path.exists(place) else None


def _read_all(descriptor: int, *, is_saved: bool) -> bytes:
    """Read up to ``MAX_FILE_BYTES``; a file of the kernel, unlike a saved one, may come in several pieces."""
    pieces, left = [], MAX_FILE_BYTES
    while left > 0 and (piece := os.read(descriptor, _PIECE_BYTES)):
        pieces.append(piece)
        left -= len(piece)
        if is_saved and len(piece) < _PIECE_BYTES:
            break
    return b"".join(pieces)


class MemoryTree(_Limited):
    """A tree held in memory, such as one read from an archive.

    Args:
        files: Content by normalised relative path.
        links: Target by path of the link; relative targets count from the link's own directory.
    """

    def __init__(self, files: Mapping[str, bytes], links: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self._files = files
        self._links = links or {}
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
        """Read the text of a file, stripped; None when it is absent."""
        content = self._files.get(path)
        if content is None and (resolved := self.real(path)) is not None:
            content = self._files.get(resolved)
        return None if content is None else self._text(path, content)

    def names(self, path: str) -> list[str]:
        """List what a directory holds, sorted; empty when there is no such directory."""
        resolved = self.real(path)
        return [] if resolved is None else sorted(self._children.get(resolved, ()))

    def may_use(self, path: str) -> bool | None:
        """Say that there is none: what was saved holds no devices."""
        return None

    def real(self, path: str) -> str | None:
        """Resolve every link of the path; None if that loops, leads nowhere or leads out of the tree."""
        done, todo, followed = "", [part for part in path.split("/") if part], 0
        todo.reverse()
        while todo:
            part = todo.pop()
            if part in (".", ".."):
                step = posixpath.normpath(f"{done}/{part}").lstrip("/")
            else:
                step = f"{done}/{part}" if done else part
            target = self._links.get(step)
            if target is None:
                done = step
                continue
            followed += 1
            joined = posixpath.normpath(posixpath.join(posixpath.dirname(step), target))
            if followed > MAX_LINKS or joined.startswith(("/", "..")):
                return None
            done = ""
            todo.extend(reversed(joined.split("/")))
        return done if done in self._files or done in self._children else None
