"""IBM's package of this name, on a stock TensorFlow: ``LMS`` of both generations, hook and callback."""

from lms import __version__
from lms.compat.classes import LMS, LMSHook, LMSKerasCallback, LMSSessionRunHook

__all__ = ["LMS", "LMSHook", "LMSKerasCallback", "LMSSessionRunHook", "__version__"]
