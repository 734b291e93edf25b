"""Every option of the command line, declared once: default < file < environment < command line.

Parser, TOML file, environment, help and docs follow from what stands here and in ``launch.model.settings``.
"""

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from launch.model.cluster_settings import ClusterSettings
from launch.model.errors import UsageError
from launch.model.plan import MODULE
from launch.model.settings import (
    ENV_PREFIX,
    JOB,
    PLACEMENT,
    Option,
    declared_options,
    number_or,
    option,
    parse_option,
    read_environ,
    real_number,
    switch,
    whole_number,
)
from lms.config import KUBERNETES_SERVICE, REPORT_VARIABLE, find_free_texts, nearest
from lmsrun.sources.files import read_files

FOREIGN_VARIABLES = frozenset(
    {
        f"{ENV_PREFIX}{name}"
        for name in (
            "JOB_ID",
            "RECEIPT_DIR",
            "RECEIPT_LINES",
            "RENDEZVOUS_PORT",
            "CONTROL",
            "CONTROL_KEY",
            "FAILURE_FILE",
            "LINE_BUFFERED",
            "EXPECT",
            "REPLAN",
            "JOB_NOTE",
            "BUSY",
            "RANK_OUTPUT",
            "TF_HOSTS",
            "ATTEMPT",
            "VENV",
        )
    }
)
"""Variables with our prefix that are no option of the command line (or one under a name of its own)."""
_INSTALLERS = frozenset(
    {"ROOT", "HOME", "DIR", "BASE", "PREFIX", "PATH", "BIN", "LIB", "INC", "INCLUDE", "VERSION"}
)
"""What environment modules and Spack set behind the name of a package, on purpose and for others to read."""
_MISSPELT = 0.7
"""How like an option's the name of a variable is, from 0 to 1, that somebody has misspelt."""
_SENT = f"{ENV_PREFIX}SENT_"
"""Begins the variables by which a rank knows, after an exec too, which receipts it has sent as lines."""

_OF_OUTER_JOB = frozenset(
    f"{ENV_PREFIX}{name}"
    for name in (
        *("CONTROL", "CONTROL_KEY", "RECEIPT_LINES", "RENDEZVOUS_PORT", "FAILURE_FILE", "LINE_BUFFERED"),
        *("EXPECT", "REPLAN", "BUSY", "RANK_OUTPUT", "TF_HOSTS", "STDIN"),
    )
) | {REPORT_VARIABLE}
"""What a rank's lmsrun told it of its own job, and is wrong in a job that the rank starts."""

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
        metavar="DIR",
        commands=("run", "check"),
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
_BY_SHORT_FLAG = {flag.lstrip("-"): declared for declared in OPTIONS.values() for flag in declared.flags}
"""``np`` is no name outside the command line, but what people try there first."""
_WISHES: dict[str, Literal["help", "version"]] = {
    **dict.fromkeys(("-h", "--help"), "help"),
    **dict.fromkeys(("-V", "--version"), "version"),
}
_CONTRADICTIONS = (
    ("numa", "off", "mem_policy", ("bind", "preferred")),
    ("numa", "off", "bind_method", ("numactl", "libnuma")),
    ("numa", "strict", "mem_policy", ("none",)),
    ("numa", "off", "omp_places", ("cores", "threads")),
    ("stall_timeout", 0.0, "stall_kill", (True,)),
    ("quiet", True, "verbose", (True,)),
)


@dataclass(frozen=True)
class Parsed:
    """What the command line itself says."""

    values: Mapping[str, Any]
    spelled: Mapping[str, str]
    """Field name to how the option was written."""
    program: tuple[str, ...] = ()
    wish: Literal["", "help", "version"] = ""
    """What the user asked for instead of a run."""
    behind: tuple[str, ...] = ()
    """Options behind the program, each as it was typed, that look as if they were meant for lmsrun."""


@dataclass(frozen=True)
class Request:
    """Options with their origins, and the program that follows them."""

    options: LaunchOptions
    program: tuple[str, ...]
    origins: Mapping[str, str]
    """Field name to where its value came from, for those that are not defaults."""
    lms_table: Mapping[str, Any]
    """The ``[lms]`` table of the TOML file."""
    warnings: tuple[str, ...] = ()
    from_files: frozenset[str] = frozenset()
    """Fields whose values stand in a file."""
    behind: tuple[str, ...] = ()
    """Options behind the program, each as it was typed, that look as if they were meant for lmsrun."""


def load_command(name: str) -> Any:
    """Import the module of a subcommand."""
    return importlib.import_module(COMMANDS[name])


def read_request(parsed: Parsed, environ: Mapping[str, str], folder: Path) -> Request:
    """Bring all sources together.

    Args:
        parsed: The command line.
        environ: The environment.
        folder: Where ``lmsrun.toml`` or ``pyproject.toml`` are looked for, beside the site's and the user's.

    Raises:
        UsageError: For an unknown or contradictory option, key or variable, or a value that it cannot have.
    """
    warnings = check_variables(environ)
    from_env = read_environ(LaunchOptions, environ)
    path = parsed.values.get("config", from_env.get("config"))
    lms_table: dict[str, Any] = {}
    from_files: list[dict[str, Any]] = []
    origins: dict[str, str] = {}
    for file in read_files(Path(path) if path else None, environ, folder):
        own = dict(file.table)
        of_lms = own.pop("lms") if isinstance(own.get("lms"), dict) else {}
        values = parse_table(own, file.name)
        file.refuse_others_texts([*_find_free_texts(values), *map("lms.{}".format, find_free_texts(of_lms))])
        lms_table |= of_lms
        from_files.append(values)
        origins |= {field: f"{file.name}: {OPTIONS[field].name}" for field in values}
    levels = (*from_files, from_env, parsed.values)
    in_files = frozenset(origins)
    origins |= {**{field: OPTIONS[field].env_name for field in from_env}, **parsed.spelled}
    refuse_contradictions(levels, origins)
    return Request(
        LaunchOptions(**{field: value for level in levels for field, value in level.items()}),
        parsed.program,
        origins,
        lms_table,
        warnings,
        in_files - from_env.keys() - parsed.spelled.keys(),
        parsed.behind,
    )


def leave_outer_job(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without what a job in which lmsrun itself is a rank has told that rank.

    Its id and its note stay: by them this job knows that the ranks around it are its own.
    """
    if not environ.get(f"{ENV_PREFIX}JOB_ID"):
        return dict(environ)
    return {
        name: value
        for name, value in environ.items()
        if name not in _OF_OUTER_JOB and not name.startswith(_SENT)
    }


def parse_argv(command: str, argv: Sequence[str]) -> Parsed:
    """Parse options up to the program; everything from the program (or ``-m MODULE``) on is left alone.

    Args:
        command: Whose options ``argv`` may name: run, topo or check.
        argv: The command line behind the subcommand.

    Raises:
        UsageError: If an option is unknown, lacks its value, or is given twice with different values.
    """
    spellings = _spellings(command)
    values: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    rest = list(argv)
    is_marked = False
    while rest and rest[0].startswith("-") and rest[0] != "-":
        word = rest.pop(0)
        if word == "--":
            is_marked = True
            break
        if word == MODULE and command in ("run", "fit"):
            if not rest:
                raise UsageError(f"{MODULE} needs the name of a module, as in python -m MODULE [ARGS]")
            rest.insert(0, word)
            break
        if word in _WISHES:
            return Parsed({}, {}, wish=_WISHES[word])
        flag, equals, text = word.partition("=")
        if flag not in spellings:
            raise UsageError(f"unknown option {flag}{_hint(flag, spellings)}")
        field, switched = spellings[flag]
        value: Any = switched if OPTIONS[field].is_switch else None
        if value is None:
            if not equals and (not rest or rest[0] == "--"):
                raise UsageError(f"{flag} needs a value: {flag} {OPTIONS[field].metavar}")
            if not equals and (rest[0] in spellings or rest[0] in _WISHES):
                raise UsageError(
                    f"{flag} needs a value ({OPTIONS[field].metavar}), but the option {rest[0]} follows; "
                    f"if that is the value, write {flag}={rest[0]}"
                )
            value = parse_option(OPTIONS[field], text if equals else rest.pop(0), flag)
        elif equals:
            raise UsageError(f"{flag} takes no value; write {flag} alone, or --no-{OPTIONS[field].name}")
        if OPTIONS[field].repeats:
            value = (*values.get(field, ()), *value)
        elif values.get(field, value) != value:
            raise UsageError(f"{flag} contradicts {spelled[field]} before it; give one of them")
        values[field], spelled[field] = value, flag
    behind = () if is_marked else find_behind(rest, spellings)
    return Parsed(values, spelled, tuple(rest), behind=behind)


def find_behind(program: Sequence[str], spellings: Mapping[str, tuple[str, bool]]) -> tuple[str, ...]:
    """Find the words behind a program that look like options of lmsrun; they go to the program all the same.

    Scripts have options of their own, such as ``--output-dir``, ``--config`` or ``--gpus``. So only those
    count that hardly any script has: not for output; with a dash inside the name, declared words as values,
    or one dash before several letters; and with a value that the option can have.
    """
    words = list(program[1:])
    found = []
    while words and words[0] != "--":
        flag, equals, text = words.pop(0).partition("=")
        if flag not in spellings:
            continue
        declared = OPTIONS[spellings[flag][0]]
        name = flag.removeprefix("--")
        is_distinct = declared.words or "-" in name.strip("-") or (name == flag and len(name) > 2)
        if declared.group == OUTPUT or not is_distinct:
            continue
        if declared.is_switch:
            found += [] if equals else [flag]
            continue
        value = text if equals else words[0] if words else ""
        try:
            parse_option(declared, value, flag)
        except UsageError:
            continue
        found.append(f"{flag}={value}" if equals else f"{flag} {value}")
    return tuple(found)


def _hint(flag: str, spellings: Mapping[str, Any]) -> str:
    if flag.endswith(".py"):
        return f"; if that is the program, write -- {flag}"
    # One letter is like everything: only another spelling of it can have been meant.
    letter = flag.strip("-").lower()
    near = [spelling for spelling in spellings if len(letter) > 1 or spelling.strip("-") == letter]
    return f"{nearest(flag, near)}; `lmsrun --help` lists them all"


def _spellings(command: str) -> dict[str, tuple[str, bool]]:
    """Every spelling of the command's options to its field, and for switches to what it sets."""
    known = {}
    for field, declared in OPTIONS.items():
        if command in declared.commands:
            known.update(dict.fromkeys((declared.long_flag, *declared.flags), (field, True)))
            if declared.is_switch:
                known[f"--no-{declared.name}"] = (field, False)
    return known


def check_variables(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Refuse ``LMSRUN_*`` variables that are nearly an option: a misspelt one would silently do nothing.

    What environment modules set for a package of our name, and Kubernetes for a Service of such a name in
    every pod of its namespace, is no mistake.

    Returns:
        A warning for every other variable that is not read.

    Raises:
        UsageError: Naming the nearest variable that exists.
    """
    known = {declared.env_name for declared in OPTIONS.values()} | FOREIGN_VARIABLES
    unread = []
    for name in sorted(environ):
        word = name.removeprefix(ENV_PREFIX)
        if word in (name, *_INSTALLERS) or name in known or name.startswith(_SENT):
            continue
        if KUBERNETES_SERVICE.search(name):
            continue
        short = _BY_SHORT_FLAG.get(word.lower())
        near = short.env_name if short else _misspelt(word)
        if near:
            raise UsageError(f"unknown variable {name}; did you mean {near}?; unset it")
        unread.append(f"{name} is no option of lmsrun, and is not read")
    return tuple(unread)


def _misspelt(word: str) -> str | None:
    """Find the variable of which a name without our prefix is a misspelling."""
    from difflib import get_close_matches  # Only a variable that is no option pays for it.

    names = (declared.env_name for declared in OPTIONS.values())
    known = {name.removeprefix(ENV_PREFIX).replace("_", ""): name for name in sorted(names)}
    near = get_close_matches(word.replace("_", ""), known, 1, cutoff=_MISSPELT)
    return known[near[0]] if near else None


def parse_table(table: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Parse the options of a TOML table; keys are the long option names, ``-`` and ``_`` alike.

    Raises:
        UsageError: For an unknown key (naming the nearest one) or a value that its option cannot have.
    """
    by_key = {declared.name: (field, declared) for field, declared in OPTIONS.items() if declared.in_file}
    values: dict[str, Any] = {}
    for key, value in table.items():
        name = key.replace("_", "-")
        if name not in by_key:
            short = _BY_SHORT_FLAG.get(name)
            hint = f"; did you mean {short.name}?" if short else nearest(name, by_key)
            raise UsageError(f"{source}: unknown key {key!r}{hint}")
        field, declared = by_key[name]
        if field in values:
            raise UsageError(f"{source}: {name} is there twice, as {name} and as {name.replace('-', '_')}")
        values[field] = _from_toml(declared, value, f"{source}: {key}")
    return values


def _find_free_texts(values: Mapping[str, Any]) -> list[str]:
    """Name the options whose values are no switch, number or declared word: programs, paths, hosts ..."""
    return sorted(
        OPTIONS[field].name
        for field, value in values.items()
        if isinstance(value, (str, tuple)) and value not in OPTIONS[field].words
    )


def _from_toml(declared: Option, value: Any, where: str) -> Any:
    items = value if isinstance(value, list) else [value]
    if not all(isinstance(item, (str, int, float)) for item in items):
        raise UsageError(f"{where} is {type(value).__name__}; needed {declared.metavar or 'true or false'}")
    texts = [str(item).lower() if isinstance(item, bool) else str(item) for item in items]
    if any("\0" in text for text in texts):  # TOML can write it; a command line and a variable cannot
        raise UsageError(f"{where} holds a NUL character; needed {declared.metavar or 'true or false'}")
    if declared.repeats:
        return tuple(texts)
    if declared.is_switch and not isinstance(value, bool):
        raise UsageError(f"{where} is {value!r}; needed true or false")
    return parse_option(declared, ",".join(texts), where)


def refuse_contradictions(levels: Sequence[Mapping[str, Any]], origins: Mapping[str, str]) -> None:
    """Refuse options that cannot both hold, if they come from one source; a stronger source simply wins.

    Args:
        levels: Values by field, from the weakest source to the strongest.
        origins: How each field was named where its value came from.

    Raises:
        UsageError: Naming both.
    """
    values = {field: value for level in levels for field, value in level.items()}
    for field, word, other, others in _CONTRADICTIONS:
        together = any(level.get(field) == word and level.get(other) in others for level in levels)
        if together and values[field] == word and values[other] in others:
            one, two = (
                origins[name] if values[name] is True else f"{origins[name]} {values[name]}"
                for name in (field, other)
            )
            raise UsageError(f"{one} contradicts {two}; give one of them")


def render_argv(parsed: Parsed, leave_out: frozenset[str]) -> list[str]:
    """Render a command line that says the same as ``parsed``, without the fields that are left out."""
    words: list[str] = []
    for field, value in parsed.values.items():
        declared = OPTIONS[field]
        if field in leave_out:
            continue
        if declared.is_switch:
            words.append(declared.long_flag if value else f"--no-{declared.name}")
        else:
            texts = value if declared.repeats else ["auto" if value is None else value]
            for text in map(str, texts):
                # A value that looks like an option must not stand alone.
                flag = declared.long_flag
                words += [f"{flag}={text}"] if text.startswith("-") else [flag, text]
    return [*words, "--", *parsed.program]
