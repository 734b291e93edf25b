"""Switch LMS on and off; ``lms.enable()`` chooses the implementation once, before the first tensor."""

import dataclasses
import importlib
import os
import threading
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lms.config import ConfigError, LMSConfig, doubtful_variables
from lms.errors import LMSError
from lms.errors import LMSWarning as LMSWarning
from lms.process_state import tensorflow_is_initialised

ActiveMode = Literal["native", "graph", "off"]

HOST_LIMIT_NAMES = ("TF_GPU_HOST_MEM_LIMIT_IN_MB", "TF_CUDA_HOST_MEM_LIMIT_IN_MB")
"""TensorFlow reads the first since 1.14, the second before."""
XLA_FLAGS, LAZY = "TF_XLA_FLAGS", "tf_xla_enable_lazy_compilation"
"""The variable with XLA's flags, and the flag for clusters that may also run uncompiled."""
OF_A_JOB = "LMSRUN_JOB_ID"
"""Set in the ranks of a job, whose launcher has told of doubtful variables once for all of them."""

PAUSED_WHY = "the training that LMS was on for is over"
"""The reason why LMS plans nothing for now: only a callback had asked for it."""
FORBIDDEN = "LMS_ENABLED switches it off"


@dataclass(frozen=True)
class State:
    """The state of LMS in this process."""

    config: LMSConfig
    active: bool
    mode: ActiveMode
    why: str
    """One line: what is at work, or the reason why nothing is."""


@dataclass(frozen=True)
class _Applied:
    state: State
    from_environment: bool


_lock = threading.RLock()
_applied: _Applied | None = None


def enable(config: LMSConfig | None = None, **overrides: Any) -> State:
    """Switch Large Model Support on in this process, at most once.

    Call it right after ``import tensorflow``, before the first tensor. Under ``lmsrun`` this has already
    happened with the job's configuration; an explicit call before the first step replaces that one.

    Args:
        config: What to do; None is what the ``LMS_*`` variables ask for.
        **overrides: Fields of LMSConfig that replace those of ``config``, as in ``enable(policy="all")``.

    Returns:
        What is now at work; with mode ``off`` or ``LMS_ENABLED=0`` nothing is, and ``why`` says so.

    Raises:
        ConfigError: If a field has a value it cannot have.
        LMSError: If another configuration is already at work, this TensorFlow cannot do what was asked, or it
            is tracing a function.
    """
    global _applied
    wanted = _wanted(config, overrides, os.environ)
    from_environment = config is None and not overrides
    if wanted.enabled and wanted.mode != "off":
        if not os.environ.get(OF_A_JOB):
            for doubt in doubtful_variables(os.environ):
                warnings.warn(doubt, LMSWarning, stacklevel=2)
        # First of all: in a rank this import itself enables the job's configuration. Not under the lock, for
        # which another thread's import of TensorFlow would wait while this one waits for that import.
        importlib.import_module("tensorflow")
    with _lock:
        if _applied is not None:
            rests = _rests(_applied.state)
            if wanted == _applied.state.config or (from_environment and not rests):
                _applied = dataclasses.replace(_applied, state=_kept(_applied.state))
                return _applied.state
        if wanted.enabled and wanted.mode != "off":
            _refuse_tracing()
        if _applied is not None:
            _withdraw(_applied, wanted)
            _applied = None
        result = _start(wanted)
        _applied = _Applied(result, from_environment)
        return result


def _refuse_tracing() -> None:
    """Refuse to switch LMS on while a function is traced: AutoGraph's copy of this module would know of it.

    Raises:
        LMSError: If TensorFlow is tracing a function in this thread.
    """
    if getattr(importlib.import_module("tensorflow"), "inside_function", bool)():
        raise LMSError(
            "lms.enable() was called in a function that TensorFlow is tracing; needed a call before that"
        )


def disable() -> None:
    """Switch LMS off: steps run as TensorFlow has optimized them, also those that ran with swaps before.

    Raises:
        LMSError: If IBM's TensorFlow has already initialised its devices with LMS on.
    """
    global _applied
    with _lock:
        if _applied is None:
            return
        _stop(_applied.state)
        _applied = None


def rest() -> None:
    """Plan nothing for now; ``report`` and ``plot`` tell what LMS did, and ``enable`` goes on with it."""
    global _applied
    with _lock:
        if _applied is not None and _applied.state.mode == "graph":
            importlib.import_module("lms.engine.installation").pause()
            resting = dataclasses.replace(_applied.state, active=False, why=PAUSED_WHY)
            _applied = dataclasses.replace(_applied, state=resting)


def state() -> State | None:
    """Return the state that ``enable`` has set up, or None."""
    return _applied.state if _applied is not None else None


def report() -> Any:
    """Report what LMS did so far; the value prints as a table: peaks, swapped tensors and bytes, refusals.

    Where LMS plans nothing (``lmsrun --no-lms``, IBM's TensorFlow, no ``lms.enable()``) it holds no graph and
    says so, with the peak that the allocator measured: a script runs with and without LMS.
    """
    idle = _why_idle()
    if idle:
        return importlib.import_module("lms.report.collector").report_idle(idle)
    return importlib.import_module("lms.engine.installation").report()


def plot(path: str | os.PathLike[str]) -> None:
    """Draw the memory of the last planned step, before and after, into a PNG or SVG file.

    Where LMS plans nothing it writes nothing, and a warning says so.

    Raises:
        LMSError: If nothing has been planned yet, or the file cannot be written.
    """
    idle = _why_idle()
    if idle:
        warnings.warn(f"lms.plot() draws nothing: LMS is {idle}", LMSWarning, stacklevel=2)
    else:
        importlib.import_module("lms.engine.installation").plot(path)


def _wanted(config: LMSConfig | None, overrides: Mapping[str, Any], environ: Mapping[str, str]) -> LMSConfig:
    """Return the configuration that a call asks for: LMS on, unless an override or a variable forbids it."""
    base = LMSConfig.from_env(environ) if config is None else config
    if not isinstance(base, LMSConfig):
        raise ConfigError(f"lms.enable({config!r}); needed an LMSConfig, or fields: enable(policy='auto')")
    enabled = overrides.get("enabled", not _is_forbidden(environ))
    return LMSConfig.from_mapping({**overrides, "enabled": enabled}, base)


def _is_forbidden(environ: Mapping[str, str]) -> bool:
    word = environ.get("LMS_ENABLED", "")
    return word != "" and not LMSConfig.from_env({"LMS_ENABLED": word}).enabled


def _start(config: LMSConfig) -> State:
    if not config.enabled or config.mode == "off":
        why = "mode is off" if config.enabled else FORBIDDEN
        return State(config, active=False, mode="off", why=why)
    tensorflow = importlib.import_module("tensorflow")
    _set_host_limit(config, os.environ)
    _compile_at_once(config, os.environ)
    bootstrap = importlib.import_module("lms.bootstrap.sitecustomize")
    if config.mode != "graph" and bootstrap.has_native(tensorflow):
        try:
            bootstrap.enable_native(tensorflow, config.defrag)
        except RuntimeError as error:
            raise LMSError(f"{error}; call lms.enable() right after 'import tensorflow'") from error
        return State(config, active=True, mode="native", why="TensorFlow's own large model support is on")
    if config.mode == "native":
        found = f"TensorFlow {tensorflow.__version__} has no tf.config.experimental.set_lms_enabled"
        raise LMSError(f"{found}; mode native needs IBM's build; try mode auto or graph")
    if config.defrag:
        _choose_allocator()
    importlib.import_module("lms.compat").install(tensorflow)
    importlib.import_module("lms.engine.installation").install(config)
    return _at_work(config)


def _at_work(config: LMSConfig) -> State:
    return State(
        config, active=True, mode="graph", why=f"each step is planned before it runs, policy {config.policy}"
    )


def _rests(applied: State) -> bool:
    return applied.mode == "graph" and not applied.active


def _kept(applied: State) -> State:
    """Resume an engine that is paused or borrowed, as its configuration is asked for; return the state."""
    if applied.mode != "graph":
        return applied
    importlib.import_module("lms.engine.installation").resume()
    return applied if applied.active else _at_work(applied.config)


def _withdraw(applied: _Applied, wanted: LMSConfig) -> None:
    """Stop an earlier configuration, if only the environment asked for it and it has done nothing."""
    if applied.state.active and (not applied.from_environment or _has_worked(applied.state)):
        earlier = ", or enable it before the first step" if applied.from_environment else ""
        raise LMSError(
            f"LMS is already on with another configuration ({_differences(applied.state.config, wanted)}); "
            f"it is applied once: call lms.disable() first{earlier}"
        )
    _stop(applied.state)


def _has_worked(applied: State) -> bool:
    """Tell whether a configuration has had effects, so that it can no longer be replaced."""
    if applied.mode == "graph":
        return bool(importlib.import_module("lms.engine.installation").has_worked())
    return tensorflow_is_initialised()


def _stop(applied: State) -> None:
    if applied.mode == "graph":
        importlib.import_module("lms.engine.installation").uninstall()
    if applied.mode == "native":
        try:
            importlib.import_module("tensorflow").config.experimental.set_lms_enabled(False)
        except RuntimeError as error:
            raise LMSError(f"native LMS cannot be switched off any more: {error}") from error


def _differences(current: LMSConfig, wanted: LMSConfig) -> str:
    names = [field.name for field in dataclasses.fields(LMSConfig)]
    changed = [name for name in names if getattr(current, name) != getattr(wanted, name)]
    return ", ".join(f"{name}: {getattr(current, name)!r}, now {getattr(wanted, name)!r}" for name in changed)


def _set_host_limit(config: LMSConfig, environ: "os._Environ[str]") -> None:
    """Set TensorFlow's variable for pinned memory, which it reads only when it makes the pool."""
    if config.host_mem_limit_mb is not None:
        for name in HOST_LIMIT_NAMES:
            environ.setdefault(name, str(config.host_mem_limit_mb))


def _compile_at_once(config: LMSConfig, environ: "os._Environ[str]") -> None:
    """Have TensorFlow run segments compiled from the first time on; it reads the flag when XLA first works.

    Where a segment may also run uncompiled, what it reads was freed late: a step of 37 MiB took 55.
    """
    flags = environ.get(XLA_FLAGS, "")
    if config.xla == "auto" and LAZY not in flags:
        environ[XLA_FLAGS] = f"{flags} --{LAZY}=false".strip()


def _choose_allocator() -> None:
    """Choose TensorFlow's allocator against fragmentation, if there is still a choice; else warn."""
    try:
        importlib.import_module("lms.tf_names.settings").set_lms_defrag_enabled(True)
    except LMSError as error:
        warnings.warn(f"defrag has no effect: {error}", LMSWarning, stacklevel=4)


def _why_idle() -> str:
    """Return mode and reason where nothing is planned in this process; empty where mode graph is at work."""
    if _applied is not None:
        state = _applied.state
        return "" if state.mode == "graph" else f"{state.mode}: {state.why}"
    if _is_forbidden(os.environ):
        return f"off: {FORBIDDEN}"
    return "off: lms.enable() was not called, or lms.disable() was"
