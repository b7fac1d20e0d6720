"""EngineOptions: every option of the engine, declared and explained once. `Config` checks them.

The command line, jobs and bench read names, types, defaults and help here. Nothing here imports torch, so `--help` is
fast. docs/reference.md says more about each option.
"""

from dataclasses import dataclass, field
from typing import Any


def _option(default: Any, help: str, *choices: str, is_for_speed: bool = False) -> Any:
    """A field.

    Args:
        help: what the command line says about it.
        choices: the values, if there are few.
        is_for_speed: answers do not depend on it, so a job may go on with another value.
    """
    return field(default=default, metadata={"help": help, "choices": choices, "is_for_speed": is_for_speed})


def _speed_option(default: Any, help: str, *choices: str) -> Any:
    return _option(default, help, *choices, is_for_speed=True)


@dataclass
class EngineOptions:
    """Options of one engine, as a caller gives them. What `Config` turns into another type is Any."""

    model: Any = field(metadata={"help": "a directory, a hub id, or with dummy weights a published shape"})
    max_num_batched_tokens: int = _speed_option(16384, "tokens of a prefill step")
    max_num_seqs: int = _speed_option(512, "sequences of a step")
    max_model_len: int | None = _option(4096, "tokens of the longest sequence, prompt and completion")
    gpu_memory_utilization: float = _speed_option(0.9, "share of the GPU's memory for this engine")
    tensor_parallel_size: int = _speed_option(1, "GPUs to split the model over")
    watchdog_timeout: float | None = _speed_option(300.0, "seconds that another rank may show no sign of life")
    enforce_eager: bool = _speed_option(False, "use no CUDA graphs")
    kvcache_block_size: int = _speed_option(256, "tokens of a KV cache block")
    num_kvcache_blocks: int = _speed_option(-1, "blocks of the KV cache; -1: as many as the memory holds")
    kvcache_gib: float | None = _speed_option(None, "GiB of KV cache; by default what gpu_memory_utilization leaves")
    kv_cache_dtype: Any = _option("auto", "keys and values in 8 bits: fp8", "auto", "fp8", "fp8_e4m3")
    logprobs_mode: str = _option(
        "raw_logprobs", "logprobs of the model, or of what tokens are drawn from", "raw_logprobs", "processed_logprobs"
    )
    state_dtype: Any = _option("float32", "of the states of linear attention", "float32", "bfloat16")
    kv_cache_scales: str = _option("auto", "scales of an fp8 KV cache", "auto", "checkpoint", "calibrated", "one")
    device: str = _speed_option("auto", "auto, cpu, cuda, or cuda:N for the GPU number N")
    dtype: Any = _option(
        "auto", "of weights and activations", "auto", "bfloat16", "float16", "float32", "half", "float"
    )
    quantization: str | None = _option(None, "round the weights while they are loaded: fp8, int4 or mxfp4")
    load_format: str = _option("auto", "dummy: random weights", "auto", "dummy")
    attention_backend: str = _speed_option("auto", "what computes attention", "auto", "flash_attn", "triton", "torch")
    enable_prefix_caching: bool = _speed_option(True, "share the KV cache blocks of equal beginnings")
    mixed_step_rows: int | None = _speed_option(
        None, "tokens of a decode step that also computes prompts; 0: no such steps; by default where they pay"
    )
    overlap_steps: bool = _speed_option(True, "launch a step before the tokens of the previous one are read")
    plain: bool = _speed_option(False, "run the plain Qwen3 and the simple loop, to compare with: models/qwen3.py")
    speculation: str | None = _speed_option(None, "try several tokens a step where text repeats itself", "suffix")
    max_speculative_tokens: int = _speed_option(7, "tokens that a step tries for a sequence, with speculation")
    seed: int | None = _option(None, "of requests without one")
    skip_tokenizer_init: bool = _option(False, "load no tokenizer: prompts are token ids")
    use_tqdm: bool = _speed_option(True, "show the progress of the start")
    tokenizer: Any = _option(None, "a directory or hub id of another tokenizer than the model's")
    revision: str | None = _option(None, "branch, tag or commit of the hub id")
    hf_config: Any = _option(None, "a transformers configuration instead of the model's")
    eos: Any = _option((), "end-of-sequence tokens instead of the model's")
