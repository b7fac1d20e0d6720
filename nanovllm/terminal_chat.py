"""`nanovllm chat MODEL`: a conversation in a terminal."""

import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

from nanovllm.engine.text.chat import Conversation
from nanovllm.engine.text.formats.answers import AnswerFormat
from nanovllm.llm import LLM
from nanovllm.sampling_params import SamplingParams

_HELP = """\
/clear   forget the conversation
/exit    end; so does Ctrl-D
Ctrl-C stops an answer. What was said of it stays in the conversation."""
_DIM, _PLAIN = "\033[2m", "\033[0m"


def chat_in_terminal(
    model: str,
    system: str | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
    sampling: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    """Answer the lines of standard input, each with the conversation so far, until it ends or says /exit.

    Args:
        model, options: as LLM takes them. One sequence runs at a time unless options say otherwise.
        system: a system message, which also stands before a conversation that /clear has begun anew.
        chat_template_kwargs: variables of the template.
        sampling: options of SamplingParams, instead of what the model's generation_config.json recommends. An answer
            may be as long as the engine allows, unless max_tokens is given.

    Raises:
        ValueError, TypeError, OSError: a wrong option, a model without a chat template; as LLM and LLM.chat.
    """
    SamplingParams(**(sampling or {}))  # A wrong option is found before the weights are loaded.
    with LLM(model, **{"max_num_seqs": 1} | options) as llm:
        params = replace(llm.get_default_sampling_params(), **{"max_tokens": None} | (sampling or {}))
        answers = llm.answer_format()
        start: Conversation = [] if system is None else [{"role": "system", "content": system}]
        _render(
            llm, [*start, {"role": "user", "content": "a"}], chat_template_kwargs
        )  # Raises if there is no template.
        conversation = list(start)
        is_terminal = sys.stdin.isatty()
        if is_terminal:
            with suppress(ImportError):  # There is none on Windows.
                import readline  # noqa: F401  (input() then edits lines and remembers them)
            print(f"Talking to {model}.\n{_HELP}")
        for text in _lines(is_terminal):
            match text.strip():
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


def _lines(is_terminal: bool) -> Iterator[str]:
    while True:
        try:
            text = input("> " if is_terminal else "")
        except EOFError:
            return
        except KeyboardInterrupt:
            print("\n/exit ends.")
            continue
        yield text


def _render(llm: LLM, conversation: Conversation, chat_template_kwargs: dict[str, Any] | None) -> list[int]:
    options = {"add_generation_prompt": True, "continue_final_message": False}
    (token_ids,) = llm.prompt_encoder.encode_chats(conversation, None, chat_template_kwargs, None, **options)
    return token_ids


def _answer(llm: LLM, answers: AnswerFormat, token_ids: list[int], params: SamplingParams) -> dict[str, str]:
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
