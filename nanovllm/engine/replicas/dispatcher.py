"""Dispatcher: an engine of replicas has it for a scheduler. It hands out sequences, and takes what comes of them."""

import math
import time
from collections.abc import Iterable, ValuesView
from types import SimpleNamespace
from typing import Any, Protocol, cast

from nanovllm.config import Config
from nanovllm.engine.cells import NoCells
from nanovllm.engine.length_limit import LengthLimit
from nanovllm.engine.replicas import messages
from nanovllm.engine.replicas.messages import News, Work
from nanovllm.engine.replicas.placement import Placement
from nanovllm.engine.sequence import Sequence, SequenceStatus
from nanovllm.engine.step import Step
from nanovllm.engine.text.outputs import EngineStats
from nanovllm.utils.host_memory import host_memory

# A step waits this long for news, so that others get their turn: exit(), and requests by hand.
_WAIT_SECONDS = 0.02

# Of the memory that is free at the start, replicas may fill so much with images together. The caller has them too.
_IMAGE_SHARE = 0.25

# Of EngineStats, what replicas have together.
_SUMMED = (
    *("kv_blocks_total", "kv_blocks_used", "kv_blocks_free", "prefix_cache_queries", "prefix_cache_hits"),
    *("prompt_tokens", "generated_tokens", "steps", "proposed_tokens", "accepted_tokens", "preemptions"),
)


class Mail(Protocol):
    """What of `Replicas` a dispatcher needs."""

    def send(self, i: int, kind: bytes, content: object = None) -> None: ...

    def receive(self, timeout: float) -> list[Any]: ...


class ReceivedText:
    """A completion's text as it comes from a replica, in the place of a TextStream."""

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self._num_taken = 0

    def take(self) -> str:
        """The text since the last call."""
        new = "".join(self.pieces[self._num_taken :])
        self._num_taken = len(self.pieces)
        return new

    def finish(self, seq: Sequence) -> str:
        """The whole text."""
        return "".join(self.pieces)


class Dispatcher:
    """
    Attributes:
        waiting, running: sequences that no replica has yet, and those that one has.
        max_num_seqs: of all replicas together.
        max_seq_len, length_limit: as a Scheduler's.
        block_manager: the sizes of all KV caches together.
        reads_steps: whether the sequences that are added are read token by token.
    """

    def __init__(self, config: Config, mail: Mail):
        """config: with the blocks of the smallest KV cache."""
        self.length_limit = LengthLimit(config)
        self.max_seq_len = self.length_limit.max_seq_len
        self.max_num_seqs = config.data_parallel_size * config.max_num_seqs
        num_blocks = config.data_parallel_size * config.num_kvcache_blocks
        self.block_manager: Any = SimpleNamespace(
            blocks=range(num_blocks),
            block_size=config.kvcache_block_size,
            enable_prefix_caching=config.enable_prefix_caching,
            cells=NoCells(),
        )
        self.reads_steps = False
        self._config, self._mail, self._num = config, mail, config.data_parallel_size
        self._most_image_bytes = int(_IMAGE_SHARE * host_memory().available / self._num)
        self._stats: list[EngineStats | None] = [None] * self._num
        self._begin()

    def _begin(self) -> None:
        config = self._config
        self._waiting: dict[int, Sequence] = {}
        self._running: dict[int, Sequence] = {}
        self._stepwise: set[int] = set()  # ids of sequences that are read token by token
        self._aborted: list[Sequence] = []
        sizes = config.max_num_seqs, self.max_seq_len, config.kvcache_block_size, config.num_kvcache_blocks
        self._placement = Placement(self._num, *sizes, config.enable_prefix_caching, self._most_image_bytes)

    @property
    def waiting(self) -> ValuesView[Sequence]:
        return self._waiting.values()

    @property
    def running(self) -> ValuesView[Sequence]:
        return self._running.values()

    def is_finished(self) -> bool:
        return not (self._waiting or self._running or self._aborted)

    def add(self, seq: Sequence) -> None:
        """Queue a sequence. Raises ValueError if it is too long."""
        self.length_limit.check(seq.num_tokens)
        seq.completion.grammar = None  # The replica makes its own.
        self._waiting[seq.seq_id] = seq
        if self.reads_steps:
            self._stepwise.add(seq.seq_id)
        self._placement.add(seq)

    def exchange(self) -> tuple[list[Sequence], Step]:
        """Hand out what replicas have room for, and wait a moment for news. Returns the sequences that have finished,
        and all that there are news of, as a step."""
        self._hand_out()
        before = self.stats()
        finished, changed = self._aborted, dict.fromkeys(self._aborted)
        self._aborted = []
        for i, kind, content in self._mail.receive(0.0 if finished else _WAIT_SECONDS) if self._running else []:
            if kind == messages.NEWS:
                self._read_news(i, content, finished, changed)
            elif kind == messages.GIVEN_BACK:
                self._take_back(i, content)
        self._hand_out()
        after = self.stats()
        num_generated = after["generated_tokens"] - before["generated_tokens"]
        num_tokens = -num_generated if num_generated else after["prompt_tokens"] - before["prompt_tokens"]
        return finished, Step(list(changed), is_prefill=num_tokens > 0, num_tokens=num_tokens)

    # -- handing out -------------------------------------------------------------------------------------------------

    def _hand_out(self) -> None:
        for donor, num in self._placement.balance():
            self._mail.send(donor, messages.GIVE_BACK, num)
        for i in range(self._num):
            groups: dict[tuple[bool, bool], list[Sequence]] = {}
            for seq in self._placement.take(i):
                reads_steps, completion = seq.seq_id in self._stepwise, seq.completion
                # With stop strings a sequence has a stream, whoever reads it; its replica looks for them.
                streams = reads_steps and completion.text_stream is not None
                completion.text_stream = ReceivedText() if streams else None
                groups.setdefault((reads_steps, streams), []).append(seq)
                self._running[seq.seq_id] = self._waiting.pop(seq.seq_id)
            for (reads_steps, streams), seqs in groups.items():
                self._mail.send(i, messages.WORK, Work.of(seqs, self._placement.moved, reads_steps, streams))

    def _take_back(self, i: int, ids: list[int]) -> None:
        self._placement.take_back(i, ids)
        for seq_id in ids:
            seq = self._running.pop(seq_id, None)
            if seq is not None:
                self._waiting[seq_id] = seq

    # -- news --------------------------------------------------------------------------------------------------------

    def _read_news(self, i: int, news: News, finished: list[Sequence], changed: dict[Sequence, None]) -> None:
        tokens, first = news.tokens.tolist(), 0
        rows = zip(
            *(news.ids.tolist(), news.counts.tolist(), news.shared.tolist(), news.times.tolist()),
            *(news.texts, news.logprobs, news.ends),
            strict=True,
        )
        for seq_id, count, shared, times, text, logprobs, end in rows:
            new, first = tokens[first : first + count], first + count
            seq = self._running.get(seq_id)
            if seq is None:  # dropped meanwhile
                continue
            completion = seq.completion
            seq.token_ids.extend(new)
            seq.num_tokens += count
            seq.last_token = seq.token_ids[-1]
            completion.num_shared_tokens = shared
            scheduled, first_token, completion.finish_time = times
            completion.scheduled_time = None if math.isnan(scheduled) else scheduled
            completion.first_token_time = None if math.isnan(first_token) else first_token
            if logprobs:
                completion.logprobs = [*(completion.logprobs or []), *logprobs]
            if text is not None and completion.text_stream is not None:
                completion.text_stream.pieces.append(text)
            changed[seq] = None
            if end is not None:
                completion.finish_reason, completion.stop_reason, completion.error = end[:3]
                completion.prompt_logprobs, completion.vector = end[3:]
                completion.text = text if completion.text_stream is None else completion.text_stream.finish(seq)
                self._end(seq)
                finished.append(seq)
        self._stats[i] = news.stats
        self._placement.report(i, news.num_received, news.stats["waiting"], news.num_movable)

    def _end(self, seq: Sequence) -> None:
        seq.status = SequenceStatus.FINISHED
        for kept in (self._waiting, self._running):
            kept.pop(seq.seq_id, None)
        self._stepwise.discard(seq.seq_id)
        self._placement.remove(seq)

    # -- dropping ----------------------------------------------------------------------------------------------------

    def abort(self, request_ids: Iterable[int] | None = None) -> list[Sequence]:
        """Drop the sequences of these requests, or all, and return them as they are known here."""
        if request_ids is None:
            dropped = [*self._waiting.values(), *self._running.values()]
            self.reset()
        else:
            dropped = self._tell_abort(request_ids)
        for seq in dropped:
            self._end_aborted(seq)
        return dropped

    def ask_abort(self, request_ids: Iterable[int] | None) -> None:
        """End these requests, or all: what they have so far comes with the next steps."""
        ids = {seq.request.request_id for seq in (*self.waiting, *self.running)}
        wanted = ids if request_ids is None else ids.intersection(request_ids)
        for seq in self._tell_abort(wanted):
            if seq.seq_id in self._waiting:
                self._end_aborted(seq)
                self._aborted.append(seq)

    def _tell_abort(self, request_ids: Iterable[int]) -> list[Sequence]:
        """Tell their replicas. Returns all their sequences."""
        ids, of_lane = set(request_ids), dict[int, list[int]]()
        found = [seq for seq in (*self.waiting, *self.running) if seq.request.request_id in ids]
        for seq in found:
            if seq.seq_id in self._running:
                of_lane.setdefault(self._placement.lane_of(seq), []).append(seq.seq_id)
        for i, seq_ids in of_lane.items():
            self._mail.send(i, messages.ABORT, seq_ids)
        return found

    def _end_aborted(self, seq: Sequence) -> None:
        seq.completion.finish_reason, seq.completion.finish_time = "abort", time.perf_counter()
        self._end(seq)

    def reset(self) -> None:
        """Drop all sequences, also after an exception: Ctrl-C may have struck between any two lines."""
        for i in range(self._num):
            self._mail.send(i, messages.DROP_ALL)
        self._begin()

    def forget_prefixes(self) -> None:
        """The prefix caches are cleared."""
        self._placement.forget_prefixes()

    # -- counters ----------------------------------------------------------------------------------------------------

    def stats(self, seconds: float = 0.0) -> EngineStats:
        """Of all replicas together, as they have last told. seconds: that steps have taken."""
        known: list[Any] = [each for each in self._stats if each is not None]
        total: Any = {name: sum(each[name] for each in known) for name in _SUMMED}
        if not known:
            total["kv_blocks_total"] = total["kv_blocks_free"] = len(self.block_manager.blocks)
        num_waiting = len(self._waiting) + sum(each["waiting"] for each in known)
        num_all = len(self._waiting) + len(self._running)
        queries, hits, generated = (
            total[name] for name in ("prefix_cache_queries", "prefix_cache_hits", "generated_tokens")
        )
        total |= {"waiting": min(num_waiting, num_all), "running": max(0, num_all - num_waiting)}
        total |= {"prefix_cache_hit_rate": hits / queries if queries else 0.0, "seconds": seconds}
        total["tokens_per_second"] = generated / seconds if seconds else 0.0
        return cast(EngineStats, {name: total[name] for name in EngineStats.__annotations__})
