"""RankPrompts: the prompts from which a model says how well a document answers a query."""

from functools import cached_property
from typing import TYPE_CHECKING, Any

from nanovllm.utils.checks import quoted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DEFAULT_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
# The form that Qwen3-Reranker has been trained with (its model card). Its answer is one token, yes or no.
_BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
_MARKS = ("<|im_start|>", "<|im_end|>")


class RankPrompts:
    """Token ids of pairs of a query and a document: for models that answer yes or no, and those of the same family with
    a head of one label, in Qwen3-Reranker's form; for other heads as the tokenizer joins two texts."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase | None", has_labels: bool, model_type: str):
        """has_labels: whether the model has a classification head."""
        self._tokenizer: Any = tokenizer
        self._has_labels, self._is_qwen3 = has_labels, model_type.startswith("qwen3")

    @cached_property
    def answers(self) -> tuple[int, int]:
        """The tokens "no" and "yes". Raises ValueError if the tokenizer shows that this is no reranker."""
        found = [self._encode(text) for text in ("no", "yes", *_MARKS)]
        if any(len(token_ids) != 1 for token_ids in found):
            raise ValueError(
                "task='rerank': the tokenizer lacks one of the tokens yes, no, <|im_start|> and <|im_end|>, with which "
                "Qwen3-Reranker answers: pass a model of its form, or one with a classification head of one label"
            )
        return found[0][0], found[1][0]

    def make(self, query: object, document: object, instruction: str | None = None) -> list[int]:
        """Token ids of one pair. Raises TypeError or ValueError unless both are texts that are not empty."""
        for name, text in (("query", query), ("document", document)):
            if not isinstance(text, str):
                raise TypeError(f"{name}={quoted(text)}: must be a text")
            if not text:
                raise ValueError(f"{name}='': must not be empty")
        if instruction is not None and not isinstance(instruction, str):
            raise TypeError(f"instruction={quoted(instruction)}: must be a text, or None for the usual one")
        if not self._has_form:
            if instruction is not None:
                raise ValueError(f"instruction={quoted(instruction)}: must be None: the model's prompts have none")
            return self._tokenizer(query, document, verbose=False)["input_ids"]
        text = f"<Instruct>: {instruction or DEFAULT_INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
        before, after = self._frame
        return [*before, *self._encode(text), *after]

    @cached_property
    def _has_form(self) -> bool:
        if not self._has_labels:
            return bool(self.answers)  # or its error
        return self._is_qwen3 and all(len(self._encode(mark)) == 1 for mark in _MARKS)

    @cached_property
    def _frame(self) -> tuple[list[int], list[int]]:
        return self._encode(_BEFORE), self._encode(_AFTER)

    def _encode(self, text: str) -> list[int]:
        if self._tokenizer is None:
            raise ValueError("task='rerank': needs the model's tokenizer, but skip_tokenizer_init is set")
        return self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
