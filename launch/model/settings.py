"""The options that shape a plan, each declared once; the command line adds its own in ``lmsrun.options``.

They are declared here, below the command line, because a rank that another launcher started plans for itself
and reads the same options from its environment.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar

from launch.model.errors import UsageError

NumaMode = Literal["auto", "strict", "off"]
MemPolicyChoice = Literal["auto", "bind", "preferred", "none"]
BindMethodChoice = Literal["auto", "numactl", "libnuma"]
Place = Literal["auto", "packed", "spread"]
Span = Literal["auto", "on", "off"]
OmpPlaces = Literal["off", "cores", "threads"]
Adapter = Literal["off", "nearest"]

ENV_PREFIX = "LMSRUN_"
QUIET = f"{ENV_PREFIX}QUIET"
"""Tells ranks that another launcher started that nobody wants their warnings."""
MIB = 1 << 20
_UNITS = {"K": 1 << 10, "M": MIB, "G": 1 << 30, "T": 1 << 40}


@dataclass(frozen=True)
class Option:
    """How one field of the options is named and read; ``parse`` raises ValueError saying what was needed."""

    name: str
    help: str
    group: str
    parse: Callable[[str], Any]
    metavar: str
    flags: tuple[str, ...] = ()
    """Further spellings on the command line, such as ``-np``."""
    words: tuple[str, ...] = ()
    is_switch: bool = False
    repeats: bool = False
    join: Callable[[Sequence[str]], str] | None = None
    """Makes one text of a list in a file; None: the option takes a single value, or repeats."""
    in_file: bool = True
    commands: tuple[str, ...] = ("run",)

    @property
    def env_name(self) -> str:
        """The environment variable."""
        return ENV_PREFIX + self.name.upper().replace("-", "_")

    @property
    def long_flag(self) -> str:
        """The spelling that help and messages use."""
        return "--" + self.name


def option(default: Any, name: str, help_text: str, group: str, **how: Any) -> Any:
    """Declare one field of a frozen options dataclass; see ``Option`` for ``how``."""
    how.setdefault("metavar", "TEXT")
    how.setdefault("parse", _some_text(how["metavar"]))
    return dataclasses.field(default=default, metadata={"option": Option(name, help_text, group, **how)})


def switch(default: bool | None, name: str, help_text: str, group: str, **how: Any) -> Any:
    """Declare an on/off option: ``--NAME`` and ``--no-NAME``."""
    return option(default, name, help_text, group, parse=parse_switch, metavar="", is_switch=True, **how)


def choice(default: str, name: str, help_text: str, group: str, words: tuple[str, ...], **how: Any) -> Any:
    """Declare an option that takes one of ``words``."""
    how.setdefault("parse", _one_of(words))
    return option(default, name, help_text, group, metavar="|".join(words), words=words, **how)


def declared_options(options_class: type) -> dict[str, Option]:
    """Field name to declaration, in the order of declaration."""
    return {declared.name: declared.metadata["option"] for declared in fields(options_class)}


def parse_switch(text: str) -> bool:
    """``1/true/yes/on`` or ``0/false/no/off``."""
    word = text.strip().lower()
    if word in {"1", "true", "yes", "on"}:
        return True
    if word in {"0", "false", "no", "off"}:
        return False
    raise ValueError("true or false")


def parse_size(text: str) -> int:
    """Bytes from ``16G``, ``16GiB``, ``40000M``; units are binary, for a GPU sold with 16 GB has 16 GiB."""
    word = text.strip().upper()
    for ending in ("IB", "B"):
        word = word.removesuffix(ending)
    factor = _UNITS.get(word[-1:], 1)
    digits = word[:-1] if factor > 1 else word
    needed = "a size such as 16G, 16GiB or 40000M"
    try:
        value = float(digits) * factor
    except ValueError:
        raise ValueError(needed) from None
    if not MIB <= value < 1 << 60:
        raise ValueError(f"{needed}, at least 1M")
    return int(value)


def parse_mebibytes(text: str) -> int:
    """MiB from a plain number of them, or from a size such as ``64G``."""
    word = text.strip()
    try:
        return whole_number(1)(word) if word.isdigit() else parse_size(word) // MIB
    except ValueError:
        raise ValueError("a number of MiB, at least 1, or a size such as 64G") from None


def parse_gpus(text: str) -> str:
    """``auto``, ``none`` or a comma list of indexes, PCI addresses, GPU and MIG UUIDs; blanks are dropped."""
    tokens = [token.strip() for token in text.split(",")]
    if not all(tokens):
        raise ValueError("auto, none, or a list such as 0,2 or GPU-<uuid>,GPU-<uuid>")
    if len(tokens) > 1 and {"auto", "none"} & set(tokens):
        raise ValueError("auto or none alone, or a list such as 0,2")
    return ",".join(tokens)


def parse_smt(text: str) -> int | None:
    """``on`` (None: all hardware threads of a core), ``off`` (one), or how many."""
    word = text.strip()
    if word in ("on", "auto", "off"):
        return 1 if word == "off" else None
    try:
        return whole_number(1, 64)(word)
    except ValueError as error:
        raise ValueError(f"on, off or {error}") from None


def whole_number(low: int, high: int = 10**9) -> Callable[[str], int]:
    """Make a parser of whole numbers from ``low`` to ``high``."""
    needed = f"a whole number, at least {low}" + (f" and at most {high}" if high < 10**9 else "")

    def parse(text: str) -> int:
        word = text.strip()
        digits = word.removeprefix("-")
        if not (digits.isascii() and digits.isdigit()) or len(digits) > 12 or not low <= int(word) <= high:
            raise ValueError(needed)
        return int(word)

    return parse


def number_or(word: str, low: int, high: int) -> Callable[[str], int | None]:
    """Make a parser of ``word`` (None), or of whole numbers from ``low`` to ``high``."""
    number = whole_number(low, high)

    def parse(text: str) -> int | None:
        if text.strip() == word:
            return None
        try:
            return number(text)
        except ValueError as error:
            raise ValueError(f"{word} or {error}") from None

    return parse


parse_port = number_or("auto", 1024, 65535)
"""``auto`` (None) or the number of a port that needs no privilege."""


def real_number(low: float, high: float = float("inf"), *, above: bool = False) -> Callable[[str], float]:
    """Make a parser of numbers in ``[low, high)``, or in ``(low, high)`` when ``above``."""
    needed = f"a number {'above' if above else 'from'} {low:g}" + (
        f" and below {high:g}" if high < 1e300 else ""
    )

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise ValueError(needed) from None
        if not low <= value < high or (above and value == low):
            raise ValueError(needed)
        return value

    return parse


def _some_text(needed: str) -> Callable[[str], str]:
    """Make a parser of any text but none: an unset shell variable must not pass as "not given"."""

    def parse(text: str) -> str:
        if not text:
            raise ValueError(needed)
        return text

    return parse


def _one_of(words: tuple[str, ...]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.strip() not in words:
            raise ValueError(f"one of {', '.join(words)}")
        return text.strip()

    return parse


PLACEMENT = "Placement and binding"
MEMORY = "Host memory"
LMS = "Large Model Support"
JOB = "Job"
FRAMEWORKS = ("auto", "horovod", "tensorflow")

Settings = TypeVar("Settings", bound="PlanSettings")


@dataclass(frozen=True)
class PlanSettings:
    """What shapes the plan of one host. Sizes are bytes unless the name says otherwise."""

    gpus: str = option(
        "auto",
        "gpus",
        "which GPUs: auto (all of them), none, or a list of indexes in PCI order, PCI addresses or UUIDs",
        PLACEMENT,
        parse=parse_gpus,
        join=",".join,
        metavar="auto|none|LIST",
    )
    numa: NumaMode = choice(
        "auto",
        "numa",
        "auto: bind as well as the machine permits and say so; strict: fail instead; off: do not bind",
        PLACEMENT,
        ("auto", "strict", "off"),
    )
    mem_policy: MemPolicyChoice = choice(
        "auto",
        "mem-policy",
        "memory policy of a rank; auto: bind if the rank's memory fits there, else preferred",
        PLACEMENT,
        ("auto", "bind", "preferred", "none"),
    )
    bind_method: BindMethodChoice = choice(
        "auto",
        "bind-method",
        "what binds; auto: numactl if it is here, else libnuma",
        PLACEMENT,
        ("auto", "numactl", "libnuma"),
    )
    place: Place = choice(
        "auto",
        "place",
        "packed: the first GPUs, or the fewest NUMA nodes; spread: over the nodes evenly; "
        "auto: GPUs packed, CPU ranks spread",
        PLACEMENT,
        ("auto", "packed", "spread"),
    )
    span: Span = choice(
        "auto",
        "span",
        "whether a rank may have several NUMA nodes; auto: CPU ranks that are fewer than the nodes",
        PLACEMENT,
        ("auto", "on", "off"),
    )
    smt: int | None = option(
        None,
        "smt",
        "hardware threads of a core that ranks get: on (all), off (one), or how many",
        PLACEMENT,
        parse=parse_smt,
        metavar="on|off|N",
    )
    reserve_cores: int = option(
        0,
        "reserve-cores",
        "cores that no rank gets, for the system: the first of the NUMA nodes in turn",
        PLACEMENT,
        parse=whole_number(0, 1 << 16),
        metavar="N",
    )
    omp_places: OmpPlaces = choice(
        "off",
        "omp-places",
        "set OMP_PLACES to each rank's cores or hardware threads, and OMP_PROC_BIND=spread",
        PLACEMENT,
        ("off", "cores", "threads"),
    )
    adapter: Adapter = choice(
        "off",
        "adapter",
        "nearest: have UCX and NCCL use the network adapter near the rank's GPU, of several",
        PLACEMENT,
        ("off", "nearest"),
    )
    oversubscribe: bool = switch(
        False, "oversubscribe", "allow more ranks than GPUs (or than cores, without GPUs)", PLACEMENT
    )
    gpu_memory_bytes: int | None = option(
        None,
        "gpu-memory",
        "memory of a GPU, in place of what is read, such as 16G (binary units)",
        MEMORY,
        parse=parse_size,
        metavar="SIZE",
    )
    host_mem_multiplier: float = option(
        4.0,
        "host-mem-multiplier",
        "host memory limit of a rank, as a multiple of its GPU's memory",
        MEMORY,
        parse=real_number(0, 1e6, above=True),
        metavar="X",
    )
    host_mem_limit_mb: int | None = option(
        None,
        "host-mem-limit",
        "host memory limit of a rank in MiB, or with a unit such as 64G, instead of the multiple",
        MEMORY,
        parse=parse_mebibytes,
        metavar="MB",
    )
    host_mem_reserve: float = option(
        0.1,
        "host-mem-reserve",
        "fraction of the host's memory that no limit may promise",
        MEMORY,
        parse=real_number(0, 1),
        metavar="X",
    )
    strict: bool = switch(
        False, "strict", "make a host memory limit that was cut, or is unchecked or unknown, an error", MEMORY
    )
    lms: bool | None = switch(
        None, "lms", "switch Large Model Support on in every rank (on unless a config says no)", LMS
    )
    lms_config: str | None = option(
        None, "lms-config", "TOML file with the settings of Large Model Support", LMS, metavar="FILE"
    )
    python: str | None = option(
        None,
        "python",
        "interpreter of .py programs, when it is not the one lmsrun runs under",
        JOB,
        metavar="PATH",
    )
    framework: str = choice(
        "auto",
        "framework",
        "how ranks find each other; tensorflow: TF_CONFIG for MultiWorkerMirroredStrategy; "
        "auto: by what the script names and what is installed",
        JOB,
        FRAMEWORKS,
    )
    tf_port: int | None = option(
        None,
        "tf-port",
        "first port of TensorFlow's servers on each host; auto: free ones",
        JOB,
        parse=parse_port,
        metavar="N|auto",
    )

    @classmethod
    def from_env(cls: type[Settings], environ: Mapping[str, str]) -> Settings:
        """Read the ``LMSRUN_*`` variables; empty ones count as unset.

        Raises:
            UsageError: If a variable holds what its option cannot be.
        """
        return cls(**read_environ(cls, environ))


def read_environ(options_class: type, environ: Mapping[str, str]) -> dict[str, Any]:
    """Read the fields of an options class that ``LMSRUN_*`` variables set.

    Raises:
        UsageError: If a variable holds what its option cannot be.
    """
    return {
        field_name: parse_option(declared, text, declared.env_name)
        for field_name, declared in declared_options(options_class).items()
        if (text := environ.get(declared.env_name, ""))
    }


def parse_option(declared: Option, text: str, where: str) -> Any:
    """One value of one option.

    Args:
        declared: Whose value it is.
        text: What the user wrote.
        where: How the user named the option there, for the message.

    Raises:
        UsageError: If the text is not such a value.
    """
    try:
        value = declared.parse(text)
    except ValueError as error:
        raise UsageError(f"{where} is {text!r}; needed {error}") from None
    return (value,) if declared.repeats else value
