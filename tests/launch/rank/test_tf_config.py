"""``TF_CONFIG`` of a rank that another launcher started: made in the rank, of hosts and a first port."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from launch.system.ports import is_port_free, likely_free_port

LMSRUN = Path(__file__).resolve().parents[3] / "lmsrun" / "__main__.py"
SECOND = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
OTHER_HOST = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}

pytestmark = pytest.mark.ranks


@pytest.fixture
def port() -> int:
    while not all(map(is_port_free, range(first := likely_free_port(), first + 2))):
        continue
    return first


def work(**environ: str) -> subprocess.CompletedProcess[str]:
    program = "import os; print(os.environ.get('TF_CONFIG'))"
    return subprocess.run(
        [sys.executable, str(LMSRUN), "worker", "--", sys.executable, "-c", program],
        env={"PATH": os.environ["PATH"], "LMSRUN_NUMA": "off", **environ},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_one_host_needs_only_a_port(port: int) -> None:
    done = work(**SECOND, LMSRUN_FRAMEWORK="tensorflow", LMSRUN_TF_PORT=str(port))
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["cluster"] == {"worker": [f"localhost:{port}", f"localhost:{port + 1}"]}
    assert told["task"] == {"type": "worker", "index": 1}


def test_several_hosts_are_listed(port: int) -> None:
    hosts = {"LMSRUN_TF_HOSTS": "a=1,b=1", "LMSRUN_TF_PORT": str(port)}
    done = work(**OTHER_HOST, LMSRUN_FRAMEWORK="tensorflow", **hosts)
    assert json.loads(done.stdout)["cluster"] == {"worker": [f"a:{port}", f"b:{port}"]}
    assert work(**OTHER_HOST, **hosts).stdout == "None\n", "only for this framework"


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        (SECOND, "without LMSRUN_TF_PORT; needed one port for all ranks"),
        ({**OTHER_HOST, "LMSRUN_TF_PORT": "20000"}, "LMSRUN_TF_HOSTS is ''; needed every host"),
        (
            {**OTHER_HOST, "LMSRUN_TF_PORT": "20000", "LMSRUN_TF_HOSTS": "a=2"},
            "rank 1 is number 0 on its host, but has the address a:20001",
        ),
    ],
)
def test_what_is_missing_is_told(environ: dict[str, str], said: str) -> None:
    done = work(**environ, LMSRUN_FRAMEWORK="tensorflow")
    assert done.returncode == 2
    assert said in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_a_port_that_is_taken_is_told_before_the_program_starts() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        number = taken.getsockname()[1]
        done = work(
            RANK="0",
            WORLD_SIZE="1",
            LOCAL_RANK="0",
            LMSRUN_FRAMEWORK="tensorflow",
            LMSRUN_TF_PORT=str(number),
        )
    assert done.returncode == 1
    assert f"port {number} of " in done.stderr and "is taken; start again" in done.stderr
