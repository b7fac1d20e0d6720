"""What the workers are told of a step: exactly what rank 0 computes, in few bytes."""

import pickle

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm import SamplingParams
from nanovllm.engine.ranks.step_messages import StepDecoder, StepEncoder
from nanovllm.engine.runner.inputs import DecodeInputs, prefill_inputs
from nanovllm.engine.sampling.logprobs import num_prompt_targets
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence

BLOCK_SIZE = 4
CPU = torch.device("cpu")


class Rank:
    """What one rank makes of a step's sequences."""

    def __init__(self, max_num_seqs: int, max_blocks: int):
        self.inputs = DecodeInputs(max_num_seqs, max_blocks, BLOCK_SIZE, CPU, None)

    @staticmethod
    def plan(seqs: list[Sequence], is_prefill: bool) -> list:
        """All that decides which collectives the step has."""
        targets = [max(0, num_prompt_targets(seq)) for seq in seqs] if is_prefill else []
        return [*targets, all(seq.is_plain for seq in seqs), any(seq.is_constrained for seq in seqs)]

    def prepare(self, seqs: list[Sequence], is_prefill: bool) -> list:
        """All that the model would be given, as plain lists."""
        if is_prefill:
            inputs, context = prefill_inputs(seqs, BLOCK_SIZE, CPU)
            named = [
                getattr(context, name) for name in ("cu_seqlens_q", "cu_seqlens_k", "slot_mapping", "block_tables")
            ]
            tensors = [*inputs, *(tensor for tensor in named if tensor is not None)]
            return [context.max_seqlen_q, context.max_seqlen_k, *(tensor.tolist() for tensor in tensors)]
        self.inputs.write(seqs, len(seqs))
        rows = {name: tensor[: len(seqs)] for name, tensor in self.inputs.rows.items()}
        return [self.inputs.input_ids[: len(seqs)].tolist(), *(tensor.tolist() for tensor in rows.values())]


class Engine:
    """A scheduler whose tokens come out of a hat, and both ends of the messages about its steps."""

    def __init__(self, num_blocks=64, max_num_seqs=8, max_num_batched_tokens=64, caching=True, max_len=64):
        self.scheduler = Scheduler(max_num_seqs, max_num_batched_tokens, max_len, num_blocks, BLOCK_SIZE, [0], caching)
        self.encoder, self.decoder = StepEncoder(), StepDecoder()
        self.ranks = [Rank(max_num_seqs, -(-max_len // BLOCK_SIZE)) for _ in range(2)]
        self.rng = np.random.default_rng(0)
        self.flying: list[Sequence] = []
        self.num_seqs = 0
        self.num_scored: dict[int, int] = {}  # seq_id -> prompt tokens whose log-probabilities are on their way

    def add(self, prompt: list[int], max_tokens: int, ignore_eos: bool = False, kind: int = 0) -> Sequence:
        """kind: 0 plain, 1 with prompt_logprobs, 2 with a grammar."""
        fields = {"prompt_logprobs": 1} if kind == 1 else {"top_k": 3} if kind == 2 else {}
        params = SamplingParams(0.5 + self.num_seqs, max_tokens, ignore_eos, seed=self.num_seqs, **fields)
        seq = Sequence(self.num_seqs, prompt, params, BLOCK_SIZE, grammar=object() if kind == 2 else None)
        self.num_seqs += 1
        self.scheduler.add(seq)
        return seq

    def step(self, overlap: bool, tokens: int = 20) -> bytes | None:
        """One step's message; with `overlap` the one before is read only after it was sent."""
        if not overlap:
            self.collect(tokens)
        message = None
        launched: list[Sequence] = []
        if not self.scheduler.is_finished():
            launched, is_prefill = self.scheduler.schedule()
            message = pickle.dumps(self.encoder.encode(launched, is_prefill), pickle.HIGHEST_PROTOCOL)
            copies, copied_prefill = self.decoder.decode(pickle.loads(message))
            assert copied_prefill == is_prefill
            ours, theirs = (
                rank.prepare(seqs, is_prefill) for rank, seqs in zip(self.ranks, (launched, copies), strict=True)
            )
            assert theirs == ours
            assert Rank.plan(copies, is_prefill) == Rank.plan(launched, is_prefill)
            assert not any(hasattr(seq, "params") for seq in copies)
            if is_prefill:
                for seq in launched:
                    self.num_scored[seq.seq_id] = self.num_scored.get(seq.seq_id, 1) + max(0, num_prompt_targets(seq))
        if overlap:
            self.collect(tokens)
        self.scheduler.advance(launched)
        self.flying = launched
        return message

    def collect(self, tokens: int) -> None:
        for seq in self.flying:
            if self.num_scored.get(seq.seq_id, 0) >= seq.num_prompt_tokens:
                seq.needs_prompt_logits = False
        if self.flying:
            self.scheduler.collect(self.flying, self.rng.integers(0, tokens, len(self.flying)).tolist())
        self.flying = []

    def reset(self) -> None:
        """As after an exception."""
        self.scheduler.reset()
        self.flying = []


actions = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 3), st.integers(1, 30), st.integers(1, 12), st.integers(0, 2)),
        st.tuples(st.just("steps"), st.integers(1, 6), st.booleans()),
        st.tuples(st.just("abort"), st.integers(0, 40)),
        st.tuples(st.just("reset")),
    ),
    min_size=1,
    max_size=40,
)


@settings(max_examples=100)
@given(
    actions=actions,
    num_blocks=st.integers(11, 30),
    max_num_seqs=st.integers(1, 6),
    max_num_batched_tokens=st.integers(3, 40),
    caching=st.booleans(),
)
def test_workers_prepare_what_rank_0_prepares(actions, num_blocks, max_num_seqs, max_num_batched_tokens, caching):
    engine = Engine(num_blocks, max_num_seqs, max_num_batched_tokens, caching)
    heads = [[10 * head + i % 7 + 1 for i in range(30)] for head in range(4)]
    for name, *args in actions:
        if name == "add":
            head, length, max_tokens, kind = args
            engine.add([*heads[head][:length], 100 + length], max_tokens, kind=kind)
        elif name == "steps":
            for _ in range(args[0]):
                engine.step(overlap=args[1])
        elif name == "abort":
            engine.collect(20)
            engine.scheduler.abort(args)
        else:
            engine.reset()
    while not engine.scheduler.is_finished():
        engine.step(overlap=True)
    # What both sides remember is bounded by what a step may hold.
    assert engine.encoder._known.keys() == engine.decoder._seqs.keys()


def test_a_decode_step_of_the_same_batch_sends_only_new_blocks():
    engine = Engine(num_blocks=64 * 70, max_num_seqs=64, max_num_batched_tokens=10**6, caching=False, max_len=1000)
    for _ in range(64):
        engine.add([7] * 200, 500, ignore_eos=True)
    assert len(engine.step(overlap=True)) > 64 * 4 * 200
    engine.step(overlap=True)  # names the batch
    sizes = [len(engine.step(overlap=True)) for _ in range(12)]
    # Every fourth step opens a block for each sequence.
    assert sorted(sizes)[8] < 150
    assert max(sizes) < 150 + 64 * 10
    # Read before the next one is sent: four bytes a token.
    assert len(engine.step(overlap=False)) < 150 + 64 * 14


def test_a_sequence_that_ends_costs_the_others_nothing():
    engine = Engine(num_blocks=64 * 70, max_num_seqs=64, max_num_batched_tokens=10**6, caching=False, max_len=1000)
    for i in range(64):
        engine.add([7] * 200, 5 + i, ignore_eos=True)
    for _ in range(2):
        engine.step(overlap=True)
    sizes = [len(engine.step(overlap=True)) for _ in range(12)]
    assert sorted(sizes)[8] < 200


def test_a_long_prompt_crosses_once():
    engine = Engine(num_blocks=300, max_num_batched_tokens=50, max_len=1000)
    engine.add([7] * 900, 4)
    sizes = []
    while engine.scheduler.waiting:
        sizes.append(len(engine.step(overlap=True)))
    assert len(sizes) == 18
    assert sum(sizes) < 900 * 4 + 225 * 3 + 18 * 150


def test_sequences_that_only_ever_prefill_are_forgotten():
    engine = Engine()
    for _ in range(50):
        engine.add([7] * 5, 1)
        engine.step(overlap=True)
    assert len(engine.decoder._seqs) <= 2
