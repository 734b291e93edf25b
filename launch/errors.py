"""Errors that a user can act on."""


class LmsrunError(Exception):
    """One clear line for a person: what was found, what was needed, what to try.

    The command line prints it without a traceback and exits with ``exit_code``.
    """

    exit_code = 2


class UsageError(LmsrunError):
    """The request itself is wrong: an option, a file, a value. Nothing was started."""


class TopologyError(LmsrunError):
    """A topology source could not be read or contradicts itself."""


class PlanError(LmsrunError):
    """The request cannot be placed on this machine."""


class JobError(LmsrunError):
    """The job could not be started or kept running, although the request was sound."""

    exit_code = 1
