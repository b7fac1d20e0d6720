"""Config: the options of an engine, checked in one place."""

import logging
import os
from copy import copy
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nanovllm.engine.batch_sizes import MAX_GRAPH_BATCH_SIZE
from nanovllm.engine.deterministic import check_deterministic
from nanovllm.engine_options import MAX_MODEL_LEN, MAX_SLOTS, EngineOptions
from nanovllm.kernels.gpu import GpuFacts
from nanovllm.kernels.matmul.fp8 import E4M3
from nanovllm.layers.formats.all_formats import QUANTIZATIONS
from nanovllm.layers.formats.format import WeightFormat
from nanovllm.models.heads import head_of, labels_of, leave_out_head
from nanovllm.models.hf_config import check_hf_config, check_token_ids, read_hf_config, supported_length
from nanovllm.models.lora import ADAPTER_FILES, read_settings
from nanovllm.models.model_files import OTHER_FILES, WEIGHT_FILES, download, find_directory, read_json
from nanovllm.models.model_size import check_layers
from nanovllm.models.presets import PRESET_NAMES, find_preset, preset_config, similar_presets
from nanovllm.models.quantization_config import checkpoint_quantization
from nanovllm.models.registry import model_class
from nanovllm.models.sentence_files import is_sentence_model, read_sentence_facts
from nanovllm.utils.checks import is_int, quoted, require
from nanovllm.utils.option_hints import HINTS, explains_unknown_options
from nanovllm.utils.rules import check_rules

logger = logging.getLogger(__name__)

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
DTYPES |= {"half": torch.float16, "float": torch.float32}  # vLLM's names
PLAIN_ARCHITECTURE = "Qwen3ForCausalLM"  # that models/qwen3.py runs
FP8_CAPABILITY = 8, 9  # of the oldest GPUs that convert and multiply e4m3
CPU_KVCACHE_GIB = 2.0
_PUBLISHED = f"published shapes are called as {PRESET_NAMES[0]}: README.md lists all {len(PRESET_NAMES)}"


@explains_unknown_options(HINTS["Config"])
@dataclass
class Config(EngineOptions):
    """Checked options of one engine; docs/reference.md describes each of them.

    The checks change some: `model` becomes a str, the directory or the published shape. `device` becomes "cuda" or
    "cpu", `dtype`, `kv_cache_dtype` and `state_dtype` a torch.dtype, and `eos` a tuple. `tokenizer` and `lora` become
    directories, or None if there is none. `max_model_len` becomes a number, `task` one of the others than "auto", and
    `hf_config` the model's.

    Attributes that the checks set:
        hub_id: the model as it is called on the hub; None for a directory or a published shape.
        generation_config: the content of the model's generation_config.json; {} if there is none.
        supported_model_len: tokens of the longest sequence that the model supports.
        device_index: the first GPU; None on a CPU.
        weight_format: of the linear layers, from `quantization` or the checkpoint; None if they are not quantized.

    Raises:
        TypeError: an unknown option; the message says what to use instead.
        ValueError: a wrong value, with the field, the value and what is allowed; or a file of the model that cannot be
            used, with its name.
        FileNotFoundError: no such model, or no config.json in it.
    """

    def __post_init__(self) -> None:
        self._convert()
        check_rules(self)
        self._resolve_model()
        self._resolve_task()
        if self.plain:
            self._check_plain()
        self._resolve_device()
        self._resolve_vision()
        self._resolve_dtype()
        self._resolve_formats()
        if self.deterministic:
            check_deterministic(self)
        self._resolve_limits()
        self._resolve_eos()
        self._resolve_tokenizer()
        self._resolve_lora()
        if self.hub_id is not None and self.load_format == "auto":
            download(self.hub_id, "model", WEIGHT_FILES, self.revision)

    @property
    def max_decode_rows(self) -> int:
        """Rows of the largest decode step: max_num_seqs, or with speculation more, up to those of a CUDA graph."""
        if self.speculation is None:
            return self.max_num_seqs
        num_rows = min(self.max_num_seqs * (1 + self.max_speculative_tokens), MAX_GRAPH_BATCH_SIZE)
        return max(self.max_num_seqs, num_rows)

    def _convert(self) -> None:
        """Turn numpy's and torch's values into Python's, and eos into a list."""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, np.generic | np.ndarray):
                setattr(self, field.name, value.tolist())
        eos: Any = [self.eos] if is_int(self.eos, 0) else self.eos
        if isinstance(eos, tuple | list | set | frozenset):
            eos = [token.item() if isinstance(token, np.generic) else token for token in eos]
        self.eos = eos
        if isinstance(self.device, torch.device):
            self.device = str(self.device)
        for name in ("dtype", "state_dtype"):
            if getattr(self, name) in DTYPES.values():
                setattr(self, name, str(getattr(self, name)).removeprefix("torch."))
        if self.kv_cache_dtype == E4M3:
            self.kv_cache_dtype = "fp8"

    def _require(self, name: str, ok: bool, allowed: str) -> None:
        require(name, getattr(self, name), ok, allowed)

    def _resolve_model(self) -> None:
        self.model, self.hub_id = str(self.model), None
        where = "hf_config"
        directory = find_directory(self.model, "model")
        preset = find_preset(self.model) if self.load_format == "dummy" and directory is None else None
        if preset is not None and self.hf_config is None:
            self.hf_config = preset_config(preset)
        if directory is not None:
            self.model = str(directory)
        elif self.load_format != "dummy" or self.hf_config is None:
            # Without the weights, which can take hours: first all else is checked.
            self.hub_id, self.model = self.model, self._download_config()
        if self.hub_id is None:
            self._require("revision", self.revision is None, f"None: model={quoted(self.model)} is not downloaded")
        if self.hf_config is None:
            where, self.hf_config = str(Path(self.model, "config.json")), read_hf_config(self.model)
        check_hf_config(self.hf_config, where)

    def _resolve_task(self) -> None:
        """Find what the engine is for, and leave out the head of a model that is to have none. What a checkpoint with a
        head of the vocabulary can do, its files may narrow: embedding models are published with the names of others."""
        head = head_of(self.hf_config)
        is_for_sentences = head == "vocabulary" and is_sentence_model(self.model)
        if self.task == "auto":
            is_embedder = head == "none" or (is_for_sentences and not self.plain and self.speculation is None)
            self.task = "classify" if head == "classes" else "embed" if is_embedder else "generate"
        possible = {
            "vocabulary": ("generate", "embed", "rerank"),
            "none": ("embed",),
            "classes": ("classify", "rerank"),
        }
        self._require("task", self.task in possible[head], f"{' or '.join(possible[head])}: {self._what_it_has(head)}")
        if head == "classes" and self.task == "rerank":
            num_labels = len(labels_of(self.hf_config))
            self._require("task", num_labels == 1, f"classify: the model has {num_labels} labels, and ranks have one")
        if self.task == "embed":
            read_sentence_facts(self.model)  # Raises for files that ask for what we do not have.
        if head == "vocabulary" and self.task == "embed":
            self.hf_config = copy(self.hf_config)
            leave_out_head(self.hf_config)

    def _resolve_vision(self) -> None:
        """Leave out a vision tower that no request of this engine could use."""
        is_of_use = self.task == "generate" and not self.text_only
        if getattr(self.hf_config, "vision", None) and not is_of_use:
            self.hf_config = copy(self.hf_config)
            self.hf_config.vision = None

    def _what_it_has(self, head: str) -> str:
        name = (getattr(self.hf_config, "architectures", None) or ["the model"])[0]
        return {
            "vocabulary": f"{name} has a head that generates, and none that classifies",
            "none": f"{name} has no head",
            "classes": f"{name} has a head that classifies; its base model generates or embeds",
        }[head]

    def _check_plain(self) -> None:
        """Raises ValueError for what the plain model does not do. It has the simple loop: no step overlaps another."""
        names = getattr(self.hf_config, "architectures", None) or []
        is_qwen3 = PLAIN_ARCHITECTURE in names[:1]
        self._require("plain", is_qwen3, f"False for {', '.join(names) or 'this model'}: it runs {PLAIN_ARCHITECTURE}")
        is_rounded = getattr(self.hf_config, "quantization_config", None) is not None
        self._require("plain", not is_rounded, "False for a quantized checkpoint")
        self.overlap_steps = False

    def _download_config(self) -> str:
        similar = similar_presets(self.model)
        meant = f"did you mean {' or '.join(similar)}?"
        # The hub asks for an organization: a mistyped shape needs no search there.
        if self.load_format == "dummy" and "/" not in self.model and similar:
            raise FileNotFoundError(f"model={quoted(self.model)}: no such directory, and no published shape: {meant}")
        try:
            return download(self.model, "model", OTHER_FILES, self.revision)
        except FileNotFoundError as error:
            if self.load_format != "dummy":
                raise
            raise FileNotFoundError(f"{error}; {meant if similar else _PUBLISHED}") from error

    def _resolve_device(self) -> None:
        available = torch.cuda.is_available()
        if self.device == "auto":
            self.device = "cuda" if available else "cpu"
        self._require("device", self.device == "cpu" or available, "cpu: torch finds no CUDA device")
        self.device_index = None
        if self.device == "cpu":
            return
        index = self.device.removeprefix("cuda").removeprefix(":")
        first, count = int(index) if index else torch.cuda.current_device(), torch.cuda.device_count()
        self._require("device", first < count, f"one of cuda:0..cuda:{count - 1}: {count} GPUs are visible")
        self._require(
            "tensor_parallel_size",
            self.tensor_parallel_size <= count - first,
            f"at most {count - first}: {count} GPUs are visible, and the first to use is cuda:{first}",
        )
        most = (count - first) // self.tensor_parallel_size
        self._require(
            "data_parallel_size",
            self.data_parallel_size <= most,
            f"at most {most} with tensor_parallel_size={self.tensor_parallel_size}: {count} GPUs are visible, and the "
            f"first to use is cuda:{first}",
        )
        self.device, self.device_index = "cuda", first

    def _resolve_dtype(self) -> None:
        name = self.dtype
        if name == "auto":
            name = "float32"
            if self.device == "cuda":
                # By name in the dictionary: transformers 5 warns of a look at the old attribute.
                own = vars(self.hf_config).get("dtype") or vars(self.hf_config).get("torch_dtype")
                own = str(own).removeprefix("torch.")
                name = own if own in ("bfloat16", "float16") else "bfloat16"
        self.dtype = DTYPES[name]

    def _resolve_formats(self) -> None:
        """Find the formats of the weights, the KV cache and the states."""
        stored = checkpoint_quantization(self.hf_config)
        self.weight_format: WeightFormat | None = stored.weights or QUANTIZATIONS.get(self.quantization or "")
        if stored.weights is not None:
            names = [name for name, format in QUANTIZATIONS.items() if isinstance(stored.weights, type(format))]
            allowed = f"None or {names[0]!r}, of a checkpoint in {names[0]}"
            self._require("quantization", self.quantization in (None, *names), allowed)
        is_used = self.state_dtype == "float32" or any(model_class(self.hf_config).spec(self.hf_config).linear_layers)
        self._require("state_dtype", is_used, "'float32' for a model without linear attention")
        self.state_dtype = DTYPES[self.state_dtype]
        check_layers(self)
        if self.weight_format is not None:
            self._check_products(self.weight_format)
        if self.kv_cache_dtype != "auto":
            found = self._gpu().capability
            allowed = "'auto' on a GPU of compute capability {}.{}: fp8 needs {}.{} or more"
            self._require("kv_cache_dtype", found >= FP8_CAPABILITY, allowed.format(*found, *FP8_CAPABILITY))
            self.kv_cache_dtype = E4M3
            return
        self.kv_cache_dtype = self.dtype
        if stored.has_kv_cache_scheme:
            logger.info("%s: has a kv_cache_scheme, which kv_cache_dtype='fp8' uses", self.model)

    def _check_products(self, format: WeightFormat) -> None:
        found = self._gpu().capability
        needed = format.check_gpu(found)
        if needed is not None:
            offer = ", perhaps with kv_cache_dtype='fp8', which works here" if found >= FP8_CAPABILITY else ""
            raise ValueError(
                f"quantization: products of fp8 need a GPU of compute capability {needed}, and this one has "
                f"{found[0]}.{found[1]}; use the unquantized checkpoint without quantization{offer}"
            )
        name = str(self.dtype).removeprefix("torch.")
        is_taken = self.device == "cpu" or name == "bfloat16" or not format.needs_bfloat16
        require("dtype", name, is_taken, "bfloat16 with weights in fp8")

    def _gpu(self) -> GpuFacts:
        """The first GPU. A CPU computes all that Hopper does."""
        return GpuFacts.of(torch.device(self.device, self.device_index or 0))

    def _resolve_limits(self) -> None:
        supported = self.supported_model_len = supported_length(self.hf_config)
        if self.max_model_len is None:
            allowed = f"given for a model of {supported} tokens: an integer in 2..{MAX_MODEL_LEN}"
            self._require("max_model_len", supported <= MAX_MODEL_LEN, allowed)
        self.max_model_len = min(self.max_model_len or supported, supported)
        self._require(
            "max_num_seqs",
            self.max_num_seqs * self.max_model_len < MAX_SLOTS,
            f"less than {-(-MAX_SLOTS // self.max_model_len)} with max_model_len={self.max_model_len}: a step counts "
            "the tokens of all its sequences in 32 bits",
        )

    def _resolve_eos(self) -> None:
        file = Path(self.model, "generation_config.json")
        self.generation_config: dict[str, Any] = read_json(file) if os.path.lexists(file) else {}
        if self.eos:
            size = self.hf_config.vocab_size
            self._require("eos", max(self.eos) < size, f"token ids in 0..{size - 1}, the model's vocabulary")
            self.eos = tuple(sorted(set(self.eos)))
            return
        self.eos = ()
        found = check_token_ids(self.generation_config.get("eos_token_id"), str(file), "eos_token_id")
        if not found:
            file = Path(self.model, "config.json")
            found = check_token_ids(getattr(self.hf_config, "eos_token_id", None), str(file), "eos_token_id")
        self.add_eos(found, str(file))

    def add_eos(self, token_ids: list[int], source: str) -> None:
        """Let sequences end at these tokens too; log and ignore those outside the vocabulary. source: for the log."""
        size = self.hf_config.vocab_size
        outside = [token for token in token_ids if token >= size]
        if outside:
            logger.warning("%s: ignoring eos_token_id %s, outside the vocabulary, 0..%d", source, outside, size - 1)
        self.eos = tuple(sorted({*self.eos, *token_ids}.difference(outside)))

    def _resolve_lora(self) -> None:
        if self.lora is None:
            return
        name, stored = str(self.lora), checkpoint_quantization(self.hf_config).weights
        if stored is not None:
            raise ValueError(
                f"lora={quoted(name)}: must be None for a checkpoint whose weights are rounded already, here to "
                f"{stored.name}: use the unquantized checkpoint, with quantization='fp8' or 'int4' to round it merged"
            )
        self.lora = str(find_directory(name, "lora") or download(name, "lora", ADAPTER_FILES))
        read_settings(self.lora)

    def _resolve_tokenizer(self) -> None:
        if self.skip_tokenizer_init:
            return
        if self.tokenizer is None:
            self.tokenizer = self.model if Path(self.model).is_dir() else None
            return
        name = str(self.tokenizer)
        self.tokenizer = str(find_directory(name, "tokenizer") or download(name, "tokenizer", OTHER_FILES))
