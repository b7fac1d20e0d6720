"""The kernels that carry a step's inputs and tokens between host and device, and the twin."""

import pytest
import torch

triton = pytest.importorskip("triton")

from nanovllm.kernels.step_copies import receive_step, return_tokens  # noqa: E402


def on_host(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """Memory that a kernel can read: page-locked beside a GPU."""
    return tensor.pin_memory() if device == "cuda" else tensor


@pytest.mark.parametrize("receive", [receive_step.kernel, receive_step.twin])
@pytest.mark.parametrize(("num_words", "num_rows"), [(2, 1), (256, 256), (258, 3), (1030, 513), (4, 300)])
def test_a_step_arrives(device, num_words, num_rows, receive):
    generator = torch.Generator().manual_seed(num_words)
    words = torch.randint(2**62, (num_words,), generator=generator)
    tokens = torch.randint(2**31, (num_rows + 3,), generator=generator)  # of more rows than the step has
    sampled = torch.randint(2**31, (num_rows + 5,), generator=generator)
    sampled[::3] = -1  # no token
    pending_rows = torch.randint(-1, num_rows + 5, (num_rows + 3,), generator=generator, dtype=torch.int32)
    pending_rows[0] = -1
    device_words = torch.zeros(num_words + 8, dtype=torch.int64, device=device)
    input_ids = torch.full((num_rows + 8,), -7, dtype=torch.int64, device=device)
    known = (on_host(x, device) for x in (tokens, pending_rows))
    receive(input_ids[:num_rows], on_host(words, device), device_words[:num_words], *known, sampled.to(device))
    assert device_words.tolist() == words.tolist() + [0] * 8
    expected = [
        token if row < 0 else max(sampled[row].item(), 0)
        for token, row in zip(tokens.tolist(), pending_rows, strict=True)
    ]
    assert input_ids.tolist() == expected[:num_rows] + [-7] * 8


@pytest.mark.parametrize("num_tokens", [1, 16, 255, 256, 257, 700])
def test_tokens_arrive(device, num_tokens):
    tokens = torch.arange(num_tokens, device=device) * 2**40
    host = on_host(torch.full((num_tokens + 4,), -1), device)
    return_tokens.kernel(tokens, host[:num_tokens])
    if device == "cuda":
        torch.cuda.synchronize()
    assert host.tolist() == tokens.tolist() + [-1] * 4
