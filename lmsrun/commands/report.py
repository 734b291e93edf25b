"""``lmsrun report``: one page of what a job did."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from launch.model.errors import UsageError
from lmsrun.command_steps import answer_wish
from lmsrun.options import OPTIONS, LaunchOptions
from lmsrun.sources.command_line import parse_argv

USAGE = "lmsrun report [--out FILE] RUN-FOLDER"
ABOUT = (
    "Write what a job did as one HTML page: the machine with its ranks, planned and verified, the step over "
    "time, the tensors at the peak, the allocator's pool, other policies. RUN-FOLDER is what --output-dir "
    "DIR made: DIR/latest is the last one. The page needs no network."
)
EXAMPLES = (("lmsrun report out/latest", "writes out/latest/report.html"),)
OPERAND = "RUN-FOLDER"
PAGE = "report.html"


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Write the page of a run folder."""
    parsed = parse_argv("report", argv)
    if answer_wish("report", parsed):
        return 0
    folders, values = list(parsed.program[:1]), dict(parsed.values)
    if behind := parsed.program[1:]:
        more = parse_argv("report", behind)  # Options may follow the folder, too.
        if answer_wish("report", more):
            return 0
        folders += more.program
        values |= more.values
    if len(folders) != 1 or not folders[0]:
        found = repr(" ".join(folders)) if folders else "none"
        raise UsageError(f"needed one run folder, such as out/latest; found {found}")
    from lmsrun.neighbours import find_places
    from lmsrun.report.recording import write_report

    folder = Path(folders[0])
    named = values.get("out")
    if named == "-":
        raise UsageError("--out - is no file; needed the name of one")
    out = Path(named or folder / PAGE)
    if out.suffix != ".html" and out.is_file() and out.resolve().parent == folder.resolve():
        raise UsageError(f"--out {out} is a file of that job; needed another one, such as {folder / PAGE}")
    try:
        places = find_places(environ.get(OPTIONS["jobs_dir"].env_name) or LaunchOptions.jobs_dir, environ)
        write_report(folder, out, places, is_named=bool(named))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        told = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise UsageError(f"{folder} holds values that no job of lmsrun writes ({told})") from None
    return 0
