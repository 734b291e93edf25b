"""``tf.distribute`` over two hosts in network namespaces, its workers started by mpirun."""

import re
from pathlib import Path

import pytest
from ssh_hosts import SshHosts, on_hosta

pytestmark = [pytest.mark.ranks, pytest.mark.cluster, pytest.mark.tensorflow, pytest.mark.extras]

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "strategy_digits.py"


def test_workers_of_two_hosts_learn_together(hosts: SshHosts, tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    where = ("--launcher", "mpirun", "--allow-run-as-root", "-H", "hosta:1,hostb:1")
    done = on_hosta(hosts, tmp_path, "run", *where, "--", str(EXAMPLE))
    assert done.returncode == 0, done.stderr[-4000:]
    last = re.search(r"test accuracy (\d\.\d+), 359 images, 2 workers hold the same weights", done.stdout)
    assert last is not None and float(last[1]) >= 0.95, done.stdout
    table = [line.split() for line in done.stderr.splitlines() if line.endswith("with its strategy made")]
    assert [(row[0], row[1]) for row in table] == [("0", "hosta"), ("1", "hostb")], done.stderr
