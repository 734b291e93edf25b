"""Which MPI the installed Horovod is linked with, read from its library without loading it."""

import importlib.util
import mmap
from pathlib import Path

from launch.installed.mpi_flavour import MpiFamily

# The shared libraries' names by MPI: Open MPI 4 and 5 (and Spectrum MPI), then MPICH on Debian and elsewhere.
_LINKED: tuple[tuple[bytes, MpiFamily], ...] = (
    (b"libmpi.so.40\0", "openmpi"),
    (b"libmpi_ibm.so", "spectrum"),
    (b"libmpich.so.12\0", "mpich"),
    (b"libmpi.so.12\0", "mpich"),
)


def read_horovod_mpi() -> MpiFamily | None:
    """Read the MPI of this Python's Horovod; None: no Horovod, one without MPI, or an MPI unknown to us."""
    try:
        spec = importlib.util.find_spec("horovod")
    except (ImportError, ValueError):
        return None
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    for folder in folders:
        for library in sorted(Path(folder).glob("*/mpi_lib*.so")):
            if (family := read_linked_mpi(library)) is not None:
                return family
    return None


def read_linked_mpi(library: Path) -> MpiFamily | None:
    """Read the MPI whose library a shared object names; None when it names none that is known."""
    try:
        with open(library, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return next((family for name, family in _LINKED if content.find(name) >= 0), None)
    except (OSError, ValueError):
        return None


def speaks_with(linked: MpiFamily | None, launcher: MpiFamily) -> bool:
    """Whether ranks linked with one MPI find each other under the launcher of another; unknown is yes."""
    groups = ({"openmpi", "spectrum"}, {"mpich", "intel"})
    return linked is None or any(linked in group and launcher in group for group in groups)
