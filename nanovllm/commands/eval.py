"""`nanovllm eval MODEL`: lm-evaluation-harness and its options, with MODEL and hints as in the other commands."""

import argparse
import json
import re
from collections.abc import Container, Sequence
from dataclasses import fields
from typing import Any

from nanovllm import __version__
from nanovllm.commands.parser import CommandParser
from nanovllm.engine_options import EngineOptions
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.quick_exit import QuickExit

_OURS = "nanovllm"  # as the harness calls this engine
_OTHER_SUBCOMMANDS = ("ls", "validate")
_MODEL, _MODEL_ARGS, _CONFIG = ("--model", "-M"), ("--model_args", "-a"), ("--config", "-C")
_OPTION = re.compile(r"--([a-z]+(?:-[a-z]+)+)")
_PRETRAINED = re.compile(r"(^|,|[{\s\"'])pretrained[\"']?\s*[=:]")


def add_eval(commands: Any) -> None:
    parser = commands.add_parser(
        "eval", help="run lm-evaluation-harness (needs the extra eval)", add_help=False, reads_options=False
    )
    parser.set_defaults(run=_eval, interrupted="without a result")


def _eval(options: argparse.Namespace) -> int:
    if options.words == ["--version"]:
        print(f"nanovllm {__version__}")
        return 0
    try:
        with QuickExit():
            from lm_eval._cli import HarnessCLI
            from lm_eval.api.registry import model_registry

            from nanovllm.integrations.lm_eval import main as run_harness
    except ModuleNotFoundError as error:
        if error.name != "lm_eval":
            raise
        raise ImportError("needs lm-evaluation-harness: pip install 'nanovllm[eval]'") from error
    words = options.words
    if words[:1] not in ([name] for name in _OTHER_SUBCOMMANDS):
        harness = HarnessCLI()._subparsers.choices["run"]
        words = harness_words(words, harness, [*model_registry.keys(), _OURS])
    run_harness(words)
    return 0


def harness_words(words: Sequence[str], harness: argparse.ArgumentParser, classes: Container[str]) -> list[str]:
    """The harness's words for those of this command. A mistake ends the process as `CommandParser.error`.

    Args:
        words: MODEL or --model MODEL, and the harness's own.
        harness: reads the harness's words.
        classes: what its --model may be; any other is a model.
    """
    parser = _EvalParser(
        prog="nanovllm eval",
        usage="%(prog)s MODEL --tasks TASK [options]",
        description="Evaluate a model, a directory or a hub id, with this engine. All options are those of "
        "lm-evaluation-harness. Options of the engine go into --model_args, as max_model_len=4096.",
        parents=[harness],
        add_help=False,
    )
    parser._option_string_actions["--model"].help = "another way to give MODEL; or a class of the harness, such as hf"
    words = list(words[1:] if words[:1] == ["run"] else words)
    if unknown := parser._unknown_option(words):
        parser.error(f"unknown option {unknown}: {parser.hint(unknown)}")
    if {"-h", "--help"} & set(words):
        parser.print_help()
        parser.exit()
    models = [words.pop(0)] if words and not words[0].startswith("-") else []
    kind, rest = _OURS, list[str]()
    has_kind = False
    while words:
        word = words.pop(0)
        name, is_joined, value = word.partition("=")
        if name not in _MODEL:
            rest.append(word)
            continue
        if not is_joined:
            if not words:
                parser.error("argument --model/-M: expected one argument")
            value = words.pop(0)
        if value in classes:
            kind, has_kind = value, True
        else:
            models.append(value)
    given = {word.split("=")[0] for word in rest}
    if len(models) > 1 or (models and _has_pretrained(rest)):
        parser.error("the model is given twice")
    if not models and not has_kind and given.isdisjoint(_CONFIG) and not _has_pretrained(rest):
        parser.error("the following arguments are required: MODEL")
    # JSON, because a path may have commas.
    model = ["--model_args", json.dumps({"pretrained": models[0]})] if models else []
    return ["run", *(["--model", kind] if models or has_kind else []), *model, *rest]


def _has_pretrained(words: Sequence[str]) -> bool:
    """Whether the model is among the --model_args."""
    is_theirs = False
    for word in words:
        name, is_joined, value = word.partition("=")
        if word.startswith("-"):
            is_theirs = name in _MODEL_ARGS
            word = value if is_joined else ""
        if is_theirs and _PRETRAINED.search(word):
            return True
    return False


class _EvalParser(CommandParser):
    """Knows the harness's options."""

    def hint(self, option: str) -> str:
        key = option.lstrip("-").replace("-", "_")
        if key in _names(EngineOptions):
            return f"write --model_args {key}=..."
        if key in _names(SamplingParams):
            return f"write --gen_kwargs {key}=..."
        return _OPTION.sub(_as_argument, super().hint(option))


def _as_argument(option: re.Match[str]) -> str:
    """An option of other commands as this one has it."""
    key = option.group(1).replace("-", "_")
    return f"--model_args {key}=..." if key in _names(EngineOptions) else option.group()


def _names(declared: Any) -> set[str]:
    return {field.name for field in fields(declared)}
