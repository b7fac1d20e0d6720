"""What states of linear attention in bfloat16 cost in accuracy: 4,000 decode steps of random tokens on a CPU.

python benchmarks/state_accuracy.py

Each head has a memory, the number of tokens after which a state has decayed to 1/e, and a typical beta, the share of a
token's correction that is written. "State": the relative error of the head's state after the last token. "Output": that
of its outputs of the last 500 tokens, after the norm. The exact ones are a prefill's in float32.
"""

import torch

from nanovllm.kernels.linear_attention.gated_delta import delta_rule_decode, delta_rule_prefill

MEMORIES = (16, 64, 256, 1024, 4096, 16384)  # tokens
BETAS = (0.5, 0.1, 0.02)
NUM_TOKENS, LAST, DIM, TAPS = 4000, 500, 128, 4


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    heads = [(memory, beta) for beta in BETAS for memory in MEMORIES]
    num_heads = len(heads)
    decay, gate = (torch.tensor(each) for each in zip(*((1 / memory, beta) for memory, beta in heads), strict=True))
    conv_dim = (2 + num_heads) * DIM
    inputs = (
        torch.randn(NUM_TOKENS, conv_dim),
        torch.randn(NUM_TOKENS, num_heads * DIM),
        torch.randn(NUM_TOKENS, num_heads) + torch.logit(gate),
        torch.randn(NUM_TOKENS, num_heads) / 2,
    )
    # softplus(dt_bias) is the decay of a token, as A is 1.
    weights = torch.randn(conv_dim, TAPS) / 2, torch.zeros(num_heads), decay.expm1().log(), torch.ones(DIM), 1e-6
    tails = torch.zeros(1, TAPS - 1, conv_dim)
    exact, states = torch.zeros(2, 1, num_heads, DIM, DIM).unbind()
    states = states.bfloat16()
    starts, none, first = (torch.tensor(each, dtype=torch.int32) for each in ([0, NUM_TOKENS], [-1], [0]))
    expected = delta_rule_prefill.twin(*inputs, *weights, tails, exact, starts, none, first, none, first, 1, num_heads)
    slot, found = torch.zeros(1, dtype=torch.int32), []
    for i in range(NUM_TOKENS):
        qkv, z, b, a = (x[i : i + 1] for x in inputs)
        found.append(delta_rule_decode.twin(qkv, z, b, a, *weights, tails, states, slot, slot + i + 1, 1, num_heads))
    outputs = [x[-LAST:].view(LAST, num_heads, DIM) for x in (torch.cat(found), expected)]
    print("| memory, tokens | beta | state, % | output, % |")
    print("| --- | --- | --- | --- |")
    for head, (memory, beta) in enumerate(heads):
        pairs = (states[0, head].float(), exact[0, head]), [x[:, head] for x in outputs]
        state, output = (100 * ((a - b).norm() / b.norm()).item() for a, b in pairs)
        print(f"| {memory:,} | {beta} | {state:.1f} | {output:.1f} |")


if __name__ == "__main__":
    main()
