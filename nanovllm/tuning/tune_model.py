"""`nanovllm tune MODEL`: from a model's name to a table on the disk."""

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from nanovllm.config import Config
from nanovllm.kernels.gpu import GpuFacts
from nanovllm.layers.backends.backend import AttentionShape
from nanovllm.layers.matmul.candidates import ALL, Quack, QuackExperts
from nanovllm.layers.matmul.problem import AnyProblem, ExpertsProblem
from nanovllm.layers.matmul.table import (
    Choice,
    Key,
    Table,
    load_table,
    package_path,
    package_table,
    read_table,
    user_path,
    write_table,
)
from nanovllm.layers.parallel.tensor_parallel import TensorParallel
from nanovllm.models.layer_facts import layer_products, one_of_each_kind
from nanovllm.models.model_size import make_meta_model
from nanovllm.tuning.journal import Journal
from nanovllm.tuning.progress import Progress
from nanovllm.tuning.tuner import DECODE_TOKENS, PREFILL_TOKENS, Picks, Result, Tuner
from nanovllm.utils.optional_packages import installed_versions

Counts = Mapping[str, Sequence[int]]  # numbers of tokens in each phase

_COUNTS: Counts = {"decode": DECODE_TOKENS, "prefill": PREFILL_TOKENS}
_PACKAGES = ("torch", "triton", "quack-kernels", "flash-attn-4")
# What a dry run lists.
_DRY_GPU, _DRY_MULTIPROCESSORS = "NVIDIA H200", 132


def tune_model(
    model: str,
    *,
    num_gpus: int,
    quantization: str | None,
    device: str,
    output: Path | None,
    into_package: bool,
    dry_run: bool,
    tokens: Sequence[int] | None = None,
) -> None:
    """Measure a model's products on a GPU, and write the table to `output`, into the package, or to the user's cache.
    What a run that was stopped has measured is not measured again. tokens: numbers of tokens to measure; None: all.
    Raises ValueError with a message for the user."""
    counts = chosen_counts(tokens)
    layers = meta_layers(model, num_gpus, quantization)
    if dry_run:
        num_timings = sum(_list(layer, settled, counts) for layer, settled in with_new_products(layers))
        print(f"{num_timings} layers to measure on a GPU like the {_DRY_GPU}")
        return
    gpu_device = _gpu(device)
    with torch.cuda.device(gpu_device):
        gpu = GpuFacts.of(gpu_device).name
        path = output or (package_path(gpu) if into_package else user_path(gpu))
        print(f"{model} on {num_gpus} x {gpu}")
        with_attention = next(layer for layer in layers if layer.self_attn is not None)
        found, journals = Table(), []
        for layer, settled in with_new_products(layers):
            start = time.perf_counter()
            shape = _attention_shape(with_attention if layer.self_attn is None else layer, gpu_device)
            table, journal = _tune_layer(layer, settled, shape, load_table(gpu_device).updated(found), counts)
            found = found.updated(table)
            journals.append(journal)
            # An existing file keeps its rows of other models.
            before = read_table(path) if path.is_file() else Table()
            write_table(path, gpu, before.updated(table))
            print(f"{len(table.rows)} rows in {time.perf_counter() - start:.0f} s: {path}")
        # Not before, or a run that is stopped at a later kind of layer would measure all kinds again.
        for journal in journals:
            journal.remove()


def chosen_counts(tokens: Sequence[int] | None) -> Counts:
    """Of the numbers of tokens that can be measured in each phase, those asked for; None: all."""
    unknown = sorted(set(tokens or ()).difference(*_COUNTS.values()))
    if unknown:
        known = ", ".join(map(str, sorted(n for counts in _COUNTS.values() for n in counts)))
        raise ValueError(f"--tokens {unknown[0]}: must be among {known}")
    chosen = {phase: [n for n in counts if tokens is None or n in tokens] for phase, counts in _COUNTS.items()}
    return {phase: counts for phase, counts in chosen.items() if counts}


def _tune_layer(
    layer: Any, settled: set[Key], shape: AttentionShape, present: Table, counts: Counts
) -> tuple[Table, Journal]:
    """Measure a layer's products, except those that are settled. Returns their rows, and the journal with what they
    were found from.

    settled: keys of products that were measured in a layer before. shape: of the model's attention, which is computed
    between the products if the layer has it. present: the choices so far. counts: from `chosen_counts`.
    """
    from nanovllm.tuning.layer_timer import LayerTimer
    from nanovllm.tuning.timed_attention import TimedAttention

    problems, gpu = layer_problems(layer), GpuFacts.of(shape.device)
    attention = TimedAttention(shape, present, max(DECODE_TOKENS))
    timer = LayerTimer(layer_products(layer), attention)
    keys, top_k = keys_and_top_k(problems)
    tuner = Tuner(keys, present, timer.candidates.values(), gpu.num_multiprocessors, timer.fitted, top_k, settled)
    versions = installed_versions(*_PACKAGES)
    inputs = [type(problem.x).__name__ for problem in problems]  # whether they are normalized first
    are_settled = [key in settled for key in keys]
    journal = Journal((gpu.name, keys, top_k, inputs, are_settled, versions, sorted(timer.candidates), counts))
    known = journal.read()
    steps = [(phase, n) for phase, numbers in counts.items() for n in numbers if (phase, n) not in known]
    if known:
        num_steps = len(known) + len(steps)
        print(f"{len(known)} of {num_steps} numbers of tokens were measured by a run that was stopped.")
        print(f"To measure them anew, remove {journal.path}", flush=True)
    with Progress("compiling kernels", "kernel") as progress:
        timer.compile(_trials(tuner, steps), progress.show)
    # What a step needs less than the most counts as done when the next one begins.
    ends = dict(zip(steps, accumulate(tuner.most_timings(*step) for step in steps), strict=True))
    total = max(ends.values(), default=0)
    with Progress("measuring", "layer", total) as progress:

        def time_layer(phase: str, num_tokens: int, picks: Picks) -> float | None:
            progress.step()
            return timer(phase, num_tokens, picks)

        def keep(phase: str, num_tokens: int, result: Result) -> None:
            journal.add(phase, num_tokens, result)
            progress.show(ends[phase, num_tokens], total)

        found = tuner.tune(time_layer, counts, progress.tell, known, keep)
    return Table(found.rows, versions=versions), journal


def _gpu(name: str) -> torch.device:
    if not torch.cuda.is_available():
        raise ValueError("needs a CUDA device, and torch finds none; --dry-run lists what would be measured")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("cpu")
    num_devices = torch.cuda.device_count()
    if device.type != "cuda" or (device.index or 0) >= num_devices:
        raise ValueError(f"--device {name}: must be cuda or cuda:N, with N less than {num_devices}")
    return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)


def meta_layers(model: str, num_gpus: int = 1, quantization: str | None = None) -> list[Any]:
    """The first DecoderLayer of each kind that a model has on one GPU of num_gpus, without memory. Raises ValueError if
    there is no such model, or if it cannot be split."""
    options: dict[str, Any] = {"load_format": "dummy", "device": "cpu", "skip_tokenizer_init": True}
    options |= {"quantization": quantization, "tensor_parallel_size": num_gpus}
    config = Config(model, dtype="bfloat16", **options)  # float16 takes the same time.
    decoder = make_meta_model(config.hf_config, config.dtype, config.weight_format, TensorParallel(size=num_gpus))
    layers: Any = decoder.model.layers
    return [layers[i] for i in one_of_each_kind(layers)]


def with_new_products(layers: Iterable[Any]) -> Iterator[tuple[Any, set[Key]]]:
    """Each DecoderLayer that has products which those before it have not, and the keys of the products that those
    have."""
    settled: set[Key] = set()
    for layer in layers:
        keys = {problem.key for problem in layer_problems(layer)}
        if not keys <= settled:
            yield layer, settled
        settled = settled | keys


def layer_problems(layer: Any) -> list[AnyProblem]:
    """A DecoderLayer's products, of one token."""
    return [make(1) for make in layer_products(layer)]


def keys_and_top_k(problems: Iterable[AnyProblem]) -> tuple[list[Key], int]:
    """The keys of a layer's products, and how many experts a token has, 1 without experts."""
    keys = [problem.key for problem in problems]
    return keys, max((problem.top_k for problem in problems if isinstance(problem, ExpertsProblem)), default=1)


def _attention_shape(layer: Any, device: torch.device) -> AttentionShape:
    attention = layer.self_attn
    sizes = attention.num_heads, attention.num_kv_heads, attention.head_dim, Config.kvcache_block_size
    return AttentionShape(*sizes, torch.bfloat16, device)


def _trials(tuner: Tuner, steps: Iterable[tuple[str, int]]) -> Iterator[tuple[str, int, int, Choice]]:
    """(phase, number of tokens, which product, choice). steps: (phase, number of tokens)."""
    for phase, num_tokens in steps:
        products = zip(tuner.present(phase, num_tokens), tuner.trials(phase, num_tokens), strict=True)
        for i, (present, trials) in enumerate(products):
            for choice in dict.fromkeys((present, *trials)):
                yield phase, num_tokens, i, choice


def _list(layer: Any, settled: set[Key], counts: Counts) -> int:
    """Print what would be measured of a layer. Returns how many timings that is."""
    keys, top_k = keys_and_top_k(layer_problems(layer))
    is_alone = all(key.operation != "linear_sum" for key in keys)
    # Over several GPUs engines have no Quack.
    candidates = [each for each in ALL if is_alone or each not in (Quack, QuackExperts)]
    tuner = Tuner(keys, package_table(_DRY_GPU), candidates, _DRY_MULTIPROCESSORS, top_k=top_k, settled=settled)
    steps = [(phase, n) for phase, numbers in counts.items() for n in numbers]
    trials = Counter(
        (phase, n, keys[i], choice.candidate) for phase, n, i, choice in _trials(tuner, steps) if keys[i] not in settled
    )
    for (phase, num_tokens, key, candidate), count in trials.items():
        weight = f"[{key.N}, {key.K}]"
        print(f"{phase:7} {num_tokens:6} tokens  {key.operation:11} {weight:14} {candidate} x {count}")
    return trials.total()
