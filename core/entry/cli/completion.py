"""`octavo completion SHELL`: a completion script, made from the commands' own parsers.

A generator of our own, not shtab: that one wants the whole program as one parser, which would import
every command at every start, and it writes nothing for fish.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from octavo.core.config import DTYPES, POLICIES
from octavo.core.entry.cli.settings import LOG_LEVELS

_INSTALL = """\
  bash   octavo completion bash > ~/.local/share/bash-completion/completions/octavo
  zsh    octavo completion zsh > "${fpath[1]}/_octavo"
  fish   octavo completion fish > ~/.config/fish/completions/octavo.fish"""
# Settings are checked where they are used, so their parsers do not list these.
_WORDS: dict[str, tuple[str, ...]] = {
    "dtype": DTYPES,
    "kv_cache_dtype": DTYPES,
    "scheduling_policy": POLICIES,
    "log_level": LOG_LEVELS,
}
_FILES = ("FILE", "DIR", "MODEL")


@dataclass(frozen=True, slots=True)
class Option:
    """A flag. takes: nothing, one of `words`, a file, or any value."""

    flag: str
    help: str
    takes: Literal["nothing", "word", "file", "value"]
    words: tuple[str, ...] = ()


@dataclass(slots=True)
class Command:
    """A command or an action of one. path: its words; words, files: what its arguments may be."""

    path: tuple[str, ...]
    help: str
    options: list[Option] = field(default_factory=list)
    words: tuple[str, ...] = ()
    files: bool = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = f"where to put it:\n{_INSTALL}"
    parser.add_argument("SHELL", choices=sorted(_SCRIPTS))


def run(options: argparse.Namespace) -> None:
    """Prints the script."""
    print(_SCRIPTS[options.SHELL](list(commands())))


def commands() -> Iterator[Command]:
    """Every command of this installation, the program itself first."""
    from octavo.core.entry.cli.main import available, command_parser
    from octavo.plugins.manager import plugins

    words = {**_WORDS, "device": ("auto", *(row.word for row in plugins().devices()))}
    here = available()
    top = Command((), "", words=tuple(here))
    top.options = [Option(f, "", "nothing") for f in ("--help", "--version")]
    yield top
    for name, text in here.items():
        parser, _ = command_parser(name)
        yield from _walk((name,), text, parser, words)


def _walk(
    path: tuple[str, ...],
    text: str,
    parser: argparse.ArgumentParser,
    words: dict[str, tuple[str, ...]],
) -> Iterator[Command]:
    found = Command(path, text)
    below = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found.words = tuple(action.choices)
            helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
            below += [(n, helps.get(n, ""), p) for n, p in action.choices.items()]
        elif action.option_strings:
            found.options += _options(action, words)
        elif action.choices:
            found.words = tuple(map(str, action.choices))
        else:
            found.files |= (action.metavar or action.dest) in _FILES
    yield found
    for name, summary, sub in below:
        yield from _walk((*path, name), summary, sub, words)


def _options(action: argparse.Action, words: dict[str, tuple[str, ...]]) -> Iterator[Option]:
    if action.help == argparse.SUPPRESS:
        return
    text = re.sub(r"\s+", " ", (action.help or "").replace("%%", "%"))
    allowed = tuple(map(str, action.choices or words.get(action.dest, ())))
    takes: Literal["nothing", "word", "file", "value"] = "value"
    if action.nargs == 0:
        takes = "nothing"
    elif allowed:
        takes = "word"
    elif action.metavar in _FILES:
        takes = "file"
    for flag in action.option_strings:
        if flag.startswith("--"):
            yield Option(flag, text, takes, allowed)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _cases(known: list[Command], word: str, value: str, files: str, rest: str) -> list[str]:
    """What may follow a flag: branches of `case "$at:$before"`, for bash and zsh alike."""
    lines = []
    for command in known:
        at = " ".join(command.path)
        groups: dict[str, list[str]] = {}
        for option in command.options:
            if option.takes == "nothing":
                continue
            does = {"word": word.format(" ".join(option.words)), "file": files, "value": value}
            groups.setdefault(does[option.takes], []).append(f'"{at}:{option.flag}"')
        lines += [f"        {'|'.join(flags)}) {does}; {rest} ;;" for does, flags in groups.items()]
    return lines


def _descend(known: list[Command]) -> list[str]:
    return [
        f'            "{" ".join(c.path[:-1])}:{c.path[-1]}") at="{" ".join(c.path)}" ;;'
        for c in known
        if c.path
    ]


def bash(known: list[Command]) -> str:
    """Completion for bash 4 and later."""
    plain = "compopt +o default +o bashdefault 2>/dev/null"
    word = plain + '; COMPREPLY=($(compgen -W "{}" -- "$cur"))'
    branches = []
    for command in known:
        flags = " ".join(option.flag for option in command.options)
        # Flags are offered where one is begun, or where nothing else can stand.
        branches.append(
            f'        "{" ".join(command.path)}") words="{" ".join(command.words)}" flags="{flags}"'
            f"{' files=1' if command.files else ''} ;;"
        )
    lines = [
        "# bash completion for octavo",
        "_octavo() {",
        '    local cur="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}"',
        '    local at="" words="" flags="" files="" i',
        "    COMPREPLY=()",
        "    for ((i = 1; i < COMP_CWORD; i++)); do",
        '        case "$at:${COMP_WORDS[i]}" in',
        *_descend(known),
        "        esac",
        "    done",
        '    case "$at:$before" in',
        *_cases(known, word, plain, ":", "return"),
        "    esac",
        '    case "$at" in',
        *branches,
        "    esac",
        f"    [[ -z $files ]] && {{ {plain}; }}",
        '    [[ $cur == -* || -z $words$files ]] && words="$words $flags"',
        '    COMPREPLY=($(compgen -W "$words" -- "$cur"))',
        "}",
        "complete -o bashdefault -o default -F _octavo octavo",
    ]
    return "\n".join(lines)


def zsh(known: list[Command]) -> str:
    """Completion for zsh, with descriptions."""
    branches = []
    helps = {command.path: command.help for command in known}
    for command in known:
        shown = [(word, helps.get((*command.path, word), "")) for word in command.words]
        shown += [(option.flag, option.help) for option in command.options]
        items = " ".join(_quoted(f"{name}:{text}" if text else name) for name, text in shown)
        files = " files=1" if command.files else ""
        branches.append(f'        "{" ".join(command.path)}") items=({items}){files} ;;')
    lines = [
        "#compdef octavo",
        "_octavo() {",
        '    local at="" before="${words[CURRENT-1]}" files="" i',
        "    local -a items",
        "    for ((i = 2; i < CURRENT; i++)); do",
        '        case "$at:${words[i]}" in',
        *_descend(known),
        "        esac",
        "    done",
        '    case "$at:$before" in',
        *_cases(known, "compadd -- {}", "_message value", "_files", "return"),
        "    esac",
        '    case "$at" in',
        *branches,
        "    esac",
        "    _describe octavo items",
        "    [[ -n $files && $PREFIX != -* ]] && _files",
        "}",
        'if [[ ${funcstack[1]} == _octavo ]]; then _octavo "$@"; else compdef _octavo octavo; fi',
    ]
    return "\n".join(lines)


def fish(known: list[Command]) -> str:
    """Completion for fish, with descriptions."""
    lines = ["# fish completion for octavo", "complete -c octavo -f"]
    helps = {command.path: command.help for command in known}
    for command in known:
        when = "__fish_use_subcommand"
        if command.path:
            parts = [f"__fish_seen_subcommand_from {word}" for word in command.path]
            if command.words:
                parts.append(f"not __fish_seen_subcommand_from {' '.join(command.words)}")
            when = "; and ".join(parts)
        base = f"complete -c octavo -n {_quoted(when)}"
        for word in command.words:
            text = helps.get((*command.path, word), "")
            lines.append(f"{base} -a {word} -d {_quoted(text)}")
        for option in command.options:
            takes = {
                "nothing": "",
                "word": f" -x -a {_quoted(' '.join(option.words))}",
                "file": " -r -F",
                "value": " -x",
            }[option.takes]
            lines.append(f"{base} -l {option.flag[2:]}{takes} -d {_quoted(option.help)}")
        if command.files:
            lines.append(f"{base} -F")
    return "\n".join(lines)


_SCRIPTS = {"bash": bash, "zsh": zsh, "fish": fish}
