"""``hwloc-gather-topology`` archives, read into memory: nothing is ever unpacked to disk.

The archive is hostile until checked: its size, the number and size of its members, their names and links.
"""

import bz2
import io
import lzma
import posixpath
import tarfile
import zlib
from typing import Protocol

from launch.discover.tree import MAX_FILE_BYTES, MemoryTree
from launch.model.errors import TopologyError

MAX_UNPACKED_BYTES = 256 << 20
"""A machine of 1000 CPUs makes a tar file of about 100 MiB; more is a decompression bomb."""
MAX_MEMBERS = 500_000
MAX_DICTIONARY_BYTES = 128 << 20
"""Memory for xz's decoder; ``xz -9`` needs 65 MiB."""

_GZIP, _BZIP2, _XZ, _USTAR = b"\x1f\x8b", b"BZh", b"\xfd7zXZ\x00", b"ustar"


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
        return _below_topology(*_members(_decompress(content, source), source), source)
    except (
        tarfile.TarError,
        zlib.error,
        lzma.LZMAError,
        EOFError,
        OSError,
        ValueError,
        OverflowError,
    ) as error:
        raise TopologyError(
            f"{source} is a damaged archive ({error}); needed one of hwloc-gather-topology; "
            "try to copy it again"
        ) from error


def _decompress(content: bytes, source: str) -> bytes:
    if content.startswith(_GZIP):
        decoder: _Decoder = zlib.decompressobj(wbits=31)
    elif content.startswith(_BZIP2):
        decoder = bz2.BZ2Decompressor()
    elif content.startswith(_XZ):
        decoder = lzma.LZMADecompressor(memlimit=MAX_DICTIONARY_BYTES)
    else:
        return content
    plain = decoder.decompress(content, MAX_UNPACKED_BYTES + 1)
    if len(plain) <= MAX_UNPACKED_BYTES and not decoder.eof:
        raise EOFError("it ends too early")
    if len(plain) > MAX_UNPACKED_BYTES:
        raise _too_large(source)
    return plain


def _too_large(source: str) -> TopologyError:
    return TopologyError(
        f"{source} unpacks to more than {MAX_UNPACKED_BYTES >> 20} MiB; "
        "needed an archive of hwloc-gather-topology, which is far smaller"
    )


def _members(plain: bytes, source: str) -> tuple[dict[str, bytes], dict[str, str]]:
    files: dict[str, bytes] = {}
    links: dict[str, str] = {}
    left = MAX_UNPACKED_BYTES
    with tarfile.open(fileobj=io.BytesIO(plain), mode="r:") as archive:
        for count, member in enumerate(archive):
            if count >= MAX_MEMBERS:
                raise TopologyError(
                    f"{source} has more than {MAX_MEMBERS} members; needed a gathered topology"
                )
            path = _inside(member.name, source)
            if member.issym():
                _inside(posixpath.join(posixpath.dirname(path), member.linkname), source)
                links[path] = member.linkname
            elif member.islnk():
                # A hard link's target counts from the archive's root, a symbolic one's from its own folder.
                links[path] = posixpath.relpath(
                    _inside(member.linkname, source), posixpath.dirname(path) or "."
                )
            elif member.isreg():
                # Members may claim more than the archive holds: a sparse one is a header and a size.
                left -= member.size
                if left < 0:
                    raise _too_large(source)
                files[path] = _content(archive, member, source)
            elif not member.isdir():
                raise TopologyError(
                    f"{source} holds {member.name!r}, a device or pipe; needed only files and links"
                )
    return files, links


def _inside(name: str, source: str) -> str:
    path = posixpath.normpath(name)
    if name.startswith("/") or path.startswith("..") or "\0" in name:
        raise TopologyError(
            f"{source} holds {name!r}, which leads outside the archive; nothing of it was used"
        )
    return "" if path == "." else path


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo, source: str) -> bytes:
    # The size is looked at first: a sparse member may claim terabytes that the archive does not hold.
    if member.size > MAX_FILE_BYTES:
        raise TopologyError(
            f"{source} holds {member.name!r} of {member.size} bytes; needed {MAX_FILE_BYTES} at most, "
            "as the kernel's files have"
        )
    opened = archive.extractfile(member)
    return opened.read() if opened else b""


def _below_topology(files: dict[str, bytes], links: dict[str, str], source: str) -> MemoryTree:
    marker = "sys/devices/system/cpu/"
    found = [path[: path.index(marker)] for path in files if f"/{marker}" in f"/{path}"]
    if not found:
        raise TopologyError(
            f"{source} holds no sys/devices/system/cpu; needed an archive of hwloc-gather-topology"
        )
    prefix = min(found, key=len)
    return MemoryTree(
        {path[len(prefix) :]: content for path, content in files.items() if path.startswith(prefix)},
        {path[len(prefix) :]: target for path, target in links.items() if path.startswith(prefix)},
    )
