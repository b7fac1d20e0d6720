"""Where does the start of `LLM(...)` spend its time?

    python benchmarks/startup.py --model Qwen3-0.6B --load-format dummy --json out.json
    python benchmarks/startup.py --model Qwen3-0.6B --make-checkpoint /tmp/qwen3 --shards 2 --fresh-caches

Every phase ends with the device idle, so that it pays for its own work. A phase inside another one counts for the outer
one. "rest" is what no phase covers. Our kernels compile in the background while weights are read; "wait for kernels" is
the time that compiling takes longer. "package kernels" is the wait for quack-kernels and flash-attn-4. A checkpoint
that was just made is read from the page cache.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path


class Phases:
    """Seconds of each phase, the outermost alone."""

    def __init__(self):
        self.seconds: dict[str, float] = {}
        self._inside = False

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if self._inside:
            yield
            return
        self._inside = True
        start = time.perf_counter()
        try:
            yield
            _synchronize()
        finally:
            self._inside = False
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def time_calls(self, owner, attribute: str, name: str) -> None:
        """Have every call of owner.attribute count for the phase."""
        function: Callable = getattr(owner, attribute)

        def timed(*args, **kwargs):
            with self.phase(name):
                return function(*args, **kwargs)

        setattr(owner, attribute, timed)


def _synchronize() -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def measure(phases: Phases, model: str, options: dict) -> float:
    """Seconds until LLM(...) is there, imports not counted; fills `phases`."""
    with phases.phase("import torch"):
        import torch
    with phases.phase("import nanovllm"):
        from nanovllm import LLM
        from nanovllm.engine import llm_engine, model_runner
        from nanovllm.engine.start import build, kernel_compilation
        from nanovllm.engine.start import start as engine_start
        from nanovllm.engine.start.package_kernels import PackageKernels
        from nanovllm.layers.backends.gpu_backend import GpuBackend
    imported = sum(phases.seconds.values())

    phases.time_calls(llm_engine, "Config", "config")
    phases.time_calls(llm_engine, "load_tokenizer", "tokenizer")
    runner = model_runner.ModelRunner
    phases.time_calls(kernel_compilation, "trace_steps", "trace kernels")
    phases.time_calls(engine_start.Start, "load_weights", "weights")
    phases.time_calls(build, "load_quack", "import quack-kernels")
    phases.time_calls(GpuBackend, "use_flash_attn4", "import flash-attn-4")
    phases.time_calls(PackageKernels, "load", "package kernels")
    phases.time_calls(runner, "warmup_model", "warm-up")
    phases.time_calls(runner, "allocate_kv_cache", "KV cache")
    phases.time_calls(runner, "capture_cudagraph", "CUDA graphs")
    phases.time_calls(engine_start, "warmup_kernels", "kernel warm-up")
    if torch.cuda.is_available():
        compile_ahead = kernel_compilation.compile_ahead

        @contextmanager
        def timed_compile_ahead(*args, **kwargs):
            with compile_ahead(*args, **kwargs):
                yield
                end_of_block = time.perf_counter()
            phases.seconds["wait for kernels"] = time.perf_counter() - end_of_block

        kernel_compilation.compile_ahead = timed_compile_ahead
        with phases.phase("CUDA context"):
            torch.zeros(1, device="cuda")

    start = time.perf_counter()
    llm = LLM(model, **options)
    _synchronize()
    seconds = time.perf_counter() - start
    covered = sum(phases.seconds.values()) - imported - phases.seconds.get("CUDA context", 0.0)
    phases.seconds["rest"] = seconds - covered
    llm.exit()
    return seconds


def make_checkpoint(preset: str, directory: Path, num_shards: int) -> None:
    """Random bfloat16 weights of a published shape as a checkpoint of `num_shards` files, without a tokenizer."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    from nanovllm.models.presets import preset_config

    config = preset_config(preset)
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in AutoModelForCausalLM.from_config(config).named_parameters()}
    directory.mkdir(parents=True, exist_ok=True)
    config.dtype = torch.bfloat16
    config.save_pretrained(directory)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shard_size = sum(shape.numel() for shape in shapes.values()) / num_shards
    weight_map, shard, written = {}, {}, 0
    for i, (name, shape) in enumerate(shapes.items()):
        shard[name] = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(std=0.02).cpu()
        written += shape.numel()
        file = f"model-{len(set(weight_map.values())) + 1:05d}.safetensors"
        if i == len(shapes) - 1 or written >= shard_size * (len(set(weight_map.values())) + 1):
            save_file(shard, directory / file, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(shard, file)
            shard = {}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen3-0.6B", help="a directory, or the name of a published shape")
    parser.add_argument("--load-format", default="auto", choices=("auto", "dummy"))
    parser.add_argument(
        "--make-checkpoint", metavar="DIR", type=Path, help="write one of the model's shape and load it"
    )
    parser.add_argument("--shards", type=int, default=2, help="files of that checkpoint")
    parser.add_argument("--fresh-caches", action="store_true", help="compile all kernels anew")
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    model, load_format = args.model, args.load_format
    with tempfile.TemporaryDirectory() as caches:
        if args.fresh_caches:
            # Read when the packages are imported.
            os.environ["TRITON_CACHE_DIR"] = os.path.join(caches, "triton")
            os.environ["XDG_CACHE_HOME"] = caches
        if args.make_checkpoint:
            # In a process of its own, which leaves the imports and the CUDA context to be measured in this one.
            maker = get_context("spawn").Process(
                target=make_checkpoint, args=(model, args.make_checkpoint, args.shards)
            )
            maker.start()
            maker.join()
            if maker.exitcode:
                sys.exit(maker.exitcode)
            model, load_format = str(args.make_checkpoint), "auto"
        phases = Phases()
        options = {"load_format": load_format, "enforce_eager": args.enforce_eager}
        options["skip_tokenizer_init"] = not Path(model, "tokenizer.json").is_file()
        ready = measure(phases, model, options)
    for name, seconds in phases.seconds.items():
        print(f"{name:20s} {seconds:7.2f} s")
    print(f"{'LLM(...) ready':20s} {ready:7.2f} s")
    files = sorted(Path(model).glob("*.safetensors")) if load_format == "auto" else []
    num_bytes = sum(file.stat().st_size for file in files)
    if num_bytes:
        gb = num_bytes / 1e9
        print(f"weights: {gb:.2f} GB in {len(files)} files, {gb / phases.seconds['weights']:.1f} GB/s")
    if args.json:
        row = {"model": model, **options, "fresh_caches": args.fresh_caches, "weight_bytes": num_bytes}
        args.json.write_text(json.dumps(row | {"ready_s": ready, "phases_s": phases.seconds}, indent=1))


if __name__ == "__main__":
    main()
