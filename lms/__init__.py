"""Large Model Support on stock TensorFlow. Importing this package imports no TensorFlow.

The functions below are imported at once, not on demand: ``lms.enable`` is a function here and a file there,
and the import system would put the module in the function's place on the file's first import. For the same
reason no other file may be called ``report``, ``plot``, ``state`` or ``disable``.
"""

from lms.config import ConfigError, LMSConfig
from lms.enable import State, disable, enable, plot, report, state
from lms.errors import LMSError

__all__ = ["ConfigError", "LMSConfig", "LMSError", "State", "disable", "enable", "plot", "report", "state"]
