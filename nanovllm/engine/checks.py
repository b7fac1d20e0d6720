"""What an engine would refuse, said without one: no weights are read, and no GPU is needed."""

from collections.abc import Iterable
from copy import copy
from os import PathLike
from typing import Any, cast

from nanovllm.config import Config
from nanovllm.engine.length_limit import LengthLimit
from nanovllm.engine.start.build import check_backend
from nanovllm.engine.text.prompts import Prompt
from nanovllm.engine.text.sequence_maker import SequenceMaker
from nanovllm.models.tokenizer_files import load_tokenizer
from nanovllm.pooling_params import PoolingParams
from nanovllm.sampling_params import SamplingParams


def check_options(model: str | PathLike[str], **options: Any) -> None:
    """Raises ValueError, TypeError or OSError as `LLM(model, **options)` does for a wrong option or file."""
    check_backend(Config(model, **options))


class RequestChecker:
    """Checks requests as an engine does when they are added.

    Attributes:
        max_seq_len: tokens of the longest sequence, prompt and completion.
        dtype: torch's, of the model.
    """

    def __init__(self, config: Config, num_kvcache_blocks: int | None = None):
        """num_kvcache_blocks: of the engine, if it is known. None: room for max_model_len."""
        config = copy(config)
        config.num_kvcache_blocks = num_kvcache_blocks or -(
            -cast(int, config.max_model_len) // config.kvcache_block_size
        )
        limit = LengthLimit(config)
        self.max_seq_len = limit.max_seq_len
        self.dtype: Any = config.dtype
        self._sequences = SequenceMaker(config, load_tokenizer(config.model, config.tokenizer), limit)

    def check(
        self, prompts: Iterable[Prompt], params: Iterable[SamplingParams | PoolingParams]
    ) -> list[Exception | None]:
        """What is wrong with each request; None if nothing is. A prompt may be the exception that another one gave."""
        made = self._sequences.make_all(prompts, params, on_error="return")
        return [each if isinstance(each, Exception) else None for each in made]

    def embedding_prefix(self, prompt_name: str | None) -> str:
        """The text that `LLM.embed` puts before each text. Raises ValueError for a name that the model lacks."""
        return self._sequences.pooled.sentence_facts.text_before(prompt_name)

    def rank_prompts(
        self, pairs: Iterable[tuple[str, str]], instruction: str | None = None
    ) -> list[list[int] | Exception]:
        """The prompts of `LLM.rerank_iter` in token ids, or what is wrong with a pair. Raises ValueError for a model
        that does not rank."""
        pooled, prompts = self._sequences.pooled, list[list[int] | Exception]()
        pooled.make(PoolingParams(task="rerank"), "")
        for query, document in pairs:
            try:
                prompts.append(pooled.rank_prompts.make(query, document, instruction))
            except (TypeError, ValueError) as error:
                prompts.append(error)
        return prompts
