"""The tokens of a step that is under way, on their way to the host."""

from collections.abc import Callable
from typing import Protocol

import torch
from typing_extensions import Self

from nanovllm.engine.step import Step
from nanovllm.kernels.step_copies import return_tokens


class Tensors(Protocol):
    """Results in some tensors."""

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """With the results of the function instead."""


def send_tokens(
    step: Step,
    tokens: torch.Tensor,
    host: torch.Tensor,
    logprobs: Tensors | None = None,
    prompt_logprobs: Tensors | None = None,
) -> None:
    """Start the copies that `Step.wait` waits for.

    Args:
        tokens: int64 [num_seqs] on the device, as the log-probabilities are.
        host: page-locked memory for them, which nobody else uses until they have been read.
    """
    step.tokens = host
    return_tokens(tokens, host)
    step.logprobs = logprobs and logprobs.map(start_copy)
    step.prompt_logprobs = prompt_logprobs and prompt_logprobs.map(start_copy)
    if tokens.device.type == "cuda":
        step.event = torch.cuda.Event()
        step.event.record()


def start_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the host, which is there once the stream has got here."""
    if tensor.device.type != "cuda":
        return tensor.clone()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
