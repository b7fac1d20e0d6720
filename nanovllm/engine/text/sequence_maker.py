"""SequenceMaker: from prompts and sampling parameters to checked sequences."""

import secrets
from array import array
from collections.abc import Callable, Iterable
from copy import copy
from functools import cached_property, partial
from typing import TYPE_CHECKING

from xxhash import xxh64_intdigest

from nanovllm.config import Config
from nanovllm.engine.features.pooling.pooled_sequence import PooledSequence
from nanovllm.engine.length_limit import LengthLimit
from nanovllm.engine.request import Completion, Request
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.text.detokenizer import Detokenizer
from nanovllm.engine.text.image_prompts import ImagePrompts
from nanovllm.engine.text.pooled_requests import PooledRequests
from nanovllm.engine.text.prompt_encoder import PromptEncoder
from nanovllm.engine.text.prompts import Prompt, TextTokens, as_array, read_prompt
from nanovllm.engine.text.special_options import NOTHING_SPECIAL, SpecialOptions
from nanovllm.engine.text.text_stream import TextStream
from nanovllm.models.registry import find_vision
from nanovllm.pooling_params import PoolingParams
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.checks import quoted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class SequenceMaker:
    """Checks requests and makes their sequences.

    Attributes:
        num_requests: so far; the next request's id.
        encoder: of its prompts.
        detokenizer: None without a tokenizer.
    """

    def __init__(self, config: Config, tokenizer: "PreTrainedTokenizerBase | None", length_limit: LengthLimit):
        """tokenizer: None accepts token ids only."""
        self.num_requests = 0
        limits = length_limit.max_seq_len, length_limit.remedy
        self.encoder = PromptEncoder(tokenizer, *limits, lambda prompts: self.image_prompts.read_all(prompts))
        if hasattr(config.hf_config, "vision"):
            self.encoder.accept_images(lambda text: self.image_prompts.reader.write_images(text))
        self.detokenizer = None if tokenizer is None else Detokenizer(tokenizer)
        self._as_array: Callable[[list[int]], array] = partial(as_array, vocab_size=config.hf_config.vocab_size)
        self._eos = config.eos
        # From it requests without a seed get one each.
        self._seed = secrets.randbits(63) if config.seed is None else config.seed
        self._length_limit = length_limit
        self._special = SpecialOptions(config, tokenizer, self.detokenizer)
        self._generates = config.task == "generate"
        self._config, self._tokenizer = config, tokenizer
        if find_vision(config.hf_config) is not None:
            self._as_array = self.image_prompts.as_array  # A place without an image is an error.

    @cached_property
    def pooled(self) -> PooledRequests:
        """What requests can be asked for that want a vector."""
        return PooledRequests(self._config, self._tokenizer)

    @cached_property
    def image_prompts(self) -> ImagePrompts:
        """Reads prompts with images."""
        return ImagePrompts(self._config, self._tokenizer)

    def make_one(self, prompt: Prompt, params: SamplingParams | PoolingParams, streams: bool = False) -> list[Sequence]:
        """The samples of one request. streams: as in make_all. Raises as make_all."""
        (token_ids,) = self.encoder.encode([prompt])
        return self._make(token_ids, params, "prompt: ", "sampling_params: ", streams=streams)

    def make_all(
        self,
        prompts: Iterable[Prompt],
        params: Iterable[SamplingParams | PoolingParams],
        on_error: str = "raise",
        start: int = 0,
        streams: bool = False,
    ) -> list[list[Sequence] | Exception]:
        """The samples of each request; texts go through the tokenizer in one batch.

        Args:
            params: one for each prompt.
            on_error: "raise" the first error, or "return" it in the place of its request.
            start: index of the first prompt.
            streams: whether texts are wanted as they come.

        Raises ValueError, TypeError, or ImportError for a missing library; the message begins with the argument and the
        index.
        """
        made: list[list[Sequence] | Exception] = []
        num_requests = self.num_requests
        for i, (token_ids, of_prompt) in enumerate(zip(self.encoder.encode(prompts), params, strict=True), start):
            try:
                made.append(self._make(token_ids, of_prompt, f"prompts[{i}]: ", f"sampling_params[{i}]: ", i, streams))
            except (TypeError, ValueError, ImportError) as error:
                if on_error == "raise":
                    self.num_requests = num_requests  # Ids have no gaps.
                    raise
                made.append(error)
        return made

    def check_request_id(self, request_id: object, unfinished: Iterable[Sequence]) -> None:
        """Raises TypeError or ValueError if no request has had this id. None stands for all requests. unfinished: for
        the message."""
        if request_id is None:
            return
        if isinstance(request_id, bool) or not isinstance(request_id, int):
            raise TypeError(
                f"request_id={quoted(request_id)}: must be an id from add_request() or a StreamDelta, or None"
            )
        if not 0 <= request_id < self.num_requests:
            known = sorted({seq.request.request_id for seq in unfinished})
            ids = ", ".join(map(str, known[:10])) + (", ..." if len(known) > 10 else "")
            raise ValueError(
                f"request_id={quoted(request_id)}: there is no such request; unfinished are: {ids or 'none'}"
            )

    def _make(
        self,
        token_ids: list[int] | Exception,
        params: SamplingParams | PoolingParams,
        where: str,
        where_params: str,
        index: int = 0,
        streams: bool = False,
    ) -> list[Sequence]:
        """The n samples of a request. Each has a seed of its own, the first one the request's."""
        try:
            if isinstance(token_ids, Exception):
                raise token_ids
            tokens = self._as_array(token_ids)
            if len(tokens) >= self._length_limit.max_seq_len:
                self._length_limit.check(len(tokens))
        except (TypeError, ValueError) as error:
            raise type(error)(f"{where}{error}") from error
        if not (self._generates and isinstance(params, SamplingParams)):
            return self._make_pooled(tokens, params, where_params, index, hasattr(token_ids, "images"))
        special = NOTHING_SPECIAL
        names_tokens = params.stop or params.stop_token_ids or params.edits_logits or params.logprob_token_ids
        has_form = params.structured_outputs is not None or params.thinking_token_budget is not None
        if names_tokens or has_form or params.extra_args or hasattr(token_ids, "images"):
            try:
                params, special = self._special.read(params, tokens, getattr(token_ids, "images", None))
            except (ValueError, ImportError) as error:
                raise type(error)(f"{where_params}{error}") from error
        request_id = self.num_requests
        self.num_requests += 1
        # A hash and not a sum, so that neighbouring requests do not draw from related streams.
        seed = _hash_seed(request_id, self._seed) if params.seed is None else params.seed
        request = Request(params, request_id, index, special.logit_edits, special.stop_tokens)
        seqs = []
        for sample in range(params.n):
            form = params.structured_outputs
            grammar = None if special.grammars is None or form is None else special.grammars.start(form)
            plain = params.is_plain
            completion = Completion(sample) if plain else Completion.of(request, sample, len(tokens), grammar)
            if self.detokenizer is not None and (streams or params.stop):
                completion.text_stream = TextStream(self.detokenizer, params, special.stop_strings)
            of_sample = _hash_seed(sample, seed) if sample else seed
            if special.thinking is not None:
                completion.thinking = copy(special.thinking)
            seqs.append(special.sequence(tokens, params, request, completion, of_sample))
        return seqs

    def _make_pooled(
        self, tokens: array, params: object, where_params: str, index: int, has_images: bool
    ) -> list[Sequence]:
        """The one sequence of a request that asks for a vector. Raises TypeError or ValueError for any other."""
        if has_images:
            raise ValueError(f"{where_params}a prompt with images gives completions, and no vectors")
        request = self.pooled.make(params, where_params)
        request.request_id, request.prompt_index = self.num_requests, index
        self.num_requests += 1
        return [PooledSequence(tokens, request)]

    def encode_all(self, prompts: list[Prompt], name: str, **options: bool) -> list[array]:
        """Token ids of each prompt. Raises ValueError or TypeError, with the name and the index of a wrong one."""
        encoded = []
        for i, token_ids in enumerate(self.encoder.encode(prompts, **options)):
            try:
                if isinstance(token_ids, Exception):
                    raise token_ids
                if hasattr(token_ids, "images"):
                    raise TypeError("has images: only completions can be asked for, by generate and its like")
                encoded.append(self._as_array(token_ids))
            except (TypeError, ValueError) as error:
                raise type(error)(f"{name}[{i}]: {error}") from error
        return encoded

    def encode_completions(self, completions: list[Prompt], prompts: list[array]) -> list[array]:
        """Token ids of each completion, those of a text such that they add it to their prompt's text, if the tokenizer
        can write it. Raises as encode_all."""
        # The model may have sampled any token.
        given = [TextTokens(each) if type(each) is list else each for each in completions]
        encoded = self.encode_all(given, "completions", add_special_tokens=False)
        for i, (completion, prompt) in enumerate(zip(completions, prompts, strict=True)):
            text = read_prompt(completion)
            if self.detokenizer is None or not isinstance(text, str):
                continue
            if self.detokenizer.added_text(prompt, len(prompt), encoded[i].tolist(), False) != text:
                encoded[i] = array("i", self.detokenizer.encode(text))
        return encoded


def _hash_seed(number: int, seed: int) -> int:
    return xxh64_intdigest(number.to_bytes(8, "little"), seed) >> 1
