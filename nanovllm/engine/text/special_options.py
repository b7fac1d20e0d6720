"""What some requests ask for beside a temperature and a length: stop strings, edits of logits, grammars."""

from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, cast

from nanovllm.config import Config
from nanovllm.engine.features.images.image_sequence import ImageSequence, PlacedImages, ThinkingImageSequence
from nanovllm.engine.features.logits.logit_edits import LogitEdits, tokenize_bad_words
from nanovllm.engine.features.logits.structured import Grammars
from nanovllm.engine.features.logits.thinking import Thinking, ThinkingSequence
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.text.detokenizer import Detokenizer
from nanovllm.engine.text.text_stream import StopStrings
from nanovllm.engine.text.thinking import ThinkingReader
from nanovllm.layers.sampling.token_masks import unpack_mask
from nanovllm.sampling_params import SamplingParams, StructuredOutputsParams
from nanovllm.utils.checks import quoted
from nanovllm.utils.sized_cache import SizedCache

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MAX_LOGIT_EDITS_BYTES = 2**26  # kept for later requests
_MAX_STOP_CHARACTERS = 2**22  # likewise


@dataclass(frozen=True)
class Special:
    """What the sequences of a request get."""

    # Tokens that a stop string stands for, and the string.
    stop_tokens: dict[int, str] = field(default_factory=dict)
    stop_strings: StopStrings | None = None  # the others
    logit_edits: LogitEdits | None = None
    grammars: Grammars | None = None  # Each sample starts one.
    thinking: Thinking | None = None  # Each sample has a copy.
    sequence: Callable[..., Sequence] = Sequence


NOTHING_SPECIAL = Special()


class SpecialOptions:
    """Reads such options. Requests of a batch often share them, so what they need is kept."""

    def __init__(self, config: Config, tokenizer: "PreTrainedTokenizerBase | None", detokenizer: Detokenizer | None):
        """tokenizer, detokenizer: None with skip_tokenizer_init."""
        self._tokenizer, self._detokenizer = tokenizer, detokenizer
        self._vocab_size, self._eos = config.hf_config.vocab_size, config.eos
        self._features = {feature.option: feature for feature in config.features}
        self._grammars: Grammars | None = None
        self._thinking: ThinkingReader | None = None
        self._config = config
        self._logit_edits: SizedCache[SamplingParams, LogitEdits] = SizedCache(
            self._make_logit_edits, lambda params, edits: edits.num_bytes, _MAX_LOGIT_EDITS_BYTES
        )
        self._stop_strings: SizedCache[tuple[str, ...], StopStrings] = SizedCache(
            StopStrings, lambda texts, _: sum(map(len, texts)), _MAX_STOP_CHARACTERS
        )

    def read(
        self, params: SamplingParams, tokens: array, images: PlacedImages | None = None
    ) -> tuple[SamplingParams, Special]:
        """The params without those stop strings that became stop tokens, and what they ask for. tokens, images: the
        prompt's. Raises ValueError or ImportError for what this model cannot do."""
        for name, value in dict(params.extra_args).items():
            if name not in self._features:
                features = ", ".join(self._features) or "none"
                raise ValueError(f"extra_args: {quoted(name)} is no feature of this engine; it has: {features}")
            self._features[name].check(value)
        if params.stop and self._detokenizer is None:
            raise ValueError(f"stop={quoted(params.stop)}: without a tokenizer there is no text to find it in")
        stop_tokens: dict[int, str] = {}
        if params.stop and self._detokenizer is not None:
            # Texts may lack special tokens.
            known = self._detokenizer.special_tokens
            stop_tokens = {known[s]: s for s in params.stop if s in known and known[s] < self._vocab_size}
        if stop_tokens:
            stop = tuple(s for s in params.stop if s not in stop_tokens.values())
            params = replace(params, stop=stop, stop_token_ids=(*params.stop_token_ids, *stop_tokens))
        self._check_vocabulary("stop_token_ids", params.stop_token_ids)
        self._check_vocabulary("logprob_token_ids", params.logprob_token_ids or ())
        self._check_ends(params)
        stop_strings = self._stop_strings.get(cast(tuple[str, ...], params.stop)) if params.stop else None
        edits = None
        if params.edits_logits:
            # Requests of a batch differ in little else.
            edits = self._logit_edits.get(params if params.seed is None else replace(params, seed=None))
        form = params.structured_outputs
        grammars = None if form is None else self._read_form(form)
        thinking = None
        if form is not None or params.thinking_token_budget is not None:
            thinking = self._start_thinking(params, tokens, edits)
        sequence: Callable[..., Sequence] = Sequence if thinking is None else ThinkingSequence
        if images is not None:
            sequence = partial(ImageSequence if thinking is None else ThinkingImageSequence, images=images)
        return params, Special(stop_tokens, stop_strings, edits, grammars, thinking, sequence)

    def _start_thinking(self, params: SamplingParams, tokens: array, edits: LogitEdits | None) -> Thinking | None:
        """What the samples of a prompt begin with, if their form or their budget depends on their thinking."""
        form = params.structured_outputs
        if self._thinking is None:
            if self._tokenizer is None or self._detokenizer is None:
                raise ValueError("thinking_token_budget: needs the model's tokenizer, but skip_tokenizer_init is set")
            self._thinking = ThinkingReader(self._config, self._tokenizer, self._detokenizer)
        thinking = self._thinking.start(tokens, params, edits)
        if thinking is None and form is not None and form.choice is not None:
            longest = max(len(text.encode()) for text in form.choice)  # A token has one byte at least.
            if params.min_tokens > longest:
                text = f"the longest choice has no more than {longest} tokens"
                raise ValueError(f"min_tokens={params.min_tokens}: {text}")
        return thinking

    def _read_form(self, form: StructuredOutputsParams) -> Grammars:
        if self._tokenizer is None:
            raise ValueError("structured_outputs: need the model's tokenizer, but skip_tokenizer_init is set")
        if self._grammars is None:
            self._grammars = Grammars(self._tokenizer, self._vocab_size, self._eos)
        self._grammars.start(form)
        return self._grammars

    def _check_vocabulary(self, name: str, token_ids: Iterable[int]) -> None:
        highest = max(token_ids, default=0)
        if highest >= self._vocab_size:
            raise ValueError(f"{name}: token id {highest} is outside the vocabulary, 0..{self._vocab_size - 1}")

    def _check_ends(self, params: SamplingParams) -> None:
        """Raises ValueError if min_tokens keeps away all tokens."""
        if params.min_tokens and len({*params.stop_token_ids, *self._eos}) >= self._vocab_size:
            raise ValueError(
                f"min_tokens={params.min_tokens}: no token is left to draw: all tokens of the vocabulary are in "
                "stop_token_ids or end a sequence, and may not come so early"
            )

    def _make_logit_edits(self, params: SamplingParams) -> LogitEdits:
        self._check_vocabulary("logit_bias", dict(params.logit_bias))
        self._check_vocabulary("allowed_token_ids", params.allowed_token_ids or ())
        if params.bad_words and self._tokenizer is None:
            raise ValueError(
                f"bad_words={quoted(params.bad_words)}: need the model's tokenizer, but skip_tokenizer_init is set; "
                "logit_bias and allowed_token_ids take token ids"
            )
        words = tokenize_bad_words(self._detokenizer.encode, params.bad_words) if self._detokenizer else []
        self._check_vocabulary("bad_words", (token for word in words for token in word))
        edits = LogitEdits(params, words, self._vocab_size)
        is_left = unpack_mask(edits.mask, self._vocab_size)
        eos = [token for token in self._eos if token < self._vocab_size]
        if params.structured_outputs is not None and eos and not is_left[eos].any():
            raise ValueError(
                f"structured_outputs: a form ends with one of the tokens {eos}, and allowed_token_ids or bad_words "
                "exclude them"
            )
        if params.min_tokens > 0:
            is_left[[*eos, *params.stop_token_ids]] = False
        if not is_left.any():
            raise ValueError(
                "no token is left to draw: allowed_token_ids, bad_words and min_tokens, which keeps away the ends, "
                "exclude all of them"
            )
        return edits
