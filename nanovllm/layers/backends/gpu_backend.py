"""What the back ends of a GPU share: long prefills may be flash-attn-4's."""

from abc import abstractmethod

from torch import Tensor

from nanovllm.kernels import HAS_TRITON
from nanovllm.layers.backends.backend import AttentionBackend, AttentionLayer, AttentionShape, StepSizes
from nanovllm.layers.backends.flash_attn4 import FlashAttn4, load_flash_attn4
from nanovllm.layers.matmul.table import Table
from nanovllm.utils.context import Context


class GpuBackend(AttentionBackend):
    """A back end that leaves prefills to flash-attn-4, except for short prompts, few tokens, and layers with a
    window or sinks.

    A call of flash-attn-4 costs the host twice as much as one of our kernels. So it pays only if the device works on a
    layer for longer than the host launches it: for steps of many new tokens, and for sequences with many keys.

    Attributes:
        max_short_prompt: tokens of a prompt up to which its own prefill is faster than flash-attn-4.
        flash_attn4_min_tokens: new tokens from which on a step is given to flash-attn-4.
        max_few_keys: of a sequence; a step with one that has more keys is given to flash-attn-4.
        flash_attn4: None where it is not used.
    """

    flash_attn4: FlashAttn4 | None = None
    max_short_prompt = flash_attn4_min_tokens = max_few_keys = 0

    @property
    def description(self) -> str:
        if self.flash_attn4 is None:
            return self.name
        return f"{self.name} (prefill: flash-attn-4, in steps of {self.flash_attn4_min_tokens} tokens or more)"

    @classmethod
    def obstacle(cls, shape: AttentionShape) -> str | None:
        if shape.device.type != "cuda":
            return "needs a CUDA device; on a CPU use torch"
        return None if HAS_TRITON else "needs the triton package, which is not installed"

    def prepare(self, shape, windows, sizes, table):
        self.use_flash_attn4(shape, sizes, table)

    def use_flash_attn4(self, shape: AttentionShape, sizes: StepSizes, table: Table) -> None:
        """Use it from now on, if it is installed and supports this model. It is not imported, which takes seconds, if
        no step can be long enough for it."""
        self.flash_attn4_min_tokens = table.setting("flash_attn4", "min_layer_work") // sizes.num_layer_params
        self.max_short_prompt = table.setting("flash_attn4", "max_short_prompt").get(self.name, 0)
        self.max_few_keys = table.setting("flash_attn4", "max_few_keys")
        has_many_tokens = sizes.max_num_batched_tokens >= self.flash_attn4_min_tokens
        if has_many_tokens or sizes.max_model_len > self.max_few_keys:
            self.flash_attn4 = load_flash_attn4(shape.dtype, shape.head_dim, shape.device)

    def prefill(self, layer, q, k, v, context):
        longest = context.max_seqlen_k
        is_short = context.block_tables is None and longest <= self.max_short_prompt
        are_few = len(k) < self.flash_attn4_min_tokens and longest <= self.max_few_keys
        reads_fp8 = context.block_tables is not None and layer.kv_scales is not None
        is_plain = layer.window is None and layer.sinks is None
        out = None
        if self.flash_attn4 is not None and is_plain and not is_short and not are_few and not reads_fp8:
            out = self.flash_attn4.prefill(q, k, v, layer.k_cache, layer.v_cache, context, layer.scale)
        return self.own_prefill(layer, q, k, v, context) if out is None else out

    @abstractmethod
    def own_prefill(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        """`prefill` without flash-attn-4."""
