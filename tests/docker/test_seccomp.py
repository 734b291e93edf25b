"""Where the kernel refuses memory policies, as in a container without CAP_SYS_NICE, ranks keep their CPUs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from forbid_mempolicy import ARCHITECTURES, program

ROOT = Path(__file__).resolve().parents[2]
REMEDY = "in a container try --cap-add SYS_NICE"
SHOW = "import os; print(sorted(os.sched_getaffinity(0)), flush=True)"

pytestmark = pytest.mark.ranks


def lmsrun(tmp_path: Path, *argv: str, filtered: bool = True) -> subprocess.CompletedProcess[str]:
    """Run lmsrun, with the filter or without."""
    words = [sys.executable, str(Path(__file__).with_name("forbid_mempolicy.py"))] if filtered else []
    words += [sys.executable, "-m", "lmsrun", *argv]
    return subprocess.run(
        words,
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
        stdin=subprocess.DEVNULL,
        check=False,
    )


@pytest.fixture(scope="module", autouse=True)
def policies_work_here(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The tests show a difference only where the kernel would allow a policy, and a filter can be set."""
    folder = tmp_path_factory.mktemp("policies")
    free = json.loads(lmsrun(folder, "check", "--json", filtered=False).stdout)
    if {check["name"]: check["status"] for check in free["checks"]}["memory policy"] != "ok":
        pytest.skip("memory policies are refused here already")
    probe = lmsrun(folder, "check", "--json")
    if probe.returncode and "prctl" in probe.stderr:
        pytest.skip("no seccomp filter can be set here")


def test_cpus_are_bound_and_the_refusal_is_said(tmp_path: Path) -> None:
    argv = ("run", "-np", "1", "--output-dir", str(tmp_path / "out"), sys.executable, "-c", SHOW)
    done = lmsrun(tmp_path, *argv)
    assert done.returncode == 0, done.stderr
    assert "memory is not bound, CPUs only" in done.stderr
    assert REMEDY in done.stderr
    (rank,) = json.loads((tmp_path / "out" / "latest" / "receipts.json").read_text())["ranks"]
    assert rank["verified"], "the CPU mask was read back and is as planned"
    assert rank["mem_policy"] is None, "what cannot be read back is unknown, not bound"
    allowed = lmsrun(tmp_path, *argv, filtered=False)
    assert "memory is not bound" not in allowed.stderr
    assert done.stdout == allowed.stdout, "the CPUs are those of a rank with a memory policy"


def test_a_policy_that_was_asked_for_is_not_dropped(tmp_path: Path) -> None:
    done = lmsrun(tmp_path, "run", "-np", "1", "--mem-policy", "bind", "true")
    assert done.returncode == 2
    assert "--mem-policy bind is refused here" in done.stderr
    assert REMEDY in done.stderr


def test_the_check_says_it(tmp_path: Path) -> None:
    checks = {
        check["name"]: check for check in json.loads(lmsrun(tmp_path, "check", "--json").stdout)["checks"]
    }
    assert checks["memory policy"]["status"] == "warn"
    assert "--cap-add SYS_NICE" in checks["memory policy"]["remedy"]


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_the_filter_refuses_what_it_names_and_nothing_else(machine: str) -> None:
    """The filter's own jumps, followed step by step, for machines that this one is not."""
    architecture, numbers = ARCHITECTURES[machine]
    code = program(architecture, numbers)

    def answer(number: int, arch: int) -> int:
        place, loaded = 0, 0
        while True:
            operation, yes, no, value = (
                int.from_bytes(code[8 * place + a : 8 * place + b], "little")
                for a, b in ((0, 2), (2, 3), (3, 4), (4, 8))
            )
            if operation == 0x06:
                return value
            if operation == 0x20:
                loaded = {0: number, 4: arch}[value]
            place += 1 + ((yes if loaded == value else no) if operation == 0x15 else 0)

    refused = {number for number in range(500) if answer(number, architecture) != 0x7FFF0000}
    assert refused == set(numbers)
    assert all(answer(number, 0x1234) == 0x7FFF0000 for number in numbers)
