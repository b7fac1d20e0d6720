"""BosCheck: a warning about a token that the prompt and the tokenizer both add."""

import logging
from collections.abc import Iterable, Sequence
from typing import Any

logger = logging.getLogger(__name__)


class BosCheck:
    """Warns once of a text that begins with the beginning-of-sequence token where the tokenizer adds it too."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._bos = getattr(tokenizer, "bos_token_id", None)

    def __call__(self, encoded: Iterable[Sequence[int]]) -> None:
        """encoded: token ids of texts."""
        if self._bos is not None and any(len(ids) > 1 and ids[0] == ids[1] == self._bos for ids in encoded):
            self._bos = None
            token = self._tokenizer.bos_token
            logger.warning(
                "a prompt begins with %s twice: its text has it already, as that of a chat template does, and the "
                "tokenizer adds another, which makes answers worse. Use chat(), or pass "
                "tokenizer(text, add_special_tokens=False) as the prompt (this is logged once)",
                token,
            )
