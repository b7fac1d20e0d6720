"""Checkpoints in int4, written out here, so that they depend on none of ours; and what their weights stand for."""

from pathlib import Path

import torch
from checkpoints import edit_json, edit_tensors
from fp8_checkpoints import is_quantized
from torch import Tensor

KINDS = ("compressed", "compressed with zeros", "awq", "gptq", "gptq with zeros", "gptq_v2")
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column in each four bits of an int32


def settings(kind: str, group: int | None) -> dict:
    """The quantization_config. group: None for whole rows."""
    if kind.startswith("compressed"):
        weights = {"num_bits": 4, "type": "int", "symmetric": kind == "compressed", "dynamic": False}
        weights |= {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
        group_0 = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
        groups = {"config_groups": {"group_0": group_0}, "ignore": ["lm_head"]}
        return {"quant_method": "compressed-tensors", "format": "pack-quantized", **groups}
    shared = {"bits": 4, "group_size": group or -1}
    if kind == "awq":
        return {"quant_method": "awq", **shared, "zero_point": True, "version": "gemm", "modules_to_not_convert": None}
    version = "gptq_v2" if kind == "gptq_v2" else "gptq"
    options = {"checkpoint_format": version, "sym": kind == "gptq", "desc_act": False, "lm_head": False}
    return {"quant_method": "gptq", **shared, **options}


def has_zeros(kind: str) -> bool:
    return kind not in ("compressed", "gptq")


def rounded(weight: Tensor, group: int | None, zeros: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Codes 0..15 [N, K], scales and zeros [N, K / group]."""
    groups = weight.float().unflatten(1, (-1, group or weight.shape[1]))
    low, high = groups.amin(2, keepdim=True).clamp(max=0), groups.amax(2, keepdim=True).clamp(min=0)
    scale = ((high - low) / 15 if zeros else groups.abs().amax(2, keepdim=True) / 7).clamp(min=1e-6)
    zero = (-low / scale).round().clamp(0, 15) if zeros else torch.full_like(scale, 8)
    codes = ((groups / scale).round() + zero).clamp(0, 15)
    return codes.flatten(1).int(), scale.squeeze(2), zero.squeeze(2).int()


def dequantized(weight: Tensor, group: int | None, zeros: bool) -> Tensor:
    codes, scale, zero = rounded(weight, group, zeros)
    groups = codes.unflatten(1, (-1, group or weight.shape[1])) - zero.unsqueeze(2)
    return (groups.float() * scale.unsqueeze(2)).flatten(1)


def packed(numbers: Tensor, dim: int, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Eight of 0..15 along dim in an int32; order: which one is in each four bits, from the lowest."""
    numbers = numbers.movedim(dim, -1)
    numbers = torch.nn.functional.pad(numbers, (0, -numbers.shape[-1] % 8)).unflatten(-1, (-1, 8)).long()
    total = sum(numbers[..., order[place]] << 4 * place for place in range(8))
    return torch.where(total >= 2**31, total - 2**32, total).int().movedim(-1, dim).contiguous()


def stored(weight: Tensor, kind: str, group: int | None) -> dict[str, Tensor]:
    """The tensors of a weight, by their last names."""
    codes, scale, zero = rounded(weight, group, has_zeros(kind))
    if kind.startswith("compressed"):
        shape = {"weight_shape": torch.tensor(weight.shape)}
        zeros = {"weight_zero_point": packed(zero, 0)} if has_zeros(kind) else {}
        return {"weight_packed": packed(codes, 1), "weight_scale": scale, **shape, **zeros}
    scales = {"scales": scale.t().contiguous()}
    if kind == "awq":
        return {"qweight": packed(codes.t(), 1, _AWQ_ORDER), "qzeros": packed(zero.t(), 1, _AWQ_ORDER), **scales}
    K = weight.shape[1]
    zeros = packed(zero.t(), 1) - (0 if kind == "gptq_v2" else 0x11111111)
    order = (torch.arange(K) // (group or K)).int()
    return {"qweight": packed(codes.t(), 0), "qzeros": zeros, "g_idx": order, **scales}


def quantize_checkpoint(path: Path, kind: str, group: int | None) -> Path:
    """Put a checkpoint of `make_checkpoint` into int4. Returns another one in floats, with the same numbers."""
    floats = path.with_name(f"{path.name}-floats")
    floats.mkdir()
    for file in path.iterdir():
        (floats / file.name).write_bytes(file.read_bytes())

    def names(tensors: dict[str, Tensor]) -> list[str]:
        return [name.removesuffix(".weight") for name in tensors if is_quantized(name.removesuffix(".weight"))]

    def dequantize(tensors: dict[str, Tensor]) -> None:
        for name in names(tensors):
            weight = tensors[f"{name}.weight"]
            tensors[f"{name}.weight"] = dequantized(weight, group, has_zeros(kind)).to(weight.dtype)

    def quantize(tensors: dict[str, Tensor]) -> None:
        for name in names(tensors):
            parts = stored(tensors.pop(f"{name}.weight"), kind, group)
            tensors.update({f"{name}.{last}": part for last, part in parts.items()})

    edit_tensors(floats, dequantize)
    edit_tensors(path, quantize)
    edit_json(path / "config.json", quantization_config=settings(kind, group))
    return floats
