"""VectorEngine: what an LLM gives beside text: embeddings, classes, ranks, and scores of choices."""

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from itertools import repeat
from typing import TYPE_CHECKING, Any, Literal, cast

from nanovllm.engine.engine_lock import User
from nanovllm.engine.llm_engine import LLMEngine, OnError, check_arguments
from nanovllm.engine.text.outputs import (
    ChoiceScores,
    ClassOutput,
    EmbeddingOutput,
    RankedDocument,
    RankOutput,
    Score,
    as_result,
)
from nanovllm.engine.text.pooled_outputs import PooledResults, first_output, pooled_error
from nanovllm.engine.text.prompts import Prompt, as_prompts, read_prompt
from nanovllm.engine.text.streaming import NO_PROMPT, PromptFeed
from nanovllm.pooling_params import PoolingParams
from nanovllm.utils.checks import quoted, require
from nanovllm.utils.collector import old_objects_set_aside
from nanovllm.utils.progress_bar import progress_bar

Pooling = Literal["auto", "last", "mean", "cls"]
Pair = tuple[str, str]  # a query and a document

# Iterators with ordered=True take at most this many times max_num_seqs prompts ahead of the next result: results may
# wait for a slow one only as long as the batch stays full.
BATCHES_AHEAD = 8


class VectorEngine(LLMEngine):
    """Methods of LLM whose requests end with their prompt."""

    if TYPE_CHECKING:  # LLM's.

        def _generate_iter(self, user: User, feed: PromptFeed, on_error: OnError) -> Iterator[tuple[int, Any]]: ...

        def score(self, prompts: Any, completions: Any, use_tqdm: bool | Callable = True) -> list[Score]: ...

    # -- embeddings ------------------------------------------------------------------------------------------------

    def embed(
        self,
        prompts: Prompt | Iterable[Prompt],
        pooling: Pooling = "auto",
        normalize: bool = True,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        use_tqdm: bool | Callable = True,
        on_error: OnError = "raise",
    ) -> list[EmbeddingOutput]:
        """A vector for each text, from the hidden states after the model's final norm.

        Args:
            prompts: in any form that generate accepts. Texts are tokenized as the model's tokenizer says, with an
                end-of-sequence token where it adds one. Token ids are taken as given.
            pooling: which hidden states: of the last token, the mean of all, or of the first token ("cls"). "auto":
                what the checkpoint's modules.json says, else "last".
            normalize: scale each vector to length 1.
            dimensions: the first numbers of each vector alone, which are normalized after the cut (Matryoshka).
            prompt_name: the name of a text in config_sentence_transformers.json that is put before each text. None: the
                one that the file names as default, if it does.
            use_tqdm: as in generate.
            on_error: "raise" refuses all texts before any work if one cannot be served; "return" serves the others, and
                the result of that one has embedding None and `error`.

        Returns:
            One EmbeddingOutput for each text, in order.

        Raises:
            ValueError, TypeError: a wrong argument or text, before any work; a model that does not embed.
            RuntimeError: hidden states of a text are NaN or infinite; or as generate.
        """
        with self._lock.turn(user := User("embed()")):
            params, prefix = self._embedding_params(pooling, normalize, dimensions, prompt_name)
            return self._run(user, "embed", prompts, params, use_tqdm, on_error, prefix)

    def embed_iter(
        self,
        prompts: Prompt | Iterable[Prompt],
        pooling: Pooling = "auto",
        normalize: bool = True,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        ordered: bool = False,
        on_error: OnError = "raise",
    ) -> Iterator[tuple[int, EmbeddingOutput]]:
        """Vectors of any number of texts, in bounded memory.

        Args:
            prompts, ordered, on_error: as in generate_iter. The others are embed's.

        Returns:
            An iterator of (index of the text, EmbeddingOutput).

        Raises as embed, for a wrong text when it is taken.
        """
        with self._lock.turn(user := User("embed_iter()")):
            params, prefix = self._embedding_params(pooling, normalize, dimensions, prompt_name)
            prompts = as_prompts(prompts, "prompts", self.tokenizer)
            return self._run_iter(user, "embed", _prefixed(prompts, *prefix), params, ordered, on_error)

    def _embedding_params(
        self, pooling: Pooling, normalize: bool, dimensions: int | None, prompt_name: str | None
    ) -> tuple[PoolingParams, tuple[str, bool]]:
        """What requests ask for, and the text before theirs, and whether it is asked for by name."""
        params = PoolingParams(pooling, normalize, dimensions, "embed")
        pooled = self._sequences.pooled
        pooled.make(params, "")  # Raises at once, with all that is wrong.
        return params, (pooled.sentence_facts.text_before(prompt_name), prompt_name is not None)

    # -- classes ---------------------------------------------------------------------------------------------------

    def classify(
        self, prompts: Prompt | Iterable[Prompt], use_tqdm: bool | Callable = True, on_error: OnError = "raise"
    ) -> list[ClassOutput]:
        """What a model with a classification head (...ForSequenceClassification, reward models among them) says of each
        text: the head's logits for the last token.

        Args:
            prompts: in any form that generate accepts. A reward model wants a whole conversation, in the form of its
                chat template.
            use_tqdm, on_error: as in embed.

        Returns:
            One ClassOutput for each text, in order.

        Raises as embed; ValueError for a model without such a head.
        """
        with self._lock.turn(user := User("classify()")):
            return self._run(user, "classify", prompts, PoolingParams(task="classify"), use_tqdm, on_error)

    def classify_iter(
        self, prompts: Prompt | Iterable[Prompt], ordered: bool = False, on_error: OnError = "raise"
    ) -> Iterator[tuple[int, ClassOutput]]:
        """Classes of any number of texts, in bounded memory: an iterator of (index of the text, ClassOutput).

        Arguments are those of generate_iter. Raises as classify, for a wrong text when it is taken.
        """
        with self._lock.turn(user := User("classify_iter()")):
            prompts = _prefixed(as_prompts(prompts, "prompts", self.tokenizer))
            return self._run_iter(user, "classify", prompts, PoolingParams(task="classify"), ordered, on_error)

    # -- ranks -----------------------------------------------------------------------------------------------------

    def rerank(
        self,
        query: str,
        documents: Iterable[str],
        instruction: str | None = None,
        use_tqdm: bool | Callable = True,
    ) -> list[RankedDocument]:
        """Order documents by how well they answer a query.

        Args:
            query: a text.
            documents: texts.
            instruction: what the query is for, in Qwen3-Reranker's prompt; None for its usual one.
            use_tqdm: as in generate.

        Returns:
            A RankedDocument for each document, the best first; equals in the order of the documents.

        Raises as embed; ValueError for a model that does not rank: with a head that is neither of the vocabulary nor of
        one label, or without a tokenizer.
        """
        with self._lock.turn(user := User("rerank()")):
            documents = _texts(documents, "documents")
            prompts = self._rank_prompts(((query, document) for document in documents), instruction, "documents")
            found = self._run(user, "rerank", prompts, PoolingParams(task="rerank"), use_tqdm, "raise")
        scores = [cast(float, output["relevance_score"]) for output in found]
        order = sorted(range(len(scores)), key=lambda i: -scores[i])
        return [as_result(RankedDocument(index=i, document=documents[i], relevance_score=scores[i])) for i in order]

    def rerank_iter(
        self,
        pairs: Iterable[Pair],
        instruction: str | None = None,
        ordered: bool = False,
        on_error: OnError = "raise",
    ) -> Iterator[tuple[int, RankOutput]]:
        """How well documents answer queries, for any number of pairs, in bounded memory.

        Args:
            pairs: of a query and a document. After a `NO_PROMPT`, as in generate_iter.
            instruction: as in rerank.
            ordered, on_error: as in generate_iter.

        Returns:
            An iterator of (index of the pair, RankOutput).

        Raises as rerank, for a wrong pair when it is taken.
        """
        with self._lock.turn(user := User("rerank_iter()")):
            params = PoolingParams(task="rerank")
            self._sequences.pooled.make(params, "")
            if isinstance(pairs, str) or not isinstance(pairs, Iterable):
                raise TypeError(f"pairs={quoted(pairs)}: must be an iterable of (query, document)")
            prompts = (
                pair if pair is NO_PROMPT else self._rank_prompt(pair, instruction) for pair in cast(Iterable, pairs)
            )
            return self._run_iter(user, "rerank", prompts, params, ordered, on_error)

    def rank_prompts(self, query: str, documents: Iterable[str], instruction: str | None = None) -> list[list[int]]:
        """The prompts, in token ids, from which the model says how well each document answers the query: for
        add_request with PoolingParams(task="rerank"). Arguments and errors are rerank's."""
        documents = _texts(documents, "documents")
        return self._rank_prompts(((query, document) for document in documents), instruction, "documents")

    def _rank_prompts(self, pairs: Iterable[Pair], instruction: str | None, name: str) -> list[list[int]]:
        """Raises TypeError or ValueError, with the name and the index of a wrong one."""
        self._sequences.pooled.make(PoolingParams(task="rerank"), "")
        prompts = []
        for i, pair in enumerate(pairs):
            prompt = self._rank_prompt(pair, instruction)
            if isinstance(prompt, Exception):
                raise type(prompt)(f"{name}[{i}]: {prompt}")
            prompts.append(prompt)
        return prompts

    def _rank_prompt(self, pair: object, instruction: str | None) -> Any:
        """Token ids, or the TypeError or ValueError that says what is wrong with the pair."""
        try:
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise TypeError(f"must be a pair of a query and a document, not {quoted(pair)}")
            return self._sequences.pooled.rank_prompts.make(pair[0], pair[1], instruction)
        except (TypeError, ValueError) as error:
            return error

    def score_choices(
        self,
        prompts: Prompt | Iterable[Prompt],
        choices: Iterable[Prompt] | Iterable[Iterable[Prompt]],
        use_tqdm: bool | Callable = True,
    ) -> list[ChoiceScores]:
        """Which of several completions the model finds the likeliest. The prompt's keys and values are shared.

        Args:
            prompts: in any form that generate accepts.
            choices: texts, with the space at their beginning if they have one: the same for all prompts, or a list for
                each prompt.
            use_tqdm: as in generate.

        Returns:
            One ChoiceScores for each prompt, in order.

        Raises as score; ValueError if there are no choices, or not a list for each prompt.
        """
        with self._lock.turn(User("score_choices()")):
            prompts = list(as_prompts(prompts, "prompts", self.tokenizer))
            each = _choices_of(choices, len(prompts))
            pairs = [(prompt, choice) for prompt, own in zip(prompts, each, strict=True) for choice in own]
            scores = iter(self.score([prompt for prompt, _ in pairs], [choice for _, choice in pairs], use_tqdm))
        found = []
        for own in each:
            totals = [next(scores)["total"] for _ in own]
            found.append(as_result(ChoiceScores(logprobs=totals, best=max(range(len(own)), key=totals.__getitem__))))
        return found

    # -- the loop ----------------------------------------------------------------------------------------------------

    def _run(
        self,
        user: User,
        task: str,
        prompts: Prompt | Iterable[Prompt],
        params: PoolingParams,
        use_tqdm: bool | Callable,
        on_error: OnError,
        prefix: tuple[str, bool] = ("", False),
    ) -> list[Any]:
        """The results of all prompts, in order; the lock is taken."""
        check_arguments(on_error, None, use_tqdm)
        self._sequences.pooled.make(params, "")
        prompts = list(_prefixed(as_prompts(prompts, "prompts", self.tokenizer), *prefix))
        with old_objects_set_aside():
            requests = self._sequences.make_all(prompts, repeat(params, len(prompts)), on_error)
        results = PooledResults(task, requests)
        num_seqs = self._queue(user, requests)
        del requests
        with old_objects_set_aside(), progress_bar(use_tqdm, num_seqs) as show:
            while self._lock.is_serving(user):
                finished, step = self._step()
                results.record(finished)
                if show is not None:
                    show(len(finished), step.num_tokens)
        found = [results.ready[i] for i in range(len(prompts))]
        if on_error == "raise":
            for i, output in enumerate(found):
                _raise_error(i, output)
        return found

    def _run_iter(
        self,
        user: User,
        task: str,
        prompts: Iterable[Any],
        params: PoolingParams,
        ordered: bool,
        on_error: OnError,
    ) -> Iterator[tuple[int, Any]]:
        require("on_error", on_error, on_error in ("raise", "return"), "one of raise, return")
        self._sequences.pooled.make(params, "")
        max_ahead = BATCHES_AHEAD * self.scheduler.max_num_seqs if ordered else None
        found = self._generate_iter(user, _PooledFeed(task, prompts, params, max_ahead), on_error)
        return found if on_error == "return" else _raising(cast(Generator, found))


class _PooledFeed(PromptFeed):
    """A PromptFeed of requests that ask for vectors."""

    make_output = staticmethod(first_output)

    def __init__(self, task: str, prompts: Iterable[Any], params: PoolingParams, max_ahead: int | None):
        self.make_error = lambda error: pooled_error(task, error)
        super().__init__(zip(prompts, repeat(params), strict=False), max_ahead)


def _raising(found: Generator[tuple[int, Any], None, None]) -> Iterator[tuple[int, Any]]:
    """The same results; an error among them ends the iterator."""
    with closing(found):
        for index, output in found:
            _raise_error(index, output)
            yield index, output


def _raise_error(index: int, output: Any) -> None:
    if "error" in output:
        raise RuntimeError(f"prompts[{index}]: {output['error']}")


def _prefixed(prompts: Iterable[Prompt], prefix: str = "", is_named: bool = False) -> Iterator[Any]:
    """The prompts with a text before theirs. An empty text has no vector, and becomes no tokens, which are refused.
    is_named: that text is asked for, so prompts of token ids are wrong."""
    for prompt in prompts:
        if prompt is NO_PROMPT:
            yield prompt
            continue
        try:
            read = prompt if type(prompt) is str else read_prompt(prompt)
        except (TypeError, ValueError) as error:
            yield error
            continue
        if isinstance(read, str):
            yield prefix + read if read else []
        elif is_named:
            yield ValueError("is token ids: prompt_name puts a text before texts")
        else:
            yield read


def _texts(texts: object, name: str) -> list[str]:
    if isinstance(texts, str) or not isinstance(texts, Iterable):
        raise TypeError(f"{name}={quoted(texts)}: must be a list of texts")
    return list(texts)


def _choices_of(choices: Any, num_prompts: int) -> list[list[Prompt]]:
    """The choices of each prompt."""
    if isinstance(choices, str) or not isinstance(choices, Iterable):
        raise TypeError(f"choices={quoted(choices)}: must be a list of texts, or a list of texts for each prompt")
    given = list(choices)
    is_nested = bool(given) and all(isinstance(each, list | tuple) and not _is_token_ids(each) for each in given)
    each = [list(own) for own in given] if is_nested else [given] * num_prompts
    if len(each) != num_prompts:
        raise ValueError(f"choices: {len(each)} lists for {num_prompts} prompts; pass one list for all, or one each")
    for i, own in enumerate(each):
        if not own:
            raise ValueError(
                f"choices[{i}]: is empty: there must be something to choose"
                if is_nested
                else "choices=[]: is empty: there must be something to choose"
            )
    return each


def _is_token_ids(choice: Any) -> bool:
    return len(choice) > 0 and all(isinstance(token, int) for token in choice)
