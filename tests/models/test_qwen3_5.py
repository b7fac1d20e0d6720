"""What is the hybrids' own: states of prefixes, kept, copied, taken back and dropped, and their configuration.

The table in tests/helpers/families.py has the rest.
"""

import math

import pytest
import torch
from checkpoints import (
    Reference,
    assert_idle,
    complete,
    edit_json,
    edit_tensors,
    generate,
    greedy,
    make_checkpoint,
    make_llm,
    needs_family,
    random_prompt,
)
from families import CHUNK, Case, fields_of
from replay import Replay
from safetensors.torch import load_file

from nanovllm import SamplingParams
from nanovllm.engine.features.speculation import speculative_scheduler
from nanovllm.engine.start import memory
from nanovllm.models.loader import check_checkpoint

pytestmark = needs_family("qwen3_5_text")

FAMILY = "qwen3_5_text"


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    case = Case(FAMILY, tmp_path_factory.mktemp("hybrid"), max_position_embeddings=512)
    return case.path, case.reference


def test_a_cached_beginning(dense):
    path, reference = dense
    beginning = random_prompt(2 * CHUNK + 5, seed=1)
    prompts = reference.draw_prompts((150, 160, 170), 10, prefix=beginning)
    expected = reference.greedy(prompts, 10)
    with make_llm(path) as llm:
        # Two wait for the first one's state of the beginning, which all share up to the last whole chunk.
        outputs = generate(llm, prompts, greedy(10))
        assert [output["token_ids"] for output in outputs] == expected
        assert sorted(output["num_cached_tokens"] for output in outputs) == [0, 2 * CHUNK, 2 * CHUNK]
        outputs = generate(llm, prompts[::-1], greedy(10))
        assert [output["token_ids"] for output in outputs] == expected[::-1]
        assert {output["num_cached_tokens"] for output in outputs} == {2 * CHUNK}
        other = reference.draw_prompts((150,), 10, seed=2)
        assert complete(llm, other, greedy(10)) == reference.greedy(other, 10)
        assert_idle(llm)


def test_samples_of_one_prompt_share_its_state(dense):
    path, reference = dense
    (prompt,) = reference.draw_prompts((2 * CHUNK + 7,), 8)
    params = SamplingParams(temperature=1.0, n=4, max_tokens=8, seed=3, ignore_eos=True)
    with make_llm(path) as llm:
        together = [sample["token_ids"] for sample in generate(llm, [prompt], params)[0]["samples"]]
        assert llm.scheduler.num_prefix_hits == 3 * 2 * CHUNK
        greedy_ones = generate(llm, [prompt], greedy(8, n=3))[0]["samples"]
        assert [sample["token_ids"] for sample in greedy_ones] == reference.greedy([prompt], 8) * 3
    with make_llm(path, enable_prefix_caching=False, overlap_steps=False) as llm:
        assert [sample["token_ids"] for sample in generate(llm, [prompt], params)[0]["samples"]] == together


def test_chunks_and_preemption_with_snapshots(dense):
    path, reference = dense
    beginning = random_prompt(CHUNK + 10, seed=3)
    prompts = reference.draw_prompts((80, 85, 81, 82), 30, prefix=beginning)
    expected = reference.greedy(prompts, 30)
    for overlap in (True, False):
        options = {"num_kvcache_blocks": 12, "max_num_batched_tokens": 100, "max_model_len": 192}
        with make_llm(path, overlap_steps=overlap, **options) as llm:
            assert complete(llm, prompts, greedy(30)) == expected
            assert llm.scheduler.num_preemptions > 0
            assert llm.scheduler.num_prefix_hits > 0
            assert_idle(llm)


def test_more_sequences_than_cells(dense):
    path, reference = dense
    prompts = reference.draw_prompts(range(5, 25), 6)
    with make_llm(path, num_kvcache_blocks=-1, kvcache_gib=6e-4) as llm:
        assert 2 <= llm.model_runner.num_cells < 20
        assert complete(llm, prompts, greedy(6)) == reference.greedy(prompts, 6)
        assert_idle(llm)


def test_a_prompt_begins_with_a_snapshot_beside_a_decode_step(dense):
    path, reference = dense
    beginning = random_prompt(CHUNK, seed=5)
    first, *others = reference.draw_prompts((70, 72, 75), 30, prefix=beginning)
    with make_llm(path, mixed_step_rows=17) as llm:
        assert complete(llm, [first], greedy(30)) == reference.greedy([first], 30)
        copied = []
        runner = llm.model_runner
        prepare = runner.prepare

        def prepare_and_record(step):
            prepare(step)
            copied.extend(step.extras.get("state copies", ()))

        runner.prepare = prepare_and_record
        ids, done = [llm.add_request(first, greedy(30))], {}
        while not llm.is_finished():
            done |= dict(llm.step()[0])
            if len(ids) == 1:
                ids += [llm.add_request(prompt, greedy(4)) for prompt in others]
        expected = reference.greedy([first, *others], 30)
        assert [done[i] for i in ids] == [expected[0], expected[1][:4], expected[2][:4]]
        assert len(copied) == 2


@pytest.mark.parametrize("num_cells", [3, 100])
def test_proposed_tokens_that_are_taken_back(dense, num_cells, monkeypatch):
    """Steps with up to five proposed tokens, of which some are wrong, greedy and sampled, with few cells and many."""
    path, reference = dense
    choose = lambda chances, num_seqs, pace: [len(each) for each in chances]  # noqa: E731
    monkeypatch.setattr(speculative_scheduler, "choose_counts", choose)
    monkeypatch.setattr(speculative_scheduler, "_MAX_LOOKING_SHARE", math.inf)  # on a busy machine too
    monkeypatch.setattr(memory, "count_cells", lambda *args: num_cells)
    prompts = reference.draw_prompts((1, 150, 70), 14)
    expected = {(i, 0): tokens for i, tokens in enumerate(reference.greedy(prompts, 14))}
    params = [SamplingParams(seed=i, n=2, max_tokens=14, ignore_eos=True) for i in range(len(prompts))]
    options = {"num_kvcache_blocks": 24, "max_num_batched_tokens": 100, "max_model_len": 256, "max_num_seqs": 6}
    with make_llm(path, **options) as llm:
        sampled = [[each["token_ids"] for each in output["samples"]] for output in generate(llm, prompts, params)]
    with make_llm(path, **options, speculation="suffix", max_speculative_tokens=5) as llm:
        llm.scheduler.proposer = Replay(expected, 0.2, 256)
        assert complete(llm, prompts, greedy(14)) == list(expected.values())
        assert_idle(llm)
        known = {(i, j): tokens for i, each in enumerate(sampled) for j, tokens in enumerate(each)}
        llm.scheduler.proposer = Replay(known, 0.2, 256)
        found = [[each["token_ids"] for each in output["samples"]] for output in generate(llm, prompts, params)]
        assert found == sampled
        assert_idle(llm)
        stats = llm.stats()
        assert 0 < stats["accepted_tokens"] < stats["proposed_tokens"]


def test_weights_that_are_updated(dense, tmp_path):
    path, _ = dense
    other = make_checkpoint(tmp_path, FAMILY, seed=1, **fields_of(FAMILY))
    reference = Reference(other)
    prompts = reference.draw_prompts((CHUNK + 9, 20), 8)
    with make_llm(path) as llm:
        complete(llm, prompts, greedy(8))
        llm.update_weights(load_file(other / "model.safetensors").items())
        assert complete(llm, prompts, greedy(8)) == reference.greedy(prompts, 8), "a snapshot of the old weights"
        llm.sleep(1)
        llm.wake_up()
        assert complete(llm, prompts, greedy(8)) == reference.greedy(prompts, 8)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_states_in_16_bits(dense, dtype):
    """Completions stay within their rounding of the best one, and a cell takes half the bytes, also of a snapshot."""
    path, reference = dense
    prompts = [random_prompt(n, seed=n) for n in (1, 40, 2 * CHUNK + 9)]
    with make_llm(path) as llm:
        whole = llm.model_runner.stores[1].bytes_per_cell
    with make_llm(path, state_dtype=dtype, max_num_batched_tokens=100) as llm:
        (_, states) = llm.model_runner.stores
        assert {layer.states.dtype for layer in states.layers} == {dtype}
        tails = sum(layer.tails[0].nbytes for layer in states.layers)
        assert states.bytes_per_cell - tails == (whole - tails) / 2
        for num_hits in (0, 2 * CHUNK):
            outputs = generate(llm, prompts, greedy(60))
            assert outputs[-1]["num_cached_tokens"] == num_hits
            regrets = [reference.regret(p, each["token_ids"]) for p, each in zip(prompts, outputs, strict=True)]
            # A step rounds a state. The errors of n steps are independent, and add up to sqrt(n) of one.
            assert max(regrets) < torch.finfo(dtype).eps * (2 * CHUNK + 69) ** 0.5
        assert_idle(llm)


def test_states_of_a_model_without_them(tmp_path):
    with pytest.raises(ValueError, match=r"state_dtype='bfloat16': must be 'float32' for a model without linear"):
        make_llm(make_checkpoint(tmp_path), state_dtype=torch.bfloat16)


# -- checkpoints ----------------------------------------------------------------------------------------------------


def test_layers_that_predict_further_tokens_are_skipped(tmp_path):
    path = make_checkpoint(tmp_path, FAMILY, **fields_of(FAMILY))
    edit_tensors(path, lambda tensors: tensors.update({"mtp.layers.0.input_layernorm.weight": torch.zeros(64)}))
    with make_llm(path) as llm:
        check_checkpoint(llm.model_runner.model, str(path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["linear_attention"] * 3}, "layer_types=.* with full_attention among its first 3"),
        ({"layer_types": ["sliding_attention"] * 3}, "layer_types=.* linear_attention or full_attention"),
        ({"attn_output_gate": False}, "attn_output_gate=False: is not supported for qwen3_5_text"),
        ({"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim=0: must be an integer > 0"),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads=3: must be a multiple"),
        ({"linear_num_key_heads": 0}, "linear_num_key_heads=0: must be an integer > 0"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ],
    ids=str,
)
def test_refused_configurations(changes, message, tmp_path):
    path = make_checkpoint(tmp_path, FAMILY, **fields_of(FAMILY))
    edit_json(path / "config.json", **changes)
    with pytest.raises(ValueError, match=message):
        make_llm(path)


def test_heads_that_ranks_cannot_share(tmp_path):
    path = make_checkpoint(tmp_path, FAMILY, **fields_of(FAMILY) | {"linear_num_key_heads": 1})
    with pytest.raises(ValueError, match=r"tensor_parallel_size=2: must divide the model's linear_num_key_heads \(1\)"):
        make_llm(path, tensor_parallel_size=2)


def test_dummy_weights(tmp_path):
    path = make_checkpoint(tmp_path, "qwen3_5_moe_text", **fields_of("qwen3_5_moe_text"))
    with make_llm(path, load_format="dummy") as llm:
        (tokens,) = complete(llm, [random_prompt(70, 1)], greedy(8))
        assert len(set(tokens)) > 1
