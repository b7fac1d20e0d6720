"""What the caller's process and a replica tell each other: numbers in arrays, and texts. No Sequence is sent.

A message is one byte that says its kind, and a tuple of arrays and lists. Pixels are beside its pickle.
"""

from array import array
from collections.abc import Iterable
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from nanovllm.engine.features.images.image_sequence import ImageSequence
from nanovllm.engine.images import ImagePrompt
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.text.image_reader import PackedImage
from nanovllm.engine.text.outputs import EngineStats
from nanovllm.engine.text.sequence_maker import SequenceMaker
from nanovllm.pooling_params import PoolingParams
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils import array_messages
from nanovllm.utils.array_messages import Packed

# From the caller.
WORK, ABORT, DROP_ALL, GIVE_BACK, CALL, EXIT = b"w", b"a", b"d", b"g", b"c", b"x"
# From a replica.
READY, FAILED, ALIVE, NEWS, GIVEN_BACK, ANSWER = b"r", b"f", b"l", b"n", b"b", b"A"

_NEVER = float("nan")  # a time that has not come


def pack(kind: bytes, content: object = None) -> Packed:
    return array_messages.pack((kind, content))


def unpack(message: Packed) -> tuple[bytes, Any]:
    return array_messages.unpack(message)


class Work(NamedTuple):
    """Sequences to complete. A prompt of several is sent once.

    Attributes:
        ids, seeds: int64 [num_seqs].
        requests, samples: int32 [num_seqs]: each one's request in this message, and which of its samples it is.
        is_movable: bool [num_seqs], whether it may be asked back.
        prompts: int32, the token ids of all requests' prompts, one after the other.
        lengths: int32 [num_requests], their numbers of tokens.
        asked: of each request its parameters, and the tokens that stop strings stand for.
        reads_steps: whether tokens are wanted as they come; else all at the end.
        streams: whether texts are wanted as they come, too.
        images: of those requests that have some, by their numbers. Equal images are one object, which is sent once.
    """

    ids: np.ndarray
    seeds: np.ndarray
    requests: np.ndarray
    samples: np.ndarray
    is_movable: np.ndarray
    prompts: np.ndarray
    lengths: np.ndarray
    asked: list[tuple[SamplingParams | PoolingParams, dict[int, str]]]
    reads_steps: bool
    streams: bool
    images: dict[int, list[PackedImage]]

    @classmethod
    def of(cls, seqs: list[Sequence], moved: Iterable[int] = (), reads_steps: bool = False, streams: bool = False):  # type: ignore[no-untyped-def]
        """moved: ids of sequences that have been another replica's."""
        firsts: dict[int, tuple[int, Sequence]] = {}  # id of the request -> its number, and the first of its sequences
        for seq in seqs:
            firsts.setdefault(id(seq.request), (len(firsts), seq))
        prompts, moved = array("i"), set(moved)
        for _, seq in firsts.values():
            prompts += seq.token_ids[: seq.num_prompt_tokens]
        return cls(
            np.array([seq.seq_id for seq in seqs], np.int64),
            np.array([seq.seed for seq in seqs], np.int64),
            np.array([firsts[id(seq.request)][0] for seq in seqs], np.int32),
            np.array([seq.completion.sample for seq in seqs], np.int32),
            np.array([seq.seq_id not in moved for seq in seqs], bool),
            np.frombuffer(prompts, np.int32) if prompts else np.zeros(0, np.int32),
            np.array([seq.num_prompt_tokens for _, seq in firsts.values()], np.int32),
            [(seq.request.asked, seq.request.stop_tokens) for _, seq in firsts.values()],
            reads_steps,
            streams,
            _images([seq for _, seq in firsts.values()]),
        )

    def make(self, maker: SequenceMaker) -> list[Sequence]:
        """The sequences, in the order of `ids`."""
        ends = [*accumulate(self.lengths.tolist(), initial=0)]
        prompts: list[Any] = [array("i", self.prompts[a:b].tobytes()) for a, b in pairwise(ends)]
        for i, images in self.images.items():
            prompts[i] = ImagePrompt(prompts[i], [image.unpack() for image in images])
        made: Any = maker.make_all(prompts, [params for params, _ in self.asked], streams=self.streams)
        for seqs, (_, stop_tokens) in zip(made, self.asked, strict=True):
            seqs[0].request.stop_tokens = stop_tokens
        found = [made[i][k] for i, k in zip(self.requests.tolist(), self.samples.tolist(), strict=True)]
        for seq, seed in zip(found, self.seeds.tolist(), strict=True):
            seq.seed = seed
        return found


def _images(seqs: list[Sequence]) -> dict[int, list[PackedImage]]:
    """The images of these sequences, as of Work."""
    known: dict[bytes, PackedImage] = {}  # by content
    found: dict[int, list[PackedImage]] = {}
    for i, seq in enumerate(seqs):
        if isinstance(seq, ImageSequence):
            images = [placed.image for placed in seq.images.each]
            found[i] = [known.setdefault(image.content_hash, PackedImage.of(image)) for image in images]
    return found


class End(NamedTuple):
    """How a sequence has ended."""

    finish_reason: str
    stop_reason: str | int | None
    error: str | None
    prompt_logprobs: Any
    vector: Any


class News(NamedTuple):
    """What sequences have got since they were last told of, and how the replica is.

    Attributes:
        ids: int64 [num_seqs].
        counts: int32 [num_seqs], their numbers of new tokens.
        tokens: int32, these tokens, one sequence's after the other's.
        shared: int32 [num_seqs], tokens that the prefix cache gave; -1 before a sequence has begun.
        times: float64 [num_seqs, 3]: when it was scheduled, got its first token, and finished; NaN if it has not.
        texts: the new text of each; None without one.
        logprobs: of the new tokens of each; None if they are not wanted.
        ends: of each; None for one that goes on.
        num_received: sequences that the replica has been sent since it last dropped all.
        num_movable: of those that wait, how many may be asked back.
        stats: the engine's.
    """

    ids: np.ndarray
    counts: np.ndarray
    tokens: np.ndarray
    shared: np.ndarray
    times: np.ndarray
    texts: list[str | None]
    logprobs: list[Any]
    ends: list[End | None]
    num_received: int
    num_movable: int
    stats: EngineStats

    @classmethod
    def of(
        cls, told: list[tuple[int, Sequence, bool]], num_received: int, num_movable: int, stats: EngineStats
    ) -> "News":
        """told: ids, sequences, and whether each has finished, with its text then."""
        tokens, counts, texts, logprobs = array("i"), [], [], list[Any]()
        for _, seq, _ in told:
            completion, first = seq.completion, seq.num_prompt_tokens
            start, end = completion.num_streamed_tokens, seq.num_known_tokens - first
            tokens += seq.token_ids[first + start : first + end]
            counts.append(end - start)
            texts.append(completion.text if completion.text_stream is None else completion.text_stream.take())
            logprobs.append(None if completion.logprobs is None else completion.logprobs[start:end])
            completion.num_streamed_tokens = end
        return cls(
            np.array([seq_id for seq_id, _, _ in told], np.int64),
            np.array(counts, np.int32),
            np.frombuffer(tokens, np.int32) if tokens else np.zeros(0, np.int32),
            np.array([seq.completion.num_shared_tokens for _, seq, _ in told], np.int32),
            np.array([_times(seq) for _, seq, _ in told], np.float64).reshape(-1, 3),
            texts,
            logprobs,
            [_end(seq) if has_ended else None for _, seq, has_ended in told],
            num_received,
            num_movable,
            stats,
        )


def _times(seq: Sequence) -> tuple[float, float, float]:
    completion = seq.completion
    scheduled, first = completion.scheduled_time, completion.first_token_time
    return _NEVER if scheduled is None else scheduled, _NEVER if first is None else first, completion.finish_time


def _end(seq: Sequence) -> End:
    completion = seq.completion
    how = str(completion.finish_reason), completion.stop_reason, completion.error
    return End(*how, completion.prompt_logprobs, completion.vector)


# -- weights -----------------------------------------------------------------------------------------------------------


class PackedTensor(NamedTuple):
    """A tensor as bytes: numpy has no bfloat16."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    content: np.ndarray  # uint8

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "PackedTensor":
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return cls(tensor.dtype, tuple(tensor.shape), flat.numpy())

    def tensor(self) -> torch.Tensor:
        if not self.content.size:
            return torch.empty(self.shape, dtype=self.dtype)
        content = self.content if self.content.flags.writeable else self.content.copy()
        return torch.from_numpy(content).view(self.dtype).reshape(self.shape)
