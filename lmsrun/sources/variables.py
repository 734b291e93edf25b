"""The variables of the environment: those that are options, those that are not, those of an outer job."""

from collections.abc import Mapping

from launch.model.errors import UsageError
from launch.model.settings import ENV_PREFIX
from lms.config import KUBERNETES_SERVICE, REPORT_VARIABLE
from lmsrun.options import BY_SHORT_FLAG, OPTIONS

FOREIGN_VARIABLES = frozenset(
    {
        f"{ENV_PREFIX}{name}"
        for name in (
            "JOB_ID",
            "RECEIPT_DIR",
            "RECEIPT_LINES",
            "RENDEZVOUS_PORT",
            "CONTROL",
            "CONTROL_KEY",
            "FAILURE_FILE",
            "LINE_BUFFERED",
            "EXPECT",
            "REPLAN",
            "JOB_NOTE",
            "BUSY",
            "RANK_OUTPUT",
            "TF_HOSTS",
            "ATTEMPT",
            "VENV",
        )
    }
)
"""Variables with our prefix that are no option of the command line (or one under a name of its own)."""
_INSTALLERS = frozenset(
    {"ROOT", "HOME", "DIR", "BASE", "PREFIX", "PATH", "BIN", "LIB", "INC", "INCLUDE", "VERSION"}
)
"""What environment modules and Spack set behind the name of a package, on purpose and for others to read."""
_MISSPELT = 0.7
"""How like an option's the name of a variable is, from 0 to 1, that somebody has misspelt."""
_SENT = f"{ENV_PREFIX}SENT_"
"""Begins the variables by which a rank knows, after an exec too, which receipts it has sent as lines."""

_OF_OUTER_JOB = frozenset(
    f"{ENV_PREFIX}{name}"
    for name in (
        *("CONTROL", "CONTROL_KEY", "RECEIPT_LINES", "RENDEZVOUS_PORT", "FAILURE_FILE", "LINE_BUFFERED"),
        *("EXPECT", "REPLAN", "BUSY", "RANK_OUTPUT", "TF_HOSTS", "STDIN"),
    )
) | {REPORT_VARIABLE, "HOROVOD_THREAD_AFFINITY"}
"""What a rank's lmsrun told it of its own job, and is wrong in a job that the rank starts."""


def leave_outer_job(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without what a job in which lmsrun itself is a rank has told that rank.

    Its id and its note stay: by them this job knows that the ranks around it are its own.
    """
    if not environ.get(f"{ENV_PREFIX}JOB_ID"):
        return dict(environ)
    return {
        name: value
        for name, value in environ.items()
        if name not in _OF_OUTER_JOB and not name.startswith(_SENT)
    }


def check_variables(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Refuse ``LMSRUN_*`` variables that are nearly an option: a misspelt one would silently do nothing.

    What environment modules set for a package of our name, and Kubernetes for a Service of such a name in
    every pod of its namespace, is no mistake.

    Returns:
        A warning for every other variable that is not read.

    Raises:
        UsageError: Naming the nearest variable that exists.
    """
    known = {declared.env_name for declared in OPTIONS.values()} | FOREIGN_VARIABLES
    unread = []
    for name in sorted(environ):
        word = name.removeprefix(ENV_PREFIX)
        if word in (name, *_INSTALLERS) or name in known or name.startswith(_SENT):
            continue
        if KUBERNETES_SERVICE.search(name):
            continue
        short = BY_SHORT_FLAG.get(word.lower())
        near = short.env_name if short else _misspelt(word)
        if near:
            raise UsageError(f"unknown variable {name}; rename it to {near}, or unset it")
        unread.append(f"{name} is no option of lmsrun, and is not read")
    return tuple(unread)


def _misspelt(word: str) -> str | None:
    """Find the variable of which a name without our prefix is a misspelling."""
    from difflib import get_close_matches  # Only a variable that is no option pays for it.

    names = (declared.env_name for declared in OPTIONS.values())
    known = {name.removeprefix(ENV_PREFIX).replace("_", ""): name for name in sorted(names)}
    near = get_close_matches(word.replace("_", ""), known, 1, cutoff=_MISSPELT)
    return known[near[0]] if near else None
