"""One boot of the NUMA guest a profile; every check of a profile reads what that one boot printed."""

import json
import shutil
import subprocess
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
RIG = REPOSITORY.parent / "shared/rig/numa-vm/run-in-numa-vm"
CACHE = Path("/tmp/numa-vm-cache")
BOOT_AND_RUN_S = 900

UP = "numa-guest: "
"""What ``steps.py`` says first on standard error, and goes on to say every two seconds."""
SILENT_S = 150
"""A boot takes 10 to 55 s; a guest whose kernel lives is silent for a few seconds."""
IMAGE_S = 600
BOOTS = 3
""":func:`boot` says why one may not be enough."""


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
    done = boot(profile, steps, folder)
    if done.returncode == 125 and "lacks packages" in done.stderr:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr[-2000:]
    return {name: Step(**result) for name, result in json.loads(done.stdout).items()}


def boot(
    profile: str, steps: Mapping[str, Sequence[str]], folder: Path, *options: str
) -> subprocess.CompletedProcess[str]:
    """Run the steps in a fresh guest of a profile, which sees ``folder``.

    QEMU emulates all CPUs, and now and then (about 1 boot in 6 of 16 CPUs on two cores) the guest's kernel
    hangs for good, with every CPU spinning: mostly while it starts, seldom later. A guest that says nothing
    for long is booted anew. A step that hangs is no reason for it: the guest lives on, stops the step after
    its time, and tells.
    """
    (folder / "steps.json").write_text(json.dumps(steps))
    rig = [str(RIG), "--profile", profile, *options]
    if options:  # more packages: another image, made once, in its own time
        subprocess.run([*rig, "--setup"], capture_output=True, check=True, timeout=IMAGE_S)
    command = [*rig, "--share", str(folder), "--timeout", str(BOOT_AND_RUN_S)]
    command += ["--", "python3", "steps.py", "steps.json"]
    for number in range(1, BOOTS + 1):
        done = _run_while_alive(command)
        if done is not None:
            return done
        warnings.warn(f"guest {profile}: boot {number} said nothing for {SILENT_S} s", stacklevel=2)
    raise AssertionError(f"guest {profile}: each of {BOOTS} boots fell silent for {SILENT_S} s")


def _run_while_alive(command: Sequence[str]) -> subprocess.CompletedProcess[str] | None:
    """What came of the command; ``None`` if it was killed because its guest fell silent."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        with out.open("w") as to_out, err.open("w") as to_err:
            process = subprocess.Popen(command, stdout=to_out, stderr=to_err, stdin=subprocess.DEVNULL)
        try:
            said, heard = 0, time.monotonic()
            while process.poll() is None:
                if (beats := err.read_text().count(UP)) > said:
                    said, heard = beats, time.monotonic()
                if time.monotonic() - heard > SILENT_S:
                    return None
                time.sleep(0.2)
            return subprocess.CompletedProcess(command, process.returncode, out.read_text(), err.read_text())
        finally:
            process.terminate()
            process.wait()


def _copy_libnuma(folder: Path) -> None:
    """py-libnuma is pure Python: the guest takes it from here."""
    try:
        import numa
    except (ImportError, AttributeError):
        return
    shutil.copytree(Path(numa.__file__).parent, folder / "numa", ignore=shutil.ignore_patterns("__pycache__"))
