"""ReplicatedEngine: what an LLM with data_parallel_size > 1 is instead of an LLMEngine with a model of its own."""

import logging
import os
import time
import weakref
from typing import Any

from nanovllm.config import Config
from nanovllm.engine.engine_lock import EngineLock, User
from nanovllm.engine.llm_engine import BY_HAND, LLMEngine
from nanovllm.engine.replicas.dispatcher import Dispatcher
from nanovllm.engine.replicas.replicas import Replicas
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import Step
from nanovllm.engine.text.formats.all_formats import end_tokens
from nanovllm.engine.text.outputs import EngineStats
from nanovllm.engine.text.sequence_maker import SequenceMaker
from nanovllm.models.tokenizer_files import load_tokenizer
from nanovllm.utils.option_hints import takes_options_of

logger = logging.getLogger(__name__)


class ReplicatedEngine(LLMEngine):
    """An LLMEngine whose steps are those of its replicas: engines in processes of their own.

    Its `scheduler` is a `Dispatcher`, and its `model_runner` stands for all replicas. A step hands out requests and
    takes what has come of others. So whatever loops over steps is the same as with one engine.

    Attributes:
        ps, events: the replicas' processes, and the connections to them.
    """

    scheduler: Any
    model_runner: Any

    @takes_options_of(Config)
    def __init__(self, model: str | os.PathLike[str], **options: Any):
        """As LLMEngine. Raises also what keeps a replica from starting, which the message names, and WorkerError."""
        start = time.perf_counter()
        self.config = config = Config(model, **options)
        self.model_runner = replicas = Replicas(config, options)
        try:
            self.tokenizer = None if config.skip_tokenizer_init else load_tokenizer(config.model, config.tokenizer)
            if self.tokenizer is not None and "eos" not in options:
                config.add_eos(end_tokens(self.tokenizer, config.chat_format), "tokenizer")
            config.num_kvcache_blocks = replicas.wait_ready()
        except BaseException:
            replicas.exit()
            raise
        self.ps, self.events = replicas.processes, replicas.connections
        self._check_workers = replicas.check
        self._lock = EngineLock(self, replicas.exit, replicas.check)
        self._finalizer = weakref.finalize(self, self._lock.exit)
        self.scheduler = Dispatcher(config, replicas)
        self._sequences = SequenceMaker(config, self.tokenizer, self.scheduler.length_limit)
        self._num_steps, self._seconds = 0, 0.0
        self._in_flight = None  # Replicas have steps in flight, and the caller has none.
        self._aborted: list[Sequence] = []
        self._sleep_level = 0
        logger.info("%d replicas ready in %.1f s", config.data_parallel_size, time.perf_counter() - start)

    def _queue(self, user: User, requests: list[list[Sequence] | Exception], reorder: bool = False) -> int:
        self.scheduler.reads_steps = user.reads_steps
        return super()._queue(user, requests, reorder)

    def _step(self) -> tuple[list[Sequence], Step]:
        """Hand out what replicas have room for, and take what they have finished since; perhaps nothing."""
        start = time.perf_counter()
        with self._lock.step():
            finished, step = self.scheduler.exchange()
            self._num_steps += 1
        self._seconds += time.perf_counter() - start
        return finished, step

    def _set_texts(self, finished: list[Sequence]) -> None:
        """Replicas have made the texts of all that they had."""
        super()._set_texts([seq for seq in finished if seq.completion.text is None])

    def is_finished(self) -> bool:
        return self.scheduler.is_finished()

    def stats(self) -> EngineStats:
        """Of all replicas together, as they have last told: `steps` are those of all of them."""
        return self.scheduler.stats(self._seconds)

    def _abort(self, request_ids: list[int] | None) -> None:
        """What a call returns of the requests comes with a later step."""
        (self.scheduler.abort if self._lock.user is BY_HAND else self.scheduler.ask_abort)(request_ids)

    def _forget_prefixes(self) -> None:
        self.model_runner.call("reset_prefix_cache")
        self.scheduler.forget_prefixes()
