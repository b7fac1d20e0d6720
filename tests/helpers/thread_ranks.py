"""Ranks 1..N-1 as threads of this process, in the place of `Workers`: they start in no time."""

import shutil
import tempfile
import threading
import traceback
from copy import copy
from queue import SimpleQueue
from types import SimpleNamespace
from unittest import mock

import torch
from checkpoints import make_llm

from nanovllm import LLM
from nanovllm.engine.ranks.process_group import join_group, open_store
from nanovllm.engine.ranks.ranks import Ranks

CPU = torch.device("cpu")


class ThreadRanks(Ranks):
    """Rank 0's. `tests/tensor_parallel` has what only processes have: their start, their end, and shared memory."""

    def __init__(self, config):
        super().__init__()
        self._config, self._folder = config, tempfile.mkdtemp()
        self._ranks = [_ThreadRank(self, rank) for rank in range(1, config.tensor_parallel_size)]
        self.failure = ""

    def meet(self, run):
        for rank in self._ranks:
            rank.start(run)
        return self.join(0)

    def join(self, rank):
        return join_group(open_store(self._folder), rank, self._config.tensor_parallel_size, CPU)

    def config_of_worker(self):
        """As workers have it: with plain attributes alone."""
        config, fields = copy(self._config), self._config.hf_config
        config.hf_config = SimpleNamespace(**vars(fields) | {"model_type": fields.model_type})
        return config

    def write(self, message):
        assert not self.failure, self.failure
        for rank in self._ranks:
            rank.calls.put(message)

    def end(self, farewell=None):
        if farewell is not None and not self.has_ended:
            for rank in self._ranks:
                rank.calls.put(farewell)
                rank.thread.join(60)
        self.has_ended = True
        shutil.rmtree(self._folder, ignore_errors=True)


class _ThreadRank(Ranks):
    """One of the others."""

    def __init__(self, first: ThreadRanks, rank: int):
        super().__init__()
        self._first, self._rank = first, rank
        self.calls: SimpleQueue[bytes] = SimpleQueue()

    def start(self, run):
        self.thread = threading.Thread(target=self._work, args=(run,), daemon=True)
        self.thread.start()

    def _work(self, run):
        try:
            run(self._first.config_of_worker(), self._rank, self).loop()
        except BaseException:
            # As text: the traceback would keep the connection, at whose end rank 0 waits.
            self._first.failure = traceback.format_exc()

    def meet(self, run):
        return self._first.join(self._rank)

    def read(self):
        return self.calls.get()


def make_llm_of_ranks(path, num_ranks: int, **options) -> LLM:
    """`make_llm` over ranks that are threads."""
    with mock.patch("nanovllm.engine.llm_engine.Workers", ThreadRanks):
        return make_llm(path, tensor_parallel_size=num_ranks, **options)
