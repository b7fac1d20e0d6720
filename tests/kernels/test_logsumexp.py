import math

import pytest
import torch

from nanovllm.kernels.sampling.logsumexp import logsumexp


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [5, 4096, 9001])
def test_logsumexp(vocab_size, dtype, device):
    wide = (torch.randn(5, vocab_size + 3) * 20).to(device, dtype)
    logits = wide[:, :vocab_size]  # a row stride of its own
    logits[1, 1:] = -math.inf
    logits[2] += 30000
    logits[3, 2] = math.nan
    found = logsumexp.kernel(logits)
    torch.testing.assert_close(found, logsumexp.twin(logits), equal_nan=True)
    torch.testing.assert_close(found, logits.double().logsumexp(1).float(), equal_nan=True)
