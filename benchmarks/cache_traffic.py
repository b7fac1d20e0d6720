"""What of a workload runs side by side in a KV cache of some size: the scheduler and its block managers, without a
model and without a GPU.

    python benchmarks/cache_traffic.py --model google/gemma-4-31B --gib 65 --workload bench

It compares one table of blocks for all layers with tables of their own for layers with a window, which give blocks back
(`layers/stores/window_split.py`). Each step samples a token for every sequence, so what is counted depends on the
lengths alone: decode steps, how many sequences one has on average, and preemptions. A step's time depends on more.
"""

import argparse
from types import SimpleNamespace

from nanovllm.bench.workloads import WORKLOADS, Workload
from nanovllm.config import Config
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.start.schedulers import make_scheduler
from nanovllm.layers.stores.paged_kv_cache import PagedKVCache
from nanovllm.layers.stores.store import Store, count_blocks
from nanovllm.layers.stores.windowed_kv_cache import WindowedKVCache
from nanovllm.models.model_size import meta_model, model_bytes
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.units import GIB


def stores_of(config: Config) -> dict[str, list[Store]]:
    """The model's stores, and what they would be without giving back."""
    stores = model_bytes(config, meta_model(config)).stores
    layers = [layer for store in stores if isinstance(store, PagedKVCache) for layer in store.layers]
    shapes = [shape for store in stores if isinstance(store, PagedKVCache) for shape in store.shapes]
    return {"one table": [PagedKVCache(layers, shapes)], "windows give back": stores}


def run(config: Config, stores: list[Store], workload: Workload, num_bytes: int) -> tuple[int, float, int]:
    """Decode steps, sequences of one on average, and preemptions."""
    config.num_kvcache_blocks = count_blocks(stores, num_bytes, 0, 2**31 // config.kvcache_block_size)
    facts = SimpleNamespace(mixed_step_rows=0, num_cells=0, step_times=None, stores=stores)
    scheduler = make_scheduler(config, facts)
    prompts, outputs = workload.draw(0)
    for prompt, output in sorted(zip(prompts, outputs, strict=True), key=lambda request: -request[1]):
        scheduler.add(Sequence(prompt, SamplingParams(max_tokens=output, ignore_eos=True)))
    num_steps = num_rows = 0
    while not scheduler.is_finished():
        seqs, is_prefill = scheduler.schedule()
        scheduler.postprocess(seqs, [0] * len(seqs), is_prefill)
        if not is_prefill:
            num_steps, num_rows = num_steps + 1, num_rows + len(seqs)
    return num_steps, num_rows / max(1, num_steps), scheduler.num_preemptions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--gib", type=float, required=True, help="of the KV cache")
    parser.add_argument("--workload", choices=WORKLOADS, default="bench")
    parser.add_argument("--prompt", type=int, nargs=2, metavar=("LEAST", "MOST"), help="other lengths of prompts")
    parser.add_argument("--output", type=int, nargs=2, metavar=("LEAST", "MOST"), help="other lengths of completions")
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--kv-cache-dtype", default="auto")
    args = parser.parse_args()
    options = {"device": "cpu", "dtype": "bfloat16", "load_format": "dummy", "skip_tokenizer_init": True}
    options |= {"max_model_len": args.max_model_len, "kv_cache_dtype": args.kv_cache_dtype}
    workload = WORKLOADS[args.workload]
    prompt, output = tuple(args.prompt or workload.prompt), tuple(args.output or workload.output)
    workload = Workload(workload.requests, prompt, output, "", workload.shared, workload.max_num_seqs)
    config = Config(args.model, **options, max_num_seqs=workload.max_num_seqs)
    print(f"{'':18} {'blocks':>7} {'of windows':>10} {'decode steps':>12} {'rows of one':>11} {'preemptions':>11}")
    for name, stores in stores_of(config).items():
        steps, rows, preemptions = run(config, stores, workload, int(args.gib * GIB))
        blocks = config.num_kvcache_blocks
        of_windows = [store.split.num_blocks(blocks) for store in stores if isinstance(store, WindowedKVCache)]
        print(f"{name:18} {blocks:7} {of_windows[0] if of_windows else blocks:10} ", end="")
        print(f"{steps:12} {rows:11.1f} {preemptions:11}")


if __name__ == "__main__":
    main()
