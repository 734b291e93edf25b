"""``lmsrun topo``: show a machine, or save it."""

import sys
from collections.abc import Mapping, Sequence

from launch.discover import read_machine
from launch.discover.saved import to_json
from launch.model.errors import UsageError
from launch.system.output_file import write_whole
from lmsrun.command_steps import answer_wish, read_sources, refuse_program, say, write_drawings
from lmsrun.file_checks import refuse_same_file
from lmsrun.render.plan import render_json
from lmsrun.render.topology import render_tree
from lmsrun.sources.command_line import parse_argv

USAGE = "lmsrun topo [options]"
ABOUT = "Show this machine, or a saved one: packages, NUMA nodes, cores, GPUs."
EXAMPLES = (
    ("lmsrun topo --save node.json", "for --topology node.json elsewhere"),
    ("lmsrun topo --svg node.svg", "a drawing of it"),
)


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Print or save the machine that a command line names."""
    parsed = parse_argv("topo", argv)
    if answer_wish("topo", parsed):
        return 0
    refuse_program("topo", parsed)
    options = read_sources(parsed, environ).options
    refuse_same_file(options, ("svg", "png", "save"))
    machine = read_machine(options.topology)
    if options.svg or options.png:
        from lmsrun.draw.machine import draw_machine

        write_drawings(draw_machine(machine, is_here=not options.topology), options, environ)
    if options.save:
        try:
            write_whole(options.save, render_json(to_json(machine)) + "\n")
        except OSError as error:
            raise UsageError(
                f"cannot write {options.save}: {error.strerror}; choose another --save"
            ) from None
        say(f"wrote {options.save}; replay it with --topology {options.save}")
    if options.json:
        print(render_json(to_json(machine)))
    elif not (options.save or options.svg or options.png):
        plain = not _takes_lines(sys.stdout.encoding)
        print(render_tree(machine, plain=plain, is_here=not options.topology))
    return 0


def _takes_lines(encoding: str | None) -> bool:
    """Whether a stream of this encoding can show the lines of a tree."""
    try:
        return bool("└├─│".encode(encoding or "ascii"))
    except (UnicodeEncodeError, LookupError):
        return False
