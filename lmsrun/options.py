"""Every option of the command line, declared once.

Parser, TOML file, environment, help and docs follow from what stands here and in ``launch.model.settings``;
``lmsrun.sources`` reads them.
"""

import importlib
import os
from dataclasses import dataclass
from typing import Any

from launch.model.cluster_settings import ClusterSettings
from launch.model.settings import (
    JOB,
    PLACEMENT,
    declared_options,
    number_or,
    option,
    real_number,
    switch,
    whole_number,
)

_ITSELF = ("completion", "version", "help", "probe-host", "plan-rank")
COMMANDS = {
    name: f"lmsrun.commands.{'itself.' if name in _ITSELF else ''}{name.replace('-', '_')}"
    for name in (
        *("run", "plan", "topo", "report", "check", "fit", "top", "worker", "ddlrun", "build-horovod"),
        *_ITSELF,
    )
} | {"hold-environment": "launch.preflight.hold_environment"}
"""The subcommands, each with its module; those of ``FOR_LMSRUN`` are no person's."""
FOR_LMSRUN = ("probe-host", "plan-rank", "hold-environment")
OUTPUT = "Output"
MAX_RANKS = 10**6
"""More is a typing error, and would only fill memory with its plan."""


parse_num_proc = number_or("auto", 1, MAX_RANKS)
"""``auto`` (None: every slot) or a number of ranks."""

parse_stdin = number_or("none", 0, MAX_RANKS)
"""``none`` (None) or the number of a rank."""


def parse_folder(text: str) -> str:
    """Parse a folder; one that is relative is one of the current folder."""
    if not text:
        raise ValueError("DIR")
    return os.path.abspath(text)


@dataclass(frozen=True)
class LaunchOptions(ClusterSettings):
    """What the user asked for, from all sources together. Times are seconds."""

    num_proc: int | None = option(
        None,
        "num-proc",
        "number of ranks; auto: one per GPU, or without GPUs one per core",
        JOB,
        parse=parse_num_proc,
        metavar="N|auto",
        flags=("-np", "-n"),
    )
    topology: str | None = option(
        None,
        "topology",
        "plan for another machine: a folder with proc/ and sys/, a hwloc archive, lstopo XML, or our JSON",
        JOB,
        metavar="SRC",
        commands=("run", "topo", "fit"),
    )
    forward: tuple[str, ...] = option(
        (),
        "forward",
        "hand a variable on to every rank; may repeat",
        JOB,
        metavar="NAME[=VALUE]",
        flags=("-x",),
        repeats=True,
    )
    avoid_busy: bool = switch(
        True, "avoid-busy", "take GPUs and cores first that no running job has", PLACEMENT
    )
    jobs_dir: str = option(
        "/tmp",  # noqa: S108 - launch.system.job_board says how this is safe
        "jobs-dir",
        "folder in whose lmsrun-jobs the running jobs of this machine find each other",
        JOB,
        parse=parse_folder,
        metavar="DIR",
        commands=("run", "check", "top"),
    )
    grace_period: float = option(
        10.0,
        "grace-period",
        "seconds between SIGTERM and SIGKILL when a job ends early",
        JOB,
        parse=real_number(0, 86400),
        metavar="S",
    )
    receipt_timeout: float = option(
        120.0,
        "receipt-timeout",
        "seconds to wait for every rank's receipt before the table is printed",
        JOB,
        parse=real_number(0, 86400),
        metavar="S",
    )
    stall_timeout: float = option(
        60.0,
        "stall-timeout",
        "seconds without output or CPU use after which a warning says who waits for whom; 0: never",
        JOB,
        parse=real_number(0, 86400),
        metavar="S",
    )
    stall_kill: bool = switch(
        False, "stall-kill", "end a job that has stood still for --stall-timeout, with code 124", JOB
    )
    output_dir: str | None = option(
        None,
        "output-dir",
        "write one file per rank and stream into a new folder there, and receipts.json",
        OUTPUT,
        metavar="DIR",
    )
    tag_output: bool | None = switch(
        None, "tag-output", "put the rank in front of each line (on with several ranks)", OUTPUT
    )
    timestamps: bool = switch(False, "timestamps", "put the time in front of each line of the ranks", OUTPUT)
    quiet: bool = switch(
        False,
        "quiet",
        "say only what is wrong: no table of verified ranks or of running jobs, no warnings",
        OUTPUT,
        flags=("-q",),
        commands=("run", "top"),
    )
    live: bool = switch(
        False, "live", "show a table of what the ranks do, on a terminal in place of their output", OUTPUT
    )
    metrics: str | None = option(
        None,
        "metrics",
        "keep figures of the ranks in this file, for Prometheus (textfile collector)",
        OUTPUT,
        metavar="FILE",
        commands=("run", "top"),
    )
    period: float = option(
        2.0,
        "period",
        "seconds between two looks of --live, --metrics and top",
        OUTPUT,
        parse=real_number(0.5, 3600),
        metavar="S",
        commands=("run", "top"),
    )
    once: bool = switch(False, "once", "look once, and print text", OUTPUT, commands=("top",), in_file=False)
    stdin: int | None = option(
        None,
        "stdin",
        "the rank that reads lmsrun's standard input; the others, or with none all, read nothing",
        JOB,
        parse=lambda text: parse_stdin(text),
        metavar="RANK|none",
    )
    max_restarts: int = option(
        0,
        "max-restarts",
        "how many times a failed job is started again as a whole, from the script's own checkpoint",
        JOB,
        parse=whole_number(0, 10_000),
        metavar="N",
    )
    dry_run: bool = switch(False, "dry-run", "print the plan and start nothing, like `lmsrun plan`", OUTPUT)
    json: bool = switch(False, "json", "print JSON", OUTPUT, commands=("run", "topo", "check", "fit"))
    target: str | None = option(
        None,
        "target",
        "the GPUs to forecast a step for, between commas: V100-16, V100-32, A100-40, A100-80, H100, H200, "
        "GH200, RTX4090, L4 (default A100-80), all of these, or here: the device at hand",
        OUTPUT,
        metavar="GPUS",
        commands=("fit",),
        in_file=False,
    )
    save: str | None = option(
        None,
        "save",
        "write the topology there, for --topology elsewhere",
        OUTPUT,
        metavar="FILE",
        commands=("topo",),
        in_file=False,
    )
    svg: str | None = option(
        None,
        "svg",
        "draw the machine, with lmsrun plan the ranks on it, with lmsrun fit the memory of a step, into this "
        "SVG file",
        OUTPUT,
        metavar="FILE",
        commands=("run", "topo", "fit"),
        in_file=False,
    )
    png: str | None = option(
        None,
        "png",
        "the same as a picture of pixels, where there is a program that paints SVG",
        OUTPUT,
        metavar="FILE",
        commands=("run", "topo", "fit"),
        in_file=False,
    )
    report: str | None = option(
        None,
        "report",
        "when the job is over, write what it did as one HTML page, as `lmsrun report` does",
        OUTPUT,
        metavar="FILE",
    )
    out: str | None = option(
        None,
        "out",
        "the page to write instead of report.html in the run folder",
        OUTPUT,
        metavar="FILE",
        flags=("-o",),
        commands=("report",),
        in_file=False,
    )
    verbose: bool = switch(
        False,
        "verbose",
        "say where each option came from, and more of what is done",
        OUTPUT,
        flags=("-v",),
        commands=("run", "topo"),
    )
    config: str | None = option(
        None,
        "config",
        "read options from this TOML file instead of ./lmsrun.toml or ./pyproject.toml",
        OUTPUT,
        metavar="FILE",
        in_file=False,
        commands=("run", "topo"),
    )


OPTIONS = declared_options(LaunchOptions)
BY_SHORT_FLAG = {flag.lstrip("-"): declared for declared in OPTIONS.values() for flag in declared.flags}
"""``np`` is no name outside the command line, but what people try there first."""
NOT_IN_FILES = tuple(declared.long_flag for declared in OPTIONS.values() if not declared.in_file)
"""They belong to one command line."""


def load_command(name: str) -> Any:
    """Import the module of a subcommand."""
    return importlib.import_module(COMMANDS[name])
