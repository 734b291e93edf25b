"""``lmsrun completion``: a script that has a shell complete lmsrun's command line."""

from collections.abc import Mapping, Sequence

from launch.model.errors import UsageError
from lms.config import nearest
from lmsrun.help_text import render_help
from lmsrun.manual.completion import SHELLS, render_completion

USAGE = f"lmsrun completion {'|'.join(SHELLS)}"
ABOUT = (
    "Print a script that has a shell complete subcommands, options, their values and files. It is made from "
    "the options of this version; the shell never starts lmsrun to complete a word."
)
EXAMPLES = (
    ("source <(lmsrun completion bash)", "for this shell; in ~/.bashrc for all"),
    ("source <(lmsrun completion zsh)", "behind compinit in ~/.zshrc"),
    ("lmsrun completion fish | source", "in ~/.config/fish/config.fish"),
)
OPERAND = "|".join(SHELLS)


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Print the script."""
    del environ
    if argv and argv[0] in ("-h", "--help"):
        print(render_help("completion"))
        return 0
    if len(argv) != 1 or argv[0] not in SHELLS:
        found = repr(" ".join(argv)) if argv else "nothing"
        near = nearest(argv[0], SHELLS) if argv else ""
        raise UsageError(f"completion: found {found}{near}; needed one of {', '.join(SHELLS)}")
    print(render_completion(argv[0]), end="")
    return 0
