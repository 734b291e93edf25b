"""Configure Large Model Support, in launcher, workers and user code alike; imports no TensorFlow.

Every field is declared once, here: its ``LMS_*`` variable, its TOML key (the field's own name), its default
and its help follow from the declaration.
"""

import dataclasses
import functools
import math
import re
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Literal

from lms.user_files import parse_toml, read_text_file

if TYPE_CHECKING:
    from pathlib import Path

Mode = Literal["auto", "native", "graph", "off"]
Policy = Literal["auto", "budget", "threshold", "all"]
Recompute = Literal["auto", "off", "only"]
Residence = Literal["auto", "device", "host"]
Xla = Literal["off", "whole", "auto"]
CtrldStrategy = Literal["chain_rule", "direct_order"]
Transport = Literal["auto", "device", "host", "file", "numpy"]

ENV_PREFIX = "LMS_"
FIRST_RULES = (
    "n_tensors",
    "lb",
    "ub",
    "ctrld_strategy",
    "fuse_swapins",
    "swap_branches",
    "branch_threshold",
)
SECOND_RULES = (
    "swapout_threshold",
    "swapin_groupby",
    "swapin_ahead",
    "sync_mode",
    "serialization",
    "serialization_by_size",
)
"""The fields that are rules of one of IBM's generations; policy ``threshold`` alone goes by them."""
PLUGIN_VARIABLE = "LMS_PLUGIN"
"""Which form of the plug-in is loaded: ``prebuilt``, ``compiled`` or ``ctypes``; for tests."""
ALLOCATOR, ASYNC_ALLOCATOR = "TF_GPU_ALLOCATOR", "cuda_malloc_async"
"""With this value the driver of a GPU of NVIDIA puts each buffer together from free pages."""
CACHE_VARIABLE = "LMS_CACHE"
"""Where built ops are kept, on every machine its own: no field, for no job decides it."""
REPORT_VARIABLE = "LMS_REPORT_DIR"
"""A folder into which a process writes its report as JSON when it ends; no field: lmsrun sets it."""
STATS_OWNER_VARIABLE = "LMS_STATS_OWNER"
"""Tells the processes that one starts which ``stats_file`` it writes: its number, a colon and the file."""
HOST_SHARES = {True: (0.25, 0.5, 1.0), False: (1.0,)}
"""How much of an optimizer's state (True) and then of the weights moves to the host by itself, where less is
not enough. All weights do: a part of them, on a device that small, leaves its free memory in pieces."""
KUBERNETES_SERVICE = re.compile(
    r"_(SERVICE_(HOST|PORT)(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(ADDR|PORT|PROTO))?)?)$"
)
"""What a Service adds to a pod: kubernetes.io, Accessing the Service, environment variables."""
_NEAR = 0.7
"""The least ratio (``difflib``'s) of a wrong name and a known one for which it may stand, misspelt."""


class ConfigError(ValueError):
    """A field has a value it cannot have; the text says which, and what was needed."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``; did you mean X?`` where known names are near, else an empty text."""
    near = find_near(name, known)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def find_near(name: str, known: Iterable[str]) -> list[str]:
    """Return the known names that a wrong one may stand for; none where nothing is near.

    That is the same name but for dashes in front and upper case, or with two neighbours changed round, or up
    to two that begin with what was given, or the one that is most like it.
    """
    from difflib import get_close_matches  # Only a mistake pays for it.

    words = {key.lstrip("-").casefold(): key for key in sorted(known, reverse=True)}
    word = name.lstrip("-").casefold()
    swapped = {word[:at] + word[at : at + 2][::-1] + word[at + 2 :] for at in range(len(word))}
    near = [word] if word in words else [other for other in words if other in swapped]
    if not near and len(word) > 1:
        begun = (other for other in words if other.startswith(word))
        near = sorted(begun, key=lambda other: (len(other), other))
    return [words[one] for one in near[:2] or get_close_matches(word, words, 1, cutoff=_NEAR)]


def _option(default: Any, text: str, *, low: float | None = None, env: str | None = None) -> Any:
    return dataclasses.field(default=default, metadata={"help": text, "low": low, "env": env})


def env_name(declared: "dataclasses.Field[Any]") -> str:
    """Return the environment variable of a field of LMSConfig."""
    return declared.metadata["env"] or ENV_PREFIX + declared.name.upper()


def _with_nearest_name(cls: type[Any]) -> type[Any]:
    """Have a misspelt field refused with the nearest name, which Python's own error lacks."""
    plain = cls.__init__

    @functools.wraps(plain)
    def init(self: Any, *args: Any, **given: Any) -> None:
        for name in given:
            if name not in cls.__dataclass_fields__:
                raise ConfigError(f"LMSConfig has no {name!r}{nearest(name, cls.__dataclass_fields__)}")
        plain(self, *args, **given)

    type.__setattr__(cls, "__init__", init)
    return cls


def _with_fields_told(cls: type[Any]) -> type[Any]:
    """Let ``help()`` tell each field with its variable, default and meaning."""
    told = [
        f"    {one.name} ({env_name(one)}, {one.default!r}):\n        {one.metadata['help']}"
        for one in fields(cls)
    ]
    cls.__doc__ = "\n".join([cls.__doc__ or "", "Fields, each with its variable and its default:", *told])
    return cls


@_with_fields_told
@_with_nearest_name
@dataclass(frozen=True)
class LMSConfig:
    """The settings of LMS in one process. Sizes are bytes unless the name says otherwise.

    Raises:
        ConfigError: If a value is outside what its field allows, or there is no such field.
    """

    enabled: bool = _option(False, "switch LMS on", env="LMS_ENABLED")
    mode: Mode = _option(
        "auto",
        "native: IBM's patched TensorFlow; graph: our planned swapping; auto: native if there, else graph",
    )
    policy: Policy = _option(
        "auto",
        "auto: fit the device's own limit, edit nothing when the step fits; budget: fit budget_bytes; "
        "threshold: IBM's distance rules; all: least memory",
    )
    budget_bytes: int | None = _option(
        None,
        "device bytes that a step's tensors may take beside the variables, if there are as many; policy "
        "budget needs it",
        low=1,
    )
    margin: float = _option(0.1, "fraction of the budget that the planner leaves unused", low=0)
    recompute: Recompute = _option(
        "auto",
        "auto: tensors that are cheaper to make again than to move are recomputed in the backward pass "
        "(not with policy threshold); off: only swap; only: recompute and swap nothing",
    )
    optimizer_state: Residence = _option(
        "auto",
        "host: what only the update reads (an optimizer's momenta) lies in host memory between steps, comes "
        "to the device for the update, and leaves again; device: it stays there; auto: on the host once a "
        "step does not fit otherwise",
    )
    variables: Residence = _option(
        "auto",
        "host: likewise the weights, which come once for the forward and once for the backward pass; auto: "
        "where the optimizer's state on the host is not enough",
    )
    xla: Xla = _option(
        "whole",
        "whole: XLA compiles a step with jit_compile as one where it fits; auto: else in segments between "
        "the swaps; off: without XLA, as with policy threshold or variables on the host",
    )
    batch_size: int | None = _option(None, "batch size to assume where the graph leaves it open", low=1)
    min_tensor_bytes: int = _option(65536, "smaller tensors stay on the device", low=0)
    bandwidth_gb_s: float | None = _option(
        None,
        "GB/s of a copy between device and host, each way; 0: measured before the first plan; "
        "None: measured on a GPU, assumed on a CPU",
        low=0,
    )
    exclude_bytes: int = _option(0, "device bytes to leave free for others", low=0)
    transport: Transport = _option("auto", "where swapped bytes go: device, host, file or numpy")
    store_dir: str | None = _option(None, "directory on a local disk for a further tier", env="LMS_STORE")
    stats_file: str | None = _option(None, "write per-step statistics there (CSV)")
    tensorboard: str | None = _option(None, "write scalars and texts for TensorBoard into this folder")
    host_mem_limit_mb: int | None = _option(None, "pinned host memory TensorFlow may take, in MiB", low=1)
    defrag: bool = _option(False, "defragment device memory (native), or the allocator's own measure")
    arithmetic_optimization: bool | None = _option(
        None, "Grappler's arithmetic rewrites while LMS is on; None: as the program has set them"
    )

    swapout_threshold: int = _option(
        -1, "v2: swap tensors whose next use is further away, in levels; -1: auto"
    )
    swapin_groupby: int = _option(-1, "v2: consumers within this many levels share a swap-in; -1: auto")
    swapin_ahead: int = _option(-1, "v2: start a swap-in this many levels before its consumer; -1: auto")
    sync_mode: int = _option(
        0, "v2: 0 none, 1 swap-outs, 2 swap-ins, 3 both wait for their neighbours", low=0
    )
    serialization: tuple[str, ...] = _option((), "v2: levels to serialise, such as 1, 3:5, 7")
    serialization_by_size: float = _option(
        0.0, "v2: serialise levels whose ops need more GiB than this", low=0
    )

    n_tensors: int = _option(-1, "v1: how many tensors to swap; -1: all, 0: none", low=-1)
    lb: int = _option(1, "v1: swap in at least this many ops before the consumer", low=1)
    ub: int = _option(10000, "v1: swap in at most this many ops before the consumer", low=1)
    ctrld_strategy: CtrldStrategy = _option("chain_rule", "v1: how the trigger of a swap-in is found")
    fuse_swapins: bool = _option(False, "v1: close consumers share one swap-in")
    swap_branches: bool = _option(False, "v1: swap along long forward branches too")
    branch_threshold: int = _option(0, "v1: a forward branch longer than this is swapped", low=0)
    optimizer_scopes: tuple[str, ...] = _option(
        (), "v1: how names of backward ops begin, beside the gradients that are found without"
    )
    starting_scope: str | None = _option(None, "v1: swap only what depends on the ops of this scope")
    starting_op_names: tuple[str, ...] = _option((), "v1: swap only what depends on these ops")
    excl_scopes: tuple[str, ...] = _option((), "v1: what ops of these whole scopes make stays")
    incl_scopes: tuple[str, ...] = _option((), "v1: swap only what ops of these whole scopes make")
    excl_types: tuple[str, ...] = _option((), "v1: what ops of these types make stays")
    incl_types: tuple[str, ...] = _option((), "v1: swap only what ops of these types make")

    excl_output_by_scopes: tuple[str, ...] = _option(
        (), "v2: what ops make whose names begin so stays on the device"
    )
    excl_output_by_types: tuple[str, ...] = _option((), "v2: what ops of these types make stays")
    excl_input_by_scopes: tuple[str, ...] = _option((), "v2: what ops read whose names begin so stays")
    excl_input_by_types: tuple[str, ...] = _option((), "v2: what ops of these types read stays")
    incl_output_by_scopes: tuple[str, ...] = _option((), "v2: swap only what ops make whose names begin so")
    incl_output_by_types: tuple[str, ...] = _option((), "v2: swap only what ops of these types make")
    incl_input_by_scopes: tuple[str, ...] = _option((), "v2: swap only what ops read whose names begin so")
    incl_input_by_types: tuple[str, ...] = _option((), "v2: swap only what ops of these types read")
    debug: bool = _option(False, "log every decision")

    def __post_init__(self) -> None:
        for declared in fields(self):
            value = _plain(getattr(self, declared.name))
            object.__setattr__(self, declared.name, value)
            _check(declared, value)
        if self.swapout_threshold == 0 or self.swapout_threshold < -1:
            raise ConfigError(
                f"swapout_threshold is {self.swapout_threshold}; needed -1 (auto) or at least 1"
            )
        if self.swapin_ahead == 0 or self.swapin_ahead < -1:
            raise ConfigError(f"swapin_ahead is {self.swapin_ahead}; needed -1 (auto) or at least 1")
        if self.swapin_groupby < -1:
            raise ConfigError(f"swapin_groupby is {self.swapin_groupby}; needed -1 (auto) or at least 0")
        if self.sync_mode > 3:
            raise ConfigError(f"sync_mode is {self.sync_mode}; needed 0, 1, 2 or 3")
        if self.lb > self.ub:
            raise ConfigError(f"lb is {self.lb} and ub is {self.ub}; needed lb <= ub")
        for text in self.serialization:
            levels_named(text)
        if self.margin >= 1:
            raise ConfigError(f"margin is {self.margin}; needed a fraction below 1")
        if self.policy == "budget" and self.budget_bytes is None:
            raise ConfigError(
                "policy is 'budget' without budget_bytes; needed a number of bytes, or policy 'auto'"
            )
        if self.policy == "threshold" and self.recompute == "only":
            raise ConfigError(
                "recompute is 'only' with policy 'threshold', whose rules say what is swapped; needed "
                "recompute 'off' or 'auto', or another policy"
            )

    @classmethod
    def from_env(cls, environ: Mapping[str, str], base: "LMSConfig | None" = None) -> "LMSConfig":
        """Read the ``LMS_*`` variables over ``base``; empty counts as unset, foreign ones are left alone."""
        given: dict[str, Any] = {
            declared.name: _from_text(declared, text)
            for declared in fields(cls)
            if (text := environ.get(env_name(declared), ""))
        }
        try:
            return dataclasses.replace(base or cls(), **given)
        except ConfigError as error:
            said = str(error).replace("'", " ").split()
            found = [declared for declared in fields(cls) if declared.name in given and declared.name in said]
            names = ", ".join(map(env_name, found))
            raise ConfigError(f"{error} (set by {names})" if names else str(error)) from error

    @classmethod
    def from_mapping(cls, table: Mapping[str, Any], base: "LMSConfig | None" = None) -> "LMSConfig":
        """Read a TOML table over ``base``; lists may also be tuples, or the sets that IBM's parameters were.

        Raises:
            ConfigError: For an unknown key (the nearest valid one is named) or a value of the wrong type.
        """
        names = [declared.name for declared in fields(cls)]
        for key in table:
            if key not in names:
                near = nearest(key, names) or "; needed the name of a setting, such as policy or margin"
                raise ConfigError(f"unknown key {key!r}{near}")
        given = {key: _listed(value) for key, value in table.items()}
        return dataclasses.replace(base or cls(), **given)

    @classmethod
    def from_toml(cls, path: "Path", base: "LMSConfig | None" = None) -> "LMSConfig":
        """Read a TOML file: its ``[lms]`` table, or the whole file when it has none.

        Raises:
            ConfigError: If the file cannot be read or is not TOML, with its name and the reason.
        """
        try:
            text = read_text_file(path)
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise ConfigError(f"cannot read {path}: {why}; needed a TOML file") from error
        try:
            table = parse_toml(text)
        except ValueError as error:
            raise ConfigError(f"{path} {error}") from error
        inner = table.get("lms", table)
        if not isinstance(inner, dict):
            raise ConfigError(f"{path}: lms is {type(inner).__name__}; needed a table")
        try:
            return cls.from_mapping(inner, base)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error

    def to_env(self) -> dict[str, str]:
        """Return the variables that differ from the defaults, for ``from_env`` to give this config back."""
        return {
            env_name(declared): _to_text(value)
            for declared in fields(self)
            if (value := getattr(self, declared.name)) != declared.default
        }

    def to_toml(self) -> str:
        """Return the fields that differ from the defaults as a TOML ``[lms]`` table."""
        lines = ["[lms]"]
        for declared in fields(self):
            value = getattr(self, declared.name)
            if value != declared.default:
                lines.append(f"{declared.name} = {_to_toml(value)}")
        return "\n".join(lines) + "\n"


DEFAULTS: Mapping[str, Any] = {declared.name: declared.default for declared in fields(LMSConfig)}
"""The default of each field."""


def doubtful_variables(environ: Iterable[str]) -> list[str]:
    """Return a warning for each ``LMS_*`` variable that LMS does not know.

    It is no error, for other programs may own such names.

    Args:
        environ: Names of variables.
    """
    known = {env_name(declared) for declared in fields(LMSConfig)} | {
        CACHE_VARIABLE,
        PLUGIN_VARIABLE,
        REPORT_VARIABLE,
        STATS_OWNER_VARIABLE,
    }
    return [
        f"{name} is no variable of Large Model Support{nearest(name, known) or '; it has no effect here'}"
        for name in sorted(environ)
        if name.startswith(ENV_PREFIX) and name not in known and not KUBERNETES_SERVICE.search(name)
    ]


def without_rules(config: LMSConfig, names: Iterable[str]) -> LMSConfig:
    """Return ``config`` with the defaults of these fields, such as ``FIRST_RULES``."""
    return dataclasses.replace(config, **{name: DEFAULTS[name] for name in names})


def idle_rules(config: LMSConfig) -> list[str]:
    """Return the fields of IBM's rules that ``config`` sets and its policy does not use."""
    if config.policy == "threshold":
        return []
    return [name for name in (*FIRST_RULES, *SECOND_RULES) if getattr(config, name) != DEFAULTS[name]]


def levels_named(text: str) -> slice:
    """Return the levels of one item of ``serialization``: ``"7"``, or a slice such as ``"3:5"``.

    Raises:
        ConfigError: If it is neither, or a slice of nothing.
    """
    try:
        if ":" in text:
            named = slice(*(int(part) if part.strip() else None for part in text.split(":")))
        else:
            named = slice(int(text), int(text) + 1 or None)
        named.indices(0)  # refuses a step of 0
    except (TypeError, ValueError):
        raise ConfigError(f"serialization has {text!r}; needed levels such as 7 or 3:5") from None
    if named.step is None and named.stop is not None and 0 <= named.stop <= (named.start or 0):
        raise ConfigError(f"serialization has {text!r}, which names no level; needed levels such as 3:5")
    return named


_HINTS: dict[str, Any] = {}


def _allowed(declared: "dataclasses.Field[Any]") -> tuple[Any, ...]:
    """Return the types, or for a Literal the words, that a field may hold."""
    if not _HINTS:
        _HINTS.update(typing.get_type_hints(LMSConfig))
    hint = _HINTS[declared.name]
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return typing.get_args(hint)
    return (hint,)


def words_of(declared: "dataclasses.Field[Any]") -> tuple[str, ...]:
    """Return the words that a field can be; none where it is no choice of words."""
    (first, *_) = _allowed(declared)
    return typing.get_args(first) if typing.get_origin(first) is Literal else ()


def _plain(value: Any) -> Any:
    """Return a number of another library, such as NumPy's, as Python's own; other values as they are."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def _check(declared: "dataclasses.Field[Any]", value: Any) -> None:
    low, words, allowed = declared.metadata["low"], words_of(declared), _allowed(declared)
    if value is None and type(None) in allowed:
        return
    if words:
        if value not in words:
            raise ConfigError(f"{declared.name} is {value!r}; needed one of {', '.join(words)}")
        return
    kind = typing.get_origin(allowed[0]) or allowed[0]
    good = isinstance(value, kind) and (kind is bool or not isinstance(value, bool)) and value != ""
    endless = isinstance(value, float) and not math.isfinite(value)
    if kind is float:
        good = isinstance(value, (int, float)) and not isinstance(value, bool) and not endless
    if not good:
        wanted = "a finite number" if endless else _wanted(declared, kind)
        raise ConfigError(f"{declared.name} is {value!r}; needed {wanted}")
    if kind is tuple:
        _check_items(declared.name, value)
    if low is not None and value < low:
        raise ConfigError(f"{declared.name} is {value}; needed at least {low:g}")


def _check_items(name: str, items: tuple[Any, ...]) -> None:
    """Refuse texts that a variable, which holds a list between commas, would not give back."""
    for item in items:
        if not isinstance(item, str) or "," in item or item != item.strip() or not item:
            raise ConfigError(f"{name} has {item!r}; needed texts without commas and blanks around them")


def find_free_texts(table: Mapping[str, Any]) -> list[str]:
    """Return the keys of a TOML table that may hold any text, such as a path."""
    return [one.name for one in fields(LMSConfig) if one.name in table and str in _allowed(one)]


def _listed(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(map(str, value))
    return tuple(sorted(map(str, value))) if isinstance(value, (set, frozenset)) else value


def _wanted(declared: "dataclasses.Field[Any]", kind: type) -> str:
    names = {
        bool: "true or false",
        int: "a whole number of bytes" if declared.name.endswith("_bytes") else "a whole number",
        float: "a number",
        str: "a text",
        tuple: "a list of texts",
    }
    return names[kind]


_SWITCH = {
    "1": True,
    "true": True,
    "yes": True,
    "on": True,
    "0": False,
    "false": False,
    "no": False,
    "off": False,
}


def _from_text(declared: "dataclasses.Field[Any]", text: str) -> Any:
    kind = typing.get_origin(_allowed(declared)[0]) or _allowed(declared)[0]
    word = text.strip()
    try:
        if kind is bool:
            return _SWITCH[word.lower()]
        if kind in (int, float):
            return kind(word)
    except (KeyError, ValueError):
        raise ConfigError(f"{env_name(declared)} is {text!r}; needed {_wanted(declared, kind)}") from None
    if kind is tuple:
        return tuple(part.strip() for part in text.split(",") if part.strip())
    return word if words_of(declared) else text


def _to_text(value: Any) -> str:
    if isinstance(value, bool):
        return "1" if value else "0"
    return ",".join(value) if isinstance(value, tuple) else str(value)


def _to_toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return "[" + ", ".join(_to_toml(item) for item in value) + "]"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return '"' + "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in escaped) + '"'
    return str(value)
