"""``lmsrun build-horovod``: compile Horovod for the TensorFlow of this Python, and install it."""

from collections.abc import Mapping, Sequence

from lmsrun.manual.pages import Flag, Value

USAGE = "lmsrun build-horovod [--check] [--jobs N]"
ABOUT = (
    "Compile Horovod for the TensorFlow of this Python, keep the wheel, and install it: its last release "
    "does not compile against TensorFlow 2.14 and later as it is. A compiler and CMake are needed, and some "
    "minutes; what fits is taken from the cache the next time."
)
EXAMPLES = (("lmsrun build-horovod --check", "what is here and what is missing"),)


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Build or find the wheel and install it; returns 1 when that cannot be done."""
    if argv and argv[0] in ("-h", "--help"):
        from lmsrun.help_text import render_help

        print(render_help("build-horovod"))
        return 0
    from lmsrun.wheels.build_horovod import main as build

    return build(argv, environ)


def read_flags() -> tuple[Flag, ...]:
    """Its own options, for pages and shells."""
    from lmsrun.wheels.build_horovod import FLAGS

    return tuple(Flag((name,), Value(metavar) if metavar else None, text) for name, metavar, text in FLAGS)
