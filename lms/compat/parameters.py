"""The constructor parameters of both generations of IBM's ``LMS``, as one request to the engine.

A call is of the first generation if it names a parameter that only that one had, or begins with optimizer
scopes; else it is of the second.
"""

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from lms.config import DEFAULTS, FIRST_RULES, SECOND_RULES, LMSConfig, without_rules
from lms.errors import LMSArgumentError

MEMORY_RATIO = "TF_LMS_SIMULATOR_MEM_RATIO"
"""The share of the device that the second generation's tuner planned for."""

FIRST = (
    "optimizer_scopes",
    "graph",
    "starting_scope",
    "starting_op_names",
    "excl_scopes",
    "incl_scopes",
    "excl_types",
    "incl_types",
    "lb",
    "ub",
    "n_tensors",
    "fuse_swapins",
    "ctrld_strategy",
    "swap_branches",
    "branch_threshold",
    "debug",
    "debug_level",
    "cpu_device",
)
"""The parameters of ``LMS`` 0.1 in their order; their defaults are those of the same fields of LMSConfig."""

SECOND = (
    "swapout_threshold",
    "swapin_groupby",
    "swapin_ahead",
    "sync_mode",
    "serialization",
    "serialization_by_size",
    "debug",
    "debug_level",
    "cpu_device",
    "gpu_device",
)
"""The same of ``LMS`` 2.0."""


SETS = frozenset(
    {"optimizer_scopes", "starting_op_names", "excl_scopes", "incl_scopes", "excl_types", "incl_types"}
)
"""Parameters that are sets of names."""


@dataclass(frozen=True)
class Request:
    """The request that one call of ``LMS(...)`` makes."""

    generation: Literal[1, 2]
    config: LMSConfig
    shown: Mapping[str, object]
    """What is logged when editing starts: the parameters in force."""
    given: frozenset[str]
    """The parameters that the call itself gives."""
    graph: Any = None


def parse_call(args: tuple[Any, ...], keywords: Mapping[str, Any], environ: Mapping[str, str]) -> Request:
    """Read the arguments of ``LMS(...)``; what the call leaves out is as the ``LMS_*`` variables have it.

    The variables of the other generation's rules are put aside: one generation's rules are in force.

    Raises:
        TypeError: For parameters that no generation had, or that belong to different ones.
        LMSArgumentError: If the first generation's optimizer scopes are missing.
        ConfigError: If a number is outside what its parameter allows.
    """
    base = replace(LMSConfig.from_env(environ), enabled=True, mode="graph")
    if is_first_generation(args, keywords):
        return _first(base, _given("0.1", FIRST, args, keywords))
    return _second(base, environ, _given("2.0", SECOND, args, keywords))


def is_first_generation(args: tuple[Any, ...], keywords: Mapping[str, Any]) -> bool:
    """Tell whether these are arguments of ``LMS`` 0.1."""
    own = set(FIRST).difference(SECOND)
    return bool(own.intersection(keywords)) or bool(args and not isinstance(args[0], int))


def _given(
    version: str, names: Iterable[str], args: tuple[Any, ...], keywords: Mapping[str, Any]
) -> dict[str, Any]:
    """Map the names of the parameters to the arguments.

    Raises:
        TypeError: If there is no such parameter, or one is given twice.
    """
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    signature = inspect.Signature([inspect.Parameter(name, kind, default=None) for name in names])
    try:
        given = signature.bind(*args, **keywords).arguments
    except TypeError as error:
        raise TypeError(f"LMS() of version {version}: {error}; it has {', '.join(names)}") from None
    _require_host(given.get("cpu_device", "/cpu:0"))
    return given


def _fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that are fields of LMSConfig, as it has them."""
    known = {declared.name for declared in fields(LMSConfig)}
    return {
        name: names_of(value) if name in SETS else value for name, value in given.items() if name in known
    }


def _first(base: LMSConfig, given: Mapping[str, Any]) -> Request:
    config = replace(without_rules(base, SECOND_RULES), policy="threshold", **_fields(given))
    if not config.optimizer_scopes:
        raise LMSArgumentError(
            "no optimizer scope is given; needed the name scopes under which the optimizer makes its "
            "gradients, as in LMS({'adam_optimizer'})"
        )
    shown: dict[str, object] = {name: getattr(config, name) for name in FIRST_RULES}
    if config.n_tensors < 0:
        shown["n_tensors"] = "all tensors"
    if not config.swap_branches:
        # Decides nothing without swap_branches; not being the default, it says whose rules apply.
        config = replace(config, branch_threshold=max(1, config.branch_threshold))
    return Request(1, config, shown, frozenset(given), given.get("graph"))


def _second(base: LMSConfig, environ: Mapping[str, str], given: Mapping[str, Any]) -> Request:
    asked = _fields(given)
    if "serialization" in asked:
        asked["serialization"] = tuple(str(level) for level in asked["serialization"] or ())
    if "serialization_by_size" in asked:
        asked["serialization_by_size"] = float(asked["serialization_by_size"])
    margin = _margin(environ, base.margin)
    config = replace(without_rules(base, FIRST_RULES), policy="auto", margin=margin, **asked)
    if any(getattr(config, name) != DEFAULTS[name] for name in SECOND_RULES):
        config = replace(config, policy="threshold")
    shown: dict[str, object] = {name: getattr(config, name) for name in SECOND_RULES}
    shown["serialization"] = list(config.serialization)
    shown["serialization_by_size"] = f"{config.serialization_by_size:g}"
    if given.get("gpu_device") is not None:
        shown["gpu_device"] = f"{given['gpu_device']} (the first visible GPU is the one that is planned for)"
    return Request(2, config, shown, frozenset(given))


def names_of(value: Iterable[str] | None) -> tuple[str, ...]:
    """Sort a set of names; a single text is one name, not its letters, and None is no name."""
    return tuple(sorted({value} if isinstance(value, str) else set(value or ())))


def _require_host(cpu_device: str) -> None:
    kind, _, number = cpu_device.lower().rpartition("/")[2].removeprefix("device:").partition(":")
    if kind != "cpu" or number not in ("", "0"):
        raise LMSArgumentError(
            f"cpu_device is {cpu_device!r}; swapped tensors go to the host, needed '/cpu:0' (lmsrun binds "
            "its memory to a NUMA node)"
        )


def _margin(environ: Mapping[str, str], default: float) -> float:
    text = environ.get(MEMORY_RATIO, "")
    if not text:
        return default
    try:
        ratio = float(text)
    except ValueError:
        ratio = 0.0
    if not 0 < ratio <= 1:
        raise LMSArgumentError(f"{MEMORY_RATIO} is {text!r}; needed a share above 0, at most 1")
    return round(1 - ratio, 6)
