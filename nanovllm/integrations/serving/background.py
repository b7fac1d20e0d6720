"""Requests that go behind the live ones: the lines of batches, in the same engine and the same steps.

A line begins only where no live request has to wait for it:

- No sequence waits, and no live request has come.
- An eighth of max_num_seqs and of the KV cache's blocks stays free for live requests.
- Between two steps, lines begin whose prompts one step can compute. So a live request waits for one such step at most.

Lines grow while they are answered. If a live request finds no room, lines are put back, the newest first, and are
answered from their beginning when there is room again.
"""

import queue
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from nanovllm import LLM, NO_PROMPT, ImagePrompt, PoolingParams, SamplingParams, StreamDelta

_FREE_SHARE = 8  # One part in so many stays free for live requests.
_POLL_SECONDS = 0.1

Output = dict[str, Any]
Params = SamplingParams | PoolingParams
TokenPrompt = list[int] | ImagePrompt  # what an engine need not tokenize


class _Line(ABC):
    """A prompt, and what has come of it. It is kept until the line is done, with its images: the line may be put back.

    Attributes:
        num_prompt_tokens: with those of images.
        num_samples: sequences that answer it.
        num_left: those that have not ended.
    """

    num_samples = 1
    num_left: int

    def __init__(self, run: "_Run", index: int, prompt: TokenPrompt, params: Params):
        self.run, self.index, self.prompt, self.params = run, index, prompt, params
        self.num_prompt_tokens = len(prompt.token_ids if isinstance(prompt, ImagePrompt) else prompt)

    @abstractmethod
    def begin(self) -> None:
        """Forget an answer that was put back. Raises ValueError for what is not served."""

    @abstractmethod
    def add(self, delta: StreamDelta) -> None: ...

    @abstractmethod
    def output(self) -> Output:
        """What jobs read of an answer that has ended."""

    @abstractmethod
    def num_blocks(self, block_size: int) -> int:
        """Of the KV cache, at most, for its tokens so far."""


class _GeneratedLine(_Line):
    """One with SamplingParams."""

    params: SamplingParams

    def __init__(self, run: "_Run", index: int, prompt: TokenPrompt, params: SamplingParams):
        super().__init__(run, index, prompt, params)
        self.num_samples = params.n
        self._clear()

    def begin(self) -> None:
        if self.params.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs: is not served; use LLM.generate, LLM.score or run-batch")
        self._clear()

    def _clear(self) -> None:
        self.num_left = self.num_samples
        self.samples: list[Output] = [
            {"text": "", "token_ids": [], "logprobs": None if self.params.logprobs is None else [], "stop_reason": None}
            for _ in range(self.num_samples)
        ]

    def add(self, delta: StreamDelta) -> None:
        sample = self.samples[delta["sample"]]
        sample["text"] += delta["text"] or ""
        sample["token_ids"] += delta["token_ids"]
        if sample["logprobs"] is not None:
            sample["logprobs"] += delta["logprobs"] or []
        if delta["finish_reason"] is not None:
            self.num_left -= 1
            sample |= {name: delta[name] for name in ("finish_reason", "stop_reason")}  # type: ignore[literal-required]
            if "error" in delta:
                sample["error"] = delta["error"]

    def output(self) -> Output:
        """As a RequestOutput, or an ErrorOutput."""
        for sample in self.samples:
            if "error" in sample:
                return _error(sample["error"])
        output = self.samples[0] | {"num_prompt_tokens": self.num_prompt_tokens, "prompt_logprobs": None}
        return output | ({"samples": self.samples} if self.num_samples > 1 else {})

    def num_blocks(self, block_size: int) -> int:
        num_tokens = self.num_prompt_tokens
        return sum(-(-(num_tokens + len(sample["token_ids"]) + 1) // block_size) for sample in self.samples)


class _PooledLine(_Line):
    """One with PoolingParams, whose request ends with its prompt."""

    def begin(self) -> None:
        self.num_left, self._output = 1, _error("it has no result")

    def add(self, delta: StreamDelta) -> None:
        if (reason := delta["finish_reason"]) is not None:
            self.num_left = 0
            is_whole = reason == "stop" and "output" in delta
            self._output = delta["output"] if is_whole else _error(delta.get("error") or f"it has no result: {reason}")

    def output(self) -> Output:
        """As an EmbeddingOutput, a ClassOutput or a RankOutput, or an ErrorOutput."""
        return self._output

    def num_blocks(self, block_size: int) -> int:
        return -(-self.num_prompt_tokens // block_size)


def _line(run: "_Run", index: int, prompt: TokenPrompt, params: Params) -> _Line:
    if isinstance(params, SamplingParams):
        return _GeneratedLine(run, index, prompt, params)
    return _PooledLine(run, index, prompt, params)


def _error(text: str) -> Output:
    """As an ErrorOutput, as far as jobs read it."""
    return {"error": text, "token_ids": []}


class _Run:
    """One call of `answer`: what waits, and what is done."""

    def __init__(self) -> None:
        self.waiting: deque[_Line] = deque()
        self.done: queue.SimpleQueue[tuple[int, Output]] = queue.SimpleQueue()
        self.is_over = False


class Background:
    """Lines on their way through an engine that also serves live requests. One batch at a time.

    A thread of the batch calls `answer`. The engine's thread, which alone calls the engine, calls the others.
    """

    def __init__(self, llm: LLM, wake: Callable[[], None]):
        """wake: called when there is a line and the engine's thread may be asleep."""
        self._llm, self._wake = llm, wake
        self._run: _Run | None = None
        self._under_way: dict[int, _Line] = {}  # by request id, the oldest first
        # Live requests that wait: the tokens of their prompts, their samples, and which of these have begun.
        self._live: dict[int, tuple[int, int, set[int]]] = {}
        self._has_stale = False  # lines of a batch that has ended
        self._end: Exception | None = None

    # -- for the batch -------------------------------------------------------------------------------------------------

    def answer(self, pairs: Iterable[tuple[Any, Any]], check: Callable[[], None]) -> Iterator[tuple[int, Output]]:
        """(index, output) of prompts, as they finish: of each TokenPrompt and its Params. Outputs are RequestOutputs,
        of PoolingParams what LLM.embed, classify or rerank_iter gives; or ErrorOutputs. Prompts are taken a few at a
        time. After a NO_PROMPT, which has no index, the next one is taken when there is an output.

        check: called several times a second; an exception that it raises ends this iterator, and drops the lines.

        Raises what has ended the engine.
        """
        run = self._run = _Run()
        remaining, index, num_under_way, has_more = iter(pairs), 0, 0, True
        try:
            while True:
                while has_more and num_under_way < 2 * self._llm.config.max_num_seqs:
                    check()
                    if (pair := next(remaining, None)) is None:
                        has_more = False
                        break
                    if pair[0] is NO_PROMPT:
                        break
                    run.waiting.append(_line(run, index, *pair))
                    self._wake()
                    index, num_under_way = index + 1, num_under_way + 1
                    while not run.done.empty():
                        num_under_way -= 1
                        yield run.done.get()
                if not num_under_way and not has_more:
                    return
                check()
                if self._end is not None:
                    raise self._end
                try:
                    done = run.done.get(timeout=_POLL_SECONDS)
                except queue.Empty:
                    continue
                num_under_way -= 1
                yield done
        finally:
            run.is_over = True
            self._has_stale = True
            self._wake()

    # -- for the engine's thread ---------------------------------------------------------------------------------------

    @property
    def has_ended(self) -> bool:
        """Whether no step is computed any more. Any thread may ask."""
        return self._end is not None

    @property
    def has_waiting(self) -> bool:
        """Whether a line can begin, or can be dropped."""
        run = self._run
        return self._has_stale or (run is not None and not run.is_over and bool(run.waiting))

    def expect(self, request_id: int, num_prompt_tokens: int, num_samples: int) -> None:
        """A live request has been added."""
        self._live[request_id] = num_prompt_tokens, num_samples, set()

    def count(self, delta: StreamDelta) -> None:
        """A sample of a live request has got tokens, or has ended."""
        request_id = delta["request_id"]
        if request_id not in self._live:
            return
        _, num_samples, begun = self._live[request_id]
        begun.add(delta["sample"])
        if len(begun) == num_samples:
            del self._live[request_id]

    def forget(self, request_id: int) -> None:
        """A live request has been aborted."""
        self._live.pop(request_id, None)

    def begin(self, has_live: bool, live_requests_come: bool) -> None:
        """Before a step: begin lines, or put some back.

        Args:
            has_live: live requests are under way.
            live_requests_come: some have not been added yet.
        """
        if self._has_stale:
            self._has_stale = False
            self._drop_stale()
        run = self._run
        if run is None or run.is_over:
            return
        if not self._llm.stats()["waiting"] and not self._live and not live_requests_come:
            self._add_lines(run)
        elif has_live:
            self._make_room(run)

    def _drop_stale(self) -> None:
        for request_id, line in [*self._under_way.items()]:
            if line.run.is_over:
                self._llm.abort_request(request_id)
                del self._under_way[request_id]

    def _add_lines(self, run: _Run) -> None:
        config, stats = self._llm.config, self._llm.stats()
        num_seqs = max(config.max_num_seqs - max(config.max_num_seqs // _FREE_SHARE, 1), 1) - stats["running"]
        num_blocks = stats["kv_blocks_free"] - stats["kv_blocks_total"] // _FREE_SHARE
        num_tokens = most_tokens = config.max_num_batched_tokens
        while run.waiting:
            line = run.waiting[0]
            num_seqs -= line.num_samples
            num_blocks -= line.num_blocks(config.kvcache_block_size)
            # A prompt that is longer than a step begins alone.
            is_too_long = num_tokens < line.num_prompt_tokens and num_tokens < most_tokens
            if (num_seqs < 0 or num_blocks < 0 or is_too_long) and not self._llm.is_finished():
                return
            num_tokens -= line.num_prompt_tokens
            self._add(run.waiting.popleft())

    def _add(self, line: _Line) -> None:
        prompt: Any = line.prompt
        try:
            line.begin()
            self._under_way[self._llm.add_request(prompt, line.params)] = line
        except (TypeError, ValueError, ImportError) as error:
            line.run.done.put((line.index, _error(str(error))))

    def _make_room(self, run: _Run) -> None:
        """Put lines back if live requests find no room beside them."""
        config, stats = self._llm.config, self._llm.stats()
        if not stats["waiting"]:
            return
        block_size = config.kvcache_block_size
        num_seqs, num_blocks = 0, stats["kv_blocks_total"] // _FREE_SHARE
        for num_tokens, num_samples, begun in self._live.values():
            num_seqs += num_samples - len(begun)
            num_blocks += (num_samples - len(begun)) * -(-num_tokens // block_size)
        num_seqs -= config.max_num_seqs - stats["running"]
        num_blocks -= stats["kv_blocks_free"]
        while self._under_way and (num_seqs > 0 or num_blocks > 0):
            request_id, line = self._under_way.popitem()
            num_seqs -= line.num_left
            num_blocks -= line.num_blocks(block_size)
            self._llm.abort_request(request_id)
            run.waiting.appendleft(line)

    def deliver(self, delta: StreamDelta) -> None:
        """What a step added to a request that is not a live one."""
        line = self._under_way.get(delta["request_id"])
        if line is None:
            return  # It was put back, or its batch has ended.
        line.add(delta)
        if not line.num_left:
            del self._under_way[delta["request_id"]]
            line.run.done.put((line.index, line.output()))

    def end(self, error: Exception) -> None:
        """No step is computed any more."""
        self._end = error
        self._under_way.clear()
