"""Requests for vectors, classes and ranks, as OpenAI's, Jina's, Cohere's and vLLM's clients write them, and their
answers. Jobs and the server read and write the same bodies."""

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar
from uuid import uuid4

import numpy as np

from nanovllm.openai_format.request_names import Row, as_token_ids
from nanovllm.utils.checks import is_int, is_whole, quoted, require
from nanovllm.utils.vector_json import as_floats, packed

if TYPE_CHECKING:
    from nanovllm import PoolingParams

# What does not change an answer.
_WITHOUT_EFFECT = {"model", "user", "metadata", "priority", "request_id", "cache_salt", "safety_identifier", "store"}
_OF_EMBEDDINGS = ("pooling", "normalize", "dimensions")
_TEXT_OR_TOKENS = "a text or a list of token ids, not empty"


@dataclass(frozen=True)
class PooledCall(ABC):
    """A request of one of these forms.

    Attributes:
        urls: where it is sent; the first one is the usual one.
        task: that answers it.
        inputs: what the engine gets a vector for, in order: texts or token ids; of ranks pairs of query and document.
        options: of PoolingParams.
    """

    inputs: list[Any]
    options: Row = field(default_factory=dict)

    urls: ClassVar[tuple[str, ...]]
    task: ClassVar[str]

    @classmethod
    @abstractmethod
    def read(cls, body: Mapping[str, Any]) -> "PooledCall":
        """Raises ValueError or TypeError with what cannot be served."""

    @abstractmethod
    def answer(self, outputs: Sequence[Mapping[str, Any]], model: str) -> Row:
        """The body of the answer. outputs: an EmbeddingOutput, ClassOutput or RankOutput for each of inputs. model: its
        name."""

    @property
    def params(self) -> "PoolingParams":
        """Raises ValueError or TypeError."""
        from nanovllm import PoolingParams

        return PoolingParams(task=self.task, **self.options)  # type: ignore[arg-type]


@dataclass(frozen=True)
class EmbeddingCall(PooledCall):
    """OpenAI's: a vector for each text."""

    encoding: str = "float"  # or base64, of float32 in little-endian order
    prompt_name: str | None = None  # as LLM.embed takes it; of vLLM and OpenAI there is none

    urls = ("/v1/embeddings",)
    task = "embed"

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> "EmbeddingCall":
        given = _given(body, "input", "encoding_format", "prompt_name", *_OF_EMBEDDINGS)
        encoding = given.get("encoding_format", "float")
        require("encoding_format", encoding, encoding in ("float", "base64"), "'float' or 'base64'")
        name = given.get("prompt_name")
        require("prompt_name", name, name is None or isinstance(name, str), "a text")
        options = {key: given[key] for key in _OF_EMBEDDINGS if key in given}
        if "dimensions" in options:
            options["dimensions"] = _as_integer(options["dimensions"])
        call = cls(_read_inputs(given), options, encoding, name)
        _ = call.params  # Raises if an option is wrong.
        return call

    def answer(self, outputs: Sequence[Mapping[str, Any]], model: str) -> Row:
        write = packed if self.encoding == "base64" else as_floats
        data = [
            {"object": "embedding", "index": index, "embedding": write(output["embedding"])}
            for index, output in enumerate(outputs)
        ]
        return {"object": "list", "data": data, "model": model, "usage": _usage(outputs)}


@dataclass(frozen=True)
class ClassifyCall(PooledCall):
    """vLLM's: probabilities of classes for each text."""

    urls = ("/classify", "/v1/classify")
    task = "classify"

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> "ClassifyCall":
        return cls(_read_inputs(_given(body, "input")))

    def answer(self, outputs: Sequence[Mapping[str, Any]], model: str) -> Row:
        data = []
        for index, output in enumerate(outputs):
            probs = np.asarray(output["probs"], np.float32)
            data.append(
                {"index": index, "label": output["label"], "probs": as_floats(probs), "num_classes": len(probs)}
            )
        head = {"id": f"classify-{uuid4().hex}", "object": "list", "created": int(time.time()), "model": model}
        return head | {"data": data, "usage": _usage(outputs)}


@dataclass(frozen=True)
class RankCall(PooledCall):
    """Jina's and Cohere's: documents by how well they answer a query, the best first."""

    top_n: int | None = None  # documents of the answer; None: all
    returns_documents: bool = True  # their texts
    instruction: str | None = None  # as LLM.rerank takes it

    urls = ("/v1/rerank", "/rerank", "/v2/rerank")
    task = "rerank"

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> "RankCall":
        given = _given(body, "query", "documents", "top_n", "return_documents", "instruction")
        for name in ("query", "documents"):
            if name not in given:
                raise ValueError(f"body: has no {name!r}")
        query, documents = given["query"], read_documents(given["documents"])
        require("query", query, isinstance(query, str) and query != "", "a text, not empty")
        top_n, returns = _as_integer(given.get("top_n")), given.get("return_documents", True)
        require("top_n", top_n, top_n is None or is_int(top_n, 1), "a positive integer")
        require("return_documents", returns, isinstance(returns, bool), "true or false")
        instruction = given.get("instruction")
        require("instruction", instruction, instruction is None or isinstance(instruction, str), "a text")
        return cls([(query, document) for document in documents], {}, top_n, returns, instruction)

    def answer(self, outputs: Sequence[Mapping[str, Any]], model: str) -> Row:
        results = []
        for index, score in ranked(outputs)[: self.top_n]:
            document = {"document": {"text": self.inputs[index][1]}} if self.returns_documents else {}
            results.append({"index": index, "relevance_score": score} | document)
        return {"id": f"rerank-{uuid4().hex}", "model": model, "results": results, "usage": _usage(outputs)}


CALLS: tuple[type[PooledCall], ...] = (EmbeddingCall, RankCall, ClassifyCall)


def ranked(outputs: Sequence[Mapping[str, Any]]) -> list[tuple[int, float]]:
    """Indices and scores of documents, the best first; equals in their order. outputs: a RankOutput for each."""
    scores = [output["relevance_score"] for output in outputs]
    return [(index, scores[index]) for index in sorted(range(len(scores)), key=lambda index: -scores[index])]


def read_documents(documents: Any) -> list[str]:
    """Texts of a list of texts or of objects with a text. Raises ValueError."""
    allowed = "a list of texts, or of objects with a text, not empty"
    require("documents", documents, isinstance(documents, list) and bool(documents), allowed)
    return [read_document(document, f"documents[{i}]") for i, document in enumerate(documents)]


def read_document(document: Any, name: str) -> str:
    """A text, or that of an object with one. Raises ValueError, which begins with the name."""
    text = document.get("text") if isinstance(document, Mapping) else document
    if not isinstance(text, str) or not text:
        raise ValueError(f"{name}={quoted(document)}: must be a text, or an object with a text, not empty")
    return text


def read_text_or_tokens(value: Any, name: str) -> str | list[int]:
    """Raises ValueError, which begins with the name."""
    value = as_token_ids(value)
    if not value or not (isinstance(value, str) or _is_token_ids(value)):
        raise ValueError(f"{name}={quoted(value)}: must be {_TEXT_OR_TOKENS}")
    return value


def _as_integer(value: Any) -> Any:
    return int(value) if is_whole(value) else value


def _is_token_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(token) is int for token in value)


def _given(body: Mapping[str, Any], *known: str) -> Row:
    """What a body says. Raises ValueError for a name that is neither known nor without effect."""
    given = {name: value for name, value in body.items() if value is not None and name not in _WITHOUT_EFFECT}
    if unknown := [name for name in given if name not in known]:
        raise ValueError(f"{unknown[0]}={quoted(given[unknown[0]])}: is unknown here; known are {', '.join(known)}")
    return given


def _read_inputs(given: Row) -> list[Any]:
    """The prompts of a body's `input`: one, or a list of them."""
    if "input" not in given:
        raise ValueError("body: has no 'input'")
    value = as_token_ids(given["input"])
    is_list = isinstance(value, list) and bool(value) and not _is_token_ids(value)
    if not is_list:
        return [read_text_or_tokens(value, "input")]
    return [read_text_or_tokens(each, f"input[{i}]") for i, each in enumerate(value)]


def _usage(outputs: Sequence[Mapping[str, Any]]) -> Row:
    num_tokens = sum(output["num_prompt_tokens"] for output in outputs)
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
