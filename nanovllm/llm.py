"""LLM: the facade that users import: all ways to ask the engine for something."""

import math
from array import array
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from nanovllm.engine.engine_lock import Call
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.requests.chat import (
    Conversation,
    Tool,
    as_conversations,
    as_tools,
    check_template_options,
    misplaced_option,
    render_chat,
)
from nanovllm.engine.requests.outputs import RequestOutput, Score, StreamDelta
from nanovllm.engine.requests.request_checker import Prompt, check_choice, pair_lazily, params_per_prompt
from nanovllm.engine.requests.streaming import DeltaReader, PromptFeed
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.collector import old_objects_set_aside
from nanovllm.utils.option_hints import CHAT_HINTS, explains_unknown_options

# In order, generate_iter takes prompts this many batches of max_num_seqs ahead of the result that comes next: results
# may pile up behind a slow one for as long as most of a batch is still at work.
BATCHES_AHEAD = 8

PROMPTS_AT_ONCE = 32  # that generate_iter takes


class LLM(LLMEngine):
    """Offline batch inference: `LLM(model).generate(prompts, sampling_params)`.

    generate and stepping by hand are LLMEngine's; here are the others. One call works at a time: while a stream or an
    iterator is half read, all others raise RuntimeError; closing or dropping it drops its requests.
    """

    @explains_unknown_options(CHAT_HINTS, misplaced_option)
    def chat(
        self,
        messages: Conversation | list[Conversation],
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[Tool] | None = None,
    ) -> list[RequestOutput]:
        """Answer conversations: the tokenizer's chat template, then `generate`.

        Args:
            messages: a list of {"role": ..., "content": ...}, or a list of such lists. Content is a text, or a list of
                {"type": "text", "text": ...}.
            sampling_params, use_tqdm: as in generate.
            chat_template: a Jinja template instead of the tokenizer's own.
            chat_template_kwargs: variables of the template, such as {"enable_thinking": False}.
            add_generation_prompt: end the prompt with the beginning of an answer.
            continue_final_message: go on with the last message, instead of answering it; wants
                add_generation_prompt=False.
            tools: what the model may call, for the template: OpenAI's schemas, or functions with type hints and a
                docstring in Google's style.

        Returns:
            One RequestOutput a conversation.

        Raises:
            ValueError: no template, or a malformed message; names the conversation and the message. Also as generate.
            TypeError: an unknown keyword, with where it belongs, or an argument of another type.
        """
        with self._lock.turn(self._new_call("chat()")):
            pass  # Refused at once where generate would be.
        if self.tokenizer is None:
            raise ValueError("chat() needs the model's tokenizer, but skip_tokenizer_init is set")
        if add_generation_prompt and continue_final_message:
            raise ValueError(
                "continue_final_message=True: the last message is either continued or answered; pass "
                "add_generation_prompt=False with it"
            )
        check_template_options(chat_template, chat_template_kwargs)
        prompts = render_chat(
            self.tokenizer,
            as_conversations(messages),
            chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=as_tools(tools),
            **chat_template_kwargs or {},
        )
        return self.generate(prompts, sampling_params, use_tqdm)

    def stream(
        self, prompts: Prompt | Iterable[Prompt], sampling_params: SamplingParams | list[SamplingParams] | None = None
    ) -> Iterator[StreamDelta]:
        """Complete prompts, and give what each step adds to each completion.

            for delta in llm.stream("Once upon a time"):
                print(delta["text"], end="", flush=True)

        The arguments are checked at once; work begins with the first delta and goes on as they are read. Stopping
        half-way (break, close(), del) drops the requests and frees their blocks.

        Args:
            prompts, sampling_params: as in generate.

        Returns:
            An iterator of StreamDelta; those of several prompts and samples come in turns.

        Raises:
            ValueError, TypeError, RuntimeError: as generate.
        """
        with self._lock.turn(call := self._new_call("stream()")):
            prompts = list(self._checker.as_prompts(prompts))
            params = params_per_prompt(sampling_params, len(prompts))
            return self._stream(call, self._make_requests(prompts, params, streams=True))

    def _stream(self, call: Call, requests: list[Any]) -> Iterator[StreamDelta]:
        reader = DeltaReader(requests)
        with self._driving(call), old_objects_set_aside():
            with self._lock.turn(call):
                self._queue(call, requests)
            while self._has_work(call):
                with self._lock.turn(call):  # Between two steps the stream may go on in another thread.
                    finished, step = self._step()
                    self._set_texts(finished)
                    deltas = list(reader.read(step.seqs, finished))
                yield from deltas

    def generate_iter(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        ordered: bool = False,
        on_error: str = "raise",
    ) -> Iterator[tuple[int, RequestOutput]]:
        """Complete as many prompts as an iterable gives, a generator over a million included.

        Prompts are taken, tokenized and checked a few at a time while the device works, as many as keep it busy, and
        results are handed out and forgotten: memory stays bounded. Stopping half-way (break, close(), del) drops what
        is unfinished and frees its blocks.

        Args:
            prompts: in any form that generate accepts.
            sampling_params: one for all, or an iterable with one each.
            ordered: in the order of the prompts, instead of as they finish. Behind a slow one results wait, up to 8
                times max_num_seqs of them, before no more prompts are taken.
            on_error: "raise" ends it all at the first prompt that cannot be served; "return" gives its error, as in
                generate, among the results.

        Returns:
            An iterator of (index of the prompt, RequestOutput).

        Raises:
            ValueError, TypeError: a wrong argument at once; a wrong prompt when it is taken, naming its index.
            RuntimeError: as generate.
        """
        with self._lock.turn(call := self._new_call("generate_iter()")):
            check_choice("on_error", on_error, ("raise", "return"))
            pairs = pair_lazily(self._checker.as_prompts(prompts), sampling_params)
            max_ahead = BATCHES_AHEAD * self.config.max_num_seqs if ordered else None
            return self._generate_iter(call, PromptFeed(pairs, max_ahead), on_error)

    def _generate_iter(self, call: Call, feed: PromptFeed, on_error: str) -> Iterator[tuple[int, RequestOutput]]:
        with self._driving(call), old_objects_set_aside():
            while self._refill(call, feed, on_error):
                while self._has_work(call):
                    with self._lock.turn(call):
                        finished, _ = self._step()
                        self._set_texts(finished)
                        feed.record(finished)
                        self._refill(call, feed, on_error)
                    yield from feed.results()
                yield from feed.results()

    def _refill(self, call: Call, feed: PromptFeed, on_error: str) -> bool:
        """Queue prompts until twice what a step computes is under way; whether there were any. So many at a time that
        a prefill is worth it, and so few that tokenizing them holds up no step."""
        scheduler, max_num_seqs = self.scheduler, self.config.max_num_seqs
        num = min(PROMPTS_AT_ONCE, max_num_seqs)
        before = feed.num_taken
        while len(scheduler.waiting) + len(scheduler.running) + num <= 2 * max_num_seqs and (batch := feed.take(num)):
            prompts, params = zip(*batch, strict=True)
            with self._lock.turn(call):
                requests = self._make_requests(list(prompts), list(params), on_error, feed.num_taken - len(batch))
                feed.admit(requests)
                if not self._queue(call, requests):
                    break  # Nothing but faults: they go out before more are taken.
        return feed.num_taken > before

    def score(
        self,
        prompts: Prompt | Iterable[Prompt],
        completions: Prompt | Iterable[Prompt],
        use_tqdm: bool | Callable = True,
    ) -> list[Score]:
        """How likely the model finds each completion after its prompt: the log-probabilities of its tokens.

        Args:
            prompts: in any form that generate accepts.
            completions: likewise, one each. Prompt and completion are tokenized apart, so that the tokens of both are
                what they are on their own.
            use_tqdm: as in generate.

        Returns:
            One Score a pair.

        Raises:
            ValueError, TypeError: as generate; and for another number of completions than of prompts, or more tokens in
                a pair than the engine's longest sequence less one.
            RuntimeError: the model's logits for a pair are NaN or infinite; or as generate.
        """
        with self._lock.turn(self._new_call("score()")):
            prompts = list(self._checker.as_prompts(prompts))
            completions = list(self._checker.as_prompts(completions, "completions"))
            if len(prompts) != len(completions):
                raise ValueError(f"completions: {len(completions)} of them for {len(prompts)} prompts; pass one each")
            beginnings: list[Any] = self._checker.check_all(prompts, params_per_prompt(None, len(prompts)))
            endings = self._checker.encode_completions(completions)
            whole = [[*beginning.token_ids, *ending] for beginning, ending in zip(beginnings, endings, strict=True)]
            limit = self.scheduler.max_seq_len - 1
            for i, token_ids in enumerate(whole):
                if len(token_ids) > limit:
                    raise ValueError(
                        f"completions[{i}]: has {len(token_ids)} tokens with its prompt; {limit} are possible"
                    )
            params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
            outputs = self.generate(whole, params, use_tqdm)
        return [_score(i, *pair) for i, pair in enumerate(zip(endings, outputs, strict=True))]


def _score(index: int, token_ids: array, output: RequestOutput) -> Score:
    """The score of pair number `index`, whose output has the log-probabilities. Raises RuntimeError where these are no
    numbers."""
    if "error" in output:
        raise RuntimeError(f"prompts[{index}]: cannot be scored: {output['error']}")
    logprobs = output["prompt_logprobs"][-len(token_ids) :]
    own = [logprob[token_id] for token_id, logprob in zip(token_ids, logprobs, strict=True)]
    total = sum(own)
    if not math.isfinite(total):
        raise RuntimeError(f"prompts[{index}]: cannot be scored: some of the model's logits hold NaN or infinity")
    return Score(token_ids=list(token_ids), logprobs=own, total=total)
