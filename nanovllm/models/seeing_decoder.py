"""A decoder that sees images: rows of embeddings stand in for placeholder tokens."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, cast

from torch import Tensor

from nanovllm.layers.backends.backend import AttentionBackend
from nanovllm.layers.backends.image_attention import ImageAttention, ImageSpan
from nanovllm.layers.layernorm import Normed
from nanovllm.models.decoder import DecoderForCausalLM, DecoderModel
from nanovllm.models.vision import VisionSpec
from nanovllm.utils.context import get_context


class ImageRows(NamedTuple):
    """The images of a prefill, as `Context.images`.

    Attributes:
        at: int64 [num_image_tokens], where in the batch the rows stand.
        rows: [num_image_tokens, row_size]: the row of each, and what it adds to the outputs of the first layers.
        spans: of each image that attends in both directions.
        ends: int32 [num_tokens], where there are spans, the position behind the last key that each token of the batch
            sees; else None.
    """

    at: Tensor
    rows: Tensor
    spans: Sequence[ImageSpan] = ()
    ends: Tensor | None = None


class SeeingModel(DecoderModel):
    """A DecoderModel that reads the context's images. Steps without images are computed as ever."""

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        context = get_context()
        if context.rope_positions is not None:
            positions = context.rope_positions
        images: ImageRows | None = context.images
        if images is None:
            return super().forward(input_ids, positions)
        if self.tp.reducer is not None:
            self.tp.reducer.begin_pass(2 * len(self.layers), False)
        norms: list[Any] = [layer.input_layernorm for layer in self.layers] + [self.norm]
        residual = self.embed_tokens(input_ids)
        if self.embedding_scale != 1:
            residual *= self.embedding_scale
        own, *added = images.rows.split(residual.shape[1], dim=1)
        residual.index_copy_(0, images.at, own)
        hidden = Normed(residual, norms[0])
        for i, (layer, next_norm) in enumerate(zip(self.layers, norms[1:], strict=True)):
            is_last = next_norm is self.norm
            if i >= len(added):
                hidden = layer(positions, hidden, next_norm, context.last_tokens if is_last else None)
                continue
            residual = layer(positions, hidden, None).value()
            residual.index_add_(0, images.at, added[i])
            hidden = Normed(residual, next_norm)
        return hidden.value()


class SeeingDecoder(DecoderForCausalLM):
    """A DecoderForCausalLM with the vision tower of its checkpoint. A family that sees images derives from this class
    first, and then from its text model's.

    Attributes:
        vision_spec: None for a checkpoint of the text model alone.
        vision: the tower.
    """

    vision_type: ClassVar[type[VisionSpec]]
    decoder = SeeingModel

    def __init__(self, config, *args):
        super().__init__(config, *args)
        self.vision_spec = None
        if getattr(config, "vision", None):
            spec = self.vision_spec = self.vision_type(config)
            if spec.num_added >= config.num_hidden_layers:
                raise ValueError(
                    f"deepstack_visual_indexes: {spec.num_added} layers, for which num_hidden_layers="
                    f"{config.num_hidden_layers} is too few: the last layer's output is the model's"
                )
            self._windows = self.checked_spec(config).windows
            self.vision = spec.make_tower().eval()
            vars(self)["checkpoint_prefixes"] = type(self).checkpoint_prefixes | spec.prefixes

    def see_both_ways(self, kind: Callable[[AttentionBackend], ImageAttention] = ImageAttention) -> None:
        """Let images attend in both directions, if the family's do: on top of the back end that each layer has now.
        kind: what computes that."""
        spec, layers = self.vision_spec, cast(Any, self.model.layers)
        if spec is None or not spec.is_bidirectional:
            return
        # As configured: where no sequence exceeds a window, the layer itself has none.
        for layer, window in zip(layers, self._windows, strict=True):
            if spec.both_ways_in == "all layers" or window is not None:
                layer.self_attn.attn.backend = kind(layer.self_attn.attn.backend)
