"""Asks every host, before a job starts, whether it can be reached, what it is like, and its versions.

``lmsrun probe-host`` prints one line about its host; a launcher asks all hosts for theirs at once over ssh,
within a time limit. The answers come from outside and are checked like any saved topology.
"""

import importlib.metadata
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launch.errors import TopologyError
from launch.topology import Machine

MARK = "\x1elmsrun-host "
PACKAGES = ("lmsrun", "tensorflow", "horovod")
MAX_ANSWER_BYTES = 4 << 20
PROBE_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class HostReport:
    """What one host answered. ``trouble`` says why nothing is known of it; None: all went well."""

    host: str
    machine: Machine | None = None
    versions: Mapping[str, str | None] = field(default_factory=dict)
    trouble: str | None = None


def describe_this_host() -> str:
    """The line by which a host answers."""
    from launch.discover import read_machine
    from launch.discover.saved import to_json

    answer: dict[str, Any] = {"topology": to_json(read_machine()), "versions": read_versions()}
    return MARK + json.dumps(answer)


def read_versions() -> dict[str, str | None]:
    """The versions that all hosts of a job should share."""
    return {name: read_version(name) for name in PACKAGES}


def read_version(package: str) -> str | None:
    """The installed version, without importing the package; None when it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def build_probe(host: str, timeout_s: float) -> list[str]:
    """The ssh command that asks a host.

    ssh hands its last word to the host's shell, so there, and only there, our own interpreter's and file's
    names are quoted for one. The host's name has been checked, and stands behind ``--``.
    """
    lmsrun = Path(__file__).resolve().parent.parent / "lmsrun" / "__main__.py"
    options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={max(1, int(timeout_s / 2))}"]
    return ["ssh", *options, "--", host, shlex.join([sys.executable, str(lmsrun), "probe-host"])]


def read_hosts(hosts: Sequence[str], timeout_s: float = PROBE_TIMEOUT_S) -> tuple[HostReport, ...]:
    """Ask all hosts at once; one that does not answer in time is in trouble, and costs only that time."""
    end = time.monotonic() + timeout_s
    asked = [(host, _start(build_probe(host, timeout_s))) for host in hosts]
    return tuple(_collect(host, child, end, timeout_s) for host, child in asked)


def parse_answer(host: str, text: str) -> HostReport:
    """Read what a host printed; banners and motd around the answer are passed over."""
    # Not splitlines(), to which the mark's first character is an end of line.
    line = next((line for line in reversed(text.split("\n")) if line.startswith(MARK)), None)
    if line is None:
        return HostReport(host, trouble="no topology in its answer; is lmsrun at the same path there?")
    from launch.discover.saved import from_json

    try:
        answer = json.loads(line[len(MARK) :])
        versions = {name: _version(answer["versions"].get(name)) for name in PACKAGES}
        return HostReport(host, from_json(answer["topology"]), versions)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, TopologyError) as error:
        return HostReport(host, trouble=f"its answer is damaged: {error}")


def compare_versions(reports: Sequence[HostReport], here: Mapping[str, str | None]) -> list[str]:
    """Where a host has another version than this one, one line each."""
    return [
        f"{report.host} has {name} {report.versions.get(name) or 'nowhere'}, this host {version or 'nowhere'}"
        for report in reports
        if report.trouble is None
        for name, version in here.items()
        if report.versions.get(name) != version
    ]


def list_troubles(reports: Sequence[HostReport]) -> list[str]:
    """A table of what is wrong where, one line a host; empty when nothing is."""
    bad = [report for report in reports if report.trouble is not None]
    width = max((len(report.host) for report in bad), default=0)
    return [f"{report.host:<{width}}  {report.trouble}" for report in bad]


def _start(argv: list[str]) -> subprocess.Popen[bytes] | OSError:
    try:
        return subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
    except OSError as error:
        return error


def _collect(
    host: str, child: "subprocess.Popen[bytes] | OSError", end: float, timeout_s: float
) -> HostReport:
    if isinstance(child, OSError):
        return HostReport(host, trouble=f"ssh cannot be run: {child.strerror}")
    try:
        out, err = child.communicate(timeout=max(0.1, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        child.kill()
        child.communicate()
        return HostReport(host, trouble=f"no answer in {timeout_s:g} s")
    if child.returncode:
        said = err.decode(errors="replace").strip().splitlines()
        reason = "".join(c for c in (said[-1] if said else "") if c.isprintable())[:200]
        return HostReport(host, trouble=reason or f"ssh exited with code {child.returncode}")
    if len(out) > MAX_ANSWER_BYTES:
        return HostReport(host, trouble=f"its answer is larger than {MAX_ANSWER_BYTES >> 20} MiB")
    return parse_answer(host, out.decode(errors="replace"))


def _version(value: object) -> str | None:
    return value[:40] if isinstance(value, str) and value.isprintable() else None
