"""SampledTokens: the tokens that a step under way will have sampled."""

import time
from collections.abc import Callable

import torch

from nanovllm.engine.sampling.logprobs import LogprobRows
from nanovllm.kernels import HAS_TRITON, use_kernels

if HAS_TRITON:
    from nanovllm.kernels.step_copies import return_tokens

_POLL_SECONDS = 50e-6


class SampledTokens:
    """The outcome of a step that is under way: its tokens on their way to the host. Read the log-probabilities that its
    sequences asked for, `logprobs` of sampled tokens and `prompt_logprobs`, after `wait`."""

    def __init__(
        self,
        tokens: torch.Tensor,
        host: torch.Tensor,
        check_workers: Callable[[], None] | None = None,
        logprobs: LogprobRows | None = None,
        prompt_logprobs: LogprobRows | None = None,
    ):
        """tokens: int64 [num_seqs] on the device, as logprobs are. host: page-locked memory for them, which nobody else
        uses until they have been read. check_workers: with several ranks, raises if one of them has died, for which the
        device would wait in vain."""
        self._tokens, self._check_workers = host, check_workers
        self._event = None
        if use_kernels(tokens):
            return_tokens(tokens, host)
        else:
            host.copy_(tokens, non_blocking=True)
        self.logprobs = logprobs and logprobs.map(_start_copy)
        self.prompt_logprobs = prompt_logprobs and prompt_logprobs.map(_start_copy)
        if tokens.device.type == "cuda":
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> list[int]:
        """The tokens, once the step is done."""
        if self._event is not None and self._check_workers is None:
            self._event.synchronize()
        elif self._event is not None:
            # The next step is under way already, so sleeping too long costs nothing.
            while not self._event.query():
                self._check_workers()
                time.sleep(_POLL_SECONDS)
        return self._tokens.tolist()


def _start_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the host, which is there once the stream has got here."""
    if tensor.device.type != "cuda":
        return tensor.clone()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
