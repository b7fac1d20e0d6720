"""Files of prompts in, files of answers out, resumable: `from nanovllm.jobs import run_batch`. See docs/jobs.md."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanovllm.jobs.check import Check, Estimate, Sample, check_batch
    from nanovllm.jobs.folder import Status, job_status
    from nanovllm.jobs.generate_actor import GenerateActor
    from nanovllm.jobs.run import JobError, Summary, run_batch
    from nanovllm.jobs.verify import Verified, verify_batch

__all__ = [
    "Check",
    "Estimate",
    "GenerateActor",
    "JobError",
    "Sample",
    "Status",
    "Summary",
    "Verified",
    "check_batch",
    "job_status",
    "run_batch",
    "verify_batch",
]

_MODULES = {"Check": "check", "check_batch": "check", "GenerateActor": "generate_actor"}
_MODULES |= {"Estimate": "check", "Sample": "check", "Status": "folder", "job_status": "folder"}
_MODULES |= {"Verified": "verify", "verify_batch": "verify"}


def __getattr__(name: str) -> object:
    """Import a public name when it is first used: `nanovllm status` and the reading process need no engine."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES.get(name, 'run')}"), name)
