"""Config: every option of the engine, checked in one place."""

import difflib
import json
import os
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from nanovllm.models import model_class
from nanovllm.models.qwen3 import get_head_dim
from nanovllm.utils.parallel import check_shardable

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
CPU_KVCACHE_GIB = 2.0
# Prefill steps of twice as many tokens take 1 to 2 % less time on an H200, and twice the memory for activations, which
# the KV cache then has not: they may take this share of the GPU's.
_STEP_TOKENS, _LONG_STEP_TOKENS = 16384, 32768
_LONG_STEP_SHARE = 1 / 40
MAX_MIXED_STEP_ROWS = 1024  # Attention's sums of a row take 64 KB for 8B.


@dataclass
class Config:
    """Options of one engine. Made through `Config.create`, which names unknown keywords.

    Attributes:
        model: a directory (~ expands), a hub id that is downloaded, or with load_format "dummy" also the name
            of a published shape ("Qwen3-0.6B", ...). After the checks: the directory, or that name.
        max_num_batched_tokens: tokens that one prefill step computes at most; None for 16,384, or 32,768 on one GPU
            of which a layer's activations of so many take a fortieth at most. After the checks: the number.
        max_num_seqs: sequences that one step computes at most.
        max_model_len: longest sequence, prompt and completion; lowered to what the model supports.
        gpu_memory_utilization: share of the GPU's memory that this engine may fill, in (0, 1], whatever others hold;
            where less is free, the KV cache takes what is.
        tensor_parallel_size: GPUs to split the model over, from the current one on; on a CPU, processes. It must divide
            the attention heads and the intermediate size, and divide the KV heads or be a multiple of them.
        enforce_eager: no CUDA graphs.
        kvcache_block_size: tokens a KV cache block, a power of two from 16.
        num_kvcache_blocks: blocks of the KV cache; -1 derives them from the memory.
        kvcache_gib: GiB of KV cache, instead of what gpu_memory_utilization leaves; on a CPU 2 unless given. Without
            effect where num_kvcache_blocks is given.
        device: "auto" (CUDA where there is a GPU), "cuda" or "cpu".
        dtype: "auto" (on a GPU the checkpoint's, float32 becoming bfloat16; on a CPU float32), "bfloat16",
            "float16" or "float32". After the checks: the torch.dtype.
        load_format: "auto" reads safetensors; "dummy" draws random weights of the model's shapes.
        attention_backend: "auto", "flash_attn", "triton" or "torch".
        enable_prefix_caching: share the KV cache blocks of equal beginnings.
        mixed_step_rows: tokens that a decode step computes, up to 1,024, where prompts are to be computed beside it, in
            the rows that none of its sequences takes; 0 for no such steps; None for 256, or max_num_batched_tokens
            where that is less, where they pay: layers of 150 million parameters or more, on one GPU, with CUDA graphs.
        overlap_steps: prepare and launch a step before the one ahead of it is read, so that the GPU never waits.
        seed: of everything that requests without a seed of their own draw; None takes a fresh one.
        skip_tokenizer_init: prompts are token ids alone, and results carry no text.
        hf_config: the model's transformers configuration; read from `model` unless given.
        eos: end-of-sequence token ids; () takes the model's, from generation_config.json and config.json.
        generation_config: no option, but what the model's generation_config.json says; {} where there is none.

    Raises:
        ValueError: a wrong value, with the field, the value and what is allowed.
        FileNotFoundError: no such model, or no config.json in it.
    """

    model: str
    max_num_batched_tokens: int | None = None
    max_num_seqs: int = 512
    max_model_len: int = 4096
    gpu_memory_utilization: float = 0.9
    tensor_parallel_size: int = 1
    enforce_eager: bool = False
    kvcache_block_size: int = 256
    num_kvcache_blocks: int = -1
    kvcache_gib: float | None = None
    device: str = "auto"
    dtype: Any = "auto"
    load_format: str = "auto"
    attention_backend: str = "auto"
    enable_prefix_caching: bool = True
    mixed_step_rows: int | None = None
    overlap_steps: bool = True
    seed: int | None = None
    skip_tokenizer_init: bool = False
    hf_config: Any = None
    eos: tuple[int, ...] = ()

    @classmethod
    def create(cls, model: str, **options) -> "Config":
        """A checked Config. Raises TypeError for an unknown option, naming the nearest one."""
        names = [field.name for field in fields(cls)]
        for name in options:
            if name not in names:
                near = difflib.get_close_matches(name, names, n=1, cutoff=0.7)
                hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names)}"
                raise TypeError(f"unknown option {name!r}: {hint}")
        return cls(model, **options)

    def __post_init__(self):
        self._check_values()
        self._resolve_model()
        model_class(self.hf_config)  # Of another architecture's fields nothing is known.
        check_shardable(self.hf_config, self.tensor_parallel_size)
        self._resolve_device()
        self._resolve_dtype()
        self._resolve_limits()
        self.generation_config = _read_generation_config(self.model)
        self._resolve_eos()

    def _check_values(self) -> None:
        for name in ("max_num_seqs", "max_model_len"):
            self._require(name, _is_int(getattr(self, name), 1), "an integer >= 1")
        tokens = self.max_num_batched_tokens
        self._require("max_num_batched_tokens", tokens is None or _is_int(tokens, 1), "an integer >= 1, or None")
        self._require("gpu_memory_utilization", _is_number(self.gpu_memory_utilization, 0, 1), "a number in (0, 1]")
        tp_ok = _is_int(self.tensor_parallel_size, 1) and self.tensor_parallel_size <= 8
        self._require("tensor_parallel_size", tp_ok, "an integer in 1..8")
        size = self.kvcache_block_size
        self._require("kvcache_block_size", _is_int(size, 16) and size & (size - 1) == 0, "a power of two, 16 or more")
        blocks = self.num_kvcache_blocks
        self._require("num_kvcache_blocks", _is_int(blocks, -1) and blocks != 0, "an integer >= 1, or -1 to derive it")
        rows, most = self.mixed_step_rows, min(MAX_MIXED_STEP_ROWS, tokens or _STEP_TOKENS)
        fits = rows is None or (_is_int(rows, 0) and rows <= most)
        self._require(
            "mixed_step_rows", fits, f"None, or in 0..{most} (the smaller of 1024 and max_num_batched_tokens)"
        )
        one_rank = not rows or self.tensor_parallel_size == 1
        self._require("mixed_step_rows", one_rank, f"0 or None with tensor_parallel_size={self.tensor_parallel_size}")
        gib = self.kvcache_gib
        self._require(
            "kvcache_gib", gib is None or _is_number(gib, 0, sys.float_info.max), "a number > 0, or None to derive it"
        )
        for name in ("enforce_eager", "enable_prefix_caching", "overlap_steps", "skip_tokenizer_init"):
            self._require(name, isinstance(getattr(self, name), bool), "True or False")
        self._require(
            "hf_config",
            self.hf_config is None or hasattr(self.hf_config, "max_position_embeddings"),
            "a transformers configuration, or None to read the model's",
        )
        self._require_one_of("device", ("auto", "cuda", "cpu"))
        self._require_one_of("load_format", ("auto", "dummy"))
        self._require_one_of("attention_backend", ("auto", "flash_attn", "triton", "torch"))
        if self.dtype in DTYPES.values():
            self.dtype = str(self.dtype).removeprefix("torch.")
        self._require_one_of("dtype", ("auto", *DTYPES))
        self._require(
            "seed", self.seed is None or (_is_int(self.seed, 0) and self.seed < 2**63), "None or in 0..2**63 - 1"
        )
        if _is_int(self.eos, 0):
            self.eos = (self.eos,)
        eos_ok = isinstance(self.eos, tuple | list | set | frozenset) and all(_is_int(t, 0) for t in self.eos)
        self._require("eos", eos_ok, "token ids >= 0")

    def _require(self, name: str, ok: bool, allowed: str) -> None:
        if not ok:
            raise ValueError(f"{name}={getattr(self, name)!r}: must be {allowed}")

    def _require_one_of(self, name: str, allowed: tuple[str, ...]) -> None:
        value = getattr(self, name)
        self._require(name, isinstance(value, str) and value in allowed, f"one of {', '.join(allowed)}")

    def _resolve_model(self) -> None:
        ok = isinstance(self.model, str | os.PathLike) and str(self.model) != ""
        self._require("model", ok, "a directory or a hub id")
        self.model = str(self.model)
        path = Path(os.path.expanduser(self.model))
        if path.is_dir():
            self.model = str(path)
        elif self.load_format == "dummy" and self._use_preset():
            return
        elif path.exists():
            raise ValueError(f"model={self.model!r}: is a file; must be the directory that holds it")
        else:
            self.model = _download(self.model)
        if self.hf_config is None:
            self.hf_config = _read_hf_config(self.model)

    def _use_preset(self) -> bool:
        from nanovllm.models.presets import PRESET_NAMES, preset_config

        name = self.model.removeprefix("Qwen/")
        if name in PRESET_NAMES and self.hf_config is None:
            self.hf_config = preset_config(name)
        return self.hf_config is not None

    def _resolve_device(self) -> None:
        available = torch.cuda.is_available()
        if self.device == "auto":
            self.device = "cuda" if available else "cpu"
        self._require("device", self.device == "cpu" or available, "cpu: torch finds no CUDA device")
        if self.device == "cuda" and self.tensor_parallel_size > 1:
            first, count = torch.cuda.current_device(), torch.cuda.device_count()
            self._require(
                "tensor_parallel_size",
                self.tensor_parallel_size <= count - first,
                f"at most {count - first}: {count} GPUs are visible, and the first is the current one, cuda:{first}",
            )

    def _resolve_dtype(self) -> None:
        if self.dtype == "auto":
            self.dtype = "float32"
            if self.device == "cuda":
                # By name in the dictionary: transformers 5 warns of a look at the old attribute.
                own = vars(self.hf_config).get("dtype") or vars(self.hf_config).get("torch_dtype")
                own = str(own).removeprefix("torch.")
                self.dtype = own if own in ("bfloat16", "float16") else "bfloat16"
        self.dtype = DTYPES[self.dtype]

    def _resolve_limits(self) -> None:
        self.max_model_len = min(self.max_model_len, _supported_length(self.hf_config))
        if self.max_num_batched_tokens is None:
            self.max_num_batched_tokens = _LONG_STEP_TOKENS if self._takes_long_steps() else _STEP_TOKENS

    def _takes_long_steps(self) -> bool:
        if self.device != "cuda" or self.tensor_parallel_size > 1:  # Of several GPUs it was not measured.
            return False
        config, head_dim = self.hf_config, get_head_dim(self.hf_config)
        num_heads = config.num_attention_heads + 2 * config.num_key_value_heads
        # The residual and what the norm makes of it; q, k and v; gate and up.
        values = 2 * config.hidden_size + num_heads * head_dim + 2 * config.intermediate_size
        memory = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        return _LONG_STEP_TOKENS * values * self.dtype.itemsize <= _LONG_STEP_SHARE * memory

    def _resolve_eos(self) -> None:
        if not self.eos:
            found = self.generation_config.get("eos_token_id")
            if found is None:
                found = getattr(self.hf_config, "eos_token_id", None)
            self.eos = found if isinstance(found, list) else [] if found is None else [found]
        self.eos = tuple(sorted(set(self.eos)))


def _is_int(value, low: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= low


def _is_number(value, above: float, up_to: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and above < value <= up_to


def _supported_length(hf_config) -> int:
    """max_position_embeddings, or what RoPE scaling stretches the original length to."""
    limit = hf_config.max_position_embeddings
    scaling = getattr(hf_config, "rope_parameters", None) or getattr(hf_config, "rope_scaling", None) or {}
    original = scaling.get("original_max_position_embeddings")
    if original and scaling.get("factor"):
        limit = max(limit, int(original * scaling["factor"]))
    return limit


def _read_hf_config(directory: str):
    """The transformers configuration of a model directory. Raises FileNotFoundError or ValueError."""
    from transformers import AutoConfig

    if not Path(directory, "config.json").is_file():
        raise FileNotFoundError(f"model={directory!r}: holds no config.json")
    try:
        return AutoConfig.from_pretrained(directory)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"model={directory!r}: config.json cannot be used: {error}") from error


def _read_generation_config(directory: str) -> dict[str, Any]:
    """The model's generation_config.json, {} without one. Raises ValueError."""
    file = Path(directory, "generation_config.json")
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text())
        if not isinstance(content, dict):
            raise ValueError(f"it holds a {type(content).__name__}")
    except ValueError as error:
        raise ValueError(f"model={directory!r}: generation_config.json cannot be used: {error}") from error
    return content


def _download(model: str) -> str:
    """The local snapshot of a hub id. Raises FileNotFoundError where there is neither directory nor hub model."""
    from huggingface_hub import snapshot_download

    if model.startswith((".", "/", "~")) or model.count("/") > 1 or "\\" in model:
        raise FileNotFoundError(f"model={model!r}: no such directory")
    try:
        return snapshot_download(model, allow_patterns=["*.safetensors", "*.json", "*.txt", "*.jinja", "*.model"])
    except Exception as error:
        raise FileNotFoundError(
            f"model={model!r}: no such directory, and as a hub id it cannot be downloaded: {error}"
        ) from error
