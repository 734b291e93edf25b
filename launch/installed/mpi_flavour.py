"""Which MPI an ``mpirun`` belongs to, from what its ``--version`` prints."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from launch.model.errors import JobError
from launch.system.run_query import read_answer

MpiFamily = Literal["openmpi", "spectrum", "mpich", "intel"]


@dataclass(frozen=True)
class MpiFlavour:
    """The implementation and its version. ``mpich`` stands for every launcher that is Hydra (MVAPICH too)."""

    family: MpiFamily
    version: tuple[int, ...]

    @property
    def title(self) -> str:
        """For messages: ``Open MPI 4.1.4``."""
        names = {
            "openmpi": "Open MPI",
            "spectrum": "IBM Spectrum MPI",
            "mpich": "MPICH (Hydra)",
            "intel": "Intel MPI",
        }
        return f"{names[self.family]} {'.'.join(map(str, self.version))}".rstrip()


# In this order: Spectrum MPI prints "(IBM Spectrum MPI)" in the frame of Open MPI, Intel MPI is Hydra inside.
_PATTERNS: tuple[tuple[MpiFamily, "re.Pattern[str]"], ...] = (
    ("spectrum", re.compile(r"IBM Spectrum MPI\)?\s+(?:v|version\s+)?(\d[\d.]*)")),
    ("openmpi", re.compile(r"\(?Open\s?MPI\)?\s+v?(\d[\d.]*)")),
    ("openmpi", re.compile(r"\(?(?:PRRTE|OpenRTE)\)?\s+v?(\d[\d.]*)")),
    ("intel", re.compile(r"Intel\(R\) MPI Library.*?Version\s+(\d[\d.]*)", re.DOTALL)),
    ("mpich", re.compile(r"HYDRA build details.*?Version:\s*(\d[\d.]*)?", re.DOTALL)),
)


def parse_mpi_version(text: str) -> MpiFlavour | None:
    """Parse the flavour that printed ``text`` for ``--version``; None when it is none that is known."""
    for family, pattern in _PATTERNS:
        match = pattern.search(text)
        if match:
            numbers = re.findall(r"\d+", match[1] or "")
            return MpiFlavour(family, tuple(int(number) for number in numbers[:4]))
    return None


def read_mpi_flavour(mpirun: str, environ: Mapping[str, str]) -> MpiFlavour:
    """Ask an ``mpirun`` what it is.

    Args:
        mpirun: Path of the executable.
        environ: Its environment.

    Raises:
        JobError: If it cannot be run, does not answer, or is none that is known.
    """
    text = read_answer([mpirun, "--version"], environ, "try another --mpirun")
    flavour = parse_mpi_version(text)
    if flavour is None:
        first = text.strip().splitlines()[:1]
        raise JobError(
            f"{mpirun!r} --version printed {first[0][:80] if first else 'nothing'!r}; "
            "needed Open MPI, Spectrum MPI, MPICH or Intel MPI"
        )
    return flavour
