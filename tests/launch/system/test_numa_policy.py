"""The CPU mask and the memory policy, set and read back in child processes: a policy stays set."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launch.model.idset import parse_ids
from launch.system.numa_policy import BindingError as Refusal
from launch.system.numa_policy import FoundBinding, apply_mem_policy, describe_policy, read_binding

ROOT = Path(__file__).resolve().parents[3]
CHILD = """
import json, sys
from pathlib import Path
import launch.system.numa_policy as m
from launch.model.idset import format_ids
out = {}
def note(name, call):
    try:
        out[name] = call()
    except m.BindingError as error:
        out[name] = "refused: " + str(error)
"""


def in_child(code: str) -> dict[str, Any]:
    """Run code that fills ``out``; a crash of the child (libnuma can) fails the test."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD + code + "\nprint(json.dumps(out))"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, (done.returncode, done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_every_policy_is_what_the_kernel_then_says() -> None:
    node = min(read_online())
    found = in_child(f"""
nodes = frozenset({{{node}}})
for policy in ("preferred", "bind"):
    note(policy + " by", lambda: m.apply_mem_policy(policy, nodes))
    note(policy, lambda: m.describe_policy(m.read_binding().mem_policy, m.read_binding().mem_nodes))
m._libnuma_membind = lambda: None
note("bind by syscall", lambda: m.apply_mem_policy("bind", nodes))
note("none by", lambda: m.apply_mem_policy("none", frozenset()))
buffer = bytearray(1 << 24)
out["numa_maps"] = Path("/proc/self/numa_maps").read_text().count("bind:" + format_ids(nodes)) > 0
""")
    if "refused" in str(found["preferred by"]):
        pytest.skip(f"no memory policy may be set here: {found['preferred by']}")
    assert found["preferred by"] == "set_mempolicy"
    assert found["preferred"] == f"preferred {node}"
    assert found["bind by"] in ("libnuma", "set_mempolicy")
    assert found["bind"] == f"bind {node}"
    assert found["bind by syscall"] == "set_mempolicy"
    assert found["none by"] == "nothing"
    assert found["numa_maps"]


def test_the_mask_is_set_and_checked() -> None:
    one = min(os.sched_getaffinity(0))
    found = in_child(f"""
note("set", lambda: m.apply_cpus(frozenset({{{one}}})))
out["cpus"] = format_ids(m.read_binding().cpus)
note("missing", lambda: m.apply_cpus(frozenset({{500000}})))
note("partly", lambda: m.apply_cpus(frozenset({{{one}, 4000}})))
""")
    assert found["set"] is None
    assert found["cpus"] == str(one)
    assert "refused: cannot bind to CPUs 500000" in found["missing"]
    assert "refused: asked for CPUs" in found["partly"]


def test_nodes_that_do_not_exist_are_refused_before_libnuma_sees_them(tmp_path: Path) -> None:
    folder = tmp_path / "devices/system/node"
    folder.mkdir(parents=True)
    (folder / "online").write_text("0,8,250-255\n")
    with pytest.raises(Refusal, match=r"memory nodes 5 were planned, this machine has 0,8,250-255"):
        apply_mem_policy("bind", frozenset({5}), str(tmp_path))
    found = in_child('note("live", lambda: m.apply_mem_policy("bind", frozenset({900})))')
    assert "memory nodes 900 were planned" in found["live"]


def test_reading_needs_no_library() -> None:
    found = read_binding()
    assert isinstance(found, FoundBinding)
    assert found.cpus == os.sched_getaffinity(0)
    assert found.mem_policy is not None


def test_policies_in_words() -> None:
    assert describe_policy("bind", {0, 8}) == "bind 0,8"
    assert describe_policy(None, ()) == "unknown"


def read_online() -> frozenset[int]:

    try:
        return parse_ids(Path("/sys/devices/system/node/has_memory").read_text())
    except OSError:
        pytest.skip("this kernel has no NUMA")
