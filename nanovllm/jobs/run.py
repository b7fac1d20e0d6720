"""run_batch: a whole job, from files of prompts to a folder of answers."""

import errno
import logging
import os
import platform
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from itertools import chain
from typing import Any, NamedTuple, NoReturn

import numpy as np
from xxhash import xxh3_128_hexdigest

from nanovllm import LLM, __version__
from nanovllm.jobs.arguments import Arguments, Cluster, Model, check_one_engine, line_bar
from nanovllm.jobs.bits import BITS, ENGINE, bits_depend_on, engine_of, sees
from nanovllm.jobs.bits import differences as facts_that_differ
from nanovllm.jobs.corrections import Corrections
from nanovllm.jobs.fingerprint import Fingerprint, differences, engine_fingerprint, job_fingerprint
from nanovllm.jobs.first_lines import Packages, check_first_lines
from nanovllm.jobs.folder import FILE_FORMATS, IMAGES, Counts, FolderLost, JobFolder
from nanovllm.jobs.given_paths import as_paths, check_path
from nanovllm.jobs.image_changes import image_changes, keep_images
from nanovllm.jobs.image_options import ask_images, folder_of, image_rules
from nanovllm.jobs.image_room import ImageRoom
from nanovllm.jobs.inputs import Inputs, Scan, find_files, hash_id, scan
from nanovllm.jobs.lines import Row, from_json
from nanovllm.jobs.parquet import ParquetFormat
from nanovllm.jobs.part_writer import PartWriter
from nanovllm.jobs.prepared import Prepared
from nanovllm.jobs.progress import Progress, generated
from nanovllm.jobs.receipt_images import IMAGE_RULES, joined_rules, kept_rules
from nanovllm.jobs.receipt_rows import num_rows, rows_with_receipts
from nanovllm.jobs.receipts import IMAGES as IMAGES_OF_RECEIPT
from nanovllm.jobs.task import Task
from nanovllm.jobs.time_and_price import check_price, price_of
from nanovllm.jobs.work import Work
from nanovllm.jobs.writer import Finished, Writer, make_rows
from nanovllm.utils.checks import is_int, require
from nanovllm.utils.sigterm import sigterm_as_interrupt
from nanovllm.utils.text_json import to_json
from nanovllm.utils.threads import available_cores

# ordered: lines that are read beyond the first one whose answer is not written. Their answers wait in memory.
_MAX_AHEAD = 16_384
_PAUSE_SECONDS = 0.01
_MAX_REPLICAS = 2**31 - 1
_NOTHING = Counts()
# What goes wrong with a disk, and not because of a call.
_OF_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ENOLCK}

logger = logging.getLogger(__name__)


class JobError(RuntimeError):
    """A job stopped half-way.

    Attributes:
        goes_on: whether a repeated call would continue the job.
    """

    goes_on = True


class Summary(NamedTuple):
    """What a job's folder holds in the end."""

    num_lines: int  # of the input
    num_answered: int  # lines in the parts
    num_failed: int  # lines in _errors.jsonl
    num_prompt_tokens: int  # of the answers
    num_completion_tokens: int
    seconds: float  # that this call took to answer lines, without the start of the engine
    tokens_per_second: float = 0.0  # generated in the last call that answered lines
    total_seconds: float = 0.0  # of all calls that have ended in order
    price: float | None = None  # of total_seconds, if price_per_hour is given
    task: str = "generate"


def run_batch(
    input: str | os.PathLike[str] | Iterable[str | os.PathLike[str]] | None,
    output: str | os.PathLike[str],
    model: Model,
    *,
    task: str = "generate",
    format: str | None = None,
    prompt_column: str | None = None,
    id_column: str = "id",
    template: str | None = None,
    system: str | None = None,
    chat_template: str | None = None,
    chat_template_kwargs: Row | None = None,
    line_parameters: bool = True,
    split_reasoning: bool = False,
    split_tool_calls: bool = False,
    pooling: str = "auto",
    normalize: bool = True,
    dimensions: int | None = None,
    prompt_name: str | None = None,
    embedding_dtype: str = "float32",
    instruction: str | None = None,
    image_column: str | None = None,
    images: str | os.PathLike[str] | Iterable[str | os.PathLike[str]] | None = None,
    prompt: str | None = None,
    image_root: str | os.PathLike[str] | None = None,
    allow_remote: bool = False,
    max_image_mib: float | None = None,
    max_image_megapixels: float | None = None,
    max_images: int | None = None,
    seed: int | None = None,
    ordered: bool = False,
    overwrite: bool = False,
    retry_errors: bool | str | os.PathLike[str] = False,
    replicas: int | None = None,
    ray_address: str | None = None,
    price_per_hour: float | None = None,
    use_tqdm: bool = True,
    **options: Any,
) -> Summary:
    """Answer every line of the input exactly once. The same call goes on where an earlier one was interrupted.

    docs/jobs.md describes the files and the guarantees.

    Args:
        input: files, globs or fsspec URLs, of JSON lines (also gzipped) or Parquet. None with images.
        output: the folder of the answers, which may exist if it is empty or holds the same job. Or a file that ends in
            .jsonl or .parquet, of which the folder is `answers.jsonl.job`.
        model: as LLM takes it; or an LLM.
        task: what is done with lines: "generate" writes texts, "embed" vectors, "classify" what a classification head
            says, and "rerank" how well documents answer queries.
        format: of the parts, "jsonl" or "parquet"; None: that of a file, or Parquet for an input of Parquet.
        prompt_column, id_column, template, system, chat_template, chat_template_kwargs, line_parameters,
            split_reasoning, split_tool_calls, seed: see LineFormat. Other tasks than "generate" have prompt_column,
            id_column and template of them.
        pooling, normalize, dimensions, prompt_name: of task "embed", as LLM.embed takes them.
        embedding_dtype: of task "embed": of the numbers, "float32" or "float16".
        instruction: of task "rerank", as LLM.rerank takes it.
        image_column: see LineFormat.
        images, prompt: instead of input: files or globs of images, and what is asked of each. A file is a line, whose
            id is its path below their folder.
        image_root: the folder below which lines' images are read, and where their relative paths begin. None: the
            folder of the images, or of the input.
        allow_remote: fetch lines' images by http and https, from public addresses.
        max_image_mib, max_image_megapixels, max_images: limits of an image's file, of its pixels, and of the images of
            a line; None: ImageRules'.
        ordered: keep the order of the input.
        overwrite: delete the answers in the folder and start over.
        retry_errors: try the lines of _errors.jsonl again. Or a file of corrected lines, which are found by their ids:
            a copy of _errors.jsonl whose rows have been changed, or lines with ids. Other errors stay.
        replicas: engines, which Ray runs on this machine or a cluster. Each has tensor_parallel_size GPUs. None: one
            engine in this process, or with ray_address as many as the cluster's GPUs allow.
        ray_address: of a Ray cluster, such as "auto". All its machines must have the model.
        price_per_hour: of all that the job runs on, in any currency; for the price in the summary.
        use_tqdm: show progress: a bar in a terminal, and a line every half minute elsewhere.
        options: of SamplingParams, for lines without their own, and of LLM.

    Raises:
        ValueError, TypeError, OSError, ImportError: a wrong call, before any work. Among them: another model or other
            parameters than the folder's job has, a changed input, an id given twice, and a folder on which another
            process works.
        JobError: the answers cannot be written any more, as on a full disk, or no engine works any more.
        KeyboardInterrupt: also for SIGTERM. All answers so far are in complete parts.
    """
    require("format", format, format in (None, "jsonl", "parquet"), "'jsonl' or 'parquet'")
    check_price(price_per_hour)
    if ordered and retry_errors:
        raise ValueError("retry_errors: its answers would follow those of later lines, which ordered=True forbids")
    check_path("output", output)
    if not isinstance(retry_errors, bool):
        check_path("retry_errors", retry_errors)
    if "://" in str(output):
        raise ValueError(f"output={str(output)!r}: must be a local folder")
    folder = JobFolder(output)
    if folder.file is not None:
        format = format or FILE_FORMATS[folder.file.suffix]
        require("format", format, format == FILE_FORMATS[folder.file.suffix], f"that of {folder.file.name}, or None")
    arguments = Arguments(
        model,
        options,
        task,
        prompt_column=prompt_column,
        id_column=id_column,
        template=template,
        system=system,
        chat_template=chat_template,
        chat_template_kwargs=chat_template_kwargs or {},
        line_parameters=line_parameters,
        split_reasoning=split_reasoning,
        split_tool_calls=split_tool_calls,
        pooling=pooling,
        normalize=normalize,
        dimensions=dimensions,
        prompt_name=prompt_name,
        embedding_dtype=embedding_dtype,
        instruction=instruction,
        image_column=image_column,
        seed=seed,
    )
    cluster = _check_cluster(replicas, ray_address, model)
    if cluster is not None:
        check_one_engine(arguments.engine_options)
        require("deterministic", True, not arguments.keeps_receipts, "False on Ray, whose machines may differ")
    limits = image_root, allow_remote, max_image_mib, max_image_megapixels, max_images
    if images is None and prompt is None:
        inputs = Inputs(_find_inputs(input, folder), id_column=id_column)
        arguments.image_rules = image_rules(*limits, folder=folder_of(inputs.paths))
    else:
        inputs, arguments.image_rules = ask_images(input, images, prompt, limits, arguments.task)
    format = format or ("parquet" if inputs.are_parquet else "jsonl")
    job = Job(folder, inputs, arguments, format, ordered, cluster, price_per_hour, use_tqdm)
    try:
        with folder, sigterm_as_interrupt():
            return job.run(overwrite, retry_errors)
    except OSError as error:
        if error.errno not in _OF_DISK:
            raise
        raise job.stopped(error) from error


def _find_inputs(patterns: Any, folder: JobFolder) -> list[str]:
    """All files, without the job's own, which a glob may cover. Raises ValueError if one of them is named itself."""
    named = as_paths("input", patterns)
    found = find_files(named)
    paths = [path for path in found if not folder.owns(path)]
    for path in found:
        if path not in paths and (path in {os.fspath(each) for each in named} or not paths):
            raise ValueError(f"input={path!r}: is a file of the job in {folder.path}; choose another output")
    return paths


@dataclass
class Job:
    """One call of run_batch, which holds the folder's lock."""

    folder: JobFolder
    inputs: Inputs
    arguments: Arguments
    format: str
    ordered: bool
    cluster: Cluster | None
    price_per_hour: float | None
    use_tqdm: bool
    parquet: ParquetFormat | None = None
    is_continued: bool = False  # An earlier call has begun it.
    num_generated: int = 0  # tokens, by this call
    has_begun: bool = False  # A call without overwrite and retry_errors would go on with it.
    counts: Counts = _NOTHING  # of the folder's rows when lines began, or have ended
    writer: Writer | None = None  # while lines are answered

    @property
    def task(self) -> Task:
        return self.arguments.task

    def run(self, overwrite: bool, retry_errors: bool | str | os.PathLike[str]) -> Summary:
        found = self._begin(overwrite, bool(retry_errors))
        try:
            self.folder.recover(self.parquet)
        except OSError as error:
            raise self.stopped(error) from error
        corrections = Corrections(self.folder, self.inputs.id_column)
        is_done, self.counts = self._read_answers(found)
        if self.is_continued and (retry_errors or not is_done.all()):
            self._check_same_root()
            self.check_lines(all_may_fail=True)
        if retry_errors is True:
            self.folder.forget_errors()
        elif retry_errors is not False:
            corrections.add(retry_errors, found)
        self.has_begun = True
        is_done, self.counts = self._read_answers(found)
        self.start = time.perf_counter()  # The start of the engines will not count.
        try:
            if not is_done.all():
                early, is_early = self._early_rows(found, is_done)
                files = self.inputs, corrections.inputs()
                self._answer(Work(self.arguments, *files, corrections.places(found), is_done, early, is_early))
        finally:
            self._end(time.perf_counter() - self.start, found, corrections)
        if (missing := found.num_lines - self.counts.answered - self.counts.failed) > 0:
            raise JobError(f"{self.folder.path}: {missing} lines are missing")
        try:
            self.folder.check()
            self.folder.finish()
        except OSError as error:
            raise self.stopped(error) from error
        progress = self.manifest["progress"]
        of_all_calls = progress.get("tokens_per_second", 0.0), progress["seconds"], progress.get("price")
        seconds = time.perf_counter() - self.start
        return Summary(found.num_lines, *self.counts, seconds, *of_all_calls, self.task.name)

    def _end(self, seconds: float, found: Scan, corrections: Corrections) -> None:
        """Write what is for people alone. On a full disk another error says so."""
        before = self.manifest["progress"]
        progress = self.counts._asdict() | {"seconds": before["seconds"] + seconds}
        # Of one call: what was generated in a call that was killed is counted, but not its time.
        speed = self.num_generated / seconds if self.num_generated else before.get("tokens_per_second")
        progress |= {} if speed is None else {"tokens_per_second": speed}
        if self.price_per_hour is not None:
            progress["price"] = price_of(progress["seconds"], self.price_per_hour)
        self.manifest["progress"] = progress
        with suppress(OSError):
            self.folder.write_manifest(self.manifest)
            corrections.repeat_rows(self.inputs, found)

    def stopped(self, error: Exception) -> JobError:
        """What an error of the folder becomes."""
        try:
            self.folder.check()
        except FolderLost as lost:  # Other errors may have come of that.
            error = lost
        if isinstance(error, FolderLost):
            stopped = JobError(f"{self.folder.path}: {error.strerror}")
            stopped.goes_on = False
            return stopped
        stopped = JobError(f"{self.folder.path}: cannot be written: {error}")
        if not self.has_begun:
            stopped = JobError(f"{stopped}; repeat the call when that is mended")
            stopped.goes_on = False
        return stopped

    # -- before work begins --------------------------------------------------------------------------------------------

    def _begin(self, overwrite: bool, retries: bool) -> Scan:
        """Check that the folder, the input and the call belong together. Reads or writes the manifest. retries: whether
        lines that have failed are tried again."""
        of_call = {"ordered": self.ordered, "format": self.format, "prompt": self.inputs.image_prompt}
        job = self.arguments.describe() | of_call
        job = from_json(to_json({name: value for name, value in job.items() if value is not None}).encode())
        before = None if overwrite else self.folder.read_manifest()
        files, model_files = self.inputs.fingerprints(), job_fingerprint(self.arguments)
        try:
            if before is not None:
                self._check_same(before, job, files, model_files, retries)
        except ValueError:
            if self.folder.read_all().answered:
                raise
            before, overwrite = None, True  # There is no answer yet that would not fit the others.
        is_elsewhere = self.cluster is not None
        if before is None:
            self.arguments.check_engine(is_elsewhere)
        found = self.scan()
        self.arguments.tell_parameters(found.columns)
        if before is None and found.columns:
            self.arguments.line_format.check_columns(found.columns, found.first_openai is not None)
        if before is None:
            self.check_lines(all_may_fail=False)
        self.is_continued = before is not None
        if self.format == "parquet":
            if found.first_openai is not None:
                line = found.first_openai
                raise ValueError(
                    f"format='parquet': {line.file}:{line.number} is a request of OpenAI's, which is answered in JSON"
                )
            self.arguments.task = replace(self.task, packs_vectors=True)
            self.parquet = ParquetFormat(self.inputs, self.task, found)
        if overwrite:
            self.folder.clear()
        if before is not None:
            self.manifest = before
            self._keep_images(files)
            if model_files is not None:
                self._check_same_model(model_files)
            return found
        self.manifest = {"job": job, "hash": xxh3_128_hexdigest(to_json(job).encode()), "input": files}
        self.manifest |= {"num_lines": found.num_lines, "versions": _versions(), "progress": {"seconds": 0.0}}
        self.manifest |= {} if model_files is None else {"model_files": model_files}
        self.folder.write_manifest(self.manifest)
        self._keep_images(files)
        return found

    def _keep_images(self, files: list[Row]) -> None:
        """What the images are now, some of which may be others than before. files: their fingerprint in the manifest.
        Each of these files may be the last one that is written."""
        is_other = self.manifest["input"] != files
        if self.inputs.image_prompt is not None and (is_other or not (self.folder.path / IMAGES).exists()):
            keep_images(self.folder, self.inputs.image_fingerprints)
        if is_other:
            self.manifest["input"] = files
            self.folder.write_manifest(self.manifest)

    def scan(self) -> Scan:
        """Look through the input. Raises ValueError."""
        with line_bar("Checking", self.use_tqdm) as bar:
            return scan(self.inputs, bar.update)

    def check_lines(self, all_may_fail: bool) -> None:
        """Raises ValueError or ImportError for what no line could have, or if no line can be answered."""
        checker = self.arguments.checker(is_elsewhere=self.cluster is not None)
        if checker is not None:
            check_first_lines(self.arguments, self.inputs, checker, all_may_fail)
        elif self.inputs.image_prompt is not None:  # This machine has no model, and so reads no images.
            raise ValueError(f"images: cannot be read: {self.arguments.read_plan(self.inputs).images}")

    def _check_same(
        self, before: Row, job: Row, files: list[Row], model_files: Fingerprint | None, retries: bool
    ) -> None:
        """Raises ValueError if the manifest is another job's."""
        # The manifest of a job that generates names no task, as in earlier versions.
        self._check_same_job({"task": "generate"} | before["job"], {"task": "generate"} | job)
        self._check_same_files(before["input"], files, retries)
        known = before.get("model_files")
        if known is not None and model_files is not None and (what := differences(known, model_files)):
            self._refuse(f"its model was another one: {what}")

    def _check_same_job(self, before: Row, now: Row) -> None:
        differing = [
            f"{name} was {before.get(name)!r} and is now {now.get(name)!r}"
            for name in [*before, *(name for name in now if name not in before)]
            if before.get(name) != now.get(name)
        ]
        if differing:
            self._refuse("; ".join(differing))

    def _check_same_files(self, before: list[Row], now: list[Row], retries: bool) -> None:
        names, names_now = ([file["name"] for file in files] for files in (before, now))
        if names != names_now:
            self._refuse(f"the input was {', '.join(names)} and is now {', '.join(names_now)}")
        for old, new in zip(before, now, strict=True):
            if old != new and self.inputs.image_prompt is not None:
                self._check_same_images(retries)
            elif old != new:
                sizes = f"it had {old['size']} bytes and now has {new['size']}"
                self._refuse(f"the input {new['name']} has changed: {sizes}{', others' * (old['size'] == new['size'])}")

    def _check_same_images(self, retries: bool) -> None:
        """The images together are others than those of the manifest."""
        changes = image_changes(self.folder, self.inputs.image_fingerprints)
        if changes is None:
            self._refuse("the input images has changed")
        if changes.names and not (retries and changes.have_failed):
            hint = "; retry_errors (--retry-errors) tries it again" if changes.have_failed else ""
            self._refuse(f"the input images has changed: {changes.what}{hint}")

    def _check_same_model(self, now: Fingerprint) -> None:
        """Also of an engine that has just started, if its files could not be known before."""
        before = self.manifest.get("model_files")
        if before is None:
            if any(self.manifest["progress"].get(name) for name in ("answered", "failed")):
                logger.warning(
                    "%s: was begun without a fingerprint of the model, so nobody can tell whether %s is still the same",
                    *(self.folder.path, self.arguments.model_name),
                )
            self.manifest["model_files"] = now
            self.folder.write_manifest(self.manifest)
        elif what := differences(before, now):
            self._refuse(f"its model was another one: {what}")

    @property
    def _image_rules(self) -> Row:
        return kept_rules(self.arguments.image_rules)

    def _check_same_root(self) -> None:
        """Receipts name images below one root, which is in the manifest."""
        before, now = self.manifest.get(IMAGE_RULES, self._image_rules)["image_root"], self._image_rules["image_root"]
        if before == now:
            return
        counts = {part: num_rows(part) for part in self.folder.parts()}
        if any(IMAGES_OF_RECEIPT in receipt for _, receipt in rows_with_receipts(counts, range(sum(counts.values())))):
            self._refuse(f"image_root (--image-root) was {before!r} and is now {now!r}, and its receipts have images")

    def _check_same_bits(self, llm: LLM) -> None:
        """All receipts of a job are of one machine."""
        now = bits_depend_on(llm)
        before = self.manifest.get(BITS)
        if before is not None and (what := facts_that_differ(before, now)):
            self._refuse(f"its bits depend on what has changed: {what}")
        self.manifest |= {BITS: now, ENGINE: engine_of(llm)}
        if sees(llm):
            self.manifest[IMAGE_RULES] = joined_rules(self.manifest.get(IMAGE_RULES), self._image_rules)
        self.folder.write_manifest(self.manifest)

    def _refuse(self, reason: str) -> NoReturn:
        raise self.folder.refusal(f"holds another job: {reason}; choose another folder, or overwrite it")

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

    def _early_rows(self, found: Scan, is_done: np.ndarray) -> tuple[list[Finished], np.ndarray]:
        """Answers that wait for their turn, and bool [num_lines]: of which lines. Their positions are those among all
        lines that are not done."""
        positions, is_early, rows = np.cumsum(~is_done) - 1, np.zeros(found.num_lines, bool), list[Finished]()
        for answered, text in self.folder.early_rows():
            (place,) = found.find(hash_id(answered.id))
            if place >= 0 and not is_done[place] and not is_early[place]:
                is_early[place] = True
                rows.append(Finished(int(positions[place]), False, text, *answered[1:]))
        return rows, is_early

    # -- the work ------------------------------------------------------------------------------------------------------

    def _answer(self, work: Work) -> None:
        finish: Any = list if self.cluster else partial(make_rows, task=self.task, responder=self.arguments.responder())
        writer = Writer(PartWriter(self.folder, self.parquet), finish, self.ordered, work.early)
        before = self.counts
        num_done = before.answered + before.failed + len(work.early)
        progress = Progress(work.num_lines, num_done, before.failed, self.use_tqdm, self.arguments.max_len)
        self.writer = writer
        try:
            if self.cluster is None:
                self._answer_here(work, writer, progress)
            else:
                self._answer_on_ray(self.cluster, work, writer, progress)
        finally:
            self.num_generated = progress.num_generated
            self.writer = None
            self.counts = Counts(*map(sum, zip(before, writer.counts, strict=True)))
            if writer.error is not None:
                raise self.stopped(writer.error) from writer.error

    @property
    def counts_so_far(self) -> Counts:
        """Of what is in the folder. Any thread may ask."""
        writer, before = self.writer, self.counts
        return before if writer is None else Counts(*map(sum, zip(before, writer.counts, strict=True)))

    def _answer_on_ray(self, cluster: Cluster, work: Work, writer: Writer, progress: Progress) -> None:
        from nanovllm.jobs.ray_job import EngineDied, RayEngines

        def begin(engines: RayEngines, files: Fingerprint) -> None:
            """One of the engines has started."""
            self._check_same_model(files)
            if not progress.has_begun:
                self.start = progress.begin(engines.generated)

        # Some seconds pass until Ray has started. Meanwhile the readers get ready.
        num_readers = 1 if self.ordered else min(available_cores(), -(-(cluster.replicas or 8) // 4))
        with work.read(num_readers) as readers, writer, progress:
            try:
                with RayEngines(cluster, self.arguments, begin) as engines:
                    engines.answer(readers, work.num_left, writer, progress, _MAX_AHEAD if self.ordered else None)
            except EngineDied as error:
                raise JobError(f"{self.folder.path}: the job has stopped: {error}") from error

    def _answer_here(self, work: Work, writer: Writer, progress: Progress) -> None:
        with work.read(1) as readers, self.arguments.engine() as llm, writer, progress:
            if not isinstance(self.arguments.model, LLM):
                self._check_same_model(engine_fingerprint(llm))
            if self.arguments.keeps_receipts:
                self._check_same_bits(llm)
            self.start = progress.begin(partial(generated, llm, self.task.counter))
            self._generate(llm, chain.from_iterable(readers), writer, progress)

    def _generate(self, llm: LLM, lines: Iterable[Prepared], writer: Writer, progress: Progress) -> None:
        """Let the engine work on all lines. This loop shares Python's lock with the engine, so it does little."""
        num_under_way = 0
        packages = Packages(llm, self.task)
        room = ImageRoom(num_engines=llm.config.data_parallel_size)

        def checked() -> Iterator[Prepared | None]:
            nonlocal num_under_way
            for prepared in lines:
                if prepared.line is None:
                    writer.put((prepared, {"error": prepared.error}))
                    progress.add(0, is_failed=True)
                    continue
                while self.ordered and prepared.position - writer.num_in_order > _MAX_AHEAD:
                    if num_under_way:
                        yield None
                    else:
                        time.sleep(_PAUSE_SECONDS)  # The writer has all that it needs.
                while num_under_way and not room.has_room(prepared.line):
                    yield None
                room.take(prepared.line)
                packages.check(prepared.line)
                num_under_way += 1
                progress.hand_out(prepared.line)
                yield prepared

        outputs: Any = self.task.answer(llm, checked())
        with closing(outputs):
            for prepared, output in outputs:
                num_under_way -= 1
                writer.put((prepared, output))
                progress.add(self.task.num_tokens(output), "error" in output, prepared.line)
                if writer.error is not None:
                    return


def _check_cluster(replicas: int | None, address: str | None, model: Model) -> Cluster | None:
    if replicas is None and address is None:
        return None
    require("replicas", replicas, replicas is None or is_int(replicas, 1, _MAX_REPLICAS), "a positive integer")
    if isinstance(model, LLM):
        raise TypeError("model: must be a directory or a hub id, of which every replica makes its own LLM")
    if find_spec("ray") is None:
        raise ImportError("replicas and ray_address need Ray: pip install 'ray>=2.59'")
    return Cluster(replicas, address)


def _versions() -> dict[str, str]:
    names = ("torch", "transformers", "tokenizers")
    return {"nanovllm": __version__, **{name: version(name) for name in names}, "python": platform.python_version()}
