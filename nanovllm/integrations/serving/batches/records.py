"""Files and batches as they are stored, and as OpenAI describes them."""

import secrets
import time
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, TypeVar

Row = dict[str, Any]
Record = TypeVar("Record", "StoredFile", "Batch")

FINAL = ("completed", "failed", "expired", "cancelled")


def new_id(prefix: str) -> str:
    """No id can be guessed, and none is a path."""
    return f"{prefix}{secrets.token_hex(16)}"


@dataclass(frozen=True)
class StoredFile:
    """A file of requests or of answers."""

    id: str
    filename: str  # as its owner calls it; never a path
    purpose: str  # batch, or batch_output
    bytes: int
    created_ns: int = field(default_factory=time.time_ns)

    def view(self) -> Row:
        """As OpenAI describes it."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": self.created_ns // 10**9,
            "expires_at": None,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


@dataclass(frozen=True)
class Batch:
    """A batch. Times are seconds since 1970.

    Attributes:
        model: the name that the server has for it.
        times: when it came to its states: in_progress, cancelling, finalizing and the last one.
        errors: why it has failed.
        num_lines: of the input; 0 until it has been checked.
        has_begun: whether there may be answers.
        outcome: the last state, once it is known. Until then there are no files; output_file_id and error_file_id are
            shown in the last state only.
    """

    id: str
    input_file_id: str
    endpoint: str
    completion_window: str
    expires_at: int
    metadata: dict[str, str] | None
    model: str
    status: str = "validating"
    times: dict[str, int] = field(default_factory=dict)
    errors: list[Row] = field(default_factory=list)
    num_lines: int = 0
    num_answered: int = 0
    num_failed: int = 0
    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0
    has_begun: bool = False
    outcome: str | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_ns: int = field(default_factory=time.time_ns)

    @property
    def has_ended(self) -> bool:
        return self.status in FINAL

    def become(self, status: str, **changes: Any) -> "Batch":
        """The batch in another state, from now on."""
        return replace(self, status=status, times=self.times | {status: int(time.time())}, **changes)

    def view(self) -> Row:
        """As OpenAI describes it."""
        files = (self.output_file_id, self.error_file_id) if self.has_ended else (None, None)
        states = ("in_progress", "cancelling", "finalizing", *FINAL)
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "model": self.model,
            "errors": {"object": "list", "data": self.errors} if self.errors else None,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": files[0],
            "error_file_id": files[1],
            "created_at": self.created_ns // 10**9,
            "expires_at": self.expires_at,
            **{f"{state}_at": self.times.get(state) for state in states},
            "request_counts": {
                "total": self.num_lines,
                "completed": self.num_answered,
                "failed": self.num_failed,
            },
            "usage": {
                "input_tokens": self.num_prompt_tokens,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": self.num_completion_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": self.num_prompt_tokens + self.num_completion_tokens,
            },
            "metadata": self.metadata,
        }


def to_row(record: StoredFile | Batch) -> Row:
    return asdict(record)


def from_row(kind: type[Record], row: Any) -> Record:
    """Raises ValueError or TypeError if this is no such record."""
    if not isinstance(row, dict):
        raise ValueError("is no record")
    known = {each.name for each in fields(kind)}
    return kind(**{name: value for name, value in row.items() if name in known})
