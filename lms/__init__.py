"""Large Model Support on stock TensorFlow. Importing this package imports no TensorFlow."""

import sys
import types

from lms.config import ConfigError, LMSConfig
from lms.enable import State, disable, enable, plot, report, state
from lms.errors import LMSError
from lms.estimate import estimate
from lms.profile import profile
from lms.version import __version__ as __version__

__all__ = [
    "ConfigError",
    "LMSConfig",
    "LMSError",
    "State",
    "disable",
    "enable",
    "estimate",
    "plot",
    "profile",
    "report",
    "state",
]


class _Package(types.ModuleType):
    """Keeps ``lms.enable`` and ``lms.report`` functions: importing files of these names would bind them."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in __all__ and isinstance(value, types.ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
