"""Add IBM's names where they are absent, and never in place of what is there."""

import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from lms.device import ibm_counters as counters
from lms.tf_names import settings

PLACES = (("config.experimental", settings.SETTINGS), ("experimental", counters.GETTERS))
CONTRIB = "tensorflow.contrib"
PACKAGES = ("tensorflow_large_model_support", "tflms", f"{CONTRIB}.lms")
"""What the package of IBM's classes was called, the last of them in TensorFlow 1."""
_CLASSES = Path(__file__).resolve().parents[1] / "compat" / PACKAGES[0] / "__init__.py"


def install(tensorflow: Any = None) -> tuple[str, ...]:
    """Add IBM's names to TensorFlow, and let the import of IBM's packages find ours.

    Args:
        tensorflow: The module to add to; None imports it.

    Returns:
        The names that were added, as in ``tf.config.experimental.set_lms_enabled``; none the second time.
    """
    if tensorflow is None:
        tensorflow = importlib.import_module("tensorflow")
    if not any(isinstance(finder, _PackageFinder) for finder in sys.meta_path):
        sys.meta_path.append(_PackageFinder())
    added = []
    for where, functions in PLACES:
        for label, module in _modules(tensorflow, where):
            added += [f"{label}.{name}" for name in _add(module, functions)]
    return tuple(added)


def _modules(tensorflow: Any, where: str) -> Iterator[tuple[str, Any]]:
    """Yield the module at ``where``, in TensorFlow itself and in the copies of its API."""
    for version in ("", "compat.v1.", "compat.v2."):
        found = tensorflow
        for part in f"{version}{where}".split("."):
            found = getattr(found, part, None)
        if found is not None:
            yield f"tf.{version}{where}", found


def _add(module: Any, functions: dict[str, Callable[..., Any]]) -> list[str]:
    absent = [name for name in functions if not hasattr(module, name)]
    for name in absent:
        setattr(module, name, functions[name])
    return absent


class _PackageFinder:
    """Finds the packages of IBM's classes where no other finder knew one: ``lms`` may lie off ``sys.path``.

    ``tensorflow.contrib``, which TensorFlow 2 no longer has, holds nothing but ``lms`` then.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of our own package, which lies beside this file."""
        if fullname == CONTRIB:
            return ModuleSpec(fullname, None, is_package=True)
        if fullname not in PACKAGES:
            return None
        return importlib.util.spec_from_file_location(fullname, _CLASSES)
