"""Whether a model can be loaded, from its shapes and its files' headers, before anything is allocated for it."""

import logging
from copy import copy
from typing import TYPE_CHECKING

from nanovllm.config import Config
from nanovllm.models.heads import head_of, note_score_bias
from nanovllm.models.loader import check_checkpoint, has_any_tensor, has_other_head, has_tensor
from nanovllm.models.model_size import meta_model, model_bytes, packed_head_bytes
from nanovllm.models.registry import find_vision, model_class
from nanovllm.utils.checks import require
from nanovllm.utils.host_memory import host_memory
from nanovllm.utils.units import GIB

if TYPE_CHECKING:
    from nanovllm.models.loader import LoadedModel

logger = logging.getLogger(__name__)


def check_model(config: Config, rank: int, free: int) -> None:
    """Raises FileNotFoundError or ValueError if the checkpoint is not the model's, and MemoryError, with the numbers,
    if there is no room for the weights.

    Rank 0 compares the headers of the files, before there are other ranks. Each rank checks the memory of its own GPU,
    and rank 0 that of a CPU. Where the checkpoint has a head of its own, though the configuration ties it to the
    embedding, the configuration is changed, as transformers does.

    Args:
        free: bytes of the rank's GPU; not read on a CPU.
    """
    number = config.data_parallel_size
    require(
        "data_parallel_size",
        number,
        number == 1,
        f"1 of one engine: LLM(model, data_parallel_size={number}) has several",
    )
    has_files = rank == 0 and config.load_format != "dummy"
    if has_files and config.hf_config.tie_word_embeddings and head_of(config.hf_config) == "vocabulary":
        untie_other_head(config)
    if has_files and head_of(config.hf_config) == "classes" and has_tensor(config.model, "score.bias"):
        config.hf_config = copy(config.hf_config)
        note_score_bias(config.hf_config)
    if has_files and getattr(config.hf_config, "vision", None):
        leave_out_missing_tower(config)
    model = meta_model(config, rank)
    if has_files:
        check_checkpoint(model, config.model, config.lora)
    if rank == 0 or config.device == "cuda":
        _check_memory(config, model, rank, free)


def untie_other_head(config: Config) -> None:
    if has_other_head(config.model, model_class(config.hf_config).checkpoint_prefixes, config.lora):
        logger.warning(
            "%s: config.json ties the head to the embedding, but lm_head.weight is another matrix: it is loaded",
            config.lora or config.model,
        )
        config.hf_config = copy(config.hf_config)
        config.hf_config.tie_word_embeddings = False


def leave_out_missing_tower(config: Config) -> None:
    """Load a checkpoint of the text model alone as that, though its configuration describes a vision tower."""
    spec = find_vision(config.hf_config)
    if spec is not None and not has_any_tensor(config.model, tuple(spec.prefixes)):
        logger.info("%s: has no vision tower: prompts are texts alone", config.model)
        config.hf_config = copy(config.hf_config)
        config.hf_config.vision = None


def _check_memory(config: Config, model: "LoadedModel", rank: int, free: int) -> None:
    sizes = model_bytes(config, model)
    needed = sizes.weights + sizes.tables
    if config.device == "cpu":
        needed += packed_head_bytes(config, model)
        memory, needed = host_memory(), needed * config.tensor_parallel_size
        free, where, remedy = memory.available, f"available in {memory.limit}", "a smaller model"
    else:
        where = "free on the GPU" + (f" of rank {rank}" if config.tensor_parallel_size > 1 else "")
        remedy = "more GPUs (tensor_parallel_size), or a smaller model; end what else holds this GPU's memory"
    if needed <= free:
        return
    dtype = str(config.dtype).removeprefix("torch.")
    remedy += "; dtype='bfloat16'" if config.dtype.itemsize > 2 else ""
    remedy += "; quantization='fp8' or 'int4'" if config.weight_format is None else ""
    raise MemoryError(
        f"model={config.model!r}: its weights take {needed / GIB:.2f} GiB in {dtype}, and {free / GIB:.2f} GiB are "
        f"{where}. What helps: {remedy}"
    )
