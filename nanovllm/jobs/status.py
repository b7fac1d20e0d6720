"""job_status: how far a job is. Works without torch."""

import os
from typing import NamedTuple

from nanovllm.jobs.folder import Counts, JobFolder
from nanovllm.jobs.lines import Row


class Status(NamedTuple):
    """The state of a job's folder."""

    job: Row  # the model and the parameters
    is_running: bool
    num_lines: int  # of the input
    counts: Counts  # of all rows in the folder, also in the open part
    seconds: float  # of all calls that have ended in order


def job_status(output: str | os.PathLike[str]) -> Status:
    """Raises ValueError or OSError if this is no job's folder."""
    folder = JobFolder(output)
    manifest = folder.read_manifest()
    if manifest is None:
        raise ValueError(f"output={str(folder.path)!r}: holds no job")
    seconds = manifest["progress"]["seconds"]
    return Status(manifest["job"], folder.is_locked(), manifest["num_lines"], folder.read(with_open=True), seconds)
