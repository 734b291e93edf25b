"""A rank that touches memory and prints where the kernel put it and its CPUs, as one line of JSON."""

import json
import mmap
import os
import re
from pathlib import Path

SIZE = 4 << 20


def main() -> None:
    block = mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE)
    for at in range(0, SIZE, mmap.PAGESIZE):
        block[at] = 1
    status = Path("/proc/self/status").read_text()
    policy, pages = biggest_mapping(Path("/proc/self/numa_maps").read_text())
    print(
        json.dumps(
            {
                "rank": int(os.environ["RANK"]),
                "cpus": re.search(r"Cpus_allowed_list:\s*(\S*)", status)[1],
                "policy": policy,
                "pages": pages,
                "page_bytes": mmap.PAGESIZE,
                "threads": os.environ.get("OMP_NUM_THREADS"),
                "limit": os.environ.get("TF_GPU_HOST_MEM_LIMIT_IN_MB"),
            }
        ),
        flush=True,
    )


def biggest_mapping(numa_maps: str) -> tuple[str, dict[str, int]]:
    """The policy and the pages per node of the mapping without a file that has the most touched pages."""
    best: tuple[str, dict[str, int]] = ("", {})
    for line in numa_maps.splitlines():
        pages = {node: int(count) for node, count in re.findall(r" N(\d+)=(\d+)", line)}
        if "file=" not in line and sum(pages.values()) > sum(best[1].values()):
            best = line.split()[1], pages
    return best


main()
