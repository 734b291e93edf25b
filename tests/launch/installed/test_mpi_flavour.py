"""Which MPI an mpirun belongs to."""

import pytest

from launch.installed.mpi_flavour import parse_mpi_version


@pytest.mark.parametrize(
    ("text", "flavour"),
    [
        (
            "mpirun (Open MPI) 4.1.4\n\nReport bugs to http://www.open-mpi.org/community/help/\n",
            ("openmpi", (4, 1, 4)),
        ),
        (
            "mpirun (Open MPI) 5.0.3\n\nReport bugs to https://www.open-mpi.org/community/help/\n",
            ("openmpi", (5, 0, 3)),
        ),
        ("prterun (PRRTE) 3.0.2\n", ("openmpi", (3, 0, 2))),
        ("mpirun (IBM Spectrum MPI) 10.3.1.02rtm0\n", ("spectrum", (10, 3, 1, 2))),
        ("HYDRA build details:\n    Version:                                 4.0.2\n", ("mpich", (4, 0, 2))),
        (
            "Intel(R) MPI Library for Linux* OS, Version 2021.10 Build 20230619 (id: c2e19c2f3e)\n",
            ("intel", (2021, 10)),
        ),
    ],
)
def test_flavours_by_what_they_print(text: str, flavour: tuple[str, tuple[int, ...]]) -> None:
    found = parse_mpi_version(text)
    assert found is not None and (found.family, found.version) == flavour


def test_an_unknown_mpi_is_not_guessed() -> None:
    assert parse_mpi_version("") is None
    assert parse_mpi_version("mpirun: command not found") is None
