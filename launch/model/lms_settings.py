"""The one LMS configuration of a job, from all of its sources."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from launch.model.errors import UsageError
from launch.model.settings import PlanSettings
from lms.config import ConfigError, LMSConfig


def read_lms_config(
    settings: PlanSettings,
    environ: Mapping[str, str],
    table: Mapping[str, Any] | None = None,
    files: Sequence[str] = (),
) -> LMSConfig:
    """On by default < ``[lms]`` of the options' files < ``--lms-config`` < ``LMS_*`` < ``--[no-]lms``.

    Args:
        settings: The job's.
        environ: Where ``LMS_*`` variables are looked for.
        table: The ``[lms]`` table of the options' files.
        files: The names of those that have one.

    Raises:
        UsageError: If a source cannot be read, or holds what LMS cannot be told.
    """
    try:
        config = _read_table(table or {}, files)
        if settings.lms_config:
            config = LMSConfig.from_toml(Path(settings.lms_config), config)
        config = LMSConfig.from_env(environ, config)
    except ConfigError as error:
        raise UsageError(f"LMS: {error}") from None
    _refuse_nul(config)
    return config if settings.lms is None else replace(config, enabled=settings.lms)


def _refuse_nul(config: LMSConfig) -> None:
    """Refuse what TOML can write and no variable can hold, by which ranks are told of the config."""
    for declared in fields(config):
        value = getattr(config, declared.name)
        texts = value if isinstance(value, tuple) else (value,)
        if any(isinstance(text, str) and "\0" in text for text in texts):
            raise UsageError(f"LMS: {declared.name} holds a NUL character; needed a text without one")


def _read_table(table: Mapping[str, Any], files: Sequence[str]) -> LMSConfig:
    try:
        return LMSConfig.from_mapping(table, LMSConfig(enabled=True))
    except ConfigError as error:
        raise ConfigError(f"[lms] of {' and '.join(files)}: {error}") from None
