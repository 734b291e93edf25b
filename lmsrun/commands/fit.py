"""``lmsrun fit``: forecast a script's training step on GPUs, without training."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

from launch.discover import read_machine
from launch.model.errors import UsageError
from launch.model.lms_settings import read_lms_config
from launch.model.plan import MODULE
from launch.plan_host.rank_env import build_rank_env, parse_forward
from launch.rank.shim import ProgramError, program_environ, resolve_program
from launch.system.exit_status import describe_status
from launch.system.process_tree import adopt_orphans, die_with_parent, read_children, sweep
from lms.config import nearest
from lmsrun.command_steps import answer_wish, read_sources, say, write_drawings
from lmsrun.draw.forecast import draw_forecast
from lmsrun.file_checks import check_can_be_written, check_lms_places, refuse_same_file
from lmsrun.options import LaunchOptions
from lmsrun.resolve import doubt_behind
from lmsrun.sources.command_line import parse_argv

USAGE = "lmsrun fit [--target GPUS | --topology SRC] [--json] [--svg FILE] [--] PROGRAM [ARGS]"
ABOUT = (
    "Run a script up to its first training step, and forecast that step on GPUs: the largest batch and the "
    "time of each way to run it. That step does not run."
)
EXAMPLES = (
    ("lmsrun fit --target V100-16,H100 train.py", "the largest batches and step times there"),
    ("lmsrun fit --topology node.json train.py", "on the GPUs of a machine that `lmsrun topo` has saved"),
    ("lmsrun fit --svg memory.svg train.py", "memory over a step with the largest batch of each mode"),
)
OPERAND = "PROGRAM"
LOOK_S, SWEEP_S = 0.02, 5.0
ISOLATED = "EIS"
"""Python's options that ignore its variables, or what ``site`` imports."""
DEFAULT_GPU = "A100-80"
SCHEMA = "lmsrun.fit/1"


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Print the forecast of the script that a command line names."""
    parsed = parse_argv("fit", argv)
    if answer_wish("fit", parsed):
        return 0
    request = read_sources(parsed, environ)
    options = request.options
    if not parsed.program:
        raise UsageError("fit needs a program, as in lmsrun fit train.py")
    given, _, unset = parse_forward(options.forward, environ, request.origins.get("forward", "-x"))
    environ = {**environ, **given}
    try:
        command = resolve_program(parsed.program, environ)
    except ProgramError as error:
        raise UsageError(str(error)) from None
    _refuse_isolated(command)
    program = parsed.program[1 if parsed.program[0] == MODULE else 0]
    gpus = _wanted(options)
    lms = read_lms_config(options, environ, request.lms_table, request.lms_files)
    lms = replace(lms, enabled=True, mode="auto")
    check_lms_places(lms)
    refuse_same_file(options, ("svg", "png"), parsed.program)
    for path, origin in ((options.svg, "--svg"), (options.png, "--png")):
        if path:
            check_can_be_written(path, origin)
    for warning in () if options.quiet else (*unset, *doubt_behind(parsed.behind, parsed.program)):
        say(f"warning: {warning}")
    with tempfile.TemporaryDirectory(prefix="lmsrun-fit-") as folder:
        found = Path(folder) / "fit.json"
        child = {
            **build_rank_env(0, 0, 1, 1),  # what any rank has, and the script may ask for
            **program_environ(environ),
            **lms.to_env(),
            "LMS_MODE": lms.mode,  # which is the default, and would not be told
            "LMSRUN_FIT": str(found),
            "LMSRUN_FIT_GPUS": json.dumps(gpus),
        }
        code = _run_until(found, command, child)
        if not found.exists():
            raise UsageError(
                f"{program} {_describe_end(code)}; needed a "
                "script that trains with Keras or a tf.function (its own messages are above)"
            )
        result = json.loads(found.read_text(encoding="utf-8"))
    if "fault" in result:
        where = "" if result.get("is_own", True) else "; LMS_DEBUG=1 shows where"
        raise UsageError(
            f"the training step of {program} cannot be forecast, and has not run: {result['fault']}{where}"
        )
    text = result.pop("text")
    print(json.dumps({"schema": SCHEMA, **result}, indent=2) if options.json else text, flush=True)
    if options.svg or options.png:
        write_drawings(draw_forecast(result), options, environ)
    return 0


def _run_until(found: Path, command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run a program until it has ended or the file is there; leave no process of it.

    A wrapper of the program, such as a shell script, must not go on as if the program had trained.

    Returns:
        The program's exit code; -N if signal N killed it.
    """
    spare, own = frozenset(read_children(os.getpid())), os.getpid()
    adopt_orphans()
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
            signal.signal(number, _end)
    try:
        process = subprocess.Popen(
            command, env=environ, stdout=sys.stderr, preexec_fn=partial(die_with_parent, signal.SIGKILL, own)
        )
        while process.poll() is None and not found.exists():
            time.sleep(LOOK_S)
        return process.poll() or 0
    finally:
        sweep(SWEEP_S, spare)


def _describe_end(code: int) -> str:
    """Say how the program ended; a negative code is that of a signal."""
    if code < 0:
        return f"{describe_status(-code)} before its first training step"
    return f"ended with exit code {code} and no training step"


def _end(number: int, _: Any) -> None:
    """End as a signal asks, but with what has to be cleaned up."""
    sys.exit(128 + number)


def _refuse_isolated(command: Sequence[str]) -> None:
    """Refuse a Python that ignores the variables by which the step is caught.

    Raises:
        UsageError: If the program is one.
    """
    option = find_isolating(command[1:]) if Path(command[0]).name.startswith("python") else None
    if option is not None:
        raise UsageError(
            f"with {option} Python ignores PYTHONPATH, by which the training step is caught: the script "
            f"would train; needed Python without {option}"
        )


def find_isolating(argv: Sequence[str]) -> str | None:
    """Return which of Python's own options, in front of the script, have it ignore its variables."""
    rest = iter(argv)
    for option in takewhile(lambda one: one.startswith("-") and one != "-", rest):
        if option == "--check-hash-based-pycs":
            next(rest, None)
        for place, letter in enumerate("" if option.startswith("--") else option[1:], start=2):
            if letter in "cm":  # what follows is the program
                return None
            if letter in ISOLATED:
                return option
            if letter in "WX":
                if place == len(option):
                    next(rest, None)
                break
    return None


def _wanted(options: LaunchOptions) -> list[Any]:
    """Return the GPUs to forecast for: names, or what is known of those of a saved topology.

    Raises:
        UsageError: If both are asked for, or there are none.
    """
    if options.topology is None:
        return list(_named(DEFAULT_GPU if options.target is None else options.target))
    if options.target is not None:
        raise UsageError("--target and --topology both name GPUs; needed one of them")
    machine = read_machine(options.topology)
    found = {
        (gpu.name or "unknown GPU", gpu.memory_bytes) for gpu in machine.gpus if gpu.memory_bytes is not None
    }
    if not found:
        has = f"{len(machine.gpus)} GPUs of unknown memory" if machine.gpus else "no GPU"
        raise UsageError(f"{options.topology} has {has}; needed one with its memory, or --target NAMES")
    return [
        {
            "name": f"{name}, {nbytes / 2**20:,.0f} MiB",
            "model": name,
            "memory_bytes": nbytes,
            "machine": machine.architecture,
        }
        for name, nbytes in sorted(found)
    ]


def _named(text: str) -> Collection[str]:
    """Return the names of GPUs, each once.

    Raises:
        UsageError: If one is not known, or there is none.
    """
    from lms.simulate.devices import NAMES, each_of

    names = [name.strip() for name in text.split(",")]
    if not any(names):
        raise UsageError(f"--target names no GPU ({text!r}); needed some of {', '.join(NAMES)}")
    for name in names:
        if not name:
            raise UsageError(f"--target {text!r} has a comma too many; try {','.join(filter(None, names))}")
        if name not in NAMES:
            raise UsageError(
                f"no GPU {name!r} is known{nearest(name, NAMES)}; needed some of {', '.join(NAMES)}"
            )
    return each_of(names)
