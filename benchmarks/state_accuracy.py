"""What states of linear attention in 16 bits cost in accuracy: decode steps of random tokens on a CPU.

    python benchmarks/state_accuracy.py
    python benchmarks/state_accuracy.py --tokens 16000

Each head has a memory, the number of tokens after which a state has decayed to 1/e, and a typical beta, the share of a
token's correction that is written. "State": the relative error of the head's state after the last token. "Output": that
of its outputs of the last 500 tokens, after the norm. The exact ones are decode steps in float32.

After each token a state is rounded to nearest, as `state_dtype` does, or at random to one of its two neighbours, the
nearer one with the larger chance.
"""

import argparse
from collections.abc import Callable

import torch
from torch import Tensor

from nanovllm.kernels.linear_attention.gated_delta import delta_rule_decode

MEMORIES = (16, 64, 256, 1024, 4096, 16384)  # tokens
BETAS = (0.5, 0.1, 0.02)
LAST, DIM, TAPS = 500, 128, 4
# Bits of float32's fraction that a dtype does not have.
DROPPED_BITS = {torch.bfloat16: 16, torch.float16: 13}


def round_at_random(states: Tensor, dtype: torch.dtype) -> Tensor:
    """states: float32. A number is rounded away from 0 with the probability that its dropped bits say."""
    dropped = 1 << DROPPED_BITS[dtype]
    bits = states.view(torch.int32) + torch.randint(dropped, states.shape, dtype=torch.int32)
    return (bits & -dropped).view(torch.float32)


def round_to_nearest(states: Tensor, dtype: torch.dtype) -> Tensor:
    return states.to(dtype).float()


ROUNDINGS: dict[str, tuple[Callable[[Tensor, torch.dtype], Tensor], torch.dtype]] = {
    "bfloat16": (round_to_nearest, torch.bfloat16),
    "bfloat16 at random": (round_at_random, torch.bfloat16),
    "float16": (round_to_nearest, torch.float16),
    "float16 at random": (round_at_random, torch.float16),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4000)
    num_tokens = parser.parse_args().tokens
    torch.manual_seed(0)
    torch.set_num_threads(1)
    heads = [(memory, beta) for beta in BETAS for memory in MEMORIES]
    num_heads, num_rows = len(heads), 1 + len(ROUNDINGS)
    decay, gate = (torch.tensor(each) for each in zip(*((1 / memory, beta) for memory, beta in heads), strict=True))
    conv_dim = (2 + num_heads) * DIM
    # softplus(dt_bias) is the decay of a token, as A is 1.
    weights = torch.randn(conv_dim, TAPS) / 2, torch.zeros(num_heads), decay.expm1().log(), torch.ones(DIM), 1e-6
    # A row for each rounding, of which the first is exact. All have the same tokens.
    tails = torch.zeros(num_rows, TAPS - 1, conv_dim)
    states = torch.zeros(num_rows, num_heads, DIM, DIM)
    cells = torch.arange(num_rows, dtype=torch.int32)
    outputs = torch.zeros(min(LAST, num_tokens), num_rows, num_heads, DIM)
    for i in range(num_tokens):
        token = (
            torch.randn(conv_dim),
            torch.randn(num_heads * DIM),
            torch.randn(num_heads) + torch.logit(gate),
            torch.randn(num_heads) / 2,
        )
        qkv, z, b, a = (x.expand(num_rows, -1) for x in token)
        lens = torch.full_like(cells, i + 1)
        out = delta_rule_decode.twin(qkv, z, b, a, *weights, tails, states, cells, lens, 1, num_heads)
        outputs[i % len(outputs)] = out.view(num_rows, num_heads, DIM)
        for row, (rounded, dtype) in enumerate(ROUNDINGS.values(), 1):
            states[row] = rounded(states[row], dtype)
    print("| memory, tokens | beta |" + "".join(f" {name}: state, % | output, % |" for name in ROUNDINGS))
    print("|" + " --- |" * (2 + 2 * len(ROUNDINGS)))
    for head, (memory, beta) in enumerate(heads):
        errors = []
        for row in range(1, num_rows):
            for found, exact in ((states[row, head], states[0, head]), (outputs[:, row, head], outputs[:, 0, head])):
                errors.append(f"{100 * ((found - exact).norm() / exact.norm()).item():.2f}")
        print(f"| {memory:,} | {beta} | " + " | ".join(errors) + " |")


if __name__ == "__main__":
    main()
