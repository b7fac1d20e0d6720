"""Texts of megabytes that are longer than any sequence, refused before all of them is tokenized."""

from collections.abc import Callable

# To tokenize ten million characters takes seconds and gigabytes. A text with this many characters for each token of the
# longest sequence is judged by its beginning first. English has about four.
CHARACTERS_PER_TOKEN = 10


def check_text(text: str, max_tokens: int, count_tokens: Callable[[str], int], remedy: str) -> None:
    """Raises ValueError, with the remedy, for a text whose beginning alone has more than twice max_tokens. Only twice,
    because the end of a beginning may have fewer tokens as a part of the whole text.

    Beginnings are tried from short to long, because some tokens have many characters, such as 64 spaces. So at most as
    much again is tokenized as without this check, and usually far less.
    """
    length = CHARACTERS_PER_TOKEN * max_tokens
    while length < len(text):
        num_tokens = count_tokens(text[:length])
        if num_tokens > 2 * max_tokens:
            raise ValueError(
                f"the text has {len(text)} characters, of which the first {length} have {num_tokens} tokens: the "
                f"longest sequence has {max_tokens} tokens, {remedy}"
            )
        length *= 2
