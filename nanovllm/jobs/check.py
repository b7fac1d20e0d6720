"""check_batch: what would fail, before anything is answered."""

import os
from collections.abc import Iterable
from typing import Any, NamedTuple, cast

from nanovllm import RequestChecker
from nanovllm.jobs.arguments import Arguments, Model, line_bar
from nanovllm.jobs.first_lines import check_first_lines
from nanovllm.jobs.inputs import Inputs, find_files, scan
from nanovllm.jobs.lines import Row
from nanovllm.jobs.reader import read
from nanovllm.jobs.writer import error_row

_MAX_ERRORS = 1000


class Check(NamedTuple):
    """What a look at the whole input has found."""

    num_lines: int
    num_failed: int  # lines that cannot be served
    num_prompt_tokens: int  # of the others
    max_completion_tokens: int  # that they may generate together
    errors: list[Row]  # the first 1,000, as rows of _errors.jsonl


def check_batch(
    input: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    model: Model,
    *,
    prompt_column: str | None = None,
    id_column: str = "id",
    template: str | None = None,
    system: str | None = None,
    chat_template: str | None = None,
    chat_template_kwargs: Row | None = None,
    line_parameters: bool = True,
    split_reasoning: bool = False,
    split_tool_calls: bool = False,
    use_tqdm: bool = True,
    **options: Any,
) -> Check:
    """Check every line of the input: its form, its id, its parameters, and its length by the tokenizer. Needs no GPU,
    reads no weights and writes nothing.

    Arguments and errors are those of run_batch. A KV cache that is smaller than max_model_len is not known here.
    """
    arguments = Arguments(
        model,
        options,
        prompt_column=prompt_column,
        id_column=id_column,
        template=template,
        system=system,
        chat_template=chat_template,
        chat_template_kwargs=chat_template_kwargs or {},
        line_parameters=line_parameters,
        split_reasoning=split_reasoning,
        split_tool_calls=split_tool_calls,
    )
    inputs = Inputs(find_files(input), id_column=id_column)
    with line_bar("Checking ids", use_tqdm) as bar:
        found = scan(inputs, bar.update)
    num_lines = found.num_lines
    arguments.tell_parameters(found.columns)
    if found.first_openai is None and found.columns:
        arguments.line_format.check_columns(found.columns)
    checker = cast(RequestChecker, arguments.checker())
    check_first_lines(arguments, inputs, checker, all_may_fail=True)
    num_failed = num_prompt_tokens = max_completion_tokens = 0
    errors: list[Row] = []
    with line_bar("Checking prompts", use_tqdm, num_lines) as bar:
        for batch in read(arguments.read_plan(inputs)):
            lines = [each.line for each in batch if each.line is not None]
            prompts: list[Any] = [line.prompt for line in lines]
            checked = iter(checker.check(prompts, [line.params for line in lines]))
            for prepared in batch:
                line = prepared.line
                error = prepared.error if line is None else next(checked)
                if line is not None and error is None:
                    length, params = len(line.prompt), line.params
                    most = min(params.max_tokens or checker.max_seq_len, checker.max_seq_len - length)
                    num_prompt_tokens += length
                    max_completion_tokens += params.n * most
                else:
                    num_failed += 1
                    errors += [error_row(prepared, str(error))] if len(errors) < _MAX_ERRORS else []
            bar.update(len(batch))
    return Check(num_lines, num_failed, num_prompt_tokens, max_completion_tokens, errors)
