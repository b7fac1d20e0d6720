"""`nanovllm generate MODEL PROMPT`: one prompt in, its answer out."""

import argparse
import logging
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nanovllm.commands.options import add_one_answer, given_of_one_answer
from nanovllm.commands.verbosity import QUIET
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.quick_exit import QuickExit

if TYPE_CHECKING:
    from nanovllm.engine.text.outputs import ChatDelta, StreamDelta
    from nanovllm.llm import LLM

logger = logging.getLogger(__name__)

_STANDARD_INPUT = "-"
_DIM, _PLAIN = "\033[2m", "\033[0m"


def add_generate(commands: Any) -> None:
    parser = commands.add_parser(
        "generate",
        help="answer one prompt",
        description="Answer one prompt, and print the answer as it is computed. The prompt is a message to the model, "
        "if it has a chat template; a model without one, and --raw, continue the text. What a model thinks goes to "
        "standard error. Sampling is what the model's generation_config.json recommends unless options say otherwise.",
    )
    parser.add_argument("model", help="a directory or a hub id")
    parser.add_argument("prompt", metavar="PROMPT", help="a text; - reads it from standard input")
    parser.add_argument("--raw", action="store_true", help="continue the text as it stands, without a chat template")
    add_one_answer(parser)
    parser.set_defaults(run=_generate, parser=parser, interrupted="the answer is not complete")


def _generate(options: argparse.Namespace) -> int:
    if options.raw:
        for name in ("system", "chat_template_kwargs"):
            if getattr(options, name) is not None:
                options.parser.error(f"argument --{name.replace('_', '-')}: not allowed with --raw")
    with QuickExit():
        from nanovllm.terminal_chat import find_model

    given = given_of_one_answer(options)
    if options.prompt == _STANDARD_INPUT:
        given["prompt"] = _read_standard_input()
    SamplingParams(**given["sampling"])  # A wrong option is found before the weights are loaded.
    model = find_model(given.pop("model"), **_of_engine(given))
    if model is not None:
        _print_answer(model, is_quiet=options.verbosity == QUIET, **given)
    return 0


def _read_standard_input() -> str:
    """Without the end of its last line, which a text that `echo` or an editor has written does not mean."""
    if sys.stdin.isatty():
        print("Write the prompt. Ctrl-D ends it.", file=sys.stderr)
    try:
        text = sys.stdin.read()
    except UnicodeDecodeError as error:
        raise ValueError(f"standard input: is not text in {error.encoding}: {error.reason}") from error
    if not text.strip():
        raise ValueError("standard input: is empty; it must hold the prompt")
    return text.removesuffix("\n").removesuffix("\r")


def _of_engine(given: dict[str, Any]) -> dict[str, Any]:
    own = ("prompt", "raw", "system", "chat_template_kwargs", "sampling")
    return {name: value for name, value in given.items() if name not in own}


def _print_answer(
    model: str,
    prompt: str,
    raw: bool,
    sampling: dict[str, Any],
    is_quiet: bool,
    system: str | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    """The answer goes to standard output and nothing else does."""
    with QuickExit():
        from nanovllm.llm import LLM

    with LLM(model, **options) as llm:
        params = replace(llm.get_default_sampling_params(), **{"max_tokens": None} | sampling)
        deltas: Iterator[Any]
        if raw or not _has_template(llm, system, chat_template_kwargs):
            deltas = llm.stream([prompt], params)
        else:
            messages = [] if system is None else [{"role": "system", "content": system}]
            messages.append({"role": "user", "content": prompt})
            deltas = llm.stream_chat(messages, params, chat_template_kwargs=chat_template_kwargs, split_reasoning=True)
        _print_deltas(deltas, is_quiet)


def _has_template(llm: "LLM", system: str | None, chat_template_kwargs: dict[str, Any] | None) -> bool:
    has_template = bool(llm.prompt_encoder.template_text())
    if not has_template and not (system is None and chat_template_kwargs is None):
        option = "--chat-template-kwargs" if system is None else "--system"
        raise ValueError(f"{option}: the model has no chat template, and so no place for it")
    return has_template


def _print_deltas(deltas: "Iterator[ChatDelta | StreamDelta]", is_quiet: bool) -> None:
    is_terminal = sys.stderr.isatty()
    dim, plain = (_DIM, _PLAIN) if is_terminal else ("", "")
    start, num_tokens, has_thought, text, last = time.perf_counter(), 0, False, "", ""
    delta: Any = {}
    for delta in deltas:
        num_tokens += len(delta["token_ids"])
        thought, text = delta.get("reasoning"), delta.get("content", delta["text"])
        if thought and not is_quiet:
            has_thought = True
            print(f"{dim}{thought}{plain}", end="", file=sys.stderr, flush=True)
        if text:
            if has_thought and not last:
                print("\n", file=sys.stderr, flush=True)
            last = text
            print(text, end="", flush=True)
    if has_thought and not last:
        print(file=sys.stderr, flush=True)
    if not last.endswith("\n"):
        print(flush=True)
    if "error" in delta:
        raise RuntimeError(delta["error"])
    if is_terminal and sys.stdout.isatty() and not is_quiet:  # After a pipe it would stand in the text.
        speed = num_tokens / (time.perf_counter() - start)
        print(f"{dim}{num_tokens} tokens, {speed:.0f} a second{plain}", file=sys.stderr)
    if delta.get("finish_reason") == "length":
        logger.warning("The answer was cut after %d tokens.", num_tokens)
