"""Man pages in mdoc(7), made from the pages: lmsrun(1), and one for each subcommand."""

import re
import textwrap
from collections.abc import Iterable

from lms import __version__
from lmsrun.help_text import SOURCES
from lmsrun.manual.pages import SUBCOMMANDS, Flag, Page, read_page

SECTION = "1"
_WIDTH = 78
_SHORT = "start bound ranks of TensorFlow jobs, with Large Model Support"
_ENVIRONMENT = (
    "Options of run are read from variables, too: the long name in capitals behind LMSRUN_, with _ for -. "
    "The settings of Large Model Support are the variables that begin with LMS_."
)
_EXIT = (
    ("0", "all went well"),
    ("1", "check found something missing, or the system refused something"),
    ("2", "the request cannot be met: one line says what was found, what was needed and what to try"),
    ("124", "a job stood still and was ended by --stall-kill"),
    ("128 + N", "the job was ended by signal N"),
    ("another", "the code of the first rank to fail"),
)


def page_names() -> tuple[str, ...]:
    """Name all pages, without their section."""
    return ("lmsrun", *(f"lmsrun-{name}" for name in SUBCOMMANDS))


def render_man(name: str, date: str) -> str:
    """One page.

    Args:
        name: One of ``page_names()``.
        date: When its content changed last, such as ``November 22, 2026``.
    """
    lines = [
        f'.\\" Made by scripts/man_pages.py of lmsrun {__version__}.',
        f".Dd {date}",
        f".Dt {name.upper()} {SECTION}",
        ".Os",
        ".Sh NAME",
        f".Nm {name}",
    ]
    if name == "lmsrun":
        lines += [f".Nd {_SHORT}", *_overview()]
    else:
        page = read_page(name.removeprefix("lmsrun-"))
        lines += [f".Nd {_lower_first(_first_sentence(page.about))}", *_subcommand(page)]
    others = [other for other in page_names() if other != name] if name == "lmsrun" else ["lmsrun"]
    lines.append(".Sh SEE ALSO")
    lines += [f".Xr {other} {SECTION} ," for other in sorted(others)]
    lines[-1] = lines[-1].removesuffix(" ,")
    return "\n".join(lines) + "\n"


def _overview() -> Iterable[str]:
    run = read_page("run")
    yield from _synopsis(run.usage)
    yield from (".Sh DESCRIPTION", *_text(run.about))
    yield from _text("Without a subcommand, run is meant.")
    yield ".Pp"
    yield "The subcommands, each with a page of its own:"
    yield ".Bl -tag -width Ds"
    for name in SUBCOMMANDS:
        yield f".It Xr lmsrun-{name} {SECTION}"
        yield from _text(_first_sentence(read_page(name).about) + ".")
    yield ".El"
    yield from (".Sh ENVIRONMENT", *_text(_ENVIRONMENT))
    yield ".Sh FILES"
    yield ".Bl -tag -width Ds"
    for path, text in (
        ("/etc/lmsrun.toml", "options of the site"),
        ("~/.config/lmsrun.toml", "options of the user"),
        ("./lmsrun.toml", "options of the folder, or [tool.lmsrun] of ./pyproject.toml"),
    ):
        yield f".It Pa {path}"
        yield from _text(text)
    yield from (".El", *_text(SOURCES))
    yield from (".Sh EXIT STATUS", ".Bl -tag -width Ds")
    for code, text in _EXIT:
        yield f".It {_argument(code)}"
        yield from _text(text)
    yield ".El"
    yield from _examples(run)


def _subcommand(page: Page) -> Iterable[str]:
    yield from _synopsis(page.usage)
    yield from (".Sh DESCRIPTION", *_text(page.about))
    for title, flags in page.groups:
        yield f".Ss {_escape(title)}"
        yield ".Bl -tag -width Ds"
        for flag in flags:
            yield _item(flag)
            yield from _text(_meaning(flag))
        yield ".El"
    if page.name in ("run", "plan"):
        yield ".Ss Where options may stand"
        yield from _text(SOURCES)
    yield from _examples(page)


def _synopsis(usage: str) -> Iterable[str]:
    """Write the usage as it stands: mdoc's own macros would say no more of what it means."""
    yield from (".Sh SYNOPSIS", ".Bd -literal")
    yield from (_begin(_escape(line.strip())) for line in usage.splitlines())
    yield ".Ed"


def _examples(page: Page) -> Iterable[str]:
    if not page.examples:
        return
    yield from (".Sh EXAMPLES", ".Bl -tag -width Ds")
    for line, meaning in page.examples:
        yield f".It Li {_argument(line)}"
        yield from _text(meaning)
    yield ".El"


def _item(flag: Flag) -> str:
    spellings = [*flag.spellings, flag.opposite] if flag.opposite else list(flag.spellings)
    value = f" Ar {_argument(flag.value.metavar)}" if flag.value else ""
    return ".It " + " , ".join(f"Fl {_escape(spelling[1:])}" for spelling in spellings) + value


def _meaning(flag: Flag) -> str:
    return flag.help + (f" (default {flag.default})" if flag.default else "")


def _first_sentence(about: str) -> str:
    """Return it without what a colon or a bracket adds: one line of ``apropos``."""
    first = " ".join(about.split()).partition(". ")[0].rstrip(".")
    return re.split(r": | \([^)]*, [^)]*,", first, maxsplit=1)[0]


def _lower_first(text: str) -> str:
    return text if text[1:2].isupper() else text[:1].lower() + text[1:]


def _text(text: str) -> Iterable[str]:
    """Write a paragraph; each sentence begins a line, as mdoc wants it."""
    for sentence in re.split(r"(?<=[.!?]) +(?=[A-Z])", " ".join(text.split())):
        for line in textwrap.wrap(_escape(sentence), _WIDTH, break_long_words=False, break_on_hyphens=False):
            yield _begin(line)


def _argument(text: str) -> str:
    """One argument of a macro, whatever is in it."""
    return '"' + _escape(text).replace('"', "\\(dq") + '"'


def _escape(text: str) -> str:
    return text.replace("\\", "\\e").replace("-", "\\-")


def _begin(line: str) -> str:
    """Return a line of text that no reader takes for a macro."""
    return f"\\&{line}" if line[:1] in (".", "'") else line
