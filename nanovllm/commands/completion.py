"""`nanovllm completion SHELL`: what makes a shell complete the commands and their options."""

import argparse
from typing import Any

SHELLS = ("bash", "zsh", "fish")
_WHERE = """\
Where it goes:
  bash  eval "$(nanovllm completion bash)"      in ~/.bashrc
  zsh   eval "$(nanovllm completion zsh)"       in ~/.zshrc, after compinit
  fish  nanovllm completion fish > ~/.config/fish/completions/nanovllm.fish"""


def add_completion(commands: Any, whole: argparse.ArgumentParser) -> None:
    """whole: the parser of all commands."""
    parser = commands.add_parser(
        "completion",
        help="print a script that makes a shell complete commands and options (needs the extra completion)",
        description="Print the script that makes a shell complete commands, options and their values.",
        epilog=_WHERE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help=" or ".join(SHELLS))
    parser.set_defaults(run=lambda options: _print_script(whole, options.shell))


def _print_script(whole: argparse.ArgumentParser, shell: str) -> int:
    try:
        import shtab
    except ModuleNotFoundError as error:
        raise ImportError("needs shtab: pip install 'nanovllm[completion]'") from error
    files = {"FILE": shtab.FILE, "FOLDER": shtab.DIRECTORY, "MODEL": shtab.DIRECTORY}
    for parser in (whole, *_commands(whole).values()):
        for action in parser._actions:
            if action.metavar in files:
                action.complete = files[action.metavar]  # type: ignore[attr-defined]
    print(shtab.complete(whole, shell), end="")
    return 0


def _commands(whole: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    return next(action.choices for action in whole._actions if isinstance(action, argparse._SubParsersAction))
