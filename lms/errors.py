"""Errors of Large Model Support that a user can act on, and what to install against some of them."""

import shlex

REQUIREMENTS = {
    "tensorflow": ("tensorflow>=2.15,<2.22", "tf-keras>=2.15,<2.22"),
    "plot": ("matplotlib>=3.7",),
    "png": ("cairosvg>=2.7",),
}
"""What an extra of pyproject.toml brings, for texts: no index may have lmsrun itself, and so its extras."""


def pip_install(extra: str) -> str:
    """Return the command that installs what an extra brings, wherever lmsrun itself came from."""
    return f"pip install {shlex.join(REQUIREMENTS[extra])}"


class LMSError(RuntimeError):
    """LMS cannot do what was asked; the text says what was found, what was needed and what to try."""


class LMSArgumentError(LMSError, ValueError):
    """A parameter of IBM's classes is missing or matches nothing in the graph."""


class PlaceError(LMSError):
    """A file, folder or device that the configuration names cannot be used.

    Whoever names one wants it: a rank that cannot have it ends before it trains, instead of training without.
    """

    ends_rank = True


class StoreError(PlaceError):
    """The place that swapped bytes were to go to cannot take them."""


class BuildError(LMSError):
    """The swap ops could not be compiled or loaded; another transport can be used."""


class UnreadableError(LMSError):
    """A graph that LMS cannot plan; it trains as it is."""


class LMSWarning(UserWarning):
    """LMS is on, but cannot do all of what was asked; the text says why and what to change."""
