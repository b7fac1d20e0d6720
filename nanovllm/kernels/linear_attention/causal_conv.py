"""The input of the gated delta rule: a short causal convolution over q, k and v, SiLU, and L2 norms of q and k.

Each channel is convolved with its own last inputs. Those of before the step are the sequence's tail. q and k are
normalized per head, as `x / sqrt(sum(x^2) + 1e-6)`. Everything is computed in float32.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

L2_EPS = 1e-6  # that of the published models, which their configurations do not name


def convolve_torch(windows: Tensor, weight: Tensor, key_dim: int, num_key_heads: int) -> Tensor:
    """Of each token q, k and v, float32 `[num_tokens, conv_dim]`.

    windows: `[num_tokens, taps, conv_dim]`, the inputs that a token sees, its own last. weight: `[conv_dim, taps]`.
    """
    mixed = F.silu((windows.float() * weight.float().t()).sum(1))
    heads = mixed[:, : 2 * num_key_heads * key_dim].view(len(mixed), 2 * num_key_heads, key_dim)
    heads *= torch.rsqrt(heads.square().sum(-1, keepdim=True) + L2_EPS)
    return mixed
