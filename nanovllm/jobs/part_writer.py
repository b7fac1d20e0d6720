"""PartWriter: appends rows to the open part of a job's folder, and completes it."""

import os

from nanovllm.jobs.folder import EARLY, ERRORS, AppendedFile, JobFolder
from nanovllm.jobs.parquet import ParquetFormat

PART_LINES = 10_000


class PartWriter:
    """Appends rows to the open part, to the errors, and to the early rows. All methods raise OSError."""

    def __init__(self, folder: JobFolder, parquet: ParquetFormat | None):
        self._folder = folder
        self._parquet = parquet
        self._number = folder.next_part()
        self._num_lines = 0
        self._part: AppendedFile | None = None
        self._errors: AppendedFile | None = None
        self._early: AppendedFile | None = None

    def write(self, answers: list[str], errors: list[str]) -> None:
        """Rows in JSON."""
        if errors:
            self._errors = self._errors or AppendedFile(self._folder.path / ERRORS)
            self._errors.append(errors)
        while answers:
            some, answers = answers[: PART_LINES - self._num_lines], answers[PART_LINES - self._num_lines :]
            self._part = self._part or AppendedFile(self._folder.open_part(self._number))
            self._part.append(some)
            self._num_lines += len(some)
            if self._num_lines == PART_LINES:
                self._complete(self._part)

    def keep_early(self, answers: list[str]) -> None:
        """Keep answers that cannot be written yet because the order is kept, so that they are not lost."""
        if answers:
            self._early = self._early or AppendedFile(self._folder.path / EARLY)
            self._early.append(answers)

    def forget_early(self) -> None:
        """Delete them: all have been written to a part that is synced."""
        if (self._folder.path / EARLY).exists():
            if self._early is not None:
                self._early.close()
                self._early = None
            os.unlink(self._folder.path / EARLY)

    def sync(self) -> None:
        """Have the disk keep what has been written."""
        self._folder.check()
        for file in self._files():
            file.sync()

    def close(self, complete: bool = True) -> None:
        """complete: False leaves the open part as it is, after an error."""
        if complete:
            self.sync()
            if self._part is not None:
                self._complete(self._part)
        for file in self._files():
            file.close()
        self._part = self._errors = self._early = None

    def _complete(self, part: AppendedFile) -> None:
        part.sync()
        part.close()
        self._part = None
        self._folder.complete(self._folder.open_part(self._number), self._number, self._parquet)
        self._number += 1
        self._num_lines = 0

    def _files(self) -> list[AppendedFile]:
        return [file for file in (self._part, self._errors, self._early) if file is not None]
