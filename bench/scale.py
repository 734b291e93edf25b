"""What a plan of Summit's size costs: 4,608 hosts with 6 GPUs each, from host list to command, ERF and JSON.

    python bench/scale.py

Goal: 2 s and 500 MB, and files that grow in proportion to the ranks.
"""

import resource
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from machines import SPECS, machine  # noqa: E402 - the tests' synthetic machines

from launch.backends.jsrun import render_erf  # noqa: E402
from launch.backends.mpirun import build_mpirun  # noqa: E402
from launch.cluster.hosts import Host, share_ranks  # noqa: E402
from launch.cluster.planner import build_job, plan_shares  # noqa: E402
from launch.cluster.slurm_lists import parse_hostlist  # noqa: E402
from launch.installed.mpi_flavour import MpiFlavour  # noqa: E402
from launch.model.cluster_settings import ClusterSettings  # noqa: E402
from launch.plan_host.planner import HostRequest  # noqa: E402

GPUS = 6


def measure(hosts: int) -> tuple[float, int]:
    """Seconds to plan so many hosts, and the bytes of what is written for their launchers."""
    model = machine(SPECS["dgx"])
    started = time.perf_counter()
    names = parse_hostlist(f"h[00001-{hosts:05d}]")
    shares = share_ranks([Host(name, GPUS) for name in names], None)
    request = HostRequest(("train.py",), GPUS, hosts * GPUS)
    planned = plan_shares(shares, lambda host: model, request)
    job = build_job(shares, ClusterSettings(), request, {}, (), only_here=False, tag_output=None)
    command = build_mpirun("mpirun", MpiFlavour("openmpi", (4,)), job, "/run")
    size = len(render_erf(planned.ranks)) + sum(map(len, command.argv))
    return time.perf_counter() - started, size


def main() -> None:
    """Print one line a size."""
    print("hosts   ranks   seconds   bytes written   peak memory")
    for hosts in (512, 1152, 4608):
        seconds, size = measure(hosts)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        print(f"{hosts:5d}  {hosts * GPUS:6d}  {seconds:8.2f}  {size:14,d}  {peak:8d} MiB")


if __name__ == "__main__":
    main()
