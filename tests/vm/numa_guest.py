"""One boot of the NUMA guest a profile; every check of a profile reads what that one boot printed."""

import json
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
RIG = REPOSITORY.parent / "shared/rig/numa-vm/run-in-numa-vm"
CACHE = Path("/tmp/numa-vm-cache")
BOOT_AND_RUN_S = 540


@dataclass(frozen=True)
class Step:
    """What came of one command in the guest."""

    code: int
    out: str
    err: str
    seconds: float

    def json(self) -> Any:
        """Its output, which is one JSON document."""
        assert self.code == 0, self.err
        return json.loads(self.out)

    def reports(self) -> dict[int, dict[str, Any]]:
        """The lines that ``rank_report.py`` printed, by rank."""
        assert self.code == 0, self.err + self.out
        lines = [json.loads(line) for line in self.out.splitlines() if line.startswith("{")]
        return {line["rank"]: line for line in lines}


def run_in_guest(
    profile: str, architecture: str, steps: Mapping[str, Sequence[str]], folder: Path
) -> dict[str, Step]:
    """Boot a profile and run the steps in order, from a copy of the packages."""
    if not RIG.exists():
        pytest.skip(f"no rig at {RIG}")
    if not list(CACHE.glob(f"root-{architecture}-*/root.img")):
        pytest.skip(
            f"no guest image for {architecture} in {CACHE}; make it with: {RIG} --profile {profile} --setup"
        )
    for package in ("launch", "lmsrun", "lms"):
        shutil.copytree(REPOSITORY / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    for script in (Path(__file__).parent / "guest").iterdir():
        if script.is_file():
            shutil.copy(script, folder)
    _copy_libnuma(folder)
    (folder / "steps.json").write_text(json.dumps(steps))
    boot = [str(RIG), "--profile", profile, "--share", str(folder), "--timeout", str(BOOT_AND_RUN_S)]
    done = subprocess.run(
        [*boot, "--", "python3", "steps.py", "steps.json"],
        capture_output=True,
        text=True,
        check=False,
        timeout=BOOT_AND_RUN_S + 60,
    )
    if done.returncode == 125 and "lacks packages" in done.stderr:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr[-2000:]
    return {name: Step(**result) for name, result in json.loads(done.stdout).items()}


def _copy_libnuma(folder: Path) -> None:
    """py-libnuma is pure Python: the guest takes it from here."""
    try:
        import numa
    except (ImportError, AttributeError):
        return
    shutil.copytree(Path(numa.__file__).parent, folder / "numa", ignore=shutil.ignore_patterns("__pycache__"))
