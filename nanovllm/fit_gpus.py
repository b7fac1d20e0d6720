"""`nanovllm fit MODEL --gpus N`: how to divide GPUs among engines, by what each division can do at most."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

from nanovllm.bench.floor import Ceilings, ModelSize, floor_seconds
from nanovllm.bench.workloads import WORKLOADS
from nanovllm.config import Config
from nanovllm.fit import needs
from nanovllm.utils.units import GIB

MAX_GPUS = 64
_WORKLOAD = WORKLOADS["throughput"]
_CEILINGS = Ceilings(4.28e12, 780e12, 780e12)  # of an H200, as `nanovllm bench` measures them
_DEFAULT_GIB = 80.0
# A sum over two H200s, as benchmarks/all_reduce.py measures it: the seconds of any, and its bytes a second.
_SUM_SECONDS, _SUM_BANDWIDTH = 4e-6, 330e9
_OTHER_BYTES = GIB // 4  # that an engine uses beside its model and a step's activations


class Division(NamedTuple):
    """N engines of T GPUs each.

    Attributes:
        num_engines, num_gpus: N and T.
        problem: why the model cannot be divided so; "" if it can.
        num_tokens: that the KV cache of an engine holds; 0 if the model does not fit.
        num_at_once: sequences of the workload that an engine has room for at once.
        tokens_per_second: completion tokens of the workload, of all engines, at most; 0 if it does not run.
    """

    num_engines: int
    num_gpus: int
    problem: str = ""
    num_tokens: int = 0
    num_at_once: int = 0
    tokens_per_second: float = 0.0


def divisions(model: str, num_gpus: int, memory_gib: float, **options: Any) -> Iterator[Division]:
    """All ways to divide the GPUs, from many engines to few. options: as LLM takes them. Raises as LLM."""
    fixed = {"device": "cpu", "load_format": "dummy", "skip_tokenizer_init": True}
    options = {"dtype": "bfloat16", **{key: value for key, value in options.items() if value != "auto"}, **fixed}
    Config(model, **options)  # What is wrong with any division is an error, and no row.
    for size in (each for each in range(1, num_gpus + 1) if num_gpus % each == 0):
        num_engines = num_gpus // size
        try:
            config = Config(model, **options, tensor_parallel_size=size)
            yield _division(config, num_engines, int(memory_gib * GIB))
        except ValueError as error:
            yield Division(num_engines, size, str(error))


def _division(config: Config, num_engines: int, memory: int) -> Division:
    needed, size = needs(config), config.tensor_parallel_size
    room = int(memory * config.gpu_memory_utilization) - needed.weights - needed.activations - _OTHER_BYTES
    num_at_once = min(config.max_num_seqs, -(-_WORKLOAD.requests // num_engines))
    length = _WORKLOAD.prompt[1] + _WORKLOAD.output[1]
    blocks_each = -(-min(length, cast(int, config.max_model_len)) // config.kvcache_block_size)
    num_blocks = needed.num_blocks(room, 0, config)
    num_at_once = min(num_at_once, needed.num_sequences(num_blocks, blocks_each))
    if needed.per_cell:
        num_at_once = min(num_at_once, max(0, room) // (blocks_each * needed.per_block + needed.per_cell))
    if not num_at_once:
        return Division(num_engines, size)
    seconds = _seconds(config, num_at_once, _WORKLOAD.requests / num_engines)
    tokens = _WORKLOAD.requests * _WORKLOAD.output[1]
    num_tokens = num_blocks * config.kvcache_block_size
    return Division(num_engines, size, "", num_tokens, num_at_once, tokens / seconds)


def _seconds(config: Config, num_at_once: int, num_requests: float) -> float:
    """Of one engine: the floor of a batch, and the sums between its GPUs; so many batches one after the other."""
    size, num_gpus = _size(config), config.tensor_parallel_size
    prompt, output = _WORKLOAD.prompt[1], _WORKLOAD.output[1]
    batch = floor_seconds(size, _CEILINGS, [prompt] * num_at_once, [output] * num_at_once, 0, num_gpus)
    if num_gpus > 1:
        steps = -(-num_at_once * prompt // config.max_num_batched_tokens)
        batch += steps * _sums(config, num_at_once * prompt // steps) + (output - 1) * _sums(config, num_at_once)
    return batch * num_requests / num_at_once


def _size(config: Config) -> ModelSize:
    formats = config.weight_format, config.kv_cache_dtype, config.state_dtype
    return ModelSize.of(config.hf_config, config.dtype, *formats)


def _sums(config: Config, num_rows: int) -> float:
    """Seconds of a step's sums over an engine's GPUs, two a layer."""
    c, num_gpus = config.hf_config, config.tensor_parallel_size
    num_bytes = num_rows * c.hidden_size * config.dtype.itemsize * 2 * (num_gpus - 1) / num_gpus
    return 2 * c.num_hidden_layers * (_SUM_SECONDS + num_bytes / _SUM_BANDWIDTH)


def print_divisions(model: str, num_gpus: int, memory_gib: Sequence[float] = (), **options: Any) -> bool:
    """Print them, and which is the fastest.

    Args:
        model, options: as LLM takes them.
        memory_gib: of each GPU; the first counts. None: 80.

    Returns:
        Whether the model runs in one of them.

    Raises ValueError, TypeError and OSError as LLM.
    """
    if not 1 <= num_gpus <= MAX_GPUS:
        raise ValueError(f"gpus={num_gpus}: must be in 1..{MAX_GPUS}")
    for name in ("tensor_parallel_size", "data_parallel_size"):
        if name in options:
            raise ValueError(f"{name}={options[name]}: with gpus, every number is tried")
    memory = memory_gib[0] if memory_gib else _DEFAULT_GIB
    found = list(divisions(model, num_gpus, memory, **options))
    fastest = max(found, key=lambda each: each.tokens_per_second)
    work = f"{_WORKLOAD.requests} requests of {_WORKLOAD.prompt[1]} + {_WORKLOAD.output[1]} tokens"
    print(f"{model} on {num_gpus} GPUs of {memory:g} GiB, {work},")
    print("at the speed of H200s, if only weights, KV cache, products and sums took time:\n")
    print(f"{'engines x GPUs':>14}  {'tokens in a KV cache':>20}  {'at once':>7}  {'tokens/s':>8}")
    for each in found:
        name = f"{each.num_engines} x {each.num_gpus}"
        if each.tokens_per_second:
            text = f"{each.num_tokens:>20,}  {each.num_at_once:>7,}  {math.floor(each.tokens_per_second):>8,}"
            print(f"{name:>14}  {text}{'  the fastest' if each is fastest else ''}")
        else:
            print(f"{name:>14}  {each.problem or 'does not fit'}")
    if not fastest.tokens_per_second:
        return False
    n, t = fastest.num_engines, fastest.num_gpus
    print(f"\nLLM({model!r}, data_parallel_size={n}, tensor_parallel_size={t})")
    return True
