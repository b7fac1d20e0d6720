"""What it saves to begin the longest completions of a batch first: steps and tokens of the scheduler, no model, no GPU.

    python benchmarks/request_order.py

A row for each batch and size of KV cache: decode steps, tokens prefilled and preemptions in the given order, with the
longest first, and in the order that the engine takes.
"""

from random import Random

from workloads import VOCABULARY, WORKLOADS

from nanovllm import SamplingParams
from nanovllm.config import Config
from nanovllm.engine.requests.request_order import longest_first
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence

BLOCK_SIZE, MAX_SEQ_LEN = Config.kvcache_block_size, Config.max_model_len
Batch = tuple[list[list[int]], list[int]]  # prompts, and how many tokens each is completed with


def groups(num_groups: int, size: int, shared: int) -> Batch:
    """Groups of prompts, one after the other, that begin with `shared` tokens in common and go on with 50 of their
    own."""
    rng = Random(0)

    def ids(count: int) -> list[int]:
        return [rng.randint(0, VOCABULARY) for _ in range(count)]

    beginnings = [ids(shared) for _ in range(num_groups)]
    prompts = [beginning + ids(50) for beginning in beginnings for _ in range(size)]
    return prompts, [rng.randint(32, 128) for _ in prompts]


def run(seqs: list[Sequence], num_blocks: int) -> str:
    scheduler = Scheduler(
        Config.max_num_seqs,
        Config.max_num_batched_tokens,
        MAX_SEQ_LEN,
        num_blocks,
        BLOCK_SIZE,
        enable_prefix_caching=True,
    )
    for seq in seqs:
        scheduler.add(seq)
    steps = prefilled = 0
    while not scheduler.is_finished():
        scheduled, is_prefill = scheduler.schedule()
        if is_prefill:
            prefilled += sum(seq.num_scheduled_tokens for seq in scheduled)
        steps += not is_prefill
        scheduler.advance(scheduled)
        scheduler.postprocess(scheduled, [0] * len(scheduled))
    return f"{steps:>6} {prefilled:>10,} {scheduler.num_preemptions:>6}"


def main() -> None:
    batches = {
        "many": (WORKLOADS["many"].draw(0), (4096, 600)),
        "bench": (WORKLOADS["bench"].draw(0), (4096, 300)),
        "64 groups of 16, 1,024 tokens shared": (groups(64, 16, 1024), (8192, 400, 200)),
    }
    print(f"{'batch, blocks; steps, tokens, preemptions:':51}{'as given':>24}{'longest first':>27}{'engine':>27}")
    for name, ((prompts, lens), sizes) in batches.items():
        for num_blocks in sizes:

            def make(prompts=prompts, lens=lens) -> list[Sequence]:
                return [
                    Sequence(i, prompt, SamplingParams(max_tokens=n, ignore_eos=True), BLOCK_SIZE)
                    for i, (prompt, n) in enumerate(zip(prompts, lens, strict=True))
                ]

            by_length = sorted(make(), key=lambda seq: seq.max_tokens, reverse=True)
            engines = longest_first(make(), MAX_SEQ_LEN, num_blocks * BLOCK_SIZE, prefix_caching=True)
            columns = (run(seqs, num_blocks) for seqs in (make(), by_length, engines))
            print(f"{name + ',':38}{num_blocks:>6}       " + "   ".join(columns), flush=True)


if __name__ == "__main__":
    main()
