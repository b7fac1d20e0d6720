"""TokenIds: a sequence's tokens."""

from array import array
from collections.abc import Iterable
from typing import Any


class TokenIds(array):
    """Token ids as an int32 array that reads like a list: it equals one, and its slices do.

    So 100,000 waiting prompts fit in memory, a ninth of what lists of Python's integers take, and numpy reads them
    without a copy.
    """

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]

    def __new__(cls, token_ids: Iterable[int] = ()) -> "TokenIds":
        return super().__new__(cls, "i", token_ids)  # type: ignore[arg-type, return-value]

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        return TokenIds(found) if isinstance(key, slice) else found

    def __eq__(self, other: object) -> bool:
        if isinstance(other, array):
            return super().__eq__(other)
        return isinstance(other, list | tuple) and self.tolist() == list(other)

    def __add__(self, other: Iterable[int]) -> "TokenIds":  # type: ignore[override]
        both = TokenIds(self)
        both.extend(other)
        return both

    def __repr__(self) -> str:
        return repr(self.tolist())
