"""Workers that fail on purpose: `faulty_main` in the place of `worker_main`, told by the environment how and which."""

import os
import signal

from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.ranks import worker
from nanovllm.engine.start import weights

KIND, RANK = "NANOVLLM_TEST_FAULT", "NANOVLLM_TEST_FAULT_RANK"
LAUNCHES_BEFORE = 4


class OnPurposeError(Exception):
    """What a worker raises here."""


def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)


def fail(*args, **kwargs):
    raise OnPurposeError("a worker fails")


def quit_quietly(*args, **kwargs):
    os._exit(3)


def later(fault, method):
    """A method of ModelRunner's that works a few times."""
    original, count = getattr(ModelRunner, method), 0

    def failing(*args):
        nonlocal count
        count += 1
        if count > LAUNCHES_BEFORE:
            fault()
        return original(*args)

    return failing


FAULTS = {
    "die-first": lambda: die(),
    "die-meeting": lambda: setattr(worker, "join_group", die),
    "die-loading": lambda: setattr(weights, "load_model", die),
    "fail-loading": lambda: setattr(weights, "load_model", fail),
    "fail-launch": lambda: setattr(ModelRunner, "launch", later(fail, "launch")),
    "quit-launch": lambda: setattr(ModelRunner, "launch", later(quit_quietly, "launch")),
    "fail-sampling": lambda: setattr(ModelRunner, "sample", later(fail, "sample")),
}


def faulty_main(seat: worker.WorkerSeat) -> None:
    if seat.rank == int(os.environ[RANK]):
        FAULTS[os.environ[KIND]]()
    worker.worker_main(seat)
