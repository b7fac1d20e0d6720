"""How the command line is read: one line for a mistake, and what to write instead of an option that does not exist."""

import argparse
import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any, NoReturn

from nanovllm.engine_options import EngineOptions
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.option_hints import HINTS

WRONG_CALL = 2  # as argparse
_MISSING = "the following arguments are required: "
_OF_PYTHON = {"LLM": EngineOptions, "SamplingParams": SamplingParams}
_NUMBER = re.compile(r"-[0-9.]")
# A name in a hint for Python, with the value that may follow it.
_IN_HINT = re.compile(r"\b(use )?([a-z]+(?:_[a-z]+)*)(?:=('[a-z0-9_]+'|True))?(?![\w(=])")


class CommandParser(argparse.ArgumentParser):
    """Reads a command's arguments.

    Options are written out. If the command has an argument "model", it may also be given as --model. A mistake ends the
    process with status 2 and one or two lines.
    """

    def __init__(self, reads_options: bool = True, **options: Any):
        """reads_options: False leaves all arguments, as `words`, to another program."""
        super().__init__(**options, allow_abbrev=False)
        self._reads_options = reads_options

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        words = list(args or ())
        if not self._reads_options:
            return argparse.Namespace(words=words, **self._defaults), []
        if unknown := self._unknown_option(words):
            self.error(f"unknown option {unknown}: {self.hint(unknown)}")
        self._check_command(words)
        found, extra = super().parse_known_args(self._model_first(words), namespace)
        model = self.model_argument()
        if extra and model is not None and model.nargs == "?" and getattr(found, "model", None) is None:
            # Before Python 3.12.7 an argument that may be missing is so where an option precedes it.
            found.model = extra.pop(0)
        if extra:
            self.error(f"unexpected argument {extra[0]!r} (a text with spaces is quoted)")
        return found, extra

    def error(self, message: str) -> NoReturn:
        if message.startswith(_MISSING):
            missing = message.removeprefix(_MISSING)
            self.exit(WRONG_CALL, f"{self.prog}: missing: {missing} (usage: {self._short_usage()})\n")
        self.exit(WRONG_CALL, f"usage: {self._short_usage()}\n{self.prog}: {message}\n")

    def format_help(self) -> str:
        # argparse's usage names every option, as the list of options below it does.
        self.usage = self.usage or self._short_usage().replace("%", "%%")
        return super().format_help()

    def hint(self, option: str) -> str:
        """What to write instead of an option that this command does not have."""
        known = {_bare(each): each for each in self._option_string_actions if each.startswith("--")}
        name = _bare(option)
        if name in known:
            return f"did you mean {known[name]}?"
        key = option.lstrip("-").replace("-", "_")
        hints = HINTS["SamplingParams"] | HINTS["Config"] | HINTS["command"]
        if key in hints:
            return self._in_shell(hints[key])
        for of, declared in _OF_PYTHON.items():
            if key in {field.name for field in fields(declared)}:
                return f"it is an option of {of} in Python, and this command does without it"
        near = [full for bare, full in known.items() if bare.startswith(name)]
        near = near or [known[bare] for bare in difflib.get_close_matches(name, known, n=1, cutoff=0.7)]
        return f"did you mean {_either(near)}?" if near else f"{self.prog} --help lists what there is"

    def _in_shell(self, hint: str) -> str:
        """A hint for Python, with options as a shell writes them."""

        def replace(found: re.Match[str]) -> str:
            use, name, value = found.groups()
            option = f"--{name.replace('_', '-')}"
            if option not in self._option_string_actions or not (use or "_" in name or value):
                return found.group()
            value = "" if value in (None, "True") else f" {value[1:-1]}"
            return f"{use or ''}{option}{value}"

        return _IN_HINT.sub(replace, hint)

    def _unknown_option(self, words: Sequence[str]) -> str | None:
        """The first word that looks like an option and is none. argparse would speak of other mistakes before."""
        for word in words:
            if word == "--" or (self._subparsers and not word.startswith("-")):  # The others are the command's.
                return None
            name = word.split("=")[0]
            if len(word) < 2 or word[0] != "-" or " " in word or _NUMBER.match(word):
                continue
            is_short = word[1] != "-" and word[:2] in self._option_string_actions
            if name not in self._option_string_actions and not is_short:
                return name
        return None

    def _check_command(self, words: Sequence[str]) -> None:
        """A mistake if the command is none. argparse would list all of them, and not name the nearest."""
        if not self._subparsers:
            return
        known = next(list(action.choices or ()) for action in self._actions if action.dest == "command")
        name = next((word for word in words if not word.startswith("-")), None)
        if name is not None and name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            self.error(f"no command {name!r}: {f'did you mean {near[0]}?' if near else ', '.join(known)}")

    def model_argument(self) -> argparse.Action | None:
        return next((each for each in self._actions if each.dest == "model" and not each.option_strings), None)

    def _model_first(self, words: list[str]) -> list[str]:
        """The words with --model as the first argument, which is the model's place."""
        if self.model_argument() is None or "--model" not in self._option_string_actions:
            return words
        for i, word in enumerate(words):
            if word == "--":
                break
            if word.startswith("--model="):
                return [word.removeprefix("--model="), *words[:i], *words[i + 1 :]]
            if word == "--model" and i + 1 < len(words) and not words[i + 1].startswith("-"):
                return [words[i + 1], *words[:i], *words[i + 2 :]]
        return words

    def _short_usage(self) -> str:
        """Without options that may be missing."""
        if self.usage:
            return self.usage % {"prog": self.prog}
        formatter = self._get_formatter()
        format_args = formatter._format_args
        parts = []
        for action in self._actions:
            if action.option_strings and action.required:
                parts.append(f"{action.option_strings[0]} {format_args(action, action.dest.upper())}")
            elif not action.option_strings:
                parts.insert(0 if action.dest == "model" else len(parts), format_args(action, action.dest.upper()))
        return " ".join([self.prog, *parts, "[options]"])


def add_model(parser: CommandParser) -> None:
    """--model as another way to give a command's argument "model", if it has one."""
    if model := parser.model_argument():
        model.metavar = "MODEL"
        help = "another way to give MODEL"
        parser.add_argument("--model", action=_Again, metavar="MODEL", default=argparse.SUPPRESS, help=help)


class _Again(argparse.Action):
    """`CommandParser` has taken the first --model."""

    def __call__(self, parser: argparse.ArgumentParser, *args: Any) -> None:
        parser.error("argument --model: is given twice")


def _bare(option: str) -> str:
    return re.sub("[-_]", "", option).lower()


def _either(names: Iterable[str]) -> str:
    return " or ".join(names)
