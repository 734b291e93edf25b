"""The constructor parameters of both generations of IBM's ``LMS``, as one request to the engine.

A call is of the first generation if it names a parameter that only that one had, or begins with optimizer
scopes; else it is of the second.
"""

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from lms.config import LMSConfig, Policy
from lms.errors import LMSArgumentError

MEMORY_RATIO = "TF_LMS_SIMULATOR_MEM_RATIO"
"""The share of the device that the second generation's tuner planned for."""


@dataclass(frozen=True)
class Request:
    """What one call of ``LMS(...)`` asked for."""

    generation: Literal[1, 2]
    config: LMSConfig
    shown: Mapping[str, object]
    """What is logged when editing starts, as the script gave it."""
    graph: Any = None


def parse_call(args: tuple[Any, ...], keywords: Mapping[str, Any], environ: Mapping[str, str]) -> Request:
    """Read the arguments of ``LMS(...)``; what no parameter of it says is as the ``LMS_*`` variables have it.

    Raises:
        TypeError: For parameters that no generation had, or that belong to different ones.
        LMSArgumentError: If the first generation's optimizer scopes are missing.
        ConfigError: If a number is outside what its parameter allows.
    """
    base = replace(LMSConfig.from_env(environ), enabled=True, mode="graph")
    if not is_first_generation(args, keywords):
        return _second(base, environ, *args, **keywords)
    if not args and "optimizer_scopes" not in keywords:
        keywords = {"optimizer_scopes": (), **keywords}
    return _first(base, *args, **keywords)


def is_first_generation(args: tuple[Any, ...], keywords: Mapping[str, Any]) -> bool:
    """Whether these are arguments of ``LMS`` 0.1."""
    own = inspect.signature(_first).parameters.keys() - inspect.signature(_second).parameters.keys()
    return bool(own.intersection(keywords)) or bool(args and not isinstance(args[0], int))


def _first(
    base: LMSConfig,
    optimizer_scopes: Iterable[str],
    graph: Any = None,
    starting_scope: str | None = None,
    starting_op_names: Iterable[str] | None = None,
    excl_scopes: Iterable[str] = (),
    incl_scopes: Iterable[str] = (),
    excl_types: Iterable[str] = (),
    incl_types: Iterable[str] = (),
    lb: int = 1,
    ub: int = 10000,
    n_tensors: int = -1,
    fuse_swapins: bool = False,
    ctrld_strategy: Any = "chain_rule",
    swap_branches: bool = False,
    branch_threshold: int = 0,
    debug: bool = False,
    debug_level: int = 1,
    cpu_device: str = "/cpu:0",
) -> Request:
    scopes = names_of(optimizer_scopes)
    if not scopes:
        raise LMSArgumentError(
            "no optimizer scope is given; needed the name scopes under which the optimizer makes its "
            "gradients, as in LMS({'adam_optimizer'})"
        )
    _require_host(cpu_device)
    config = replace(
        base,
        policy="threshold",
        lb=lb,
        ub=ub,
        n_tensors=n_tensors,
        fuse_swapins=fuse_swapins,
        ctrld_strategy=ctrld_strategy,
        swap_branches=swap_branches,
        # Decides nothing without swap_branches; not being the default, it says whose rules apply.
        branch_threshold=branch_threshold if swap_branches else max(1, branch_threshold),
        optimizer_scopes=scopes,
        starting_scope=starting_scope,
        starting_op_names=names_of(starting_op_names or ()),
        excl_scopes=names_of(excl_scopes),
        incl_scopes=names_of(incl_scopes),
        excl_types=names_of(excl_types),
        incl_types=names_of(incl_types),
        debug=debug,
    )
    shown = {
        "n_tensors": "all tensors" if n_tensors < 0 else n_tensors,
        "lb": lb,
        "ub": ub,
        "ctrld_strategy": ctrld_strategy,
        "fuse_swapins": fuse_swapins,
        "swap_branches": swap_branches,
        "branch_threshold": branch_threshold,
    }
    return Request(1, config, shown, graph)


def _second(
    base: LMSConfig,
    environ: Mapping[str, str],
    swapout_threshold: int = -1,
    swapin_groupby: int = -1,
    swapin_ahead: int = -1,
    sync_mode: int = 0,
    serialization: Iterable[int | str] = (),
    serialization_by_size: float = 0,
    debug: bool = False,
    debug_level: int = 1,
    cpu_device: str = "/cpu:0",
    gpu_device: str | None = None,
) -> Request:
    _require_host(cpu_device)
    given = (swapout_threshold, swapin_groupby, swapin_ahead)
    forced = bool(sync_mode or serialization or serialization_by_size) or any(value != -1 for value in given)
    policy: Policy = "threshold" if forced else "auto"
    config = replace(
        base,
        policy=policy,
        margin=_margin(environ, base.margin),
        swapout_threshold=swapout_threshold,
        swapin_groupby=swapin_groupby,
        swapin_ahead=swapin_ahead,
        sync_mode=sync_mode,
        serialization=tuple(str(level) for level in serialization),
        serialization_by_size=float(serialization_by_size),
        debug=debug,
    )
    shown = {
        "swapout_threshold": swapout_threshold,
        "swapin_groupby": swapin_groupby,
        "swapin_ahead": swapin_ahead,
        "sync_mode": sync_mode,
        "serialization": list(config.serialization),
        "serialization_by_size": serialization_by_size,
    }
    if gpu_device is not None:
        shown["gpu_device"] = f"{gpu_device} (the first visible GPU is the one that is planned for)"
    return Request(2, config, shown)


def names_of(value: Iterable[str]) -> tuple[str, ...]:
    """A set of names in their order; a single text is one name, not its letters."""
    return tuple(sorted({value} if isinstance(value, str) else set(value)))


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
