"""A job on several GPUs or machines: Ray Data reads, sends blocks of lines to actors with an engine each, and writes.

A part is complete once it has its final name, as on one machine (folder.py). Its file is made in a folder of this run,
which the next run removes: workers may outlive their driver for a moment, and can complete no part any more.
"""

import logging
import os
import pickle
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import ray
from ray.data import DataContext, Datasink, Datasource, ReadTask, read_datasource
from ray.data.block import BlockMetadata

from nanovllm.jobs.arguments import Arguments, Cluster
from nanovllm.jobs.folder import ERRORS, AppendedFile, JobFolder, sync
from nanovllm.jobs.generate_actor import actor_pool, start_engine
from nanovllm.jobs.parquet import ParquetFormat
from nanovllm.jobs.reader import Prepared, ReadPlan, read
from nanovllm.jobs.text_json import to_json
from nanovllm.jobs.writer import make_rows

# Each block costs the driver milliseconds, so blocks are large. The first ones are small, so that work begins at once.
_FIRST_BLOCK, _BLOCK = 64, 256  # lines
BLOCKS_PER_PART = 4  # at least, except in the last one. A killed driver loses those that wait for others.

# A row of the dataset is a whole batch of lines, and a block is one row, which is never split. So a retry makes the
# same blocks, also if its answers are longer, and no line gets lost or comes twice.
_LINES = pa.schema([("lines", pa.binary())])  # a pickled list of Prepared
_ANSWERS = pa.schema([("answers", pa.list_(pa.string())), ("errors", pa.list_(pa.string()))])  # rows of output, in JSON
_BLOCK_BYTES = 1  # Ray ends a block behind the row with which it has as many.


def answer_on_ray(
    cluster: Cluster,
    plan: ReadPlan,
    lines_per_file: list[int],
    arguments: Arguments,
    folder: JobFolder,
    parquet: ParquetFormat | None,
    use_tqdm: bool,
) -> None:
    """Answer all lines of the plan. Raises RayError or OSError; what is complete by then stays."""
    sink = _Parts(folder, parquet)
    with _connected(cluster.address):
        options = arguments.engine_options
        num_engines = int(ray.cluster_resources().get("GPU", 0)) // options.get("tensor_parallel_size", 1)
        pool = actor_pool(cluster.replicas or max(1, num_engines), options, {"arguments": arguments})
        files = _Lines(_plans(plan, lines_per_file))
        with _context(use_tqdm):
            lines = read_datasource(files, override_num_blocks=len(plan.paths))
            answers = lines.map_batches(_AnswerLines, **pool)
            answers.write_datasink(sink)


@contextmanager
def _connected(address: str | None) -> Iterator[None]:
    """A block that uses the caller's connection, or one of its own."""
    if ray.is_initialized():
        yield
        return
    on_sigterm = signal.getsignal(signal.SIGTERM)
    quiet: Any = {"log_to_driver": False, "logging_level": logging.WARNING}
    ray.init(address, **quiet) if address else ray.init("local", include_dashboard=False, **quiet)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, on_sigterm)  # Ray has set one that aborts the process.
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def _context(use_tqdm: bool) -> Iterator[None]:
    context = DataContext.get_current().copy()
    context.target_max_block_size = _BLOCK_BYTES
    context.enable_progress_bars = use_tqdm and sys.stderr.isatty()
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    with DataContext.current(context):
        yield


# -- reading -----------------------------------------------------------------------------------------------------------


def _plans(plan: ReadPlan, lines_per_file: list[int]) -> list[ReadPlan]:
    """One for each file with unfinished lines."""
    is_done = np.split(plan.is_done, np.cumsum(lines_per_file)[:-1])
    plans = zip(plan.paths, plan.names, is_done, strict=True)
    return [plan._replace(paths=[path], names=[name], is_done=done) for path, name, done in plans if not np.all(done)]


class _Lines(Datasource):
    """Lines as requests, whose prompts are token ids. Lines with the same beginning are in the same block."""

    def __init__(self, plans: list[ReadPlan]):
        self._plans = plans

    def estimate_inmemory_data_size(self) -> int | None:
        return None

    def get_read_tasks(self, parallelism: int, *args: Any, **options: Any) -> list[ReadTask]:
        metadata = BlockMetadata(num_rows=None, size_bytes=None, exec_stats=None, input_files=None)
        return [ReadTask(partial(_read_blocks, plan), metadata, _LINES) for plan in self._plans]


def _read_blocks(plan: ReadPlan) -> Iterator[pa.Table]:
    lines, limit = list[Prepared](), _FIRST_BLOCK
    for batch in read(plan):
        lines += batch
        if len(lines) >= limit:
            yield pa.table([[pickle.dumps(lines)]], schema=_LINES)
            lines, limit = [], min(2 * limit, _BLOCK)
    if lines:
        yield pa.table([[pickle.dumps(lines)]], schema=_LINES)


# -- answering ---------------------------------------------------------------------------------------------------------


class _AnswerLines:
    def __init__(self, arguments: Arguments, num_threads: int):
        self._responder = arguments.responder()
        self._engine = start_engine(arguments, num_threads)

    def __call__(self, batch: pa.Table) -> pa.Table:
        lines: list[Prepared] = pickle.loads(batch["lines"][0].as_py())
        rows = make_rows(self._engine.answer(lines), self._responder)
        return pa.table([[[to_json(row) for row in kind]] for kind in rows], schema=_ANSWERS)


# -- writing -----------------------------------------------------------------------------------------------------------


class _Parts(Datasink):
    """Parts of a job's folder, one for each task, and errors.jsonl, which the driver writes in the end."""

    def __init__(self, folder: JobFolder, parquet: ParquetFormat | None):
        self._folder, self._parquet = folder.path.absolute(), parquet
        self._staging = folder.new_staging()
        self._first = folder.next_part()

    @property
    def min_rows_per_write(self) -> int:
        return BLOCKS_PER_PART

    def write(self, blocks: Iterable[pa.Table], ctx: Any) -> list[str]:
        """Returns the rows of errors.jsonl."""
        table = pa.concat_tables(blocks)
        if answers := list(chain.from_iterable(table["answers"].to_pylist())):
            self._write_part(answers, self._first + ctx.task_idx)
        return list(chain.from_iterable(table["errors"].to_pylist()))

    def _write_part(self, answers: list[str], number: int) -> None:
        if not self._staging.is_dir():
            where = f"{self._staging}: is not there on {socket.gethostname()}"
            raise FileNotFoundError(f"{where}: all machines must share the folder of the answers")
        staging = JobFolder(self._staging)
        with open(staging.open_part(number), "w", encoding="utf-8") as file:
            file.writelines(f"{answer}\n" for answer in answers)
        staged = staging.complete(number, self._parquet)
        os.replace(staged, self._folder / staged.name)
        sync(self._folder)

    def on_write_complete(self, write_result: Any) -> None:
        if errors := list(chain.from_iterable(write_result.write_returns)):
            file = AppendedFile(self._folder / ERRORS)
            file.append(errors)
            file.sync()
            file.close()
        shutil.rmtree(self._staging)
