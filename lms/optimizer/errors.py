"""The plug-in's error."""

from lms.errors import LMSError


class PluginError(LMSError):
    """The plug-in cannot be loaded or asked; the text says what was found and needed, and what to try."""
