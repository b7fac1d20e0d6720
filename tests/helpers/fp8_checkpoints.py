"""Checkpoints in fp8, and what their model computes: written out here, so that it depends on none of ours, except that
it follows an engine where an input is as near to one e4m3 number as to the next."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
from checkpoints import edit_json, edit_tensors, make_checkpoint, make_llm, random_prompt
from torch import Tensor
from transformers import AutoModelForCausalLM

from nanovllm import LLM
from nanovllm.layers.formats.fp8 import Fp8

E4M3 = torch.float8_e4m3fn
# What the order of float32's sums may change of a logprob (the tests without quantization allow as much), and of an
# input over the largest of its row. Rounding to e4m3 changes them by 1e-1 and 3e-2.
TOLERANCE = 1e-4
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


def divided(x: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """x over the scales of groups, and these: float32."""
    grouped = group(x.float(), rows, columns)
    # By factors, as the engine does: a division may give the next float32, and that another e4m3 number.
    scale = grouped.abs().amax((1, 3), keepdim=True) * (1 / 448)
    scaled = grouped * torch.where(scale > 0, 1 / scale, 0.0)
    return scaled.reshape(x.shape), scale[:, 0, :, 0]


def rounded(x: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """e4m3 values and the float32 scales of groups."""
    scaled, scale = divided(x, rows, columns)
    return scaled.to(E4M3), scale


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


class RoundedInputs:
    """What an engine's products in fp8 multiplied, for a reference that is to round alike.

    An engine and a reference add in different orders. So an input that stands on the edge between two e4m3 numbers may
    be rounded up by one and down by the other. That number then differs by up to an eighth, and soon many others do: no
    bound on the results follows from the dtype. So the reference takes the engine's e4m3 number where it is as near as
    its own. What is left are differences of float32.
    """

    def __init__(self) -> None:
        # Linear attention normalizes the output of each head, however small: a row may be far off, not all of them.
        self.is_hybrid = False
        self._rows: dict[int, list[Tensor]] = {}

    def add(self, values: Tensor) -> None:
        """values: e4m3 numbers `[num_tokens, K]`, without their scales."""
        self._rows.setdefault(values.shape[1], []).append(values.float())

    def nearest(self, scaled: Tensor) -> Tensor:
        """Each row of `[num_tokens, K]`, of magnitudes up to 448, as the engine rounded it. A factor of a row is in its
        scale alone, so it does not matter where the engine multiplies by one.

        Raises:
            AssertionError: the engine multiplied no row that is this one, rounded to nearest.
        """
        rows = torch.cat(self._rows[scaled.shape[1]])
        found = rows[torch.cdist(scaled, rows, compute_mode="donot_use_mm_for_euclid_dist").argmin(1)]
        excess = (found - scaled).abs() - (scaled.to(E4M3).float() - scaled).abs()
        worst = excess.amax(1)
        off = worst.mean() if self.is_hybrid else worst.max()
        assert off <= TOLERANCE * 448, "the engine's inputs are others, or are not rounded to nearest"
        return found


@contextmanager
def recorded_inputs() -> Iterator[RoundedInputs]:
    """Those of the engines of this process."""
    inputs, quantize_input = RoundedInputs(), Fp8.quantize_input

    def record(format, x, *args):
        quantized = quantize_input(format, x, *args)
        inputs.add(quantized.values)
        return quantized

    with mock.patch.object(Fp8, "quantize_input", record):
        yield inputs


def reference_model(path: Path, in_blocks: bool, inputs: RoundedInputs) -> torch.nn.Module:
    """transformers' model of an unquantized checkpoint, with weights and inputs rounded."""
    model = AutoModelForCausalLM.from_pretrained(path).float().eval()
    for name, module in model.named_modules():
        if isinstance(getattr(module, "down_proj", None), torch.nn.Parameter):
            for matrices in (_of_experts(module, "gate_up_proj"), _of_experts(module, "down_proj")):
                for matrix in matrices:
                    matrix.copy_(dequantized(*rounded(matrix, *weight_group(matrix, in_blocks))))
            module.forward = partial(_experts, module, in_blocks, inputs)
        elif is_quantized(name):
            weight = module.weight.data
            module.weight.data = dequantized(*rounded(weight, *weight_group(weight, in_blocks)))
            module.register_forward_pre_hook(round_input(in_blocks, inputs))
    return model


def _rounded_input(x: Tensor, in_blocks: bool, inputs: RoundedInputs) -> Tensor:
    scaled, scale = divided(x.flatten(0, -2), 1, 128 if in_blocks else x.shape[-1])
    return dequantized(inputs.nearest(scaled), scale).view(x.shape)


def round_input(in_blocks: bool, inputs: RoundedInputs):
    """A hook of a linear layer."""
    return lambda module, args: (_rounded_input(args[0], in_blocks, inputs),)


def _of_experts(module, name: str) -> Tensor:
    """[num_experts, N, K]. gpt-oss, whose experts have biases, has them with columns first."""
    weights = getattr(module, name).data
    return weights.transpose(1, 2) if hasattr(module, f"{name}_bias") else weights


def _experts(module, in_blocks: bool, inputs: RoundedInputs, x: Tensor, experts: Tensor, shares: Tensor) -> Tensor:
    """What transformers 5 computes by the fused weights of all experts."""

    def product(x, name, expert):
        y = F.linear(_rounded_input(x, in_blocks, inputs), _of_experts(module, name)[expert])
        return y + getattr(module, f"{name}_bias")[expert] if hasattr(module, f"{name}_bias") else y

    def gated(x):
        if hasattr(module, "limit"):
            return module._apply_gate(x)
        gate, up = x.chunk(2, dim=-1)
        return module.act_fn(gate) * up

    total = torch.zeros_like(x)
    for expert in experts.unique().tolist():
        token, slot = (experts == expert).nonzero(as_tuple=True)
        y = product(gated(product(x[token], "gate_up_proj", expert)), "down_proj", expert)
        total.index_add_(0, token, y * shares[token, slot, None])
    return total


@torch.inference_mode()
def reference_logprobs(
    path: Path, prompt: list[int], completion: list[int], inputs: RoundedInputs, in_blocks: bool = False
) -> Tensor:
    """Of the completion's tokens, by `reference_model`."""
    model = reference_model(path, in_blocks, inputs)
    # Without the last token: an engine that generates it has no use for its inputs.
    logits = model(torch.tensor([(prompt + completion)[:-1]])).logits[0, len(prompt) - 1 :]
    return logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None]).flatten()


def scored(llm: LLM, prompt: list[int], completion: list[int]) -> Tensor:
    """The same, by an engine."""
    (score,) = llm.score([prompt], [completion], use_tqdm=False)
    return torch.tensor(score["logprobs"])


def assert_scores_like_the_reference(
    path: Path, plain: Path, prompt: list[int], completion: list[int], in_blocks: bool = False, **options
) -> None:
    """An engine with options on a checkpoint, against `reference_model` of the same checkpoint unquantized."""
    with make_llm(path, **options) as llm, recorded_inputs() as inputs:
        found = scored(llm, prompt, completion)
    expected = reference_logprobs(plain, prompt, completion, inputs, in_blocks)
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)


def short_scores(llm: LLM) -> Tensor:
    """Logprobs [16, 4] of short completions. In most of them no input stands on an edge between two e4m3 numbers."""
    prompts, completions = ([random_prompt(4, seed) for seed in range(first, first + 16)] for first in (0, 16))
    return torch.tensor([each["logprobs"] for each in llm.score(prompts, completions, use_tqdm=False)])


def many_scores(llm: LLM) -> Tensor:
    """Logprobs [8, 60], whose errors by rounding average out."""
    prompts, completions = ([random_prompt(size, size + i) for i in range(8)] for size in (40, 60))
    return torch.tensor([each["logprobs"] for each in llm.score(prompts, completions, use_tqdm=False)])
