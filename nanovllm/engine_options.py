"""EngineOptions: every option of the engine, declared and explained once, with its rules. `Config` checks them.

The command line, jobs and bench read names, types, defaults and help here. Nothing here imports torch, so `--help` is
fast. docs/reference.md says more about each option.
"""

import math
import os
import re
from dataclasses import MISSING, dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from nanovllm.utils.checks import is_int
from nanovllm.utils.rules import FLAG, Converted, Rule, integer, number, one_of, option, together

if TYPE_CHECKING:
    import torch

MAX_MIXED_STEP_ROWS = 1024  # Attention keeps tens of kilobytes of partial sums for one row.
# A CUDA grid has at most 65,535 programs on its second axis, where attention has one a sequence and a few hundred more.
MAX_NUM_SEQS = 2**15
MAX_NUM_BATCHED_TOKENS = 2**20  # Activations already take 12 GiB, even in the smallest published shape.
MAX_MODEL_LEN = 2**24  # RoPE's table takes 8 GiB at a head_dim of 128. No published model is longer.
MAX_KVCACHE_BLOCK_SIZE = 2**16  # One block takes 7 GiB, even in the smallest published shape.
MAX_WATCHDOG_SECONDS = 86_400
MAX_KVCACHE_GIB = 2**16  # more than one machine has
MAX_SPECULATIVE_TOKENS = 15
MAX_REPLICAS = 64  # far more than one machine has GPUs
_TINY = math.ulp(0.0)  # the smallest number above 0
MAX_SLOTS = 2**31  # Kernels count KV cache slots, and the keys of all sequences of a step, in int32.

# What type checkers and editors offer. The rules below are made of these names. Quantizations and formats of chats have
# tables of their own, which take longer to import: a test compares them.
DType = Literal["auto", "bfloat16", "float16", "float32", "half", "float"]
KVCacheDType = Literal["auto", "fp8", "fp8_e4m3"]
KVCacheScales = Literal["auto", "checkpoint", "calibrated", "one"]
StateDType = Literal["float32", "float16", "bfloat16"]
LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]
LoadFormat = Literal["auto", "dummy"]
Task = Literal["auto", "generate", "embed", "classify", "rerank"]
AttentionBackend = Literal["auto", "flash_attn", "triton", "torch"]
Speculation = Literal["suffix"]
Quantization = Literal["fp8", "int4", "mxfp4"]
ChatFormat = Literal["harmony", "gemma4", "mistral", "seed_oss", "qwen_xml", "hermes", "llama3_json", "think", "plain"]


def _option(default: Any, help: str, *rules: Rule, is_for_speed: bool = False) -> Any:
    """A field.

    Args:
        help: what the command line says about it.
        is_for_speed: answers do not depend on it, so a job may go on with another value.
    """
    choices = next((rule.choices for rule in rules if rule.choices), ())
    return option(default, *rules, help=help, choices=choices, is_for_speed=is_for_speed)


def _speed_option(default: Any, help: str, *rules: Rule) -> Any:
    return _option(default, help, *rules, is_for_speed=True)


def _quantizations() -> list[str]:
    from nanovllm.layers.formats.all_formats import QUANTIZATIONS  # It imports torch.

    return list(QUANTIZATIONS)


def _chat_formats() -> list[str]:
    from nanovllm.engine.text.formats.all_formats import FORMATS  # `--help` needs none of them.

    return list(FORMATS)


def _is_feature(value: Any) -> bool:
    return isinstance(getattr(value, "option", None), str) and hasattr(value, "edit_logits")


def _is_name(value: Any) -> bool:
    return isinstance(value, str | os.PathLike) and str(value) != ""


def _most_blocks(options: Any) -> int:
    return MAX_SLOTS // options.kvcache_block_size


def _most_mixed_rows(options: Any) -> int:
    return min(MAX_MIXED_STEP_ROWS, options.max_num_batched_tokens)


_MODEL = Rule(_is_name, "a directory or a hub id")
_LENGTH = integer(2, MAX_MODEL_LEN, f"an integer in 2..{MAX_MODEL_LEN}, or None for the model's own", none=True)
_SHARE = number(_TINY, 1, "a number in (0, 1]")
_SECONDS = number(1, MAX_WATCHDOG_SECONDS, f"a number in 1..{MAX_WATCHDOG_SECONDS}, or None for no watchdog", none=True)
_BLOCK_SIZE = Rule(
    lambda size: is_int(size, 16, MAX_KVCACHE_BLOCK_SIZE) and size & (size - 1) == 0,
    f"a power of two in 16..{MAX_KVCACHE_BLOCK_SIZE}",
)
_NUM_BLOCKS = together(
    lambda options: is_int(options.num_kvcache_blocks, 1, _most_blocks(options)),
    lambda options: (
        f"an integer in 1..{_most_blocks(options)} ({MAX_SLOTS} tokens in blocks of "
        f"{options.kvcache_block_size}), or -1 to derive it"
    ),
)
_GIB = number(_TINY, MAX_KVCACHE_GIB, f"a number in (0, {MAX_KVCACHE_GIB}], or None to derive it")
_SCALES = one_of(*get_args(KVCacheScales))
_OF_FP8 = together(lambda options: options.kv_cache_dtype != "auto", "'auto' without kv_cache_dtype='fp8'")
_DEVICE = Rule(
    lambda name: isinstance(name, str) and re.fullmatch("auto|cpu|cuda(:[0-9]+)?", name) is not None,
    "one of auto, cuda, cpu, or cuda:N for the GPU number N",
)
_QUANTIZATION = Rule(
    lambda name: name in _quantizations(), lambda name: f"None or one of {', '.join(_quantizations())}"
)
_CHAT_FORMAT = Rule(lambda name: name in _chat_formats(), lambda name: f"None or one of {', '.join(_chat_formats())}")
_DTYPE = one_of(*get_args(DType))
_MIXED_ROWS = together(
    lambda options: is_int(options.mixed_step_rows, 0, _most_mixed_rows(options)),
    lambda options: f"None, or in 0..{_most_mixed_rows(options)} (the smaller of 1024 and max_num_batched_tokens)",
)
_OF_ONE_RANK = together(
    lambda options: options.mixed_step_rows == 0 or options.tensor_parallel_size == 1,
    lambda options: f"0 or None with tensor_parallel_size={options.tensor_parallel_size}",
)
_SPECULATION = one_of(*get_args(Speculation))._replace(allowed="None or one of suffix")
_NOT_PLAIN = together(lambda options: not options.plain, "None with plain=True")
_GENERATES = "auto", "generate"
_GENERATES_IF_PLAIN = together(
    lambda options: not options.plain or options.task in _GENERATES, "'generate' or 'auto' with plain=True"
)
_GENERATES_IF_SPECULATIVE = together(
    lambda options: options.speculation is None or options.task in _GENERATES,
    lambda options: f"'generate' or 'auto' with speculation={options.speculation!r}",
)
_IF_USED = together(
    lambda options: not options.skip_tokenizer_init, "None with skip_tokenizer_init=True, which loads no tokenizer"
)
_OF_FILES = together(lambda options: options.load_format != "dummy", "None with load_format='dummy'")
_ADAPTER = Rule(_is_name, "a name, or None")
_HF_CONFIG = Rule(
    lambda config: hasattr(config, "max_position_embeddings"),
    "a transformers configuration, or None to read the model's",
)
_EOS = Rule(lambda eos: isinstance(eos, list) and all(is_int(token, 0) for token in eos), "token ids >= 0")
_FEATURES = Rule(
    lambda given: (
        isinstance(given, list | tuple) and len({each.option for each in given if _is_feature(each)}) == len(given)
    ),
    "a list of engine.features.feature.Feature objects, each with an `option` of its own",
)
_REVISION = Rule(lambda name: isinstance(name, str) and name != "", "a name, or None")


@dataclass
class EngineOptions:
    """Options of one engine, as a caller gives them. What `Config` turns into another type is Any or Converted."""

    model: Any = _option(MISSING, "a directory, a hub id, or with dummy weights a published shape", _MODEL)
    max_num_batched_tokens: int = _speed_option(16384, "tokens of a prefill step", integer(1, MAX_NUM_BATCHED_TOKENS))
    max_num_seqs: int = _speed_option(512, "sequences of a step", integer(1, MAX_NUM_SEQS))
    max_model_len: int | None = _option(4096, "tokens of the longest sequence, prompt and completion", _LENGTH)
    gpu_memory_utilization: float = _speed_option(0.9, "share of the GPU's memory for this engine", _SHARE)
    tensor_parallel_size: int = _speed_option(1, "GPUs to split the model over", integer(1, 8))
    data_parallel_size: int = _speed_option(
        1, "engines, each on tensor_parallel_size GPUs of its own", integer(1, MAX_REPLICAS)
    )
    watchdog_timeout: float | None = _speed_option(
        300.0, "seconds that another rank may show no sign of life", _SECONDS
    )
    enforce_eager: bool = _speed_option(False, "use no CUDA graphs", FLAG)
    kvcache_block_size: int = _speed_option(256, "tokens of a KV cache block", _BLOCK_SIZE)
    num_kvcache_blocks: int = _speed_option(-1, "blocks of the KV cache; -1: as many as the memory holds", _NUM_BLOCKS)
    kvcache_gib: float | None = _speed_option(
        None, "GiB of KV cache; by default what gpu_memory_utilization leaves", _GIB
    )
    kv_cache_dtype: Converted["KVCacheDType | torch.dtype", Any] = _option(
        "auto",
        "keys and values in 8 bits: fp8",
        one_of(*get_args(KVCacheDType)),
        _NOT_PLAIN._replace(allowed="'auto' with plain=True"),
    )
    logprobs_mode: LogprobsMode = _option(
        "raw_logprobs",
        "logprobs of the model, or of what tokens are drawn from",
        one_of(*get_args(LogprobsMode)),
    )
    state_dtype: Converted["StateDType | torch.dtype", Any] = _option(
        "float32", "of the states of linear attention", one_of(*get_args(StateDType))
    )
    kv_cache_scales: KVCacheScales = _option("auto", "scales of an fp8 KV cache", _SCALES, _OF_FP8)
    device: Converted["str | torch.device", Any] = _speed_option(
        "auto", "auto, cpu, cuda, or cuda:N for the GPU number N", _DEVICE
    )
    dtype: Converted["DType | torch.dtype", Any] = _option("auto", "of weights and activations", _DTYPE)
    quantization: Quantization | None = _option(
        None, "round the weights while they are loaded: fp8, int4 or mxfp4", _QUANTIZATION, _NOT_PLAIN
    )
    lora: Any = _option(None, "a LoRA adapter to merge while loading: a PEFT folder or hub id", _ADAPTER, _OF_FILES)
    load_format: LoadFormat = _option("auto", "dummy: random weights", one_of(*get_args(LoadFormat)))
    task: Task = _option(
        "auto",
        "what the engine is for: generate, embed, classify or rerank; by default what the checkpoint can do",
        one_of(*get_args(Task)),
        _GENERATES_IF_PLAIN,
        _GENERATES_IF_SPECULATIVE,
    )
    text_only: bool = _option(False, "leave a vision tower out, and its memory: prompts are texts alone", FLAG)
    attention_backend: AttentionBackend = _speed_option(
        "auto", "what computes attention", one_of(*get_args(AttentionBackend))
    )
    enable_prefix_caching: bool = _speed_option(True, "share the KV cache blocks of equal beginnings", FLAG)
    mixed_step_rows: int | None = _speed_option(
        None,
        "tokens of a decode step that also computes prompts; 0: no such steps; by default where they pay",
        _MIXED_ROWS,
        _OF_ONE_RANK,
        together(lambda options: options.mixed_step_rows == 0 or not options.plain, "0 or None with plain=True"),
    )
    overlap_steps: bool = _speed_option(True, "launch a step before the tokens of the previous one are read", FLAG)
    plain: bool = _speed_option(
        False, "run the plain Qwen3 and the simple loop, to compare with: models/qwen3.py", FLAG
    )
    deterministic: bool = _option(
        False, "give a request the same bits, whatever else is in the batch: docs/deterministic.md", FLAG
    )
    speculation: Speculation | None = _speed_option(
        None, "try several tokens a step where text repeats itself", _SPECULATION, _NOT_PLAIN
    )
    max_speculative_tokens: int = _speed_option(
        7, "tokens that a step tries for a sequence, with speculation", integer(1, MAX_SPECULATIVE_TOKENS)
    )
    seed: int | None = _option(None, "of requests without one", integer(0, 2**63 - 1, "None or in 0..2**63 - 1"))
    skip_tokenizer_init: bool = _option(False, "load no tokenizer: prompts are token ids", FLAG)
    use_tqdm: bool = _speed_option(True, "show the progress of the start", FLAG)
    tokenizer: Any = _option(
        None, "a directory or hub id of another tokenizer than the model's", Rule(_is_name, "a name, or None"), _IF_USED
    )
    chat_format: ChatFormat | None = _option(
        None, "how the model marks what it thinks and calls: harmony, hermes, ...; by default found", _CHAT_FORMAT
    )
    revision: str | None = _option(None, "branch, tag or commit of the hub id", _REVISION)
    hf_config: Any = _option(None, "a transformers configuration instead of the model's", _HF_CONFIG)
    features: Any = _option((), "what requests may ask for by extra_args", _FEATURES)
    eos: Any = _option((), "end-of-sequence tokens instead of the model's", _EOS)
