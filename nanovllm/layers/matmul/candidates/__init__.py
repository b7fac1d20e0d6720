"""The candidates that compute products, a file each."""

import torch

from nanovllm.kernels import HAS_TRITON
from nanovllm.layers.matmul.candidate import Candidate
from nanovllm.layers.matmul.candidates.cublas import Cublas
from nanovllm.layers.matmul.candidates.dequantized import Dequantized
from nanovllm.layers.matmul.candidates.expert_tiles import ExpertTiles
from nanovllm.layers.matmul.candidates.experts_gemv import ExpertsGemv
from nanovllm.layers.matmul.candidates.fixed_order import FixedOrderProducts
from nanovllm.layers.matmul.candidates.four_bit_experts import FourBitExperts
from nanovllm.layers.matmul.candidates.four_bit_experts_gemv import FourBitExpertsGemv
from nanovllm.layers.matmul.candidates.four_bit_experts_hopper import FourBitExpertsHopper
from nanovllm.layers.matmul.candidates.four_bit_gemv import FourBitGemv
from nanovllm.layers.matmul.candidates.four_bit_hopper import FourBitHopper
from nanovllm.layers.matmul.candidates.four_bit_tiles import FourBitTiles
from nanovllm.layers.matmul.candidates.fused_silu import FusedSilu
from nanovllm.layers.matmul.candidates.gemv import Gemv
from nanovllm.layers.matmul.candidates.grouped_experts import GroupedExperts
from nanovllm.layers.matmul.candidates.int4_gemv import Int4Gemv
from nanovllm.layers.matmul.candidates.mxfp4_experts_gemv import Mxfp4ExpertsGemv
from nanovllm.layers.matmul.candidates.onednn import Onednn
from nanovllm.layers.matmul.candidates.quack import Quack
from nanovllm.layers.matmul.candidates.quack_experts import QuackExperts
from nanovllm.layers.matmul.candidates.scaled_mm import ScaledMm
from nanovllm.layers.matmul.candidates.split_k import SplitK

# What the tuner tries.
ALL: tuple[type[Candidate], ...] = (
    *(Cublas, ScaledMm, Dequantized, Gemv, SplitK, FusedSilu, Quack, ExpertTiles, ExpertsGemv, QuackExperts),
    *(Int4Gemv, FourBitGemv, FourBitTiles, FourBitHopper, FourBitExperts, FourBitExpertsGemv),
    *(FourBitExpertsHopper, GroupedExperts, Mxfp4ExpertsGemv),
)


def make_candidates(device: torch.device | None = None, quack: Quack | None = None) -> list[Candidate]:
    """Those that run on a device; without one the defaults. quack: None without quack-kernels."""
    candidates: list[Candidate] = [Cublas(), ScaledMm(), Dequantized(), Onednn(), ExpertTiles(), FixedOrderProducts()]
    if HAS_TRITON and device is not None and device.type == "cuda":
        candidates += [Gemv(), SplitK(device), FusedSilu(), ExpertsGemv()]
        candidates += [Int4Gemv(), FourBitGemv(device), FourBitTiles(device), FourBitHopper(device)]
        candidates += [FourBitExperts(), FourBitExpertsGemv(), FourBitExpertsHopper()]
        candidates += [Mxfp4ExpertsGemv(), GroupedExperts()]
    return candidates if quack is None else [*candidates, quack, QuackExperts(quack)]
