"""ImageColumns: the images of a step's prompts, from their pixels to rows of embeddings."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanovllm.engine.features.columns import Columns, ContextFields
from nanovllm.engine.features.images.image_sequence import ImageSequence, PlacedImage
from nanovllm.engine.step import Rows, Step
from nanovllm.layers.backends.image_attention import ImageSpan
from nanovllm.models.seeing_decoder import ImageRows, SeeingDecoder
from nanovllm.models.vision import ProcessedImage, send


class _Piece(NamedTuple):
    """Rows of one image that a prefill computes: `length` of them from `first` on. They are the step's from `to` on."""

    first: int
    length: int
    to: int


class _Encoded(NamedTuple):
    """An image that the tower computes in a step.

    Attributes:
        image: what it reads.
        pieces: the rows that prompts of the step need.
        key: if its rows are kept for the next step, of what they are; else None.
    """

    image: ProcessedImage
    pieces: list[_Piece]
    key: tuple[int, int] | None


class _ImageWork(NamedTuple):
    """What all ranks do for the images of a prefill, as `Step.extras["images"]`."""

    num_rows: int  # that the step's prompts need
    kept: list[_Piece]  # of the image that the step before has kept
    encoded: list[_Encoded]
    spans: list[ImageSpan]  # where images attend in both directions


class ImageColumns(Columns):
    """Lets the vision tower compute the images of a prefill, in front of it on the same device, and hands their rows to
    the model. With M-RoPE, also the positions.

    An image is computed when a step needs one of its rows. If a chunk of its prompt cuts it, the rows are kept for the
    next step: those of one image, because at most one prompt goes on in the next step.

    Attributes:
        max_image_rows: of the largest image.
        max_patches: that the tower computes at once.
    """

    def __init__(
        self,
        model: SeeingDecoder,
        dtype: torch.dtype,
        device: torch.device,
        max_model_len: int,
        one_by_one: bool = False,
    ):
        """
        Args:
            dtype: of the model.
            one_by_one: whether the tower computes each image alone. Then its operations have the same shapes each time,
                and so an image's rows have the same bits, whatever images a step has beside it.
        """
        spec: Any = model.vision_spec
        self._spec, self._tower, self._dtype, self._device = spec, model.vision, dtype, device
        self.max_image_rows, self.max_patches = spec.limits(max_model_len)
        self._one_by_one = one_by_one
        self._kept = torch.empty(self.max_image_rows, spec.row_size, dtype=dtype, device=device)
        self._kept_key: tuple[int, int] | None = None  # (seq_id, index of the image) of what it has
        if spec.has_axes:
            layers: Any = model.model.layers
            tables = (layer.self_attn.rotary_emb for layer in layers if layer.self_attn is not None)
            self._rope: Tensor = next(table.cos_sin_cache for table in tables if table is not None)
            self._axes = torch.tensor(spec.axes(self._rope.shape[-1] // 2), device=device)

    def layout(self, max_rows):
        return {"rope_positions": ((max_rows,), np.int64)} if self._spec.has_axes else {}

    def is_used(self, step):
        if step.is_prefill:
            return any(isinstance(seq, ImageSequence) for seq in step.seqs)
        return self._spec.has_axes

    # -- steps without new images ------------------------------------------------------------------------------------

    def write(self, step, rows, host, num_rows):
        positions, num_tokens = host["rope_positions"][:num_rows], len(rows.positions)
        positions[:num_tokens] = rows.positions
        positions[num_tokens:] = 0
        deltas = [seq.images.delta if isinstance(seq, ImageSequence) else 0 for seq in step.seqs]
        if any(deltas):
            positions[:num_tokens] += np.array(deltas)[rows.owners]
        return {"rope_positions": positions}

    def context(self, arrays, num_rows, kind):
        return {"rope_positions": arrays["rope_positions"][:num_rows]} if self._spec.has_axes else {}

    # -- prefills ----------------------------------------------------------------------------------------------------

    def prefill(self, step, rows):
        work, at = _ImageWork(0, [], [], []), list[np.ndarray]()
        known: dict[bytes, _Encoded] = {}  # what this step computes, by content
        firsts = rows.heads + 1 - [seq.num_scheduled_tokens for seq in step.seqs]  # rows of the batch
        for owner, (seq, first) in enumerate(zip(step.seqs, firsts.tolist(), strict=True)):
            if not isinstance(seq, ImageSequence):
                continue
            begin, end = seq.num_cached_tokens, seq.num_cached_tokens + seq.num_scheduled_tokens
            for index, placed in enumerate(seq.images.each):
                start, stop = max(begin, placed.start), min(end, placed.end)
                if start >= stop:
                    continue
                at.append(np.arange(start, stop) - begin + first)
                piece = _Piece(start - placed.start, stop - start, work.num_rows)
                work = work._replace(num_rows=work.num_rows + piece.length)
                if self._spec.is_bidirectional:
                    work.spans.append(ImageSpan(start - begin + first, piece.length, start, owner, placed.start))
                key = seq.seq_id, index
                if key == self._kept_key:
                    work.kept.append(piece)
                else:
                    _plan(work.encoded, known, placed, piece, key if stop < placed.end else None)
        step.extras["images"] = work
        arrays = {"image_rows": np.concatenate(at)} if at else {}
        if work.spans:
            ends = rows.positions + 1
            for span in work.spans:
                ends[span.row : span.row + span.length] = span.end
            arrays["image_ends"] = ends.astype(np.int32)
        if self._spec.has_axes:
            arrays["rope_axes"] = self._positions(step, rows)
        return arrays

    @staticmethod
    def _positions(step: Step, rows: Rows) -> np.ndarray:
        """The three parts of the position of each row, int64 [3, num_rows]."""
        found = np.broadcast_to(rows.positions, (3, len(rows.positions))).copy()
        end = 0
        for seq in step.seqs:
            start, end = end, end + seq.num_scheduled_tokens
            if isinstance(seq, ImageSequence):
                first = seq.num_cached_tokens
                found[:, start:end] = seq.images.of_tokens(first, first + seq.num_scheduled_tokens)
        return found

    def prefill_context(self, arrays, step):
        work: _ImageWork | None = step.extras.get("images")
        if work is None:
            return {}
        fields: ContextFields = {}
        if work.num_rows:
            at, ends = arrays["image_rows"], arrays.get("image_ends")
            fields["images"] = ImageRows(at, self._rows(work), work.spans, ends)
        if self._spec.has_axes:
            fields |= self._rotation(arrays["rope_axes"])
        return fields

    def largest_prefill(self, num_tokens):
        self._spec.encode(self._tower, self._spec.largest_images(self.max_patches, self._dtype, self._device))
        at = torch.arange(num_tokens, device=self._device)
        rows = torch.zeros(num_tokens, self._spec.row_size, dtype=self._dtype, device=self._device)
        # For the kernel that a step with images launches. Only the first key is in all sequences.
        ends = torch.ones_like(at, dtype=torch.int32) if self._spec.is_bidirectional else None
        fields: ContextFields = {"images": ImageRows(at, rows, ends=ends)}
        return fields | self._rotation(torch.zeros_like(at).expand(3, -1)) if self._spec.has_axes else fields

    def _rotation(self, positions: Tensor) -> ContextFields:
        """A row of RoPE's table for each token: of each pair, the numbers of one part of its position. positions: int64
        [3, num_tokens]."""
        index = positions[self._axes].t()
        table = [part.squeeze(1).gather(0, index) for part in self._rope.chunk(2, dim=-1)]
        at = torch.arange(len(index), device=index.device)
        return {"rope": torch.cat(table, dim=1).unsqueeze(1), "rope_positions": at}

    def _rows(self, work: _ImageWork) -> Tensor:
        """The rows that a step needs, in the order of its batch: [num_rows, row_size]."""
        rows = torch.empty(work.num_rows, self._spec.row_size, dtype=self._dtype, device=self._device)
        for first, length, to in work.kept:  # before others are kept in their place
            rows[to : to + length] = self._kept[first : first + length]
        for batch in self._batches(work.encoded):
            images = [self._send(each.image) for each in batch]
            found = self._spec.encode(self._tower, images).split([image.num_rows for image in images])
            for each, own in zip(batch, found, strict=True):
                for first, length, to in each.pieces:
                    rows[to : to + length] = own[first : first + length]
                if each.key is not None:
                    self._kept_key = None
                    self._kept[: len(own)] = own
                    self._kept_key = each.key
        return rows

    def _send(self, image: ProcessedImage) -> ProcessedImage:
        pixels = send(image.pixel_values, self._device, self._dtype)
        extra = {name: send(array, self._device) for name, array in image.extra.items()}
        return image._replace(pixel_values=pixels, extra=extra)

    def _batches(self, encoded: list[_Encoded]) -> Iterator[list[_Encoded]]:
        """The images in batches of up to max_patches; of a larger image, one alone."""
        batch, num_patches = list[_Encoded](), 0
        for each in encoded:
            own = self._spec.num_patches(each.image)
            if batch and (self._one_by_one or num_patches + own > self.max_patches):
                yield batch
                batch, num_patches = [], 0
            batch.append(each)
            num_patches += own
        if batch:
            yield batch


def _plan(
    encoded: list[_Encoded],
    known: dict[bytes, _Encoded],
    placed: PlacedImage,
    piece: _Piece,
    key: tuple[int, int] | None,
) -> None:
    """Have the tower compute an image, unless it computes an equal one in this step. key: if a chunk cuts it."""
    content = placed.image.content_hash
    before = known.get(content)
    if before is not None and key is None:
        before.pieces.append(piece)
        return
    known[content] = _Encoded(placed.image.processed, [piece], key)
    encoded.append(known[content])
