"""Checkpoints in fp8, and what their model computes: written out here, so that it depends on none of ours."""

from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from checkpoints import edit_json, edit_tensors, make_checkpoint
from torch import Tensor
from transformers import AutoModelForCausalLM

from nanovllm import LLM

E4M3 = torch.float8_e4m3fn
# Whole blocks of 128 x 128 on one rank, and with half as many rows or columns no longer.
BLOCK_SIZES = {"hidden_size": 128, "intermediate_size": 384, "head_dim": 64}
CHANNELS = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False},
            "input_activations": {
                "num_bits": 8,
                "type": "float",
                "strategy": "token",
                "symmetric": True,
                "dynamic": True,
            },
        }
    },
    "ignore": ["lm_head"],
}
BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def group(x: Tensor, rows: int, columns: int) -> Tensor:
    """[n, m] as [n / rows, rows, m / columns, columns]."""
    return x.reshape(len(x) // rows, rows, x.shape[1] // columns, columns)


def rounded(x: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """e4m3 values and the float32 scales of groups."""
    grouped = group(x.float(), rows, columns)
    scale = grouped.abs().amax((1, 3), keepdim=True) / 448
    values = torch.nan_to_num(grouped / scale).to(E4M3)
    return values.reshape(x.shape), scale[:, 0, :, 0]


def dequantized(values: Tensor, scale: Tensor) -> Tensor:
    rows, columns = len(values) // len(scale), values.shape[1] // scale.shape[1]
    return (group(values.float(), rows, columns) * scale[:, None, :, None]).reshape(values.shape)


def is_quantized(name: str) -> bool:
    """Whether a checkpoint in fp8 has a module of this name in fp8."""
    return name.endswith(("proj", "in_proj_qkv", "in_proj_z", "in_proj_qkvz")) and not name.endswith("router.proj")


def weight_group(weight: Tensor, in_blocks: bool) -> tuple[int, int]:
    return (128, 128) if in_blocks else (1, weight.shape[1])


def make_fp8_checkpoint(directory: Path, in_blocks: bool, **fields) -> Path:
    """A checkpoint of make_checkpoint, quantized like those of the hub: Qwen3-*-FP8, or FP8_DYNAMIC."""
    path = make_checkpoint(directory, **(BLOCK_SIZES if in_blocks else {}) | fields)
    quantize_checkpoint(path, in_blocks)
    return path


def quantize_checkpoint(path: Path, in_blocks: bool) -> None:
    def quantize(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if is_quantized(name.removesuffix(".weight"))]:
            values, scale = rounded(tensors[name], *weight_group(tensors[name], in_blocks))
            tensors[name] = values
            tensors[name + ("_scale_inv" if in_blocks else "_scale")] = scale

    edit_tensors(path, quantize)
    edit_json(path / "config.json", quantization_config=BLOCKS if in_blocks else CHANNELS)


def reference_model(path: Path, in_blocks: bool, with_inputs: bool = True) -> torch.nn.Module:
    """transformers' model of an unquantized checkpoint with rounded weights, and with_inputs rounded inputs too."""
    model = AutoModelForCausalLM.from_pretrained(path).float().eval()
    for name, module in model.named_modules():
        if isinstance(getattr(module, "down_proj", None), torch.nn.Parameter):
            for weight in (module.gate_up_proj, module.down_proj):
                for of_expert in weight.data:
                    of_expert.copy_(dequantized(*rounded(of_expert, *weight_group(of_expert, in_blocks))))
            module.forward = partial(_experts, module, in_blocks if with_inputs else None)
        elif is_quantized(name):
            weight = module.weight.data
            module.weight.data = dequantized(*rounded(weight, *weight_group(weight, in_blocks)))
            if with_inputs:
                module.register_forward_pre_hook(round_input(in_blocks))
    return model


def _rounded_input(x: Tensor, in_blocks: bool) -> Tensor:
    rows = x.flatten(0, -2)
    return dequantized(*rounded(rows, 1, 128 if in_blocks else x.shape[-1])).view(x.shape)


def round_input(in_blocks: bool):
    """A hook of a linear layer."""
    return lambda module, args: (_rounded_input(args[0], in_blocks),)


def _experts(module, in_blocks: bool | None, x: Tensor, experts: Tensor, shares: Tensor) -> Tensor:
    """What transformers 5 computes by the fused weights of all experts. in_blocks None: inputs are not rounded."""

    def product(x, weight):
        return F.linear(x if in_blocks is None else _rounded_input(x, in_blocks), weight)

    total = torch.zeros_like(x)
    for expert in experts.unique().tolist():
        token, slot = (experts == expert).nonzero(as_tuple=True)
        gate, up = product(x[token], module.gate_up_proj[expert]).chunk(2, dim=-1)
        y = product(module.act_fn(gate) * up, module.down_proj[expert])
        total.index_add_(0, token, y * shares[token, slot, None])
    return total


@torch.inference_mode()
def reference_logprobs(
    path: Path, prompt: list[int], completion: list[int], in_blocks: bool = False, with_inputs: bool = True
) -> Tensor:
    """Of the completion's tokens, by `reference_model`."""
    model = reference_model(path, in_blocks, with_inputs)
    logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None]).flatten()


def scored(llm: LLM, prompt: list[int], completion: list[int]) -> Tensor:
    """The same, by an engine."""
    (score,) = llm.score([prompt], [completion], use_tqdm=False)
    return torch.tensor(score["logprobs"])
