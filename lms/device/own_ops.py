"""Load the ops that plans may have beside those of a transport, compiled if the cache does not hold them."""

from collections.abc import Mapping

from lms.native.build import ASSIGN, FILLER
from lms.native.library import load_library


def load_filler(environ: Mapping[str, str]) -> None:
    """Load the op of :mod:`lms.simulate.fillers`.

    Raises:
        BuildError: If it cannot be compiled or loaded.
    """
    load_library(FILLER, environ)


def load_assignment(environ: Mapping[str, str]) -> None:
    """Load the op of :mod:`lms.ir.assignments`.

    Raises:
        BuildError: If it cannot be compiled or loaded.
    """
    load_library(ASSIGN, environ)
