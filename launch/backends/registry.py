"""The launchers by name; the module of one is imported when it is asked for."""

import importlib
import os
import shutil
from collections.abc import Mapping

from launch.backends.backend import Backend
from launch.model.cluster_settings import LAUNCHERS, ClusterSettings

FOREIGN = tuple(name for name in LAUNCHERS if name not in ("auto", "local"))
"""Those that start ranks in our place; each has the module of its name, and that its ``BACKEND``."""


def load_backend(name: str) -> Backend:
    """Import the launcher of a name out of ``FOREIGN``."""
    backend: Backend = importlib.import_module(f"launch.backends.{name}").BACKEND
    return backend


def find_launchers(settings: ClusterSettings, environ: Mapping[str, str]) -> dict[str, str]:
    """Find the launchers that are installed here, each with the path of its program."""
    path = environ.get("PATH", os.defpath)
    found = {}
    for name in FOREIGN:
        programs = (shutil.which(word, path=path) for word in load_backend(name).executables(settings))
        if program := next(filter(None, programs), None):
            found[name] = program
    return found
