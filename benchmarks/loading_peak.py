"""How much memory does loading take, beside the weights as they are afterwards?

    python benchmarks/loading_peak.py --quantization int4
    python benchmarks/loading_peak.py --model Qwen3-1.7B --quantization fp8 --device cpu

A checkpoint in bfloat16 with random weights of the model's shape is made first, in a temporary folder. On a GPU the
peak is that of torch's allocator. On a CPU it is that of the process's own pages, without the file's.
"""

import argparse
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from startup import make_checkpoint

from nanovllm import LLM, Config
from nanovllm.engine.start import start

GIB = 2**30


def own_bytes() -> int:
    """Of this process, without pages of files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


class Peak:
    """The most own bytes in a block, sampled every millisecond."""

    def __enter__(self) -> "Peak":
        self.bytes, self._is_over = own_bytes(), threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._is_over.wait(1e-3):
            self.bytes = max(self.bytes, own_bytes())

    def __exit__(self, *_: Any) -> None:
        self._is_over.set()
        self._thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen3-0.6B")
    parser.add_argument("--quantization")
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    load_weights = start.load_weights

    def measured(config: Config, model: torch.nn.Module, rank: int) -> None:
        weights = sum(parameter.nbytes for parameter in model.parameters())
        begin = time.perf_counter()
        if config.device == "cuda":
            before = torch.cuda.memory_allocated() - weights
            torch.cuda.reset_peak_memory_stats()
            load_weights(config, model, rank)
            peak = torch.cuda.max_memory_allocated() - before
        else:
            # Pages of weights that nothing was written to yet do not count.
            for parameter in model.parameters():
                parameter.data.zero_()
            before = own_bytes() - weights
            with Peak() as most:
                load_weights(config, model, rank)
            peak = most.bytes - before
        seconds = time.perf_counter() - begin
        print(f"weights {weights / GIB:.3f} GiB, peak while loading {peak / GIB:.3f} GiB, {seconds:.1f} s", flush=True)

    start.load_weights = measured
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(args.model, Path(folder), 1)
        options: dict[str, Any] = {"max_model_len": 512, "max_num_batched_tokens": 512, "max_num_seqs": 4}
        options |= {"enforce_eager": True, "skip_tokenizer_init": True, "dtype": "bfloat16"}
        LLM(folder, quantization=args.quantization, device=args.device, **options).exit()


if __name__ == "__main__":
    main()
