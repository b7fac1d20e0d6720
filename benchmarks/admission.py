"""What it saves to let waiting requests wait while as many run as may, or while the cache is as good as full: steps and
tokens of the scheduler, no model, no GPU.

    python benchmarks/admission.py

Two rows for each batch and size of KV cache, once as every prompt begins that finds its blocks, and as the engine does
it: decode steps and the mean of their sequences, prefill steps and those among them of under 4,096 tokens, tokens
prefilled, and preemptions. The caches of some 4,200 and 2,900 blocks are those of Qwen3-0.6B and 8B on an H200.
"""

from random import Random

from workloads import VOCABULARY

from nanovllm import SamplingParams
from nanovllm.config import Config
from nanovllm.engine import scheduler as scheduler_module
from nanovllm.engine.admission import Admission
from nanovllm.engine.requests.request_order import longest_first
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence

BLOCK_SIZE, MAX_SEQ_LEN = Config.kvcache_block_size, Config.max_model_len
SMALL_STEP = 4096
# Requests, prompt tokens, output tokens, blocks.
BATCHES = [
    (256, (100, 1024), (100, 1024), 4190),
    (2048, (32, 128), (32, 128), 4190),
    (4096, (100, 1024), (100, 1024), 4190),
    (2048, (2000, 3500), (100, 500), 4190),
    (2048, (100, 1024), (100, 1024), 2900),
    (1024, (2000, 3500), (100, 500), 2900),
    (512, (100, 1024), (100, 1024), 600),
    (256, (100, 1024), (100, 1024), 300),
    (2048, (32, 128), (32, 512), 600),
]


class Eager:
    """Every prompt begins that finds its blocks."""

    is_open, num_spare = True, 0

    def __init__(self, *_):
        pass

    def began(self, seq: Sequence) -> None:
        pass


def run(admission: type, seqs: list[Sequence], num_blocks: int) -> str:
    scheduler_module.Admission = admission
    limits = (Config.max_num_seqs, Config.max_num_batched_tokens, MAX_SEQ_LEN)
    scheduler = Scheduler(*limits, num_blocks, BLOCK_SIZE)
    for seq in longest_first(seqs, MAX_SEQ_LEN, num_blocks * BLOCK_SIZE, prefix_caching=True):
        scheduler.add(seq)
    steps = rows = prefills = small = prefilled = 0
    while not scheduler.is_finished():
        scheduled, is_prefill = scheduler.schedule()
        if is_prefill:
            num_tokens = sum(seq.num_scheduled_tokens for seq in scheduled)
            prefills, prefilled, small = prefills + 1, prefilled + num_tokens, small + (num_tokens < SMALL_STEP)
        else:
            steps, rows = steps + 1, rows + len(scheduled)
        scheduler.advance(scheduled)
        scheduler.postprocess(scheduled, [0] * len(scheduled))
    preemptions = scheduler.num_preemptions
    return f"{steps:6} {rows / steps:5.0f} {prefills:9} {small:5} {prefilled:11,} {preemptions:11}"


def main() -> None:
    columns = f"{'decode':>6} {'seqs':>5} {'prefills':>9} {'small':>5} {'tokens':>11} {'preemptions':>11}"
    print(f"{'requests, prompt, output, blocks':44}{'':8}{columns}")
    for num_requests, prompt, output, num_blocks in BATCHES:
        for admission, how in ((Eager, "eager"), (Admission, "engine")):
            rng = Random(0)
            seqs = [
                Sequence(
                    i,
                    [rng.randint(0, VOCABULARY) for _ in range(rng.randint(*prompt))],
                    SamplingParams(max_tokens=rng.randint(*output), ignore_eos=True),
                    BLOCK_SIZE,
                )
                for i in range(num_requests)
            ]
            name = f"{num_requests}, {prompt[0]}..{prompt[1]}, {output[0]}..{output[1]}, {num_blocks}"
            print(f"{name:44}{how:8}{run(admission, seqs, num_blocks)}", flush=True)


if __name__ == "__main__":
    main()
