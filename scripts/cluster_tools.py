"""Install what only the tests of clusters need: MPICH, Slurm, munge, shellcheck, sshd.

Daemons have no business on a person's machine, so this installs as root in CI, or when ``CLUSTER_TOOLS=1``
asks for it; elsewhere it says what is missing, and the tests that need it skip. It never fails a build.
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
    "shellcheck": "shellcheck",
    "openssh-server": "sshd",
}
"""Debian package -> the program that shows it is there."""


def missing_tools(path: str) -> list[str]:
    """The packages whose program is not in ``path``; daemons live in sbin, which it may leave out."""
    where = os.pathsep.join([path, "/usr/sbin", "/sbin"])
    return [package for package, program in PACKAGES.items() if shutil.which(program, path=where) is None]


def main() -> int:
    """Install what is missing, if that is wanted; always 0."""
    missing = missing_tools(os.environ.get("PATH", os.defpath))
    if not missing:
        return 0
    wanted = os.environ.get("CI") or os.environ.get("CLUSTER_TOOLS") == "1"
    if not (wanted and os.geteuid() == 0 and shutil.which("apt-get")):
        print(
            f"tests: not found: {', '.join(missing)}; what needs them skips (CLUSTER_TOOLS=1 installs them)"
        )
        return 0
    environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    log = ROOT / ".venv-cluster-tools.log"
    print(f"tests: installing {' '.join(missing)} with apt", flush=True)
    try:
        run_logged(["apt-get", "update", "-qq"], environ, log, lambda line: None)
        argv = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing]
        run_logged(argv, environ, log, lambda line: None)
    except BuildError as error:
        print(f"tests: {error}; tests that need them skip", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
