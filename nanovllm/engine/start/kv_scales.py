"""The scales of an fp8 KV cache: those of the checkpoint, calibrated ones, or 1.

All are powers of two (see `kernels.attention.kv_quantization`). They are chosen before the first key is stored, and
again when weights change, which empties the cache. So they hold for every block of it. CUDA graphs read them where they
are.
"""

import logging
from collections.abc import Iterable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from nanovllm.config import Config
from nanovllm.kernels.attention.kv_quantization import E4M3_MAX
from nanovllm.layers.attention import Attention
from nanovllm.layers.stores.paged_kv_cache import PagedKVCache
from nanovllm.layers.stores.store import Store
from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.models.layer_facts import attention_layers
from nanovllm.models.loader import open_tensors
from nanovllm.utils.context import Context, step_context

if TYPE_CHECKING:
    from nanovllm.models.loader import LoadedModel

logger = logging.getLogger(__name__)

# What checkpoints call the scales of a layer: llm-compressor and vLLM; ModelOpt; older compressed-tensors.
_NAMES = (
    "self_attn.{0}_scale",
    "self_attn.attn.{0}_scale",
    "self_attn.{0}_proj.{0}_scale",
    "self_attn.{0}_proj.output_scale",
)

# A later value may be this many times as large as the largest of the calibration before it is clamped. (Rounding the
# scale up to a power of two adds up to a factor of two.) e4m3 keeps full precision over 15 powers of two, so the margin
# costs next to none.
MARGIN = 4
_CALIBRATION_PROMPTS, _CALIBRATION_LENGTH = 8, 256
_SMALLEST_SCALE = 2.0**-14  # float16 then holds the smallest value of a cache exactly.


def choose_kv_scales(config: Config, model: "LoadedModel", stores: Iterable[Store]) -> str | None:
    """Fill the scales of the KV caches among the stores, if they have any, as the option kv_cache_scales says. All
    ranks must call this together. Returns what to say of them in the log; None if there are none."""
    caches = [store for store in stores if isinstance(store, PagedKVCache)]
    if caches[0].scales is None or not isinstance(model, DecoderForCausalLM):
        return None
    of_caches = {layer: scales for each in caches for layer, scales in zip(each.layers, each.scales or (), strict=True)}
    attentions: Any = [model.model.layers[i].self_attn for i in attention_layers(model)]  # in the model's order
    layers = [each.attn for each in attentions]
    all_scales = [of_caches[layer] for layer in layers]
    are_calibrated = False
    wanted, source = config.kv_cache_scales, "one"
    found: list[torch.Tensor] | None = None
    if wanted in ("auto", "checkpoint") and config.load_format != "dummy":
        found, source = checkpoint_scales(config, model), "the checkpoint"
    if found is None and wanted == "checkpoint":
        raise ValueError(
            f"kv_cache_scales='checkpoint': {config.model} has no scales, such as "
            f"'model.layers.0.{_NAMES[0].format('k')}', or load_format='dummy' reads none; use 'calibrated'"
        )
    if found is None and wanted != "one":
        found, source = calibrated_scales(config, model, layers, all_scales), "calibration"
        are_calibrated = True
    for cache in caches:
        cache.are_scales_calibrated = are_calibrated
    for scales, of_layer in zip(all_scales, found or (), strict=found is not None):
        scales.copy_(powers_of_two(of_layer))
    smallest, largest = torch.cat(all_scales, dim=1).aminmax()
    return f"{source}, {smallest.item():g} to {largest.item():g}"


def calibrate_again(config: Config, model: "LoadedModel", stores: Iterable[Store]) -> None:
    """Choose the scales again, if they depend on the weights, which are others now. The caches must be empty. All ranks
    must call this together."""
    if any(isinstance(store, PagedKVCache) and store.are_scales_calibrated for store in stores):
        choose_kv_scales(config, model, stores)


def powers_of_two(scales: torch.Tensor) -> torch.Tensor:
    """The next powers of two that are not smaller."""
    mantissa, exponent = torch.frexp(scales)
    exponent = exponent - (mantissa == 0.5).int()
    return torch.ldexp(torch.ones_like(scales), exponent).clamp(min=_SMALLEST_SCALE)


def checkpoint_scales(config: Config, model: DecoderForCausalLM) -> list[torch.Tensor] | None:
    """Float32 `[2, this rank's kv_heads]` of each layer; None if the checkpoint has none. Raises ValueError, naming the
    tensor, if it has some of them only, or wrong ones."""
    scales, missing = [], []
    with ExitStack() as stack:
        tensors = open_tensors(config.model, stack, model.checkpoint_prefixes)
        for layer in attention_layers(model):
            projection: Any = model.model.layers[layer].self_attn.qkv_proj  # type: ignore[union-attr]
            num_kv_heads = projection.matrix_sizes["k"] // projection.head_size
            first, count = projection.first_kv_head, projection.num_kv_heads
            scales.append(torch.ones(2, count))
            for i, part in enumerate("kv"):
                names = [f"model.layers.{layer}.{name.format(part)}" for name in _NAMES]
                name = next((name for name in names if name in tensors), None)
                if name is None:
                    missing.append(names[0])
                    continue
                values = tensors[name].content[...].float().flatten()
                is_valid = values.numel() in (1, num_kv_heads) and (values > 0).all() and values.isfinite().all()
                if not is_valid:
                    raise ValueError(
                        f"{tensors[name].file}: tensor {name!r} must hold one number above 0, or one for each of "
                        f"{num_kv_heads} KV heads, not {values.tolist()[: num_kv_heads + 1]}"
                    )
                scales[-1][i] = values.expand(num_kv_heads)[first : first + count]
    if len(missing) == 2 * len(scales):
        return None
    if missing:
        raise ValueError(
            f"{config.model}: {missing[0]!r} is missing, and so are {len(missing) - 1} other scales of the KV cache, "
            "but not all; use kv_cache_scales='calibrated'"
        )
    return scales


@torch.inference_mode()
def calibrated_scales(
    config: Config, model: DecoderForCausalLM, layers: Iterable[Attention], like: Iterable[torch.Tensor]
) -> list[torch.Tensor]:
    """Find by prefills of a few prompts, without a cache, the scales with which the largest key and value of each head
    are a `MARGIN`-th of the largest e4m3 number. They depend on the model alone (and on max_model_len, if that is
    shorter than a prompt), not on what the engine will be asked."""
    largest = [torch.zeros_like(scales) for scales in like]
    device = largest[0].device
    with ExitStack() as hooks:
        for layer, of_layer in zip(layers, largest, strict=True):

            def record(q, k, v, context, attend=layer.attend, of_layer=of_layer) -> torch.Tensor:
                for x, of_part in zip((k, v), of_layer, strict=True):
                    torch.maximum(of_part, x.abs().amax((0, 2)).float(), out=of_part)
                return attend(q, k, v, context)

            vars(layer)["attend"] = record
            hooks.callback(vars(layer).pop, "attend")
            # What is written to a cache is rounded by the scales that it has so far.
            hooks.callback(_set_caches, layer, layer.k_cache, layer.v_cache)
            _set_caches(layer, *2 * (layer.k_cache.new_empty(0),))
        prompts = _calibration_prompts(config).to(device)
        # A CPU dequantizes a weight in fp8 for each product. A GPU's kernels for more tokens may not be compiled yet.
        for together in prompts.split(len(prompts) if device.type == "cpu" else 1):
            num_prompts, length = together.shape
            cu_seqlens = torch.arange(num_prompts + 1, dtype=torch.int32, device=device) * length
            positions = torch.arange(length, device=device).repeat(num_prompts)
            no_cells = cu_seqlens.new_full((4, num_prompts), -1)  # A model with states begins with empty ones.
            with step_context(Context(True, cu_seqlens, cu_seqlens, length, length, cells=no_cells)):
                model(together.flatten(), positions)
    if not all(
        of_layer.isfinite().all() for of_layer in largest
    ):  # The cache would clamp infinity to a number, and the logits not show it.
        logger.warning(
            "KV cache scales: the calibration found keys or values that are NaN or infinite: the weights are damaged, "
            "or overflow in dtype %s; try dtype='float32', or 'bfloat16' instead of float16",
            str(config.dtype).removeprefix("torch."),
        )
    # Of zeros alone, and of what is not finite, no scale follows.
    for of_layer in largest:
        of_layer[~of_layer.isfinite() | (of_layer == 0)] = E4M3_MAX / MARGIN
    return [of_layer * (MARGIN / E4M3_MAX) for of_layer in largest]


def _set_caches(layer: Attention, k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
    layer.k_cache, layer.v_cache = k_cache, v_cache


def _calibration_prompts(config: Config) -> torch.Tensor:
    """Random tokens, equal at every start. Every second prompt begins with the model's BOS token."""
    # numpy's generator gives the same numbers on every device.
    shape = _CALIBRATION_PROMPTS, min(_CALIBRATION_LENGTH, cast(int, config.max_model_len))
    prompts = np.random.default_rng(0).integers(config.hf_config.vocab_size, size=shape)
    bos = getattr(config.hf_config, "bos_token_id", None)
    if isinstance(bos, int) and 0 <= bos < config.hf_config.vocab_size:
        prompts[::2, 0] = bos
    return torch.from_numpy(prompts)
