"""The workers of a ``tf.distribute`` job: where each rank's server is, and ``TF_CONFIG``, which says it."""

import json
from collections.abc import Iterable, Mapping, Sequence

from launch.model.errors import UsageError

TF_CONFIG = "TF_CONFIG"
HOSTS_VARIABLE = "LMSRUN_TF_HOSTS"
"""``a=4,b=4`` in rank order, for ranks that another launcher starts."""
HIGHEST_PORT = 65535


def build_tf_env(workers: Sequence[str], rank: int) -> dict[str, str]:
    """Build the variable by which ``MultiWorkerMirroredStrategy`` finds its workers.

    Args:
        workers: ``host:port`` of every rank, in rank order.
        rank: Which of them this is.
    """
    cluster = {"cluster": {"worker": list(workers)}, "task": {"type": "worker", "index": rank}}
    return {TF_CONFIG: json.dumps(cluster)}


def name_workers(shares: Iterable[tuple[str, int]], first_port: int) -> tuple[str, ...]:
    """Name every rank's server: on each host the first rank has the first port, the next one the next.

    Raises:
        UsageError: If a host has more ranks than ports from there on.
    """
    workers = []
    for host, ranks in shares:
        if first_port + ranks - 1 > HIGHEST_PORT:
            raise UsageError(
                f"{ranks} ranks on {host} need ports up to {first_port + ranks - 1}; needed a --tf-port "
                f"of at most {HIGHEST_PORT - ranks + 1}"
            )
        bracketed = f"[{host}]" if ":" in host else host
        workers += [f"{bracketed}:{first_port + number}" for number in range(ranks)]
    return tuple(workers)


def format_hosts(shares: Iterable[tuple[str, int]], own_name: str) -> str:
    """Write down how many ranks each host has; ``localhost`` gets the name that others know."""
    pairs = tuple(shares)
    names = {"localhost": own_name} if len(pairs) > 1 else {}
    return ",".join(f"{names.get(host, host)}={ranks}" for host, ranks in pairs)


def read_hosts(environ: Mapping[str, str], local: int, world: int) -> tuple[tuple[str, int], ...]:
    """Read ``LMSRUN_TF_HOSTS``; without it a job of one host is this one.

    Raises:
        UsageError: If it is missing where there are several hosts, or cannot be read.
    """
    text = environ.get(HOSTS_VARIABLE, "")
    if not text and local == world:
        return (("localhost", world),)
    try:
        shares = tuple(
            (host, int(ranks)) for host, _, ranks in (one.rpartition("=") for one in text.split(","))
        )
    except ValueError:
        shares = ()
    counted = sum(ranks for _, ranks in shares)
    if counted != world or not all(host and ranks > 0 for host, ranks in shares):
        raise UsageError(
            f"{HOSTS_VARIABLE} is {text[:80]!r}; needed every host with its ranks in rank order, {world} in "
            "all, such as a=4,b=4 (lmsrun run sets it)"
        )
    return shares
