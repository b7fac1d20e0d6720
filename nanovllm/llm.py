"""LLM: the class that users import; chat, streams, generate_iter and score; weights that change, and sleep."""

import math
import os
from array import array
from collections.abc import Callable, Generator, Iterable, Iterator
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, cast, overload

import torch

from nanovllm.config import Config
from nanovllm.engine.engine_lock import User
from nanovllm.engine.llm_engine import BY_HAND, OnError
from nanovllm.engine.replicas.replicated_engine import ReplicatedEngine
from nanovllm.engine.text.chat import Conversation, Tool, as_conversations, misplaced_chat_option
from nanovllm.engine.text.chat_answers import ChatAnswers, chat_deltas
from nanovllm.engine.text.formats.all_formats import find_format
from nanovllm.engine.text.formats.answers import AnswerFormat
from nanovllm.engine.text.outputs import ChatDelta, ErrorOutput, RequestOutput, Score, StreamDelta, as_result
from nanovllm.engine.text.prompt_encoder import PromptEncoder
from nanovllm.engine.text.prompts import Prompt, TextTokens, as_prompts, pair_lazily, params_per_prompt
from nanovllm.engine.text.streaming import PromptFeed, new_deltas
from nanovllm.engine.vectors import BATCHES_AHEAD, VectorEngine
from nanovllm.models.loader import TensorFacts, checked_tensors
from nanovllm.sampling_params import SamplingParams, misplaced_option
from nanovllm.utils.checks import quoted, require
from nanovllm.utils.collector import old_objects_set_aside
from nanovllm.utils.option_hints import HINTS, explains_unknown_options, takes_options_of

PROMPTS_AT_ONCE = 32  # taken by generate_iter


class LLM(VectorEngine):
    """Offline batch inference: `LLM(model).generate(prompts, sampling_params)`.

    One call works at a time: while a stream or an iterator is half read, all other calls raise RuntimeError. Closing or
    dropping it drops its requests.

    With data_parallel_size > 1 it is a ReplicatedEngine, whose engines are in processes of their own.
    """

    if not TYPE_CHECKING:  # Checkers read the arguments of __init__.

        @takes_options_of(Config)
        def __new__(cls, *args, **options):
            """Choose the engine, once: whatever else this class does is the same for both."""
            is_one = options.get("data_parallel_size", 1) == 1
            return super().__new__(cls if is_one else type(cls.__name__, (cls, ReplicatedEngine), {}))

    def __repr__(self) -> str:
        config = vars(self).get("config")
        if config is None:  # A debugger asks while the options are checked.
            return super().__repr__()
        device = config.device if config.device_index is None else f"cuda:{config.device_index}"
        dtype = str(config.dtype).removeprefix("torch.")
        name = config.hub_id or config.model
        return f"LLM({name!r}, device={device!r}, dtype={dtype!r})"

    @explains_unknown_options(HINTS["chat"], misplaced_chat_option)
    def chat(
        self,
        messages: Conversation | list[Conversation],
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        use_tqdm: bool = True,
        chat_template: str | os.PathLike[str] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[Tool] | None = None,
        split_reasoning: bool = False,
        split_tool_calls: bool = False,
    ) -> list[RequestOutput]:
        """Answer conversations: the tokenizer's chat template, then `generate`.

        Args:
            messages: a list of {"role": ..., "content": ...}, or a list of such lists. Content is a text, or a list of
                {"type": "text", "text": ...} and, for a model that sees, {"type": "image", "image": ...} or
                {"type": "image_url", "image_url": {"url": ...}} (docs/images.md).
            sampling_params, use_tqdm: as in generate.
            chat_template: a Jinja template instead of the tokenizer's own, or the file of one.
            chat_template_kwargs: variables of the template, such as {"enable_thinking": False}.
            add_generation_prompt: end the prompt with the beginning of an answer.
            continue_final_message: continue the last message instead of answering it; needs
                add_generation_prompt=False.
            tools: functions that the model may call, for the template: OpenAI's schemas, or Python functions with type
                hints and a docstring in Google's style.
            split_reasoning: give results the keys reasoning and content: what the model thinks, and what it says. Where
                the tags of the model's format are special tokens, as those of gpt-oss are, the text has them.
            split_tool_calls: give results the keys content and tool_calls: what the model calls, in the form of a
                message's tool_calls, and the rest of the text.

        Returns:
            One RequestOutput for each conversation.

        Raises:
            ValueError: no template, or a malformed message, which is named. Also as generate.
            TypeError: an argument of a wrong type, or an unknown one, with a hint where it belongs.
        """
        with self._lock.turn(User("chat()")):
            pass  # Raises at once if generate would.
        prompts, answers = self._read_chats(
            "chat()",
            messages,
            chat_template,
            chat_template_kwargs,
            add_generation_prompt,
            continue_final_message,
            tools,
            split_reasoning,
            split_tool_calls,
        )
        if answers is None:
            return self.generate(prompts, sampling_params, use_tqdm)
        outputs = self.generate(prompts, answers.params(sampling_params), use_tqdm)
        answers.add_parts(outputs)
        return outputs

    @explains_unknown_options(HINTS["chat"], misplaced_chat_option)
    def stream_chat(
        self,
        messages: Conversation | list[Conversation],
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        chat_template: str | os.PathLike[str] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[Tool] | None = None,
        split_reasoning: bool = False,
        split_tool_calls: bool = False,
    ) -> Iterator[ChatDelta]:
        """Answer conversations, and yield what each step adds to each answer: the tokenizer's chat template, then
        `stream`.

            for delta in llm.stream_chat([{"role": "user", "content": "Who are you?"}]):
                print(delta["content"], end="", flush=True)

        Args:
            messages, sampling_params, chat_template, chat_template_kwargs, add_generation_prompt,
                continue_final_message, tools: as in chat.
            split_reasoning: what the model thinks is in `reasoning`, and not in `content`.
            split_tool_calls: what the model calls is in `tool_calls`, and not in `content`. A call comes whole, with
                the step that completes it.

        Returns:
            An iterator of ChatDelta. The contents of all deltas together are the content that chat gives, and so are
            the other parts. It is checked, computed and left as a stream.

        Raises:
            ValueError, TypeError, RuntimeError: as chat.
        """
        with self._lock.turn(user := User("stream_chat()")):
            prompts, answers = self._read_chats(
                user.name,
                messages,
                chat_template,
                chat_template_kwargs,
                add_generation_prompt,
                continue_final_message,
                tools,
                split_reasoning,
                split_tool_calls,
            )
            params = params_per_prompt(
                sampling_params if answers is None else answers.params(sampling_params), len(prompts)
            )
            return chat_deltas(self._stream(user, self._sequences.make_all(prompts, params, streams=True)), answers)

    def _read_chats(
        self,
        method: str,
        messages: Conversation | list[Conversation],
        chat_template: str | os.PathLike[str] | None,
        chat_template_kwargs: dict[str, Any] | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        tools: list[Tool] | None,
        split_reasoning: bool,
        split_tool_calls: bool,
    ) -> tuple[list[Any], ChatAnswers | None]:
        """The prompts of conversations, and what splits their answers; None if nothing does."""
        if self.tokenizer is None:
            raise ValueError(f"{method} needs the model's tokenizer, but skip_tokenizer_init is set")
        for name, value in (("split_reasoning", split_reasoning), ("split_tool_calls", split_tool_calls)):
            if not isinstance(value, bool):
                raise TypeError(f"{name}={quoted(value)}: must be True or False")
        if add_generation_prompt and continue_final_message:
            raise ValueError(
                "continue_final_message=True: the last message is either continued or answered; pass "
                "add_generation_prompt=False with it"
            )
        conversations = as_conversations(messages)
        prompts = self.prompt_encoder.encode_chats(
            conversations,
            chat_template,
            chat_template_kwargs,
            tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        if not split_reasoning and not split_tool_calls:
            return prompts, None
        answers = self.answer_format(chat_template)
        parts = split_reasoning, tools, split_tool_calls
        return prompts, ChatAnswers(answers, conversations, prompts, continue_final_message, *parts)

    @explains_unknown_options(HINTS["generate"], misplaced_option)
    def stream(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
    ) -> Iterator[StreamDelta]:
        """Complete prompts, and yield what each step adds to each completion.

            for delta in llm.stream("Once upon a time"):
                print(delta["text"], end="", flush=True)

        The arguments are checked at once. Steps are computed as deltas are read. Stopping half-way (break, close(),
        del) drops the requests and frees their blocks.

        Args:
            prompts, sampling_params: as in generate.

        Returns:
            An iterator of StreamDelta. Those of several prompts and samples alternate.

        Raises:
            ValueError, TypeError, RuntimeError: as generate.
        """
        with self._lock.turn(user := User("stream()", reads_steps=True)):
            prompts = list(as_prompts(prompts, "prompts", self.tokenizer))
            params = params_per_prompt(sampling_params, len(prompts))
            return self._stream(user, self._sequences.make_all(prompts, params, streams=True))

    def _stream(self, user: User, requests: list[Any]) -> Generator[StreamDelta, None, None]:
        try:
            with old_objects_set_aside():
                self._queue(user, requests)
                while self._lock.is_serving(user):
                    with self._lock.turn(user):  # for one step only, so that another thread may read on
                        finished, step = self._step()
                        self._set_texts(finished)
                        deltas = list(new_deltas(step.seqs, finished))
                    yield from deltas
        finally:
            self._lock.drop(user)

    @overload
    def generate_iter(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        ordered: bool = False,
        on_error: Literal["raise"] = "raise",
    ) -> Iterator[tuple[int, RequestOutput]]: ...

    @overload
    def generate_iter(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        ordered: bool = False,
        *,
        on_error: OnError,
    ) -> Iterator[tuple[int, RequestOutput | ErrorOutput]]: ...

    @explains_unknown_options(HINTS["generate"], misplaced_option)
    def generate_iter(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        ordered: bool = False,
        on_error: OnError = "raise",
    ) -> Iterator[tuple[int, RequestOutput | ErrorOutput]]:
        """Complete any number of prompts, such as a generator over a million, in bounded memory.

        Prompts are taken and checked a few at a time, just enough to keep the device busy, and results are not kept.
        Stopping half-way (break, close(), del) drops unfinished requests and frees their blocks.

        Args:
            prompts: in any form that generate accepts. After a `NO_PROMPT` the next one is taken when a step
                has been computed. The iterator ends there if nothing is under way.
            sampling_params: one for all, or an iterable with one each (and any for a NO_PROMPT).
            ordered: yield results in the order of the prompts, instead of as they finish. Up to 8 times max_num_seqs
                results may wait for a slow one.
            on_error: "raise" ends the iterator at the first prompt that cannot be served; "return" yields an
                ErrorOutput for it, as in generate.

        Returns:
            An iterator of (index of the prompt, RequestOutput or ErrorOutput).

        Raises:
            ValueError, TypeError: a wrong argument, at once; a wrong prompt, when it is taken, naming its index.
            RuntimeError: as generate.
        """
        with self._lock.turn(user := User("generate_iter()")):
            require("on_error", on_error, on_error in ("raise", "return"), "one of raise, return")
            pairs = pair_lazily(as_prompts(prompts, "prompts", self.tokenizer), sampling_params)
            max_ahead = BATCHES_AHEAD * self.scheduler.max_num_seqs if ordered else None
            return self._generate_iter(user, PromptFeed(pairs, max_ahead), on_error)

    def _generate_iter(
        self, user: User, feed: PromptFeed, on_error: OnError
    ) -> Iterator[tuple[int, RequestOutput | ErrorOutput]]:
        try:
            with self._lock.turn(user):
                pass  # Raises before any prompt is taken.
            with old_objects_set_aside():
                while self._refill(user, feed, on_error):
                    while self._lock.is_serving(user):
                        with self._lock.turn(user):
                            finished, _ = self._step()
                            self._set_texts(finished)
                            feed.record(finished)
                            self._refill(user, feed, on_error)
                        yield from feed.results()
                    yield from feed.results()
        finally:
            self._lock.drop(user)

    def _refill(self, user: User, feed: PromptFeed, on_error: OnError) -> bool:
        """Queue prompts until twice max_num_seqs sequences are under way. Returns whether there were any. A few prompts
        at a time: enough for a prefill, but too few to delay a step by tokenizing them."""
        scheduler, max_num_seqs = self.scheduler, self.scheduler.max_num_seqs
        num = min(PROMPTS_AT_ONCE, max_num_seqs)
        before = feed.num_taken
        while len(scheduler.waiting) + len(scheduler.running) + num <= 2 * max_num_seqs and (batch := feed.take(num)):
            prompts, params = zip(*batch, strict=True)
            with self._lock.turn(user):
                start = feed.num_taken - len(batch)
                requests = self._sequences.make_all(list(prompts), params, on_error, start)
                for index, request in enumerate(requests, start):
                    if isinstance(request, Exception):
                        feed.refuse(index, request)
                if not self._queue(user, requests):
                    break  # All were wrong: yield their errors before taking more.
        return feed.num_taken > before

    @explains_unknown_options(HINTS["generate"], misplaced_option)
    def score(
        self,
        prompts: Prompt | Iterable[Prompt],
        completions: Prompt | Iterable[Prompt],
        use_tqdm: bool | Callable = True,
    ) -> list[Score]:
        """How likely the model finds each completion after its prompt: the log-probabilities of its tokens.

        Args:
            prompts: in any form that generate accepts.
            completions: likewise, one for each prompt. Prompt and completion are tokenized separately. A text is the
                completion's as generate returns it, with the space at its beginning if it has one.
            use_tqdm: as in generate.

        Returns:
            One Score for each pair.

        Raises:
            ValueError, TypeError: as generate; also if there are not as many completions as prompts, or a pair is as
                long as the engine's longest sequence.
            RuntimeError: the model's logits for a pair are NaN or infinite; or as generate.
        """
        with self._lock.turn(User("score()")):
            prompts = list(as_prompts(prompts, "prompts", self.tokenizer))
            completions = list(as_prompts(completions, "completions", self.tokenizer))
            if len(prompts) != len(completions):
                raise ValueError(f"completions: {len(completions)} of them for {len(prompts)} prompts; pass one each")
            beginnings = self._sequences.encode_all(prompts, "prompts")
            endings = self._sequences.encode_completions(completions, beginnings)
            whole = [TextTokens([*beginning, *ending]) for beginning, ending in zip(beginnings, endings, strict=True)]
            limit = self.scheduler.max_seq_len - 1
            for i, token_ids in enumerate(whole):
                if len(token_ids) > limit:
                    raise ValueError(
                        f"completions[{i}]: has {len(token_ids)} tokens with its prompt; {limit} are possible"
                    )
            # Prompts are not scored, so what the prefix cache has of them is not computed again.
            params = {
                num_tokens: SamplingParams(
                    temperature=0, max_tokens=1, prompt_logprobs=0, prompt_logprobs_start=-num_tokens
                )
                for num_tokens in set(map(len, endings))
            }
            outputs = self.generate(whole, [params[len(ending)] for ending in endings], use_tqdm)
        return [_score(i, *pair) for i, pair in enumerate(zip(endings, outputs, strict=True))]

    # -- requests by hand --------------------------------------------------------------------------------------------

    def step_deltas(self) -> list[StreamDelta]:
        """Compute one step, as `step` does, and return what it adds to each completion, as `stream` does. Requests may
        be added and aborted between two steps, so that a server can use it. Raises as `step`."""
        with self._lock.turn(BY_HAND):
            finished, step = self._step_by_hand()
            self._set_texts(finished)
            return list(new_deltas(step.seqs, finished))

    def abort_request(self, request_id: int | None = None) -> None:
        """Drop an unfinished request with all its samples, or with None all requests. A request that has finished or
        been aborted stays as it is.

        A generate, stream or generate_iter returns what the request has so far, with finish_reason "abort"; `step` and
        `step_deltas` do not return it. Call this between steps: from on_step, or from the loop that reads a stream.

        Raises:
            ValueError, TypeError: there has been no request with this id.
            RuntimeError: another thread is inside a call.
        """
        with self._lock.no_other_thread("abort_request()"):
            self._sequences.check_request_id(request_id, chain(self.scheduler.waiting, self.scheduler.running))
            self._abort(None if request_id is None else [request_id])

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes; running requests keep their blocks. Raises RuntimeError if another thread is
        inside a call."""
        with self._lock.no_other_thread("reset_prefix_cache()"):
            self._forget_prefixes()

    # -- weights that change, and memory that others need meanwhile ---------------------------------------------------

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Overwrite weights, such as those of a trainer after a step. CUDA graphs and kernels stay.

        Args:
            weights: pairs of a name in the checkpoint and a tensor, whole as in the checkpoint, on any device and of
                any float dtype. They need not be all weights. An engine with weights in fp8 quantizes them.

        Raises:
            ValueError, TypeError: an unknown name, a wrong shape or dtype, or no such pairs. Nothing has changed then.
            RuntimeError: requests are unfinished, another thread is inside a call, the engine sleeps at level 2, or it
                has exited.

        The prefix cache is cleared. After any other exception some weights may be new and some old: update them again.
        """
        with self._lock.turn(User("update_weights()")):
            if self._sleep_level == 2:
                raise RuntimeError("update_weights(): the weights' memory has been given back: call wake_up() first")
            tensors = checked_tensors(self.model_runner.model, weights)
            with self._lock.step():
                self._forget_prefixes()
                facts = {name: TensorFacts(tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
                self.model_runner.call("update_weights", tensors, for_workers=(facts,))

    def sleep(self, level: int = 1) -> None:
        """Give GPU memory back until `wake_up`, such as to a trainer in the same process.

        Args:
            level: 1 gives back the KV cache and the CUDA graphs, 2 the weights too.

        Raises ValueError for another level, and RuntimeError as update_weights does, or if the engine sleeps already.
        The prefix cache is cleared.
        """
        if level not in (1, 2):
            raise ValueError(f"level={quoted(level)}: must be 1 (the KV cache) or 2 (also the weights)")
        with self._lock.turn(User("sleep()")), self._lock.step():
            if self._sleep_level:
                raise RuntimeError("sleep(): the engine sleeps already")
            self._forget_prefixes()
            self._sleep_level = level
            self.model_runner.call("sleep", level)

    def wake_up(self) -> None:
        """Take the memory again, and capture CUDA graphs again. After level 2 the weights are the checkpoint's. Does
        nothing if the engine does not sleep.

        Raises MemoryError if the memory is not free: the engine sleeps on then; and RuntimeError as update_weights.
        """
        with self._lock.turn(User("wake_up()")), self._lock.step():
            if self._sleep_level:
                self.model_runner.call("wake_up")
                self._sleep_level = 0

    # -- what the model says of itself ------------------------------------------------------------------------------

    def get_tokenizer(self) -> Any:
        """The model's transformers tokenizer. Raises ValueError with skip_tokenizer_init."""
        if self.tokenizer is None:
            raise ValueError("get_tokenizer(): there is no tokenizer, because skip_tokenizer_init is set")
        return self.tokenizer

    def answer_format(self, chat_template: str | os.PathLike[str] | None = None) -> AnswerFormat:
        """How the model's answers are written, by `chat_format` or found with a chat template.

        chat_template: as in chat. Raises ValueError with skip_tokenizer_init, or if this is no template.
        """
        template = self.prompt_encoder.template_text(chat_template)
        if template not in self._answer_formats:
            found = find_format(self.get_tokenizer(), template, self.config.chat_format)
            self._answer_formats[template] = AnswerFormat(self.tokenizer, found)
        return self._answer_formats[template]

    @cached_property
    def _answer_formats(self) -> dict[str, AnswerFormat]:
        """By the text of their template."""
        return {}

    @property
    def prompt_encoder(self) -> PromptEncoder:
        """What makes token ids of this engine's prompts."""
        return self._sequences.encoder

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's generation_config.json recommends. Raises ValueError if that cannot be used."""
        return SamplingParams.from_generation_config(self.config.generation_config)


def _score(index: int, token_ids: array, output: RequestOutput) -> Score:
    """output: of the pair, with the log-probabilities of its tokens. token_ids: the completion's."""
    if "error" in output:
        raise RuntimeError(f"prompts[{index}]: cannot be scored: {output['error']}")
    logprobs = cast(list[dict[int, float]], output["prompt_logprobs"])[-len(token_ids) :]
    own = [logprob[token_id] for token_id, logprob in zip(token_ids, logprobs, strict=True)]
    total = sum(own)
    if not math.isfinite(total):
        raise RuntimeError(f"prompts[{index}]: cannot be scored: some of the model's logits hold NaN or infinity")
    return as_result(Score(token_ids=list(token_ids), logprobs=own, total=total))
