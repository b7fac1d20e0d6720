"""The thread that computes steps for the requests of an event loop."""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from nanovllm import (
    LLM,
    EngineStats,
    ImageRules,
    PoolingParams,
    SamplingParams,
    StreamDelta,
    as_conversations,
    find_image_reader,
    image_sources,
    with_images,
)
from nanovllm.integrations.serving.background import Background
from nanovllm.openai_format.request_names import ChatOptions

logger = logging.getLogger(__name__)

_WAKE = object()
MAX_IMAGES = 64  # of a request
REQUESTS_AT_ONCE = 32  # read between two steps: enough to fill a batch, but too few to delay a step by tokenizing them


class ServerEnds(RuntimeError):
    """No request is served any more."""


class EngineDied(ServerEnds):
    """A step has failed."""


class Submission:
    """Prompts of one call, with the same parameters.

    Attributes:
        events: first the number of prompt tokens, then (index of the choice, StreamDelta) until each choice has ended;
            or an exception at any time. The choices are the first prompt's samples, then the next one's.
        num_samples: of a prompt.
        num_choices: of all prompts.
        splits_answers: whether answers are split into what the model thinks, says and calls.
        opens_reasoning: known with the first event: whether the chat template has opened it.
    """

    def __init__(self, prompts: list[Any], params: SamplingParams | PoolingParams, chat_options: ChatOptions | None):
        """prompts: texts or token ids; conversations with chat_options."""
        self.prompts, self.params, self.chat_options = prompts, params, chat_options
        self.num_samples = params.n if isinstance(params, SamplingParams) else 1
        self.num_choices = len(prompts) * self.num_samples
        self.events: asyncio.Queue[Any] = asyncio.Queue()
        self.is_cancelled = False  # written by the event loop
        self.splits_answers = False
        self.opens_reasoning = False  # written by the thread, as request_ids
        self.request_ids: list[int] = []

    def encoded(self, llm: LLM) -> list[Any]:
        """The prompts as the engine's thread reads them. Raises ValueError or TypeError."""
        return self.prompts


class EngineLoop:
    """Runs an LLM in a thread of its own, which alone calls it.

    Attributes:
        error: what ended the engine; None while it works.
        answers: how the model's answers to chats are written.
        background: for requests that go behind those of the event loop.
        images: reads those of conversations; None if the model reads none.
        image_rules: which images are read.
    """

    def __init__(self, llm: LLM, chat_template: str | None = None, image_rules: ImageRules | None = None):
        """
        Args:
            chat_template: a Jinja template; None: the tokenizer's.
            image_rules: which images are read; None: those that requests hold themselves, as data: URLs.
        """
        self.error: BaseException | None = None
        self.on_death: Callable[[], None] = lambda: None  # called in the event loop
        self._llm = llm
        self.answers = llm.answer_format(chat_template)
        self._encoder, self._chat_template = llm.prompt_encoder, chat_template
        self.image_rules = ImageRules(max_images=MAX_IMAGES) if image_rules is None else image_rules
        self.images = find_image_reader(
            llm.config.model,
            None,
            llm.get_tokenizer(),
            self.image_rules,
            str(llm.config.dtype).removeprefix("torch."),
        )
        # New submissions and cancelled ones; _WAKE if there is something to do in the background; None at the end.
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.background = Background(llm, self._wake)
        self._is_woken = False
        self._submissions: dict[int, tuple[Submission, int]] = {}  # request id -> its submission, index of the prompt
        self._num_left: dict[int, int] = {}  # request id -> samples that have not ended
        self._open: set[Submission] = set()  # not cancelled yet; of the event loop
        self._end: ServerEnds | None = None  # likewise
        self._thread = threading.Thread(target=self._run, name="nanovllm-engine", daemon=True)

    # -- for the event loop ------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Called in the event loop that submits."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self) -> None:
        """Drop all requests, and wait for the step under way."""
        self._inbox.put(None)
        self._thread.join()

    def read_images(self, submission: Submission) -> None:
        """Read the images of a submission's conversations before it is submitted, so that no step waits for them. Takes
        as long as they take to come and to be decoded. Raises ValueError or TypeError."""
        if self.images is None or submission.chat_options is None:
            return
        for index, messages in enumerate(submission.prompts):
            try:
                (conversation,) = as_conversations([messages])
            except ValueError as error:
                raise ValueError(
                    str(error).removeprefix("conversation 0: ").removeprefix("conversation 0, ")
                ) from error
            if sources := image_sources(conversation):
                submission.prompts[index] = with_images(conversation, self.images.read_all(sources))

    def submit(self, submission: Submission) -> None:
        """Its events begin to come. Raises ServerEnds."""
        if self._end is not None:
            raise self._end
        self._open.add(submission)
        self._inbox.put(submission)

    @property
    def is_serving(self) -> bool:
        """Whether calls are accepted."""
        return self._end is None and self.error is None and self._thread.is_alive()

    def stats(self) -> EngineStats:
        return self._llm.stats()  # Counters, which may be read from any thread.

    def cancel(self, submission: Submission) -> None:
        """Drop what is left of a submission. Called at the end of each submission."""
        self._open.discard(submission)
        if not submission.is_cancelled:
            submission.is_cancelled = True
            self._inbox.put(submission)

    def end_calls(self, end: ServerEnds) -> None:
        """Raise an exception in all calls under way, and in those to come."""
        self._end = self._end or end
        for submission in self._open:
            submission.events.put_nowait(self._end)

    def _die(self, error: BaseException) -> None:
        self.end_calls(EngineDied(f"the engine died: {type(error).__name__}: {error}"))
        self.on_death()

    # -- in the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._read_inbox():
                self.background.begin(bool(self._submissions), self._inbox.qsize() > self._is_woken)
                if not self._llm.is_finished():
                    self._deliver(self._llm.step_deltas())
            self._llm.abort_request()
            while not self._llm.is_finished():  # the step under way
                self._llm.step_deltas()
        except BaseException as error:
            logger.error("the engine died", exc_info=error)
            self.error = error
            self._call(partial(self._die, error))
        finally:
            self.background.end(ServerEnds("the server ends"))

    def _read_inbox(self) -> bool:
        """Do what the event loop asks for, and wait for it if there is nothing else to do. Returns False at the end."""
        for _ in range(REQUESTS_AT_ONCE):
            try:
                submission = self._inbox.get(block=self._llm.is_finished() and not self.background.has_waiting)
            except queue.Empty:
                break
            if submission is None:
                return False
            if submission is _WAKE:
                self._is_woken = False
            elif submission.is_cancelled:
                self._abort(submission)
            else:
                self._add(submission)
        return True

    def _wake(self) -> None:
        """Called by any thread."""
        if not self._is_woken:
            self._is_woken = True
            self._inbox.put(_WAKE)

    def _add(self, submission: Submission) -> None:
        num_prompt_tokens, params = 0, submission.params
        if submission.splits_answers and isinstance(params, SamplingParams):
            params = self.answers.with_tags(params)
        try:
            for index, prompt in enumerate(submission.encoded(self._llm)):
                read = self._read_prompt(prompt, submission.chat_options)
                request_id = self._llm.add_request(read, params, streams=True)
                token_ids: Any = read if isinstance(read, list) else read.token_ids
                submission.request_ids.append(request_id)
                self._submissions[request_id], self._num_left[request_id] = (submission, index), submission.num_samples
                num_prompt_tokens += len(token_ids)
                self.background.expect(request_id, len(token_ids), submission.num_samples)
                if submission.chat_options is not None:
                    submission.opens_reasoning = self.answers.opens_reasoning(token_ids)
        except (TypeError, ValueError, ImportError) as error:
            self._abort(submission)
            self._post([(submission, error)])
        else:
            self._post([(submission, num_prompt_tokens)])

    def _read_prompt(self, prompt: Any, chat_options: ChatOptions | None) -> Any:
        """Token ids, or an ImagePrompt. Raises ValueError or TypeError."""
        if chat_options is not None:
            encoded = self._encoder.encode_chat(prompt, self._chat_template, *chat_options)
            if isinstance(encoded, dict) and self.images is not None:  # They have been read.
                return self.images.prompt(encoded["prompt_token_ids"], encoded["images"])
            return encoded
        if not isinstance(prompt, str | list):
            raise TypeError(f"prompt: must be a text or a list of token ids, not {type(prompt).__name__}")
        (token_ids,) = self._encoder.encode([prompt])
        if isinstance(token_ids, Exception):
            raise type(token_ids)(f"prompt: {token_ids}") from token_ids
        return token_ids

    def _abort(self, submission: Submission) -> None:
        for request_id in submission.request_ids:
            if self._submissions.pop(request_id, None) is not None:
                self._llm.abort_request(request_id)
                del self._num_left[request_id]
                self.background.forget(request_id)

    def _deliver(self, deltas: list[StreamDelta]) -> None:
        events = []
        for delta in deltas:
            request_id = delta["request_id"]
            if request_id not in self._submissions:
                self.background.deliver(delta)
                continue
            self.background.count(delta)
            submission, index = self._submissions[request_id]
            events.append((submission, (index * submission.num_samples + delta["sample"], delta)))
            if delta["finish_reason"] is not None:
                self._num_left[request_id] -= 1
                if not self._num_left[request_id]:
                    del self._submissions[request_id], self._num_left[request_id]
        self._post(events)

    def _post(self, events: list[tuple[Submission, Any]]) -> None:
        """Hand events over, all of a step at once: a call for each would wake the event loop as often."""
        self._call(partial(_put_all, events))

    def _call(self, function: Callable[[], object]) -> None:
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:  # The event loop is closed: nobody waits.
            logger.debug("the event loop has ended before the engine")


def _put_all(events: list[tuple[Submission, Any]]) -> None:
    for submission, event in events:
        submission.events.put_nowait(event)
