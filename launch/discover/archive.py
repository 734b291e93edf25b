"""``hwloc-gather-topology`` archives, read into memory: nothing is ever unpacked to disk.

The archive is hostile until checked: its size, the number, depth and size of its members, names and links.
The tar headers are read here, for the standard library needs 60 us for each: an archive of a machine with
1000 CPUs has 60,000, and one that is to be refused after as many would keep a user waiting for seconds.
"""

import bz2
import lzma
import posixpath
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, TypeVar

from launch.discover.tree import MAX_FILE_BYTES, MAX_NAMES, MemoryTree
from launch.model.errors import TopologyError

MAX_PACKED_BYTES = 4 << 20
"""Half a second of bzip2. The largest archive among hwloc's own, of 256 CPUs, has 90 kB."""
MAX_UNPACKED_BYTES = 128 << 20
"""A machine of 1000 CPUs makes a tar file of about 100 MiB; more is a decompression bomb."""
MAX_DICTIONARY_BYTES = 80 << 20
"""Memory for xz's decoder; ``xz -9`` needs 65 MiB."""
MAX_DEPTH = 64
"""Folders in a name; those below ``/sys`` are 20 deep."""
MAX_PATH_BYTES = 4096
"""The kernel's PATH_MAX."""

_GZIP, _BZIP2, _XZ, _USTAR = b"\x1f\x8b", b"BZh", b"\xfd7zXZ\x00", b"ustar"
_BLOCK, _PIECE_BYTES = 512, 1 << 20
_REGULAR, _HARD_LINK, _SYMBOLIC_LINK, _FOLDER = b"0\0" + b"7", b"1", b"2", b"5"
_LONG_NAME, _LONG_TARGET, _PAX, _PAX_OF_ALL = b"L", b"K", b"x", b"g"


class _Decoder(Protocol):
    @property
    def eof(self) -> bool: ...
    def decompress(self, data: bytes, max_length: int, /) -> bytes: ...


def is_archive(head: bytes) -> bool:
    """Whether a file that begins with these bytes (512, if it has so many) is a tar archive."""
    return head.startswith((_GZIP, _BZIP2, _XZ)) or head[257:262] == _USTAR


def read_archive(content: bytes, source: str) -> MemoryTree:
    """Read a gathered topology.

    Args:
        content: The whole archive, compressed (gzip, bzip2, xz) or not.
        source: Its name, for the error.

    Returns:
        The tree below the folder that holds ``sys/``.

    Raises:
        TopologyError: If it is damaged, too large, leads outside itself or holds no topology.
    """
    try:
        return _below_topology(_read_members(_Unpacked(content)))
    except TopologyError as error:
        raise TopologyError(f"{source} {error}") from error
    except (zlib.error, lzma.LZMAError, EOFError, OSError, ValueError) as error:
        raise TopologyError(
            f"{source} is a damaged archive ({error}); needed one of hwloc-gather-topology; "
            "try to copy it again"
        ) from error


class _Unpacked:
    """The tar file in an archive, unpacked piece by piece as it is read."""

    def __init__(self, content: bytes) -> None:
        packed = content.startswith((_GZIP, _BZIP2, _XZ))
        if packed and len(content) > MAX_PACKED_BYTES:
            raise TopologyError(
                f"has {len(content)} bytes; needed an archive of hwloc-gather-topology, which has "
                f"{MAX_PACKED_BYTES} at most"
            )
        self.has_checksum = packed
        """Whether the packing has one, so that not every header's need be computed."""
        self._pieces = _unpack(content) if packed else iter((content,))
        self._piece, self._at, self._total = b"", 0, 0

    def take(self, size: int) -> bytes:
        """Take the next bytes.

        Raises:
            EOFError: If there are fewer.
            TopologyError: If more came out than an archive of a machine holds.
        """
        while len(self._piece) - self._at < size:
            following = next(self._pieces, None)
            if following is None:
                raise EOFError("it ends too early")
            self._total += len(following)
            if self._total > MAX_UNPACKED_BYTES:
                raise TopologyError(
                    f"unpacks to more than {MAX_UNPACKED_BYTES >> 20} MiB; "
                    "needed an archive of hwloc-gather-topology, which is far smaller"
                )
            self._piece, self._at = self._piece[self._at :] + following, 0
        self._at += size
        return self._piece[self._at - size : self._at]


def _unpack(content: bytes) -> Iterator[bytes]:
    if content.startswith(_GZIP):
        yield from _unpack_gzip(content)
        return
    decoder: _Decoder = (
        bz2.BZ2Decompressor()
        if content.startswith(_BZIP2)
        else lzma.LZMADecompressor(memlimit=MAX_DICTIONARY_BYTES)
    )
    piece = decoder.decompress(content, _PIECE_BYTES)
    while piece:
        yield piece
        piece = b"" if decoder.eof else decoder.decompress(b"", _PIECE_BYTES)


def _unpack_gzip(content: bytes) -> Iterator[bytes]:
    decoder = zlib.decompressobj(wbits=31)
    piece = decoder.decompress(content, _PIECE_BYTES)
    while piece:
        yield piece
        piece = b"" if decoder.eof else decoder.decompress(decoder.unconsumed_tail, _PIECE_BYTES)


@dataclass(frozen=True)
class _Members:
    files: dict[str, bytes]
    links: dict[str, str]


def _read_members(unpacked: _Unpacked) -> _Members:
    """Every file and link, by the name that it has in the archive."""
    members = _Members({}, {})
    said: dict[str, str] = {}
    for count in range(MAX_NAMES):
        header = unpacked.take(_BLOCK)
        if not header.strip(b"\0"):
            return members
        if count == 0 or not unpacked.has_checksum:
            _check_header(header)
        kind, size = header[156:157], int(header[124:136].rstrip(b" \0") or b"0", 8)
        if kind in (_LONG_NAME, _LONG_TARGET, _PAX, _PAX_OF_ALL):
            said |= _read_remarks(kind, _take_padded(unpacked, size, "a name"))
            continue
        _enter(members, header, kind, said, unpacked, int(said.get("size", size)))
        said = {}
    raise TopologyError(f"has more than {MAX_NAMES} members; needed a gathered topology")


def _check_header(header: bytes) -> None:
    """Refuse a header whose checksum is wrong: the file is damaged, or no tar file."""
    told = header[148:156].rstrip(b" \0")
    if int(told or b"0", 8) != sum(header[:148]) + sum(header[156:]) + 8 * 32:
        raise ValueError("a header's checksum is wrong")


def _take_padded(unpacked: _Unpacked, size: int, name: str) -> bytes:
    # The size is looked at first: a member may claim terabytes that the archive does not hold.
    if not 0 <= size <= MAX_FILE_BYTES:
        raise TopologyError(
            f"holds {name[:80]!r} of {size} bytes; needed {MAX_FILE_BYTES} at most, as the kernel's have"
        )
    return unpacked.take(-(-size // _BLOCK) * _BLOCK)[:size]


def _read_remarks(kind: bytes, content: bytes) -> dict[str, str]:
    """Read what GNU's and POSIX's extra headers say of the member behind them."""
    if kind in (_LONG_NAME, _LONG_TARGET):
        return {"path" if kind == _LONG_NAME else "linkpath": _text(content)}
    remarks = {}
    while kind == _PAX and content:
        length, _, rest = content.partition(b" ")
        used = len(length) + 1
        key, _, value = rest[: max(0, int(length) - used)].partition(b"=")
        if int(length) <= used:
            raise ValueError("an extended header of no length")
        if key.startswith(b"GNU.sparse"):
            raise TopologyError("holds a sparse file; needed the kernel's files as they are")
        if key in (b"path", b"linkpath", b"size"):
            remarks[key.decode()] = _text(value.removesuffix(b"\n"))
        content = content[int(length) :]
    return remarks


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode("utf-8", "surrogateescape")


def _enter(
    members: _Members, header: bytes, kind: bytes, said: dict[str, str], unpacked: _Unpacked, size: int
) -> None:
    name = said.get("path") or _text(header[:100])
    if not said.get("path") and header[257:263] == _USTAR + b"\0" and header[345] != 0:
        name = f"{_text(header[345:500])}/{name}"
    path = _inside(name)
    target = said.get("linkpath") or _text(header[157:257])
    if kind == _SYMBOLIC_LINK:
        _inside(posixpath.join(posixpath.dirname(path), target))
        members.links[path] = target
    elif kind == _HARD_LINK:
        # A hard link's target counts from the archive's root, a symbolic one's from its own folder.
        members.links[path] = posixpath.relpath(_inside(target), posixpath.dirname(path) or ".")
    elif kind in _REGULAR and not name.endswith("/"):
        members.files[path] = _take_padded(unpacked, size, name)
    elif kind != _FOLDER and kind not in _REGULAR:
        raise TopologyError(
            f"holds {name[:80]!r}, a device or pipe or sparse file; needed only files and links"
        )


def _inside(name: str) -> str:
    if len(name) > MAX_PATH_BYTES or name.count("/") > MAX_DEPTH:
        raise TopologyError(
            f"holds a name of {len(name)} bytes in {name.count('/')} folders ({name[:20]!r}...); "
            f"needed {MAX_PATH_BYTES} bytes and {MAX_DEPTH} folders at most"
        )
    path = posixpath.normpath(name)
    if name.startswith("/") or path.startswith(".."):
        raise TopologyError(f"holds {name!r}, which leads outside the archive; nothing of it was used")
    return "" if path == "." else path


def _below_topology(members: _Members) -> MemoryTree:
    marker = "sys/devices/system/cpu/"
    found = (path[: path.index(marker)] for path in members.files if f"/{marker}" in f"/{path}")
    prefix = min(found, key=len, default=None)
    if prefix is None:
        raise TopologyError("holds no sys/devices/system/cpu; needed an archive of hwloc-gather-topology")
    return MemoryTree(_below(prefix, members.files), _below(prefix, members.links))


_Held = TypeVar("_Held", str, bytes)


def _below(prefix: str, members: dict[str, _Held]) -> dict[str, _Held]:
    """Take the members of one folder out of ``members``, by their path in it, so that none is held twice."""
    below = {}
    while members:
        path, held = members.popitem()
        if path.startswith(prefix):
            below[path[len(prefix) :]] = held
    return below
