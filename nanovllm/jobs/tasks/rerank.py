"""The task "rerank": how well each line's document, or each of its documents, answers its query."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nanovllm import PromptEncoder
from nanovllm.jobs.columns import is_missing, names_of
from nanovllm.jobs.lines import Row
from nanovllm.jobs.tasks.pooled import PooledFormat, PooledLine, PooledTask
from nanovllm.openai_format.pooled_calls import RankCall, ranked, read_document, read_documents
from nanovllm.utils.checks import quoted, require

if TYPE_CHECKING:  # The reading process has no torch.
    from nanovllm import LLM, PoolingParams, RequestChecker


@dataclass(frozen=True)
class RankFormat(PooledFormat):
    """How lines with a query and documents are read. Raises ValueError for a wrong option."""

    PROMPTS = ("query", "document", "documents")
    ANSWERS = ("relevance_score", "results")

    instruction: str | None = None  # as LLM.rerank takes it

    def __post_init__(self) -> None:
        for name in ("prompt_column", "template"):
            if (value := getattr(self, name)) is not None:
                raise ValueError(f"{name}={quoted(value)}: lines of task='rerank' have 'query', and 'document(s)'")
        super().__post_init__()
        is_text = self.instruction is None or isinstance(self.instruction, str)
        require("instruction", self.instruction, is_text, "a text, or None")

    def check_columns(self, columns: list[str], has_requests: bool = False) -> None:
        if not has_requests and ("query" not in columns or not {"document", "documents"} & set(columns)):
            names = names_of(columns)
            raise ValueError(f"input: no line has 'query' and 'document' or 'documents'; there are: {names}")

    def read(self, row: Row) -> PooledLine:
        """Raises ValueError with what is wrong with the row."""
        query = row.get("query")
        require("query", query, isinstance(query, str) and query != "", "a text, not empty")
        given = [name for name in ("document", "documents") if not is_missing(row.get(name))]
        if len(given) != 1:
            has = "has 'document' and 'documents'" if given else "has no 'document' and no 'documents'"
            raise ValueError(f"{has}: a line has one of them")
        if given == ["document"]:
            return PooledLine([(query, read_document(row["document"], "document"))], self.data(row))
        pairs = [(query, document) for document in read_documents(row["documents"])]
        return PooledLine(pairs, self.data(row), is_list=True)


@dataclass(frozen=True)
class Rerank(PooledTask):
    line_format: RankFormat

    name = "rerank"
    call = RankCall

    def _read_row(self, row: Row) -> PooledLine:
        return self.line_format.read(row)

    def _own_call(self, call: RankCall) -> RankCall:
        own, of_job = call.instruction, self.line_format.instruction
        if own is not None and own != of_job:
            raise ValueError(f"instruction={quoted(own)}: must be that of the job, {of_job!r}")
        return call

    def encode(self, encoder: PromptEncoder, inputs: list[Any]) -> list[Any]:
        return inputs  # The engine makes the model's prompt of a query and a document.

    def prompts(self, checker: "RequestChecker", inputs: list[Any]) -> list[Any]:
        return checker.rank_prompts(inputs, self.line_format.instruction)

    def params(self, line: PooledLine | None) -> "PoolingParams":
        from nanovllm import PoolingParams

        return PoolingParams(task="rerank")

    def iterate(self, llm: "LLM", inputs: Iterator[Any]) -> Iterator[tuple[int, Any]]:
        return llm.rerank_iter(inputs, instruction=self.line_format.instruction, on_error="return")

    def prompt_of(self, llm: "LLM", given: Any) -> Any:
        with suppress(TypeError, ValueError):  # Its output will say what is wrong with it.
            query, document = given
            return llm.rank_prompts(query, [document], self.line_format.instruction)[0]

    def _answer(self, line: PooledLine, outputs: list[Any]) -> Row:
        if not line.is_list:
            return {"relevance_score": outputs[0]["relevance_score"]}
        return {"results": [{"index": index, "relevance_score": score} for index, score in ranked(outputs)]}

    def columns(self) -> Row:
        import pyarrow as pa

        result = pa.struct({"index": pa.int64(), "relevance_score": pa.float64()})
        return super().columns() | {"relevance_score": pa.float64(), "results": pa.list_(result)}
