"""The step whose memory is measured before the KV cache takes the rest."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from nanovllm.engine.memory import largest_prefill


@pytest.mark.parametrize(
    ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "num_tokens"),
    [
        (512, 16384, 4096, 16384),
        (512, 1023, 4096, 1023),
        (600, 1024, 4096, 1024),
        (3, 1024, 4096, 1024),
        (3, 1024, 100, 300),
        (8, 5, 100, 5),
        (1, 1, 1, 1),
    ],
)
def test_no_step_has_more_tokens(max_num_seqs, max_num_batched_tokens, max_model_len, num_tokens):
    config = SimpleNamespace(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        hf_config=SimpleNamespace(vocab_size=50),
    )
    (input_ids, positions, *sampling), context = largest_prefill(config, torch.device("cpu"))
    num_seqs = min(max_num_seqs, max_num_batched_tokens)
    ends = context.cu_seqlens_q.tolist()
    lengths = [end - start for start, end in pairwise(ends)]
    assert (len(input_ids), len(lengths), ends[-1]) == (num_tokens, num_seqs, num_tokens)
    assert 1 <= min(lengths) <= max(lengths) == context.max_seqlen_q <= max_model_len
    assert positions.tolist() == [i for length in lengths for i in range(length)]
    assert context.last_tokens.tolist() == [end - 1 for end in ends[1:]]
    assert [len(tensor) for tensor in sampling] == [num_seqs] * 3
