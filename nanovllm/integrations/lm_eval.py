"""lm-evaluation-harness: importing this file registers the model `nanovllm`. See docs/integrations.md."""

import logging
import sys
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, cast
from unittest.mock import patch

import torch
from jinja2 import TemplateError
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from nanovllm import LLM, RequestOutput, SamplingParams

logger = logging.getLogger(__name__)

MODEL = "nanovllm"
CPU_BLOCK_SIZE = 16  # On a CPU small blocks cost nothing, and choices share more of their context.
_SUBCOMMANDS = ("run", "ls", "validate")

# What the harness calls a request for a log-likelihood: its texts (None for a part of a longer text), the tokens of the
# context, and those of the continuation.
TokenPair = tuple[tuple[str, str] | None, list[int], list[int]]


@register_model(MODEL)
class NanoVLLM(TemplateLM):
    """An LLM as a model of the harness. All requests of a call go to the engine at once.

    Attributes:
        llm: the engine.
        tokenizer: its tokenizer.
        max_length: tokens of the longest input, as the harness's own classes count them: a continuation's last token
            is not an input.
    """

    def __init__(
        self,
        pretrained: str,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        chat_template_args: dict[str, Any] | None = None,
        enable_thinking: bool | None = None,
        think_end_token: str | int | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        seed: int = 1234,
        **options: Any,
    ):
        """
        Args:
            pretrained: a directory or a hub id.
            max_length: see the attribute; None: what the model supports.
            max_gen_toks: the most tokens of an answer, for tasks that do not say it.
            add_bos_token: whether a text begins with the beginning-of-sequence token; None: as the tokenizer does it.
            prefix_token_id: the context of a text that has none; None: the tokenizer's beginning-of-sequence token,
                else its end-of-sequence token.
            chat_template_args: variables of the chat template.
            enable_thinking: the same for this variable. Only answers can be asked for then, not log-likelihoods.
            think_end_token: the text, or the token's id (digits are one too), that ends an answer's thinking, which is
                not judged. enable_thinking needs it.
            batch_size: has no effect: the engine fills its batches itself.
            max_batch_size: sequences under way at the same time, at most.
            device: as LLM's. "cuda:0", the command line's default, is a CPU where there is no GPU, as for the harness's
                own classes.
            seed: of answers that are sampled.
            options: LLM's other options.

        Raises TypeError or ValueError as LLM does, and ValueError for enable_thinking without think_end_token.
        """
        super().__init__()
        if enable_thinking and think_end_token is None:
            raise ValueError("enable_thinking=True needs think_end_token: the text or the token id that ends thinking")
        if max_length is not None:
            if "max_model_len" in options:
                raise ValueError("max_length and max_model_len: give one of them")
            options["max_model_len"] = max_length + 1
        if max_batch_size is not None:
            options["max_num_seqs"] = max_batch_size
        if device is not None:
            options["device"] = "auto" if device == "cuda:0" else device
        if options.get("device", "auto") == "cpu" or not torch.cuda.is_available():
            options = {"kvcache_block_size": CPU_BLOCK_SIZE} | options
        self.llm = LLM(pretrained, **{"max_model_len": None, "seed": seed} | options)
        self.tokenizer = self.llm.get_tokenizer()
        self.max_length = self.llm.scheduler.max_seq_len - 1
        self.max_gen_toks = max_gen_toks
        self._add_bos_token = add_bos_token
        self._prefix_token_id = prefix_token_id
        self._thinks = bool(enable_thinking)
        if isinstance(think_end_token, str) and think_end_token.isdigit():
            think_end_token = int(think_end_token)
        self._think_end_token = think_end_token
        self._template_args = dict(chat_template_args or {})
        if enable_thinking is not None:
            self._template_args["enable_thinking"] = enable_thinking

    # -- text and tokens ---------------------------------------------------------------------------------------------

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        bos = self.tokenizer.bos_token_id
        default = self.eot_token_id if bos is None else bos
        return default if self._prefix_token_id is None else self._prefix_token_id

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer.name_or_path.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """A chat template may have written the beginning-of-sequence token; it is not added twice."""
        if add_special_tokens is None:
            has_prefix = string.startswith(self.tokenizer.decode(self.prefix_token_id))
            add_special_tokens = False if has_prefix else self._add_bos_token
        if add_special_tokens is not None:
            kwargs["add_special_tokens"] = add_special_tokens
        return self.tokenizer(string, verbose=False, **kwargs)["input_ids"]

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The conversation's text. As in the harness's own classes, system messages are left out for a template that
        refuses them."""
        options = {"add_generation_prompt": add_generation_prompt, "continue_final_message": not add_generation_prompt}
        options |= self._template_args
        try:
            return self.tokenizer.apply_chat_template(chat_history, tokenize=False, **options)
        except TemplateError as error:
            logger.warning("the chat template refuses the conversation (%s): trying without system messages", error)
            others = [message for message in chat_history if message["role"] != "system"]
            return self.tokenizer.apply_chat_template(others, tokenize=False, **options)

    # -- log-likelihoods ---------------------------------------------------------------------------------------------

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """See LM.loglikelihood. Raises ValueError with enable_thinking."""
        if self._thinks:
            raise ValueError("enable_thinking: a model that thinks can only be asked for answers, not log-likelihoods")
        return super().loglikelihood(requests, disable_tqdm)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """See LM.loglikelihood_rolling: each text is scored in windows of max_length tokens."""
        texts = [request.args[0] for request in requests]
        windows: list[TokenPair] = []
        ends = [0]
        for text in texts:
            pairs = get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self.max_length, 1)
            windows += [(None, *make_disjoint_window(pair)) for pair in pairs]
            ends.append(len(windows))
        scores = [logprob for logprob, _ in self._loglikelihood_tokens(windows, disable_tqdm)]
        totals = [sum(scores[start:end]) for start, end in pairwise(ends)]
        for text, total in zip(texts, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
        return totals

    def _loglikelihood_tokens(
        self, requests: list[TokenPair], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """(sum of the continuation's log-probabilities, whether each of its tokens is the likeliest) of each request.
        A context that is too long is cut on the left."""
        # Requests that differ in the last token alone are one prompt, whose last token they all need.
        prompts: dict[tuple[int, ...], list[int]] = {}  # to the indices of the requests
        for i, (_, context, continuation) in enumerate(requests):
            if not 0 < len(continuation) <= self.max_length:
                raise ValueError(f"a continuation has {len(continuation)} tokens; 1 to {self.max_length} can be scored")
            tokens = [*context, *continuation][-self.max_length - 1 :]
            prompts.setdefault(tuple(tokens[:-1]), []).append(i)
        params = []
        for indices in prompts.values():
            continuations = [requests[i][2] for i in indices]
            last_tokens = tuple(sorted({continuation[-1] for continuation in continuations}))
            params.append(_params(last_tokens, max(map(len, continuations)) - 1))
        answers: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        outputs = self._run(list(map(list, prompts)), params, disable_tqdm)
        for indices, output in zip(prompts.values(), outputs, strict=True):
            for i in indices:
                texts, _, continuation = requests[i]
                answers[i] = _score(continuation, output)
                if texts is not None:  # A part of a longer text is kept with the whole.
                    self.cache_hook.add_partial("loglikelihood", texts, answers[i])
        return answers

    # -- answers -----------------------------------------------------------------------------------------------------

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """See LM.generate_until. Raises TypeError or ValueError for options of a task that SamplingParams refuses."""
        contexts, options = zip(*(request.args for request in requests), strict=True) if requests else ((), ())
        prompts, params, stops = [], [], []
        for context, given in zip(contexts, options, strict=True):
            sampling = cast(dict[str, Any], normalize_gen_kwargs(given, self.max_gen_toks))
            stop = [text for text in sampling.pop("until") if text]
            max_tokens = sampling.pop("max_gen_toks")
            if max_tokens >= self.max_length:
                raise ValueError(
                    f"max_gen_toks={max_tokens}: must be less than the model's longest sequence, {self.max_length}"
                )
            sampling.pop("do_sample")  # The temperature says it.
            if sampling.get("num_beams") == 1:  # What the harness's own classes do by default; others are refused.
                sampling.pop("num_beams")
            sampling.setdefault("temperature", 0.0)
            prompts.append(self.tok_encode(context)[max_tokens - self.max_length :])
            # A model that thinks may write a task's stop string while it does.
            stop_at = stop if self._think_end_token is None else ()
            params.append(SamplingParams(max_tokens=max_tokens, stop=stop_at, **sampling))
            stops.append(stop)
        answers = []
        for context, given, stop, output in zip(
            contexts, options, stops, self._run(prompts, params, disable_tqdm), strict=True
        ):
            answers.append(self._judged(output["token_ids"], stop))
            self.cache_hook.add_partial("generate_until", (context, given), answers[-1])
        return answers

    def _judged(self, token_ids: list[int], stop: list[str]) -> str:
        """What of an answer is judged, as the harness's `hf` model finds it."""
        # Not the output's text, which goes on a prompt's text: the harness decodes an answer by itself.
        end = self._think_end_token
        if not isinstance(end, int):
            return postprocess_generated_text(self.tokenizer.decode(token_ids, skip_special_tokens=True), stop, end)
        places = [i for i, token_id in enumerate(token_ids) if token_id == end]
        answer = token_ids[places[-1] + 1 :] if places else token_ids
        text = self.tokenizer.decode(answer, skip_special_tokens=True).lstrip()
        return postprocess_generated_text(text, stop, None)

    def _run(self, prompts: list[list[int]], params: list[SamplingParams], disable_tqdm: bool) -> list[RequestOutput]:
        outputs = self.llm.generate(prompts, params, use_tqdm=not disable_tqdm)
        for i, output in enumerate(outputs):
            if "error" in output:
                raise RuntimeError(f"request {i} cannot be served: {output['error']}")
        return outputs


@lru_cache(maxsize=4096)
def _params(token_ids: tuple[int, ...], num_before: int) -> SamplingParams:
    """For the log-probabilities of the last num_before tokens of a prompt, and of each of token_ids after it."""
    return SamplingParams(
        temperature=0,
        max_tokens=1,
        logprobs=1,
        logprob_token_ids=token_ids,
        prompt_logprobs=1 if num_before else None,
        prompt_logprobs_start=-num_before,
    )


def _score(continuation: list[int], output: RequestOutput) -> tuple[float, bool]:
    """output: of a prompt that ends with all of the continuation except its last token."""
    found = list(cast(list[dict[int, float]], output["logprobs"]))
    if len(continuation) > 1:
        found[:0] = cast(list[dict[int, float]], output["prompt_logprobs"])[1 - len(continuation) :]
    total, is_greedy = 0.0, True
    for token_id, logprobs in zip(continuation, found, strict=True):
        total += logprobs[token_id]
        # Of tokens that are equally likely, greedy sampling takes the one with the lowest id.
        is_greedy &= token_id == min(logprobs, key=lambda other: (-logprobs[other], other))
    return total, is_greedy


def main(arguments: Sequence[str]) -> None:
    """The harness's own command line, with `--model nanovllm` unless the arguments or a file of them say otherwise."""
    words = list(arguments)
    names = {word[:2] if word[:2] in ("-M", "-C") else word.split("=")[0] for word in words}
    if words and words[0] not in _SUBCOMMANDS and not names & {"-h", "--help"}:
        words.insert(0, "run")
    if words[:1] == ["run"] and names.isdisjoint({"--model", "-M", "--config", "-C"}):
        words[1:1] = ["--model", MODEL]
    with patch.object(sys, "argv", ["nanovllm eval", *words]):
        cli_evaluate()
