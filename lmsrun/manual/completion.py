"""Scripts by which bash, zsh and fish complete a command line of lmsrun, made from the pages.

A script holds all words: to complete one, a shell starts nothing. The words up to the program are read as
``lmsrun.sources`` reads them: options may take values, the first other word is the program or ``ddlrun``.
"""

import shlex
from collections.abc import Callable, Iterable

from launch.model.plan import MODULE
from lmsrun.manual.pages import SUBCOMMANDS, Flag, Page, Value, read_page

_EVERYWHERE = (Flag(("-h", "--help"), None, "print the help of this subcommand"),)
_WITH_MODULE = ("run", "plan", "fit")
_MODULE = Flag((MODULE,), None, "run a module of Python; all that follows belongs to it")
_VERSION = Flag(("-V", "--version"), None, "print the version of lmsrun")


def render_completion(shell: str) -> str:
    """Write the script for a shell, one of ``SHELLS``."""
    return _RENDER[shell]([read_page(name) for name in SUBCOMMANDS])


def _flags(page: Page) -> tuple[Flag, ...]:
    module = (_MODULE,) if page.name in _WITH_MODULE else ()
    version = (_VERSION,) if page.name in ("run", "plan") else ()
    return (*page.flags, *module, *version, *_EVERYWHERE)


def _spellings(flag: Flag) -> tuple[str, ...]:
    return (*flag.spellings, flag.opposite) if flag.opposite else flag.spellings


def _first_clause(text: str) -> str:
    """Return what fits beside an option in a shell's menu."""
    return text.partition(";")[0].partition("\n")[0]


def _first_sentence(page: Page) -> str:
    return " ".join(page.about.split()).partition(". ")[0].partition("; ")[0].rstrip(".")


def _fill(template: str, **parts: str) -> str:
    for name, text in parts.items():
        template = template.replace(f"@{name}@", text)
    return template


_BASH = """\
# bash completion of lmsrun, made by `lmsrun completion bash`
_lmsrun_words() {  # options, options that a value follows, words behind the options, their kind
    case $1 in
@commands@
    esac
}

_lmsrun_value() {  # words and kind of what follows an option of a subcommand
    case "$1 $2" in
@values@
    *) words='' kind=text ;;
    esac
}

_lmsrun_offer() {  # complete $cur with words, and with what is of a kind
    mapfile -t COMPREPLY < <(compgen -W "$1" -- "$cur")
    local found=()
    case $2 in
    files | program) mapfile -t found < <(compgen -f -- "$cur") ;;
    folders) mapfile -t found < <(compgen -d -- "$cur") ;;
    variables) mapfile -t found < <(compgen -e -- "$cur") ;;
    esac
    [[ $2 != text && $2 != variables ]] && compopt -o filenames 2>/dev/null
    COMPREPLY+=("${found[@]}")
}

_lmsrun() {
    local cur=${COMP_WORDS[COMP_CWORD]} command=run at=1 value word options valued words kind
    local IFS=$' \\t\\n'  # the user's own would not split words
    COMPREPLY=()
    case ${COMP_WORDS[1]} in
    @names@) ((COMP_CWORD > 1)) && command=${COMP_WORDS[1]} at=2 ;;
    esac
    _lmsrun_words "$command"
    while ((at < COMP_CWORD)); do
        word=${COMP_WORDS[at]}
        if [[ $valued == *" $word "* ]]; then
            value=$((at + 1))
            # bash takes the = of --option=value for a word
            [[ ${COMP_WORDS[value]} == = ]] && ((value < COMP_CWORD)) && ((value++))
            if ((value >= COMP_CWORD)); then
                [[ $cur == = ]] && cur=
                _lmsrun_value "$command" "$word"
                _lmsrun_offer "$words" "$kind"
                return
            fi
            at=$value
        elif [[ $word == ddlrun && $command == @running@ ]]; then
            command=ddlrun
            _lmsrun_words ddlrun
        elif [[ $word != -* || $word == -- || ($word == @module@ && $command == @programs@) ]]; then
            _lmsrun_offer "" files  # of the program, whatever it is
            return
        fi
        ((at++))
    done
    if [[ $cur == -* ]]; then
        _lmsrun_offer "$options" text
    else
        ((COMP_CWORD == 1)) && words="$words @all@"
        _lmsrun_offer "$words" "$kind"
    fi
}

complete -F _lmsrun lmsrun
"""


def _render_bash(pages: list[Page]) -> str:
    def commands() -> Iterable[str]:
        for page in pages:
            flags = _flags(page)
            words = " ".join(spelling for flag in flags for spelling in _spellings(flag))
            valued = " ".join(spelling for flag in flags if flag.value for spelling in flag.spellings)
            operand, kind = _words_and_kind(page.operand)
            yield f"    {page.name}) options='{words}' valued=' {valued} ' words='{operand}' kind={kind} ;;"

    def values() -> Iterable[str]:
        for page in pages:
            for flag in page.flags:
                words, kind = _words_and_kind(flag.value)
                if words or kind != "text":
                    names = " | ".join(f'"{page.name} {spelling}"' for spelling in flag.spellings)
                    yield f"    {names}) words='{words}' kind={kind} ;;"

    return _fill(
        _BASH,
        commands="\n".join(commands()),
        values="\n".join(values()),
        names=" | ".join(SUBCOMMANDS),
        all=" ".join(SUBCOMMANDS),
        module=MODULE,
        running="@(run|plan)",
        programs=f"@({'|'.join(_WITH_MODULE)})",
    )


def _words_and_kind(value: Value | None) -> tuple[str, str]:
    return (" ".join(value.words), value.kind) if value else ("", "text")


_ZSH = """\
#compdef lmsrun
# zsh completion of lmsrun, made by `lmsrun completion zsh`
_lmsrun() {
    local -a subcommands
    subcommands=(
@commands@
    )
    local command=run
    if (( CURRENT == 2 )) && [[ $words[2] != -* ]]; then
        _describe -t commands subcommand subcommands
        _files
        return
    fi
    if (( ${subcommands[(I)${words[2]}:*]} )); then
        command=$words[2]
        shift words
        (( CURRENT-- ))
    fi
    _lmsrun_$command
}

_lmsrun_program() {  # behind the options: the program, or IBM's launcher with options of its own
    if (( CURRENT > 1 )) && [[ $words[1] == ddlrun ]]; then
        _lmsrun_ddlrun
    else
        _files
    fi
}

@functions@

if [[ $funcstack[1] == _lmsrun ]]; then
    _lmsrun "$@"
else
    compdef _lmsrun lmsrun
fi
"""


def _render_zsh(pages: list[Page]) -> str:
    commands = [
        f"        {shlex.quote(page.name + ':' + _zsh_text(_first_sentence(page)))}" for page in pages
    ]
    functions = []
    for page in pages:
        specs = [spec for flag in _flags(page) for spec in _zsh_specs(flag)]
        if page.operand and page.operand.kind == "program":
            specs.append("'*::program:_lmsrun_program'")
        elif page.operand:
            specs.append(shlex.quote(f"1:{_zsh_value(page.operand)}"))
        body = " \\\n".join(f"        {spec}" for spec in specs)
        functions.append(f"_lmsrun_{page.name}() {{\n    _arguments -S -A '-*' \\\n{body}\n}}")
    return _fill(_ZSH, commands="\n".join(commands), functions="\n\n".join(functions))


def _zsh_specs(flag: Flag) -> Iterable[str]:
    about = f"[{_zsh_text(_first_clause(flag.help))}]"
    for spelling in flag.spellings:
        # With = behind it, an option takes its value in the same word or the next; with -np it is the next.
        long = "=" if flag.value and spelling.startswith("--") else ""
        value = f":{_zsh_value(flag.value)}" if flag.value else ""
        yield shlex.quote(f"*{spelling}{long}{about}{value}")
    if flag.opposite:
        yield shlex.quote(f"*{flag.opposite}[not: {about[1:]}")


def _zsh_value(value: Value) -> str:
    actions = {
        "files": "_files",
        "folders": "_files -/",
        "variables": "_parameters -g '*export*'",
        "program": "_files",
        "text": "",
    }
    action = f"({' '.join(value.words)})" if value.words else actions[value.kind]
    return f"{_zsh_text(value.metavar)}:{action}"


def _zsh_text(text: str) -> str:
    for character in "\\[]:":
        text = text.replace(character, f"\\{character}")
    return text


_FISH = """\
# fish completion of lmsrun, made by `lmsrun completion fish`
function __lmsrun_at -d 'Whether the options, or what follows them, of these subcommands are typed'
    set -l words (commandline -opc)[2..-1]
    set -l command run
    if set -q words[1]; and contains -- $words[1] @names@
        set command $words[1]
        set -e words[1]
    end
    while set -q words[1]
        set -l word $words[1]
        set -e words[1]
        if contains -- "$command $word" @valued@
            set -e words[1]
        else if test $word = ddlrun; and contains -- $command run plan
            set command ddlrun
        else if not string match -q -- '-*' $word; or test $word = --
            return 1
        else if test $word = @module@; and contains -- $command @programs@
            return 1
        end
    end
    contains -- $command $argv
end

function __lmsrun_first -d 'Whether a subcommand may stand here'
    test (count (commandline -opc)) -eq 1
end

@lines@
"""


_FISH_FOLDERS = "(__fish_complete_directories (commandline -ct))"


def _render_fish(pages: list[Page]) -> str:
    valued = [
        shlex.quote(f"{page.name} {spelling}")
        for page in pages
        for flag in page.flags
        if flag.value
        for spelling in flag.spellings
    ]
    lines = [
        f"complete -c lmsrun -n __lmsrun_first -a {page.name} -d {_fish_text(_first_sentence(page))}"
        for page in pages
    ]
    sharing: dict[Flag, list[str]] = {}
    for page in pages:
        for flag in _flags(page):
            sharing.setdefault(flag, []).append(page.name)
    for flag, names in sharing.items():
        where = f"complete -c lmsrun -n '__lmsrun_at {' '.join(names)}'"
        about = _fish_text(_first_clause(flag.help))
        lines.append(f"{where} {_fish_spellings(flag.spellings)} -d {about}{_fish_value(flag.value)}")
        if flag.opposite:
            lines.append(
                f"{where} -l {flag.opposite[2:]} -d {_fish_text('not: ' + _first_clause(flag.help))}"
            )
    for page in pages:
        where = f"complete -c lmsrun -n '__lmsrun_at {page.name}'"
        words, kind = _words_and_kind(page.operand)
        if kind == "folders":
            words = _FISH_FOLDERS
        if kind in ("folders", "text"):
            lines.append(f"{where} -f" + (f" -a '{words}'" if words else ""))
    return _fill(
        _FISH,
        names=" ".join(SUBCOMMANDS),
        valued=" ".join(valued),
        module=MODULE,
        programs=" ".join(_WITH_MODULE),
        lines="\n".join(lines),
    )


def _fish_spellings(spellings: tuple[str, ...]) -> str:
    words = []
    for spelling in spellings:
        name = spelling.lstrip("-")
        kind = "-l" if spelling.startswith("--") else "-s" if len(name) == 1 else "-o"
        words.append(f"{kind} {name}")
    return " ".join(words)


def _fish_value(value: Value | None) -> str:
    if value is None:
        return ""
    if value.words:
        return f" -x -a '{' '.join(value.words)}'"
    offered = {
        "folders": f" -x -a '{_FISH_FOLDERS}'",
        "variables": " -x -a '(set -xn)'",
        "text": " -x",
    }
    return offered.get(value.kind, " -r -F")


def _fish_text(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


_RENDER: dict[str, Callable[[list[Page]], str]] = {
    "bash": _render_bash,
    "zsh": _render_zsh,
    "fish": _render_fish,
}
SHELLS = tuple(_RENDER)
"""The shells that a script can be made for."""
