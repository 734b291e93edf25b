"""Errors that a user can act on."""

import re
from collections.abc import Mapping


class LmsrunError(Exception):
    """One clear line for a person: what was found, what was needed, what to try.

    The command line prints it without a traceback and exits with ``exit_code``.
    """

    exit_code = 2

    def named_by(self, origins: Mapping[str, str]) -> "LmsrunError":
        """Return the same error, beginning with how its option was really written.

        Args:
            origins: Such as ``{"gpus": "lmsrun.toml: gpus"}``, for what was not left at its default.
        """
        text = str(self)
        option = re.match(r"--([a-z-]+)", text)
        origin = origins.get(option[1].replace("-", "_")) if option else None
        return type(self)(origin + text[option.end() :]) if option and origin else self


class UsageError(LmsrunError):
    """The request itself is wrong: an option, a file, a value. Nothing was started."""


class TopologyError(LmsrunError):
    """A topology source could not be read or contradicts itself."""


class TopologyLimitError(TopologyError):
    """A topology source holds more than a machine can have."""


class PlanError(LmsrunError):
    """The request cannot be placed on this machine."""


class JobError(LmsrunError):
    """The job could not be started or kept running, although the request was sound."""

    exit_code = 1
