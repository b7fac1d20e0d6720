"""The threads that work on batches: one checks their input, one answers them, one batch at a time."""

import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import Any

from nanovllm import LLM, ImageRules, RequestChecker
from nanovllm.integrations.serving.background import Background
from nanovllm.integrations.serving.batches.batch_job import BatchArguments, BatchJob, Pace, make_job, write_files
from nanovllm.integrations.serving.batches.endpoints import ENDPOINTS
from nanovllm.integrations.serving.batches.input_check import check_input, disk_error
from nanovllm.integrations.serving.batches.records import Batch, Row, StoredFile, new_id
from nanovllm.integrations.serving.batches.store import BatchStore
from nanovllm.jobs.first_lines import error_of_call
from nanovllm.jobs.folder import Counts
from nanovllm.jobs.run import JobError

logger = logging.getLogger(__name__)

RETRY_SECONDS = 30.0  # after an error of the disk
_UNFINISHED = {
    "cancelled": ("batch_cancelled", "This request was not executed, because the batch was cancelled."),
    "expired": ("batch_expired", "This request was not executed before the completion window ended."),
    "failed": ("batch_failed", "This request was not executed, because the batch failed."),
}


class CannotCancel(ValueError):
    """A batch has ended, or nearly."""


class _Ended(Exception):
    """The batch under way has been cancelled, or has expired."""

    def __init__(self, outcome: str):
        self.outcome = outcome


class _Stopped(Exception):
    """The server ends."""


class BatchRunner:
    """Answers the batches of a store, the oldest first, behind an engine's live requests.

    All that it knows is in the store, so that another runner goes on where this one was killed.
    """

    def __init__(
        self,
        store: BatchStore,
        llm: LLM,
        background: Background,
        served_name: str,
        image_rules: ImageRules | None = None,
        **of_lines: Any,
    ):
        """
        Args:
            served_name: the name that clients use for the model.
            image_rules: which images of lines are read; None: those that lines hold themselves, as data: URLs.
            of_lines: chat_template, split_reasoning and split_tool_calls, as LineFormat's.
        """
        self.store, self.model = store, served_name
        self._llm, self._background, self._of_lines = llm, background, of_lines
        self._image_rules = ImageRules() if image_rules is None else image_rules
        self._current: tuple[str, BatchJob] | None = None
        self._is_stopping = threading.Event()
        self._news = threading.Event()
        self._checks = ThreadPoolExecutor(1, "nanovllm-batch-checks")
        self._thread = threading.Thread(target=self._run, name="nanovllm-batches", daemon=True)

    # -- for the routes ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        for batch in self.store.batches():
            if batch.status == "validating":
                self._checks.submit(self._check, batch.id)
        self._thread.start()

    def stop(self) -> None:
        """Write the answers so far, and end the threads. After `start`."""
        self._is_stopping.set()
        self._news.set()
        self._checks.shutdown(cancel_futures=True)
        self._thread.join()

    @cached_property
    def _checker(self) -> RequestChecker:
        return RequestChecker(self._llm.config, self._llm.scheduler.length_limit.num_blocks)

    def check_model(self, endpoint: str) -> None:
        """Raises ValueError if the model can serve no request of an endpoint, with what it can do instead."""
        (error,) = self._checker.check([[0]], [ENDPOINTS[endpoint].params])
        if error is not None:
            raise ValueError(f"endpoint={endpoint!r}: cannot be served by {self.model!r}: {error_of_call(error)}")

    def add(self, batch: Batch) -> None:
        """Raises ValueError for `check_model`'s reason, and KeyError if its input has been deleted."""
        self.check_model(batch.endpoint)
        self.store.add_batch(batch)
        self._checks.submit(self._check, batch.id)

    def cancel(self, batch_id: str) -> Batch:
        """Raises CannotCancel, and KeyError if there is no such batch."""

        def change(batch: Batch) -> Batch:
            if batch.has_ended or batch.status == "finalizing":
                raise CannotCancel(f"{batch.id} is {batch.status}, and cannot be cancelled")
            if batch.status == "cancelling":
                return batch
            batch = batch.become("cancelling")
            return batch if batch.has_begun else batch.become("cancelled")

        batch = self.store.update(batch_id, change)
        self._news.set()
        return batch

    def batches(self) -> list[Batch]:
        """All of them, the oldest first, as they are now."""
        now = time.time()
        for batch in self.store.batches():
            if not batch.has_ended and not batch.has_begun and now >= batch.expires_at:
                self.store.update(batch.id, _expire)
        return list(map(self._counted, self.store.batches()))

    def batch(self, batch_id: str) -> Batch | None:
        if (batch := self.store.batch(batch_id)) is None:
            return None
        if not batch.has_ended and not batch.has_begun and time.time() >= batch.expires_at:
            batch = self.store.update(batch_id, _expire)
        return self._counted(batch)

    def _counted(self, batch: Batch) -> Batch:
        """With the counts of the job that runs."""
        current = self._current
        if current is None or current[0] != batch.id or batch.has_ended:
            return batch
        return _with_counts(batch, current[1].counts_so_far)

    # -- checking ------------------------------------------------------------------------------------------------------

    def _check(self, batch_id: str) -> None:
        """Called in the thread of checks."""
        batch = self.store.batch(batch_id)
        if batch is None or batch.status != "validating":
            return
        try:
            path = self.store.content(batch.input_file_id)
            num_lines, errors = check_input(path, batch.endpoint, self.model, Pace(self._llm, self._raise_if_stopping))
        except _Stopped:
            return
        except OSError as error:
            if not isinstance(error, FileNotFoundError):
                self._check_again(batch_id, error)
                return
            num_lines, errors = 0, [_error("server_error", "the file is not there any more")]
        except Exception as error:
            logger.error("%s: cannot be checked", batch_id, exc_info=error)
            num_lines, errors = 0, [_error("server_error", f"the file cannot be read: {type(error).__name__}")]

        def change(batch: Batch) -> Batch:
            if batch.status != "validating":  # It was cancelled meanwhile.
                return batch
            state = "failed" if errors else "in_progress"
            return batch.become(state, errors=errors, num_lines=num_lines)

        try:
            self.store.update(batch_id, change)
        except OSError as error:
            self._check_again(batch_id, error)
        self._news.set()

    def _check_again(self, batch_id: str, error: OSError) -> None:
        """After an error of the disk, which may pass. Batches behind it wait as long."""
        logger.error("%s: cannot be checked: %s; another attempt in %d seconds", batch_id, error, RETRY_SECONDS)
        if not self._is_stopping.wait(RETRY_SECONDS):
            with suppress(RuntimeError):  # The server has just begun to end.
                self._checks.submit(self._check, batch_id)

    def _raise_if_stopping(self) -> None:
        if self._is_stopping.is_set():
            raise _Stopped

    # -- answering -----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_stopping.is_set():
            self._news.clear()
            try:
                if (batch := self._next()) is None:
                    self._news.wait()
                else:
                    self._work(batch)
            except _Stopped:
                return
            except (JobError, OSError) as error:
                logger.error("batches: %s; another attempt in %d seconds", error, RETRY_SECONDS)
                self._is_stopping.wait(RETRY_SECONDS)
            except Exception as error:
                if self._background.has_ended:
                    return
                logger.error("batches: another attempt in %d seconds", RETRY_SECONDS, exc_info=error)
                self._is_stopping.wait(RETRY_SECONDS)

    def _next(self) -> Batch | None:
        """One that has begun, or the oldest."""
        batches = [each for each in self.batches() if each.status in ("in_progress", "cancelling", "finalizing")]
        return min(batches, key=lambda batch: (not batch.has_begun, batch.created_ns), default=None)

    def _work(self, batch: Batch) -> None:
        """Until the batch has ended. Raises what may go on later."""
        if batch.status == "in_progress" and batch.outcome is None:
            batch = self.store.update(batch.id, _begin)
            if batch.status != "in_progress":
                return  # It has just been cancelled.
            batch = self._answer(batch)
        elif batch.outcome is None:
            batch = self._plan(batch.id, "cancelled", Counts())
        try:
            self._finish(batch)
        except ValueError as error:  # Its folder stays as it is.
            logger.error("%s: its answers cannot be read: %s", batch.id, error)
            errors = [_error("server_error", "the answers cannot be read; the server's log says more")]
            no_files: Row = {"output_file_id": None, "error_file_id": None}
            self.store.update(batch.id, lambda batch: batch.become("failed", errors=errors, **no_files))

    def _answer(self, batch: Batch) -> Batch:
        def check() -> None:
            self._raise_if_stopping()
            if (now := self.store.batch(batch.id)) is not None and now.status == "cancelling":
                raise _Ended("cancelled")
            if time.time() >= batch.expires_at:
                raise _Ended("expired")

        job: BatchJob | None = None

        def counts() -> Counts:
            return Counts() if job is None else job.counts

        try:
            self.check_model(batch.endpoint)  # The server may have another one than before.
            job = self._make_job(batch, check)
            self._current = batch.id, job
            check()
            with job.folder:
                job.run(False, False)
            return self._plan(batch.id, "completed", counts())
        except _Ended as ended:
            return self._plan(batch.id, ended.outcome, counts())
        except _Stopped:
            raise
        except Exception as error:
            if isinstance(error, JobError) or disk_error(error) is not None or self._background.has_ended:
                raise
            # The input has been damaged, or the server has another model than before, or a package is missing.
            logger.error("%s: has failed", batch.id, exc_info=error)
            return self._plan(batch.id, "failed", counts(), _error("server_error", self._without_paths(str(error))))
        finally:
            self._current = None

    def _make_job(self, batch: Batch, check: Callable[[], None]) -> BatchJob:
        endpoint = ENDPOINTS[batch.endpoint]
        options = {name: self._of_lines[name] for name in endpoint.options if name in self._of_lines}
        of_model = self.model, check, self._checker, self._image_rules
        arguments = BatchArguments(self._llm, self._background, *of_model, endpoint.task, **options)
        folder, input = self.store.job_folder(batch.id), self.store.content(batch.input_file_id)
        return make_job(folder, input, arguments, Pace(self._llm, check))

    def _without_paths(self, text: str) -> str:
        """Clients need not know where the server keeps files."""
        return text.replace(f"{self.store.path}{os.sep}", "")

    def _plan(self, batch_id: str, outcome: str, counts: Counts, *errors: Row) -> Batch:
        """Say how a batch ends, and what its files are called, before they are made: whoever goes on makes the same.

        counts: of the answers so far.
        """

        def change(batch: Batch) -> Batch:
            if batch.status != "cancelling":
                batch = batch.become("finalizing")
            output, error = new_id("file-"), new_id("file-")
            batch = replace(batch, outcome=outcome, output_file_id=output, error_file_id=error)
            return _with_counts(replace(batch, errors=list(errors)), counts)

        return self.store.update(batch_id, change)

    def _finish(self, batch: Batch) -> None:
        store, outcome = self.store, str(batch.outcome)
        ids = {"output": str(batch.output_file_id), "error": str(batch.error_file_id)}
        paths = {name: store.content(file_id) for name, file_id in ids.items()}
        files = write_files(
            store.job_folder(batch.id),
            store.content(batch.input_file_id),
            _UNFINISHED.get(outcome),
            paths["output"],
            paths["error"],
            Pace(self._llm, self._raise_if_stopping),
        )
        kept: dict[str, str | None] = {}
        for name, size in (("output", files.output_bytes), ("error", files.error_bytes)):
            if size:
                store.keep(StoredFile(ids[name], f"{batch.id}_{name}.jsonl", "batch_output", size))
            else:
                paths[name].unlink()
            kept[f"{name}_file_id"] = ids[name] if size else None
        store.update(batch.id, lambda batch: _with_counts(batch.become(outcome, **kept), files.counts))
        store.delete_job(batch.id)


def _begin(batch: Batch) -> Batch:
    return replace(batch, has_begun=True) if batch.status == "in_progress" else batch


def _expire(batch: Batch) -> Batch:
    return batch if batch.has_ended or batch.has_begun else batch.become("expired")


def _with_counts(batch: Batch, counts: Counts) -> Batch:
    return replace(
        batch,
        num_answered=counts.answered,
        num_failed=counts.failed,
        num_prompt_tokens=counts.num_prompt_tokens,
        num_completion_tokens=counts.num_completion_tokens,
    )


def _error(code: str, message: str) -> Row:
    return {"code": code, "message": message, "line": None, "param": None}
