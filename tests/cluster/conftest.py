"""What several tests of clusters share."""

import os
import subprocess
from collections.abc import Iterator

import pytest
from cluster_run import needs
from slurm_cluster import PROGRAMS as SLURM_PROGRAMS
from slurm_cluster import SlurmCluster
from ssh_hosts import PROGRAMS, SshHosts


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHosts]:
    """Two hosts that ssh leads to; ``ssh_hosts.py`` says how they are made and taken down."""
    needs(*PROGRAMS, "mpirun")
    if os.geteuid() != 0:
        pytest.skip("namespaces need root")
    if subprocess.run(["unshare", "--net", "--mount", "true"], check=False, capture_output=True).returncode:
        pytest.skip("this machine permits no namespaces")
    with SshHosts(tmp_path_factory.mktemp("ssh")) as both:
        yield both


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """Start a real Slurm of two nodes on this machine."""
    needs(*SLURM_PROGRAMS)
    if os.geteuid() != 0:
        pytest.skip("slurmd starts tasks of other users: it needs root")
    with SlurmCluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster
