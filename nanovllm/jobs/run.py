"""run_batch: a whole job, from files of prompts to a folder of answers."""

import os
import platform
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from itertools import count, tee
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
from xxhash import xxh3_128_hexdigest

from nanovllm import __version__
from nanovllm.jobs.arguments import Arguments, Cluster, Model, line_bar
from nanovllm.jobs.folder import Counts, JobFolder, PartWriter
from nanovllm.jobs.inputs import Inputs, Scan, find_files, scan
from nanovllm.jobs.lines import Row, from_json
from nanovllm.jobs.parquet import ParquetFormat
from nanovllm.jobs.reader import Prepared, ReadAhead, ReadPlan
from nanovllm.jobs.text_json import to_json
from nanovllm.jobs.writer import Writer
from nanovllm.llm import LLM
from nanovllm.sampling_params import MAX_INT32, SamplingParams
from nanovllm.utils.checks import is_int, require


class JobError(RuntimeError):
    """A job stopped half-way. The same call goes on with it."""


class Summary(NamedTuple):
    """What a job's folder holds in the end."""

    num_lines: int  # of the input
    num_answered: int  # lines in the parts
    num_failed: int  # lines in errors.jsonl
    num_prompt_tokens: int  # of the answers
    num_completion_tokens: int
    seconds: float  # that this call took to answer lines, without the start of the engine


def run_batch(
    input: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    model: Model,
    *,
    format: str | None = None,
    prompt_column: str | None = None,
    id_column: str = "id",
    template: str | None = None,
    system: str | None = None,
    chat_template: str | None = None,
    chat_template_kwargs: Row | None = None,
    line_parameters: bool = True,
    seed: int | None = None,
    ordered: bool = False,
    overwrite: bool = False,
    retry_errors: bool = False,
    replicas: int | None = None,
    ray_address: str | None = None,
    use_tqdm: bool = True,
    **options: Any,
) -> Summary:
    """Answer every line of the input exactly once. The same call goes on where an earlier one was interrupted.

    docs/jobs.md describes the files and the guarantees.

    Args:
        input: files, globs or fsspec URLs, of JSON lines (also gzipped) or Parquet.
        output: the folder of the answers. It may exist if it is empty or holds the same job.
        model: as LLM takes it; or an LLM.
        format: of the parts, "jsonl" or "parquet"; None: Parquet for an input of Parquet.
        prompt_column, id_column, template, system, chat_template, chat_template_kwargs, line_parameters, seed: see
            LineFormat.
        ordered: keep the order of the input.
        overwrite: delete the answers in the folder and start over.
        retry_errors: try the lines of errors.jsonl again.
        replicas: engines, which Ray Data runs on this machine or a cluster. Each has tensor_parallel_size GPUs. None:
            one engine in this process, or with ray_address as many as the cluster's GPUs allow.
        ray_address: of a Ray cluster, such as "auto". All its machines must share the output's folder.
        use_tqdm: show a progress bar in a terminal.
        options: of SamplingParams, for lines without their own, and of LLM.

    Raises:
        ValueError, TypeError, OSError, ImportError: a wrong call, before any work. Among them: another model or other
            parameters than the folder's job has, a changed input, an id given twice, and a folder on which another
            process works.
        JobError: the answers cannot be written any more, as on a full disk, or Ray has given up.
        KeyboardInterrupt: also for SIGTERM. All answers so far are in complete parts.
    """
    require("format", format, format in (None, "jsonl", "parquet"), "'jsonl' or 'parquet'")
    if ordered and retry_errors:
        raise ValueError("retry_errors: its answers would follow those of later lines, which ordered=True forbids")
    if "://" in str(output):
        raise ValueError(f"output={str(output)!r}: must be a local folder")
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
        seed=seed,
    )
    cluster = _check_cluster(replicas, ray_address, model, ordered)
    inputs = Inputs(find_files(input), id_column=id_column)
    format = format or ("parquet" if inputs.are_parquet else "jsonl")
    with JobFolder(output) as folder, _sigterm_as_interrupt():
        return _Job(folder, inputs, arguments, format, ordered, cluster, use_tqdm).run(overwrite, retry_errors)


@dataclass
class _Job:
    """One call of run_batch, which holds the folder's lock."""

    folder: JobFolder
    inputs: Inputs
    arguments: Arguments
    format: str
    ordered: bool
    cluster: Cluster | None
    use_tqdm: bool
    parquet: ParquetFormat | None = None

    def run(self, overwrite: bool, retry_errors: bool) -> Summary:
        manifest, found = self._begin(overwrite)
        try:
            self.folder.recover(self.parquet)
        except OSError as error:
            raise self._unwritable(error) from error
        if retry_errors:
            self.folder.forget_errors()
        is_done, self.counts = self._read_answers(found)
        self.start = time.perf_counter()  # Without Ray the start of the engine will not count.
        try:
            if not is_done.all():
                answer = self._answer if self.cluster is None else self._answer_on_ray
                answer(self.arguments.read_plan(self.inputs, is_done), found)
        finally:
            seconds = time.perf_counter() - self.start
            if self.cluster is not None:
                self.counts = self.folder.read()
            manifest["progress"] = self.counts._asdict() | {"seconds": manifest["progress"]["seconds"] + seconds}
            with suppress(OSError):  # On a full disk another error says so.
                self.folder.write_manifest(manifest)
        if (missing := found.num_lines - self.counts.answered - self.counts.failed) > 0:
            raise JobError(f"{self.folder.path}: {missing} lines are missing: do all machines share this folder?")
        return Summary(found.num_lines, *self.counts, seconds)

    def _unwritable(self, error: Exception) -> JobError:
        return JobError(f"{self.folder.path}: cannot be written: {error}")

    # -- before work begins --------------------------------------------------------------------------------------------

    def _begin(self, overwrite: bool) -> tuple[Row, Scan]:
        """Check that the folder, the input and the call belong together. Returns the manifest."""
        job = self.arguments.describe() | {"ordered": self.ordered, "format": self.format}
        job = from_json(to_json({name: value for name, value in job.items() if value is not None}).encode())
        manifest = self.folder.read_manifest()
        if overwrite:
            self._check_input_is_elsewhere()
            manifest = None
        if manifest is not None:
            self._check_same_job(manifest["job"], job)
        else:
            self.arguments.check_engine(is_elsewhere=self.cluster is not None)
        files = self.inputs.fingerprints()
        if manifest is not None:
            self._check_same_files(manifest["input"], files)
        with line_bar("Checking", self.use_tqdm) as bar:
            found = scan(self.inputs, bar.update)
        self.arguments.tell_parameters(found.columns)
        if self.format == "parquet":
            if found.first_openai is not None:
                line = found.first_openai
                raise ValueError(
                    f"format='parquet': {line.file}:{line.number} is a request of OpenAI's, which is answered in JSON"
                )
            self.parquet = ParquetFormat(self.inputs, self.arguments.line_format, found)
        if overwrite:
            self.folder.clear()
        if manifest is None:
            manifest = {"job": job, "hash": xxh3_128_hexdigest(to_json(job).encode()), "input": files}
            manifest |= {"num_lines": found.num_lines, "versions": _versions(), "progress": {"seconds": 0.0}}
            self.folder.write_manifest(manifest)
        return manifest, found

    def _check_input_is_elsewhere(self) -> None:
        for path in self.inputs.paths:
            if Path(path.removeprefix("file://")).resolve().parent == self.folder.path.resolve():
                raise ValueError(f"input={path!r}: is in the folder that is to be overwritten; choose another folder")

    def _check_same_job(self, before: Row, now: Row) -> None:
        differences = [
            f"{name} was {before.get(name)!r} and is now {now.get(name)!r}"
            for name in [*before, *(name for name in now if name not in before)]
            if before.get(name) != now.get(name)
        ]
        if differences:
            self._refuse("; ".join(differences))

    def _check_same_files(self, before: list[Row], now: list[Row]) -> None:
        names, names_now = ([file["name"] for file in files] for files in (before, now))
        if names != names_now:
            self._refuse(f"the input was {', '.join(names)} and is now {', '.join(names_now)}")
        for old, new in zip(before, now, strict=True):
            if old != new:
                sizes = f"it had {old['size']} bytes and now has {new['size']}"
                self._refuse(f"the input {new['name']} has changed: {sizes}{', others' * (old['size'] == new['size'])}")

    def _refuse(self, reason: str) -> NoReturn:
        raise ValueError(
            f"output={str(self.folder.path)!r}: holds another job: {reason}; choose another folder, or overwrite it"
        )

    def _read_answers(self, found: Scan) -> tuple[np.ndarray, Counts]:
        """bool [num_lines]: which lines have a row in the folder."""
        hashes = bytearray()
        counts = self.folder.read(hashes.extend)
        places = found.find(hashes)
        is_done = np.zeros(found.num_lines, bool)
        is_done[places[places >= 0]] = True
        if is_done.sum() < len(places):
            raise ValueError(f"{self.folder.path}: holds rows that are no answers of this input, or one of them twice")
        return is_done, counts

    # -- the work ------------------------------------------------------------------------------------------------------

    def _answer_on_ray(self, plan: ReadPlan, found: Scan) -> None:
        from ray.exceptions import RayError

        from nanovllm.jobs.ray_job import answer_on_ray

        try:
            answer_on_ray(
                self.cluster, plan, found.lines_per_file, self.arguments, self.folder, self.parquet, self.use_tqdm
            )
        except (OSError, RayError) as error:
            reason = str(error).rstrip().rpartition("\n")[2]  # after the traceback of another process
            raise JobError(f"{self.folder.path}: the job has stopped: {reason}") from error

    def _answer(self, plan: ReadPlan, found: Scan) -> None:
        writer = Writer(PartWriter(self.folder, self.parquet), self.arguments.responder(), self.ordered)
        try:
            with ReadAhead(plan) as lines, self.arguments.engine() as llm, writer:
                self.start = time.perf_counter()
                self._generate(llm, lines, writer, found.num_lines)
        finally:
            self.counts = Counts(*map(sum, zip(self.counts, writer.counts, strict=True)))
            if writer.error is not None:
                raise self._unwritable(writer.error) from writer.error

    def _generate(self, llm: LLM, lines: Iterable[Prepared], writer: Writer, num_lines: int) -> None:
        """Let the engine work on all lines. This loop shares Python's lock with the engine, so it does little."""
        under_way: dict[int, Prepared] = {}
        before = self.counts
        bar = line_bar("Answering", self.use_tqdm, num_lines, before.answered + before.failed)

        def requests() -> Iterator[tuple[Any, SamplingParams]]:
            indices = count()
            for prepared in lines:
                if prepared.line is None:
                    writer.put(prepared, {"error": prepared.error})
                    bar.update()
                else:
                    under_way[next(indices)] = prepared
                    yield prepared.line.prompt, prepared.line.params

        pairs, same_pairs = tee(requests())
        prompts, params = (prompt for prompt, _ in pairs), (params for _, params in same_pairs)
        num_tokens = 0
        outputs: Any = llm.generate_iter(prompts, params, self.ordered, on_error="return")
        with bar, closing(outputs):
            for index, output in outputs:
                writer.put(under_way.pop(index), output)
                num_tokens += len(output["token_ids"])
                rate = num_tokens / (time.perf_counter() - self.start)
                bar.set_postfix_str(f"{before.failed + writer.counts.failed} errors, {rate:.0f} tok/s", refresh=False)
                bar.update()
                if writer.error is not None:
                    return


def _check_cluster(replicas: int | None, address: str | None, model: Model, ordered: bool) -> Cluster | None:
    if replicas is None and address is None:
        return None
    require("replicas", replicas, replicas is None or is_int(replicas, 1, MAX_INT32), "a positive integer")
    if ordered:
        raise ValueError("ordered=True: several replicas finish out of order; sort the answers, or use one engine")
    if isinstance(model, LLM):
        raise TypeError("model: must be a directory or a hub id, of which every replica makes its own LLM")
    if find_spec("ray") is None:
        raise ImportError("replicas and ray_address need Ray: pip install 'ray[data]' pyarrow")
    return Cluster(replicas, address)


def _versions() -> dict[str, str]:
    names = ("torch", "transformers", "tokenizers")
    return {"nanovllm": __version__, **{name: version(name) for name in names}, "python": platform.python_version()}


@contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """A block in which SIGTERM does what Ctrl-C does, unless the caller has a handler of its own."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return

    def interrupt(number: int, frame: object) -> NoReturn:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
