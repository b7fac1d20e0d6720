"""`nanovllm chat MODEL`: a conversation in a terminal."""

import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.sampling_params import SamplingParams
from nanovllm.terminal_input import find_command, read_messages, terminal_reader
from nanovllm.utils.quick_exit import QuickExit

if TYPE_CHECKING:
    from nanovllm.engine.text.chat import Conversation
    from nanovllm.engine.text.formats.answers import AnswerFormat
    from nanovllm.llm import LLM

_HELP = """\
/clear   forget the conversation
/exit    end; so does Ctrl-D
Ctrl-C stops an answer. What was said of it stays in the conversation.
A pasted text of several lines is one message."""
_COMMANDS = "/clear", "/exit", "/help", "/quit", "/?"
_DIM, _PLAIN = "\033[2m", "\033[0m"


def chat_in_terminal(
    model: str,
    system: str | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
    sampling: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    """Answer the messages of standard input, each with the conversation so far, until it ends or says /exit.

    Without a terminal each line is a message.

    Args:
        model, options: as LLM takes them. One sequence runs at a time unless options say otherwise. A name that is no
            folder may mean a model of the hub (`hub_model`): in a terminal it is offered, elsewhere refused.
        system: a system message, which also stands before a conversation that /clear has begun anew.
        chat_template_kwargs: variables of the template.
        sampling: options of SamplingParams, instead of what the model's generation_config.json recommends. An answer
            may be as long as the engine allows, unless max_tokens is given.

    Raises:
        ValueError, TypeError, OSError: a wrong option, a model without a chat template; as LLM and LLM.chat.
    """
    SamplingParams(**(sampling or {}))  # A wrong option is found before the weights are loaded.
    options = {"max_num_seqs": 1} | options
    found = find_model(model, **options)
    if found is None:
        return
    model = found
    with QuickExit():
        from nanovllm.llm import LLM

    with LLM(model, **options) as llm:
        params = replace(llm.get_default_sampling_params(), **{"max_tokens": None} | (sampling or {}))
        answers = llm.answer_format()
        start: Conversation = [] if system is None else [{"role": "system", "content": system}]
        _render(
            llm, [*start, {"role": "user", "content": "a"}], chat_template_kwargs
        )  # Raises if there is no template.
        conversation = list(start)
        read_line, is_waiting = terminal_reader()
        if sys.stdin.isatty():
            print(f"Talking to {model}.\n{_HELP}")
        for text in read_messages(read_line, is_waiting, _COMMANDS):
            try:
                command = find_command(text, _COMMANDS)
            except ValueError as error:
                print(error, file=sys.stderr)
                continue
            match command or text.strip():
                case "":
                    continue
                case "/exit" | "/quit":
                    return
                case "/clear":
                    conversation = list(start)
                    continue
                case "/help" | "/?":
                    print(_HELP)
                    continue
            question = {"role": "user", "content": text}
            try:
                answer = _answer(llm, answers, _render(llm, [*conversation, question], chat_template_kwargs), params)
            except (ValueError, RuntimeError) as error:
                print(f"{error}\n/clear forgets the conversation.", file=sys.stderr)
                continue
            conversation += [question, {"role": "assistant", **answer}]


def find_model(model: str, **options: Any) -> str | None:
    """What LLM takes for a model's name: the name, or a model of the hub that it means, if that may be downloaded. In a
    terminal a person is asked; None if they decline. Raises FileNotFoundError as `hub_model`."""
    if options.get("use_tqdm", True):
        _tell(f"Starting {model} ...")  # The imports alone take seconds.
    if Path(model).expanduser().exists():
        return model
    with QuickExit():
        from nanovllm.model_offer import hub_model

    chosen = hub_model(model, _ask if sys.stdin.isatty() and sys.stderr.isatty() else None, _tell, **options)
    if chosen is None:
        _tell("Nothing was downloaded.")
    return chosen


def _ask(question: str) -> str:
    """As input(), which asks on standard output where that is the terminal."""
    print(question, end="", file=sys.stderr, flush=True)
    return sys.stdin.readline()


def _tell(text: str) -> None:
    """Say something while a person waits. It is no part of what is said."""
    if sys.stderr is not None and sys.stderr.isatty():
        print(text, file=sys.stderr, flush=True)


def _render(llm: "LLM", conversation: "Conversation", chat_template_kwargs: dict[str, Any] | None) -> list[int]:
    options = {"add_generation_prompt": True, "continue_final_message": False}
    (token_ids,) = llm.prompt_encoder.encode_chats(conversation, None, chat_template_kwargs, None, **options)
    return token_ids


def _answer(llm: "LLM", answers: "AnswerFormat", token_ids: list[int], params: SamplingParams) -> dict[str, str]:
    """Print an answer as it comes. Returns its message, as far as it came before Ctrl-C."""
    is_terminal = sys.stdout.isatty()
    dim, plain = (_DIM, _PLAIN) if is_terminal else ("", "")
    splitter = answers.splitter(is_open=answers.opens_reasoning(token_ids))
    thought, content, num_tokens, start = "", "", 0, time.perf_counter()
    with suppress(KeyboardInterrupt):
        for delta in llm.stream([token_ids], answers.with_tags(params)):
            reasoning, text, _ = splitter.push(delta["text"] or "", delta["token_ids"], delta.get("finish_reason"))
            if text and thought and not content:
                print("\n")
            thought, content, num_tokens = thought + reasoning, content + text, num_tokens + len(delta["token_ids"])
            print(f"{dim}{reasoning}{plain}" if reasoning else "", text, sep="", end="", flush=True)
            if "error" in delta:
                raise RuntimeError(delta["error"])
    seconds = time.perf_counter() - start
    print()
    if is_terminal:
        print(f"{_DIM}{num_tokens} tokens, {num_tokens / seconds:.0f} a second{_PLAIN}")
    return {"content": content} | ({"reasoning_content": thought} if thought else {})
