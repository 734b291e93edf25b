"""Install what only some tests need: Slurm, sshd, podman, newer MPIs, shells, compilers, a browser ...

Daemons have no business on a person's machine, so this installs as root in CI, or when ``CLUSTER_TOOLS=1``
asks for it; elsewhere it says what is missing, and the tests that need it skip. It never fails a build. Open
MPI 5, MPICH 5 and Intel MPI come as Python packages of their makers, each into a folder of its own below
``.venv-mpi``, where nothing but the tests finds them.
"""

import os
import shutil
import sys
from pathlib import Path

from build_horovod import BuildError, run_logged

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {
    "mpich": "mpirun.mpich",
    "munge": "munged",
    "slurm-client": "srun",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "openssh-server": "sshd",
    "debootstrap": "debootstrap",
    "buildah": "buildah",
    "podman": "podman",
    "runc": "runc",
    "netavark": "/usr/lib/podman/netavark",
    "iptables": "iptables",  # what netavark calls
    "iproute2": "ip",  # hosts in network namespaces
    "hwloc-nox": "hwloc-calc",  # reads machines beside us
    "zsh": "zsh",
    "fish": "fish",
    "mandoc": "mandoc",
    "chromium": "chromium",  # opens reports
    "chromium-driver": "chromedriver",
    "gcc-aarch64-linux-gnu": "aarch64-linux-gnu-gcc",  # wheels of other architectures
    "libc6-dev-arm64-cross": "/usr/aarch64-linux-gnu/lib/libc.so.6",
    "gcc-powerpc64le-linux-gnu": "powerpc64le-linux-gnu-gcc",
    "libc6-dev-ppc64el-cross": "/usr/powerpc64le-linux-gnu/lib/libc.so.6",
    "librsvg2-bin": "rsvg-convert",
}
"""Debian package -> the program that shows it is there."""
MPI_FOLDER = ROOT / ".venv-mpi"
MPIS = {"openmpi": "bin/mpirun", "mpich": "bin/mpirun", "impi-rt": "bin/mpiexec.hydra"}
"""Python package -> its launcher, in the folder of that name."""


def missing_tools(path: str) -> list[str]:
    """List the packages whose program is not in ``path``; daemons live in sbin, which it may leave out."""
    where = os.pathsep.join([path, "/usr/sbin", "/sbin"])
    return [package for package, program in PACKAGES.items() if shutil.which(program, path=where) is None]


def missing_mpis() -> list[str]:
    """List the Python packages of MPIs whose launcher is not in its folder."""
    return [package for package, program in MPIS.items() if not (MPI_FOLDER / package / program).is_file()]


def main() -> int:
    """Install what is missing, if that is wanted; always 0."""
    wanted = bool(os.environ.get("CI")) or os.environ.get("CLUSTER_TOOLS") == "1"
    install_mpis(wanted)
    install_packages(wanted)
    return 0


def install_mpis(wanted: bool) -> None:
    """Install the MPIs that come as Python packages; none needs another one, or root."""
    missing = missing_mpis()
    if not missing:
        return
    if not wanted:
        print(f"tests: not found: {', '.join(missing)} below {MPI_FOLDER.name}; what needs them skips")
        return
    print(f"tests: installing {' '.join(missing)} below {MPI_FOLDER.name}", flush=True)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    for package in missing:
        argv = [*pip, "--prefix", str(MPI_FOLDER / package), package]
        try:
            run_logged(argv, dict(os.environ), ROOT / ".venv-cluster-tools.log", lambda line: None)
        except BuildError as error:
            print(f"tests: {error}; tests that need {package} skip", file=sys.stderr)


def install_packages(wanted: bool) -> None:
    """Install the system's packages; that takes root and apt."""
    missing = missing_tools(os.environ.get("PATH", os.defpath))
    if not missing:
        return
    if not (wanted and os.geteuid() == 0 and shutil.which("apt-get")):
        print(
            f"tests: not found: {', '.join(missing)}; what needs them skips (CLUSTER_TOOLS=1 installs them)"
        )
        return
    environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    log = ROOT / ".venv-cluster-tools.log"
    print(f"tests: installing {' '.join(missing)} with apt", flush=True)
    try:
        run_logged(["apt-get", "update", "-qq"], environ, log, lambda line: None)
        argv = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing]
        run_logged(argv, environ, log, lambda line: None)
    except BuildError as error:
        print(f"tests: {error}; tests that need them skip", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
