"""What the lines of a batch may ask for."""

from typing import NamedTuple

from nanovllm.openai_format.openai_batch import CHAT, COMPLETION


class Endpoint(NamedTuple):
    """A route whose requests may be lines of a batch."""

    prompt: str  # the key of a body that every line needs


# By the url that a batch and its lines name.
ENDPOINTS = {kind.url: Endpoint(kind.prompt) for kind in (CHAT, COMPLETION)}
