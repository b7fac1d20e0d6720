"""Qwen3.5 and Qwen3-Next against transformers, float32 on the CPU, token for token; and the checkpoints that there are.

`test_family_parity.py` draws their switches.
"""

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
from replay import Replay
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING

from nanovllm import SamplingParams
from nanovllm.engine.features.speculation import speculative_scheduler
from nanovllm.engine.start import memory
from nanovllm.models.loader import check_checkpoint

pytestmark = needs_family("qwen3_5_text")

HEADS = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "head_dim": 32,
    "num_hidden_layers": 4,
    "full_attention_interval": 4,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
}
FAMILIES = {
    "dense": ("qwen3_5_text", {}),
    "experts": ("qwen3_5_moe_text", EXPERTS),
    "next": ("qwen3_next", EXPERTS | {"num_hidden_layers": 3, "full_attention_interval": 2}),
}
CHUNK = 64  # tokens between the states that can be kept


def make(directory, kind: str = "dense", **changes):
    family, fields = FAMILIES[kind]
    return make_checkpoint(directory, family=family, **HEADS | fields | changes)


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, tmp_path_factory):
    """(checkpoint, its Reference) of each family."""
    path = make(tmp_path_factory.mktemp("hybrid"), request.param)
    return path, Reference(path)


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    path = make(tmp_path_factory.mktemp("hybrid"))
    return path, Reference(path)


def test_a_cached_beginning(model):
    path, reference = model
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


def test_chunks_and_preemption_with_snapshots(model):
    path, reference = model
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
    with make_llm(path, num_kvcache_blocks=-1, kvcache_gib=1e-3) as llm:
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


@pytest.mark.slow
def test_two_ranks_give_the_same_tokens(model):
    """Value heads, key heads and query heads are split, and both ranks have a copy of the one KV head."""
    path, reference = model
    prompts = reference.draw_prompts((1, 45, 90, 31), 12)
    prompts += reference.draw_prompts((80, 85), 12, prefix=random_prompt(CHUNK, seed=1))
    with make_llm(path, tensor_parallel_size=2, num_kvcache_blocks=40, max_num_batched_tokens=90) as llm:
        assert complete(llm, prompts, greedy(12)) == reference.greedy(prompts, 12)
        assert complete(llm, prompts, greedy(12)) == reference.greedy(prompts, 12)
        assert llm.scheduler.num_prefix_hits > 0


@pytest.mark.slow
def test_one_kv_head_on_two_ranks(tmp_path):
    path = make(tmp_path, num_key_value_heads=1, attention_bias=True)
    reference = Reference(path)
    prompts = reference.draw_prompts((1, 45, 31), 12)
    with make_llm(path, tensor_parallel_size=2) as llm:
        assert complete(llm, prompts, greedy(12)) == reference.greedy(prompts, 12)


def test_weights_that_are_updated(dense, tmp_path):
    path, _ = dense
    other = make(tmp_path, seed=1)
    reference = Reference(other)
    prompts = reference.draw_prompts((CHUNK + 9, 20), 8)
    with make_llm(path) as llm:
        complete(llm, prompts, greedy(8))
        llm.update_weights(load_file(other / "model.safetensors").items())
        assert complete(llm, prompts, greedy(8)) == reference.greedy(prompts, 8), "a snapshot of the old weights"
        llm.sleep(1)
        llm.wake_up()
        assert complete(llm, prompts, greedy(8)) == reference.greedy(prompts, 8)


def test_states_in_bfloat16(dense):
    """Completions stay within their rounding of the best one, and a cell takes half the bytes, also of a snapshot."""
    path, reference = dense
    prompts = [random_prompt(n, seed=n) for n in (1, 40, 2 * CHUNK + 9)]
    with make_llm(path) as llm:
        whole = llm.model_runner.stores[1].bytes_per_cell
    with make_llm(path, state_dtype="bfloat16", max_num_batched_tokens=100) as llm:
        (_, states) = llm.model_runner.stores
        assert {layer.states.dtype for layer in states.layers} == {torch.bfloat16}
        tails = sum(layer.tails[0].nbytes for layer in states.layers)
        assert states.bytes_per_cell - tails == (whole - tails) / 2
        for num_hits in (0, 2 * CHUNK):
            outputs = generate(llm, prompts, greedy(60))
            assert outputs[-1]["num_cached_tokens"] == num_hits
            regrets = [reference.regret(p, each["token_ids"]) for p, each in zip(prompts, outputs, strict=True)]
            assert max(regrets) < 0.05
        assert_idle(llm)


def test_states_of_a_model_without_them(tmp_path):
    with pytest.raises(ValueError, match=r"state_dtype='bfloat16': must be 'float32' for a model without linear"):
        make_llm(make_checkpoint(tmp_path), state_dtype=torch.bfloat16)


# -- checkpoints ----------------------------------------------------------------------------------------------------


def vision_language(path, family: str, architecture: str) -> None:
    """Rewrite a text checkpoint as one of the vision-language class, as they are published: with a vision tower, a
    layer that predicts further tokens, and experts in one tensor."""

    def edit(tensors):
        experts = sorted({name.split(".experts.")[0] for name in tensors if ".experts." in name})
        for folder in experts:
            parts = {
                part: [tensors.pop(f"{folder}.experts.{i}.{part}.weight") for i in range(EXPERTS["num_experts"])]
                for part in ("gate_proj", "up_proj", "down_proj")
            }
            gate_up = zip(parts["gate_proj"], parts["up_proj"], strict=True)
            tensors[f"{folder}.experts.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in gate_up])
            tensors[f"{folder}.experts.down_proj"] = torch.stack(parts["down_proj"])
        for name in [name for name in tensors if name.startswith("model.")]:
            tensors["model.language_model." + name.removeprefix("model.")] = tensors.pop(name)
        tensors["model.visual.patch_embed.proj.weight"] = torch.zeros(2, 2)
        tensors["mtp.fc.weight"] = torch.zeros(2, 2)

    edit_tensors(path, edit)
    text = CONFIG_MAPPING[f"{family}_text"].from_pretrained(path).to_dict()
    text["rope_parameters"] |= {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
    text = {name: value for name, value in text.items() if value is not None}
    content = {"model_type": family, "architectures": [architecture], "text_config": text}
    (path / "config.json").unlink()
    edit_json(path / "config.json", tie_word_embeddings=text["tie_word_embeddings"], **content)


@pytest.mark.parametrize(
    ("kind", "family", "architecture", "is_tied"),
    [
        ("dense", "qwen3_5", "Qwen3_5ForConditionalGeneration", True),
        ("experts", "qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", False),
    ],
)
def test_the_text_model_of_a_vision_language_checkpoint(kind, family, architecture, is_tied, tmp_path):
    path = make(tmp_path, kind, tie_word_embeddings=is_tied)
    reference = Reference(path)
    prompts = reference.draw_prompts((9, 40), 8)
    vision_language(path, family, architecture)
    for num_ranks in (1, 2) if kind == "experts" else (1,):
        with make_llm(path, tensor_parallel_size=num_ranks) as llm:
            assert complete(llm, prompts, greedy(8)) == reference.greedy(prompts, 8)


def test_layers_that_predict_further_tokens_are_skipped(tmp_path):
    path = make(tmp_path)
    edit_tensors(path, lambda tensors: tensors.update({"mtp.layers.0.input_layernorm.weight": torch.zeros(64)}))
    with make_llm(path) as llm:
        check_checkpoint(llm.model_runner.model, str(path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["linear_attention"] * 4}, "layer_types=.* with full_attention among its first 4"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types=.* linear_attention or full_attention"),
        ({"attn_output_gate": False}, "attn_output_gate=False: is not supported for qwen3_5_text"),
        ({"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim=0: must be an integer > 0"),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads=3: must be a multiple"),
        ({"linear_num_key_heads": 0}, "linear_num_key_heads=0: must be an integer > 0"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ],
    ids=str,
)
def test_refused_configurations(changes, message, tmp_path):
    path = make(tmp_path)
    edit_json(path / "config.json", **changes)
    with pytest.raises(ValueError, match=message):
        make_llm(path)


def test_heads_that_ranks_cannot_share(tmp_path):
    path = make(tmp_path, linear_num_key_heads=1, linear_num_value_heads=4)
    with pytest.raises(ValueError, match=r"tensor_parallel_size=2: must divide the model's linear_num_key_heads \(1\)"):
        make_llm(path, tensor_parallel_size=2)


def test_dummy_weights(tmp_path):
    path = make(tmp_path, "experts")
    with make_llm(path, load_format="dummy") as llm:
        (tokens,) = complete(llm, [random_prompt(70, 1)], greedy(8))
        assert len(set(tokens)) > 1
