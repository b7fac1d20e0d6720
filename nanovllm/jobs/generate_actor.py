"""GenerateActor: an engine in an actor of Ray Data, which works on several blocks at once."""

import logging
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from typing import TYPE_CHECKING, Any

import torch

from nanovllm import LLM
from nanovllm.jobs.arguments import Arguments, Model, check_one_engine
from nanovllm.jobs.arrow_rows import arrow_rows
from nanovllm.jobs.columns import column_name
from nanovllm.jobs.inputs import RawLine
from nanovllm.jobs.lines import Line, LineFormat, Row, read_id
from nanovllm.jobs.prepared import Prepared
from nanovllm.jobs.receipts import row_with_receipt
from nanovllm.jobs.task import Output, Task
from nanovllm.jobs.writer import error_row
from nanovllm.utils.text_json import to_json
from nanovllm.utils.threads import available_cores

if TYPE_CHECKING:
    import pyarrow as pa

logger = logging.getLogger(__name__)

# Blocks that an actor works on. Together they should have a few times max_num_seqs lines, because a block is held until
# its longest answer is complete.
_BLOCKS_AT_ONCE, _BATCH = 8, 256
_BLOCKS_AHEAD = 2  # at the actor, and not begun
# Blocks of them would fill the memory: a row of a page takes as much as 10,000 rows of text.
_NO_IMAGES = "GenerateActor reads none; run_batch does, also with Ray (replicas, ray_address)"


Done = Callable[[tuple[Prepared, Output]], object]  # takes a line and its RequestOutput


class SharedEngine:
    """An engine with a thread of its own. Requests of all threads join the batch as they come."""

    def __init__(self, llm: LLM, task: Task, on_error: Callable[[], object] = lambda: None):
        """on_error: called if a step fails, after which nothing is answered any more."""
        self.llm, self._task = llm, task
        self._on_error = on_error
        self._error: BaseException | None = None
        self._requests: queue.SimpleQueue[deque[tuple[Prepared, Done]]] = queue.SimpleQueue()
        # By the positions that lines have here: theirs are those of their blocks.
        self._done: dict[int, tuple[int, Done]] = {}
        self._numbers = count()
        threading.Thread(target=self._run, name="nanovllm-engine", daemon=True).start()

    def submit(self, lines: Iterable[Prepared], done: Done) -> None:
        """Lines that have no error, and whose prompts are token ids. What cannot be served gets an output with one."""
        self._requests.put(deque((each, done) for each in lines))

    def answer(self, lines: list[Prepared]) -> list[tuple[Prepared, Output]]:
        """Wait for the outputs of lines, some of which may have an error."""
        outputs: queue.SimpleQueue[tuple[Prepared, Output]] = queue.SimpleQueue()
        good = [each for each in lines if each.line is not None]
        self.submit(good, outputs.put)
        found: list[tuple[Prepared, Output]] = [(each, {"error": each.error}) for each in lines if each.line is None]
        found += [outputs.get() for _ in good]
        return sorted(found, key=lambda pair: pair[0].position)

    def check(self) -> None:
        """Raises what has ended the engine, if something has."""
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            for prepared, output in self._task.answer(self.llm, self._lines()):
                position, done = self._done.pop(prepared.position)
                done((prepared._replace(position=position), output))
        except BaseException as error:
            logger.exception("The engine has died")
            self._error = error
            self._on_error()

    def _lines(self) -> Iterator[Prepared | None]:
        """None where no line waits and the engine has other work."""
        while True:
            try:
                requests = self._requests.get(block=not self._done)
            except queue.Empty:
                yield None
                continue
            while requests:  # None is kept here: with its images, a line is the engine's alone.
                prepared, done = requests.popleft()
                number = next(self._numbers)
                self._done[number] = prepared.position, done
                yield prepared._replace(position=number)


class GenerateActor:
    """Answers the rows of a Ray dataset: `dataset.map_batches(GenerateActor, **GenerateActor.pool(model, replicas=8))`.

    A row is a line as run_batch reads it: a prompt, and perhaps parameters of its own. All columns are kept. These are
    added: text, finish_reason, num_prompt_tokens and num_completion_tokens; samples, logprobs and prompt_logprobs,
    which are JSON; reasoning with split_reasoning; and error, which says why a row has no answer and is null for all
    others. Columns of the input with such a name become `input_text` and so on. Needs Ray: pip install 'ray[data]'
    pyarrow.
    """

    def __init__(
        self,
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
        seed: int | None = None,
        num_threads: int = 1,
        **options: Any,
    ):
        """num_threads: of torch, which Ray sets to one. The others are those of run_batch."""
        self._arguments = Arguments(
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
            seed=seed,
        )
        self._responder = self._arguments.responder()
        self._engine = start_engine(self._arguments, num_threads, _end_process)
        self._format: LineFormat = self._arguments.line_format  # type: ignore[assignment]
        self._preparer = self._arguments.task.preparer(
            self._engine.llm.get_tokenizer(), self._arguments.max_len, self._arguments.chat_format, _NO_IMAGES
        )

    @staticmethod
    def pool(model: str | os.PathLike[str], *, replicas: int = 1, **options: Any) -> Row:
        """Arguments of `map_batches` for a pool of actors.

        Args:
            model: a directory that all machines have, or a hub id.
            replicas: engines. Each has tensor_parallel_size GPUs, if the cluster has any.
            options: of GenerateActor.
        """
        import ray
        from ray.data import ActorPoolStrategy

        check_one_engine(options)

        use_gpus = options.get("device") != "cpu" and ray.cluster_resources().get("GPU", 0) > 0
        compute = ActorPoolStrategy(
            size=replicas,
            max_concurrent_calls_per_actor=_BLOCKS_AT_ONCE,
            max_tasks_in_flight_per_actor=_BLOCKS_AT_ONCE + _BLOCKS_AHEAD,
            enable_true_multi_threading=True,
        )
        num_threads = max(1, available_cores() // replicas)
        return {
            "fn_constructor_kwargs": options | {"model": os.fspath(model), "num_threads": num_threads},
            "compute": compute,
            "num_gpus": options.get("tensor_parallel_size", 1) if use_gpus else 0,
            # Reads, writes and the filter of a checkpoint want whole CPUs. If actors had any part of one, a machine of
            # one or two CPUs would never start a pipeline.
            "num_cpus": 0,
            "batch_size": _BATCH,  # Ray refuses actors with GPUs without it.
            "batch_format": "pyarrow",
        }

    def __call__(self, batch: "pa.Table") -> "pa.Table":
        import pyarrow as pa

        rows = arrow_rows(batch)
        prepared = self._preparer.prepare(enumerate(map(_raw_line, range(len(rows)), rows)))
        answers = []
        for each, output in self._engine.answer(prepared):
            if "error" in output:
                answers.append({"error": error_row(each, output["error"])["error"]})
            else:
                line: Line = each.line._replace(columns={}, openai=None)  # type: ignore[union-attr]
                answers.append(row_with_receipt(each.id, line, output, self._responder))
        added = (*self._format.added_keys[1:], "error")
        table = batch.rename_columns([column_name(name, batch.column_names, added) for name in batch.column_names])
        for name in added:
            values = [answer.get(name) for answer in answers]
            if name in self._format.json_keys:
                values = [None if value is None else to_json(value) for value in values]
            table = table.append_column(name, pa.array(values, pa.int64() if name.startswith("num_") else pa.string()))
        return table


def start_engine(arguments: Arguments, num_threads: int, on_error: Callable[[], object] = lambda: None) -> SharedEngine:
    torch.set_num_threads(num_threads)
    llm = LLM(arguments.model, **arguments.engine_options)  # type: ignore[arg-type]
    return SharedEngine(llm, arguments.task, on_error)


def _end_process() -> None:
    """Ray then starts a new actor. To one that lives on it would send retries."""
    os._exit(1)


def _raw_line(number: int, row: Row) -> RawLine:
    try:
        line_id = read_id(row)
    except ValueError:  # An id of any type may name a row of a dataset.
        line_id = str(row.get("id", row.get("custom_id")))
    return RawLine(number if line_id is None else line_id, "", number, row, None, 0)
