"""How fast does the GPU multiply matrices for a second instead of a moment, and does the power limit hold it back?

    python benchmarks/sustained_products.py --json out.json

The floor's matrix rate is measured with a pause after each product. A prefill is many products in a row. There a card
may reach its power limit and lower its clock; nvidia-smi, asked every 20 ms, says whether it did.
"""

import argparse
import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryFile

import torch
from required_gpus import require_gpus

# tokens, output columns, input columns
SHAPES = {
    "8192 cubed": (8192, 8192, 8192),
    "8B qkv": (16000, 6144, 4096),
    "8B o": (16000, 4096, 4096),
    "8B gate and up": (16000, 24576, 4096),
    "8B down": (16000, 4096, 12288),
    "0.6B qkv": (16000, 4096, 1024),
    "0.6B o": (16000, 1024, 2048),
    "0.6B gate and up": (16000, 6144, 1024),
    "0.6B down": (16000, 1024, 3072),
}
SECONDS = 0.8  # of products in a row
SW_POWER_CAP = 4  # NVML's reason "the clock is lowered to stay below the power limit"


def this_card() -> list[str]:
    """nvidia-smi's option for the current device, which it numbers without CUDA_VISIBLE_DEVICES."""
    return ["-i", f"GPU-{torch.cuda.get_device_properties().uuid}"]


@contextmanager
def watching(samples: list) -> Iterator[None]:
    """Append (SM clock in MHz, power in W, reasons for a lower clock) to samples, every 20 ms until the block ends."""
    query = "--query-gpu=clocks.sm,power.draw.instant,clocks_event_reasons.active"
    options = ["--format=csv,noheader,nounits", "-lms", "20", *this_card()]
    with TemporaryFile("w+") as output:
        process = subprocess.Popen(["nvidia-smi", query, *options], stdout=output, text=True)
        try:
            yield
        finally:
            process.terminate()
            process.wait()
            output.seek(0)
            *lines, _ = output.read().split("\n")  # The last one may have been cut off.
            for line in lines:
                fields = line.split(",")
                if len(fields) == 3:
                    samples.append((float(fields[0]), float(fields[1]), int(fields[2], 16)))


def measure(tokens: int, columns: int, inputs: int) -> dict:
    """Rates in TFLOP/s of a product that the host waits for, and of products in a row, with clock and power then."""
    x = torch.randn(tokens, inputs, device="cuda").bfloat16()
    weight = (torch.randn(columns, inputs, device="cuda") * inputs**-0.5).bfloat16()
    flops = 2 * tokens * columns * inputs

    def rate(count: int) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(count):
            x @ weight.t()
        end.record()
        end.synchronize()
        return count * flops / start.elapsed_time(end) / 1e9

    rate(2)
    alone = [rate(1) for _ in range(9)]
    samples: list[tuple[float, float, int]] = []
    with watching(samples):
        in_a_row = rate(max(1, int(SECONDS * 1e12 * median(alone) / flops)))
    busy = [sample for sample in samples if sample[1] > max(s[1] for s in samples) / 2]
    return {
        "alone": median(alone),
        "in_a_row": in_a_row,
        "clock_mhz": median(s[0] for s in busy) if busy else None,
        "watts": median(s[1] for s in busy) if busy else None,
        "share_power_capped": sum(bool(s[2] & SW_POWER_CAP) for s in busy) / len(busy) if busy else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    args = parser.parse_args()
    require_gpus(parser)
    query = "--query-gpu=name,power.limit,clocks.max.sm"
    command = ["nvidia-smi", query, "--format=csv,noheader", *this_card()]
    card = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    print(card)
    results = {}
    for name, shape in SHAPES.items():
        r = results[name] = measure(*shape)
        print(
            f"{name:18s} alone {r['alone']:4.0f} TFLOP/s, in a row {r['in_a_row']:4.0f} at {r['clock_mhz']} MHz, "
            f"{r['watts']} W, power cap in {r['share_power_capped']:.0%} of the samples",
            flush=True,
        )
    if args.json:
        Path(args.json).write_text(json.dumps({"card": card, "results": results}, indent=1))


if __name__ == "__main__":
    main()
