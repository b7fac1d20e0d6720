"""Attention by Triton kernels that give a token the same bits in each step: of `deterministic=True` on a GPU."""

from nanovllm.kernels import HAS_TRITON
from nanovllm.kernels.attention.fixed_order import (
    MAX_HEAD_DIM,
    FixedOrderWorkspace,
    fixed_order_decode,
    fixed_order_prefill,
)
from nanovllm.layers.backends.backend import AttentionBackend


class FixedOrderTritonBackend(AttentionBackend):
    """The rows of a decode step need no plan: lengths and block tables say all. Rows of one sequence in a speculative
    step are computed apart."""

    name = "fixed_order"
    is_batch_invariant = True

    @classmethod
    def obstacle(cls, shape):
        if shape.device.type != "cuda":
            return "needs a CUDA device"
        if not HAS_TRITON:
            return "needs the triton package, which is not installed"
        if shape.is_fp8_cache:
            return "keeps no keys and values in fp8"
        return None if shape.head_dim <= MAX_HEAD_DIM else f"head_dim {shape.head_dim} is more than {MAX_HEAD_DIM}"

    def prepare(self, shape, windows, sizes, table):
        of_rows = sizes.max_rows, shape.num_heads, shape.head_dim
        self.workspace = FixedOrderWorkspace(*of_rows, sizes.max_model_len, shape.device)

    def prefill(self, layer, q, k, v, context, ends=None):
        """ends: as of `fixed_order_prefill`."""
        lengths = context.cu_seqlens_q, context.cu_seqlens_k, context.max_seqlen_q
        options = context.block_tables, layer.scale, layer.window, layer.sinks, ends
        return fixed_order_prefill(q, k, v, layer.k_cache, layer.v_cache, *lengths, *options)

    def decode(self, layer, q, context):
        step = layer.k_cache, layer.v_cache, context.context_lens, context.block_tables
        return fixed_order_decode(q, *step, layer.scale, self.workspace, layer.window, layer.sinks)
