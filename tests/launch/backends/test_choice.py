"""Which launcher auto takes, and what contradicts the job."""

from dataclasses import replace

import pytest

from launch.backends.choice import Surroundings, choose_launcher
from launch.cluster.allocation import Allocation
from launch.cluster.hosts import Host
from launch.model.errors import UsageError


def around(**more: object) -> Surroundings:
    plain = Surroundings(2, False, None, {"mpirun": "/usr/bin/mpirun", "horovodrun": "/bin/horovodrun"})
    return replace(plain, **more)  # type: ignore[arg-type]


SLURM = Allocation("slurm", "7", (Host("a"), Host("b")), (None, None))
FLUX = Allocation("flux", "f1", (Host("a"), Host("b")), (None, None))
CSM = Allocation("lsf", "7", (Host("a"), Host("b")), (None, None), csm=True)


@pytest.mark.parametrize(
    ("asked", "there", "name"),
    [
        ("auto", around(only_here=True, hosts=1), "local"),
        ("auto", around(), "mpirun"),
        ("auto", around(found={"horovodrun": "/bin/horovodrun"}), "horovodrun"),
        ("auto", around(allocation=SLURM), "mpirun"),
        ("auto", around(allocation=SLURM, found={"srun": "/bin/srun", "mpirun": "/bin/mpirun"}), "srun"),
        ("auto", around(allocation=FLUX, found={"flux": "/bin/flux", "mpirun": "/bin/mpirun"}), "flux"),
        ("auto", around(allocation=CSM, found={"jsrun": "/bin/jsrun"}), "jsrun"),
        ("auto", around(elastic=True), "horovodrun"),
        ("srun", around(), "srun"),
        ("mpirun", around(only_here=True), "mpirun"),
    ],
)
def test_the_launcher_is_chosen_and_explained(asked: str, there: Surroundings, name: str) -> None:
    choice = choose_launcher(asked, there)
    assert choice.name == name and choice.why


@pytest.mark.parametrize(
    ("asked", "there", "said"),
    [
        ("local", around(), "this host only, but 2 hosts"),
        ("auto", around(found={}), "2 hosts: needed srun, mpirun or horovodrun"),
        ("auto", replace(around(found={}), hosts=1), "1 host: needed srun"),
        ("local", replace(around(), hosts=1), "this host only, but 1 other host is asked for"),
        ("auto", around(allocation=CSM), "needs jsrun"),
        ("mpirun", around(elastic=True), "cannot run an elastic job"),
        ("auto", around(elastic=True, found={}), "needs horovodrun"),
    ],
)
def test_a_launcher_that_cannot_be(asked: str, there: Surroundings, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        choose_launcher(asked, there)
