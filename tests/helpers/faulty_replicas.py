"""Replicas that fail on purpose. Their processes import this file."""

import os
import signal
import time

from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.replicas.replica import replica_main

KIND = "NANOVLLM_TEST_REPLICA_FAULT"  # the environment's variable that says what the last replica does


def faulty_main(seat):
    kind = os.environ[KIND]
    is_last = seat.options["seed"] == 1  # See the test: the options of replicas are the same otherwise.
    if kind == "die-first" and is_last:
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "no-memory" and is_last:
        LLMEngine.__init__ = _fail
    if kind == "bug" and is_last:
        LLMEngine.__init__ = _fail_oddly
    if kind == "step" and is_last:
        LLMEngine._step = _fail_oddly
    if kind == "stop" and is_last:
        LLMEngine._step = _stop
    replica_main(seat)


def _fail(self, *args, **options):
    raise MemoryError("no room for the weights")


class OnPurposeError(Exception):
    pass


def _fail_oddly(self, *args, **options):
    raise OnPurposeError("a replica fails")


def _stop(self):
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(1000)
