"""Every family on every kind of engine, against transformers: float32 on the CPU, token for token.

The families are the rows of tests/helpers/families.py. Each test here is a column: one engine, over the row's
checkpoint. NANOVLLM_PARITY_CASES sets how many more checkpoints of a row are drawn for the first column; and, with
`-m nightly`, for two others.
"""

import json
import math
import os
import shutil
from collections import defaultdict

import pytest
import torch
from checkpoints import (
    assert_idle,
    complete,
    edit_json,
    edit_tensors,
    generate,
    greedy,
    has_transformers,
    make_checkpoint,
    make_llm,
    needs_family,
    random_prompt,
)
from families import FAMILIES, NUM_TOKENS, Case, fields_of
from fp8_checkpoints import assert_scores_like_the_reference
from replay import Replay
from thread_ranks import make_llm_of_ranks
from transformers import AutoConfig
from vision_checkpoints import VISION_FAMILIES

from nanovllm import SamplingParams
from nanovllm.config import Config
from nanovllm.engine.features.speculation import speculative_scheduler
from nanovllm.layers.matmul.table import Key
from nanovllm.models import registry
from nanovllm.models.layer_facts import one_of_each_kind
from nanovllm.models.plain import PlainQwen3
from nanovllm.models.registry import model_class
from nanovllm.tuning.tune_model import layer_problems, with_new_products

NUM_DRAWN = int(os.environ.get("NANOVLLM_PARITY_CASES", 1))
ROWS = [(name, seed) for seed in (None, *range(NUM_DRAWN)) for name in FAMILIES]
# Prompts in chunks, and sequences that are preempted.
CRAMPED = {"num_kvcache_blocks": 8, "max_num_batched_tokens": 20}
PARAMS = [greedy(NUM_TOKENS, logprobs=0 if i % 2 else None) for i in range(4)]


def over(rows, *marks_of_drawn, others_nightly=None):
    """A test for each of these rows, a nightly one where a family is not in `others_nightly`. Those of one row come
    together, so each checkpoint is made once."""
    params = []
    for family, seed in rows:
        marks = [needs_family(family), *(() if seed is None else marks_of_drawn)]
        if others_nightly and family not in others_nightly:
            marks.append(pytest.mark.nightly)
        params.append(pytest.param((family, seed), id=family if seed is None else f"{family}-{seed}", marks=marks))
    return pytest.mark.parametrize("case", params, indirect=True)


every_case, every_row = over(ROWS), over(ROWS[: len(FAMILIES)])
drawn_nightly = over(ROWS, pytest.mark.nightly)
# For what costs a second a row and does not depend on the family, beside a test that every row has.
some_rows = over(ROWS[: len(FAMILIES)], others_nightly=("qwen3", "qwen3_next", "gpt_oss", "gemma4_text", "granite"))


@pytest.fixture(scope="module")
def case(request, tmp_path_factory):
    family, seed = request.param
    return Case(family, tmp_path_factory.mktemp(family), seed)


@every_case
def test_tokens_and_log_probabilities_also_from_the_cache(case):
    with make_llm(case.path, max_model_len=case.max_model_len) as llm:
        case.assert_like_transformers(generate(llm, case.prompts, PARAMS))
        again = generate(llm, case.prompts[::-1], PARAMS[::-1])[::-1]
        case.assert_like_transformers(again)
        assert [output["num_cached_tokens"] for output in again] == [*map(case.num_cached, case.prompts)]
        assert asked_products(llm) == tuned_products(llm)
        assert_idle(llm)


def asked_products(llm) -> set[Key]:
    """Those that the engine has looked up in the table."""
    return {key._replace(phase="") for key in llm.model_runner.model.matmul._rows}


def tuned_products(llm) -> set[Key]:
    """Those that `nanovllm tune` would measure, of the same layers."""
    layers = llm.model_runner.model.model.layers
    measured = with_new_products(layers[i] for i in one_of_each_kind(layers))
    return {problem.key._replace(phase="") for layer, _ in measured for problem in layer_problems(layer)}


@drawn_nightly
def test_chunks_and_preempted_sequences(case):
    with make_llm(case.path, max_model_len=case.max_model_len, **CRAMPED) as llm:
        case.assert_like_transformers(generate(llm, case.prompts, PARAMS))
        assert llm.scheduler.num_preemptions > 0
        assert_idle(llm)


@every_row
def test_one_step_after_the_other_without_a_cache(case):
    options = {"num_kvcache_blocks": 8, "overlap_steps": False, "enable_prefix_caching": False}
    with make_llm(case.path, max_model_len=case.max_model_len, **options) as llm:
        case.assert_like_transformers(generate(llm, case.prompts, PARAMS))
        assert llm.scheduler.num_preemptions > 0
        assert_idle(llm)


@drawn_nightly
def test_prompts_beside_decode_steps(case):
    """The first prompt alone is prefilled. The others enter beside its decode steps, since they end before it."""
    limits, is_mixed = (12, 6, 2, 4), []
    with make_llm(case.path, max_model_len=case.max_model_len, mixed_step_rows=17, max_num_batched_tokens=17) as llm:
        prepare = llm.model_runner.prepare
        llm.model_runner.prepare = lambda step: (prepare(step), is_mixed.append(step.kind.is_mixed))
        case.assert_greedy(complete(llm, case.prompts, [greedy(limit) for limit in limits]), limits)
        assert sum(is_mixed) > 2
        assert_idle(llm)


def test_a_window_that_no_sequence_exceeds_is_none(tmp_path):
    path = make_checkpoint(tmp_path, "mistral", sliding_window=13)
    for longest, window in ((14, 13), (13, None)):
        with make_llm(path, max_model_len=longest) as llm:
            assert {layer.window for layer in llm.model_runner.kv_store.layers} == {window}


@every_row
def test_two_ranks(case):
    """In chunks, with preemption, and the second time from the cache."""
    with make_llm_of_ranks(case.path, 2, max_model_len=case.max_model_len, **CRAMPED) as llm:
        for _ in range(2):
            case.assert_like_transformers(generate(llm, case.prompts, PARAMS))
        assert llm.scheduler.num_preemptions > 0
        assert_idle(llm)


@some_rows
def test_two_ranks_in_int4(case):
    check_int4(case, 2)


@every_row
def test_int4(case):
    check_int4(case, 1)


def check_int4(case, num_ranks):
    """The checkpoint's numbers are such that int4 holds them."""
    options = {"quantization": "int4", "max_model_len": case.max_model_len}
    with make_llm_of_ranks(case.path, num_ranks, **options) as llm:
        assert torch.uint8 in {parameter.dtype for parameter in llm.model_runner.model.parameters()}
        case.assert_like_transformers(generate(llm, case.prompts, PARAMS))


@every_row
def test_fp8(case):
    """Weights and inputs are rounded, and nothing else."""
    if case.name == "gpt_oss" and not has_transformers("5"):
        pytest.skip("its experts have another forward here")
    prompt, completion = case.prompts[1], case.prompts[3]
    assert_scores_like_the_reference(case.path, case.path, prompt, completion, quantization="fp8")


@every_row
def test_speculation(case, monkeypatch):
    """Steps with up to five proposed tokens, of which some are wrong, greedy and sampled."""
    choose = lambda chances, num_seqs, pace: [len(each) for each in chances]  # noqa: E731
    monkeypatch.setattr(speculative_scheduler, "choose_counts", choose)
    monkeypatch.setattr(speculative_scheduler, "_MAX_LOOKING_SHARE", math.inf)  # on a busy machine too
    sampled = [SamplingParams(seed=i, n=2, max_tokens=NUM_TOKENS, ignore_eos=True) for i in range(4)]
    options = {"num_kvcache_blocks": 24, "max_num_seqs": 6, "speculation": "suffix", "max_speculative_tokens": 5}
    with make_llm(case.path, max_model_len=case.max_model_len, **options) as llm:
        for params in (greedy(NUM_TOKENS), sampled):
            known = defaultdict(list)  # Without knowledge nothing is proposed.
            llm.scheduler.proposer = Replay(known, 0.2, case.fields["vocab_size"])
            found = all_samples(llm, case.prompts, params)
            known |= found
            assert all_samples(llm, case.prompts, params) == found
            if params is not sampled:
                case.assert_greedy([*found.values()])
            assert_idle(llm)
        stats = llm.stats()
        assert 0 < stats["accepted_tokens"] < stats["proposed_tokens"]


def all_samples(llm, prompts, params) -> dict[tuple[int, int], list[int]]:
    """Token ids by (index of the prompt, sample)."""
    outputs = [output.get("samples", (output,)) for output in generate(llm, prompts, params)]
    return {(i, j): each["token_ids"] for i, samples in enumerate(outputs) for j, each in enumerate(samples)}


@over([row for row in ROWS if FAMILIES[row[0]].has_plain_twin])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_plain_twin(case, num_ranks):
    """Greedy tokens are transformers', and drawn ones those of the fast decoder."""
    params = [SamplingParams(0.9, NUM_TOKENS, ignore_eos=True, seed=i, top_p=0.5 + i / 6) for i in range(4)]
    found = []
    for plain in (True, False):
        options = {"plain": plain, "max_model_len": case.max_model_len, **CRAMPED}
        with make_llm_of_ranks(case.path, num_ranks if plain else 1, **options) as llm:
            assert isinstance(llm.model_runner.model, PlainQwen3) == plain
            case.assert_like_transformers(generate(llm, case.prompts, PARAMS))
            found.append(complete(llm, case.prompts, params))
            assert llm.scheduler.num_preemptions > 0
            assert_idle(llm)
    assert found[0] == found[1]


@some_rows
def test_two_ranks_in_fp8_round_no_worse(case):
    """Each has scales for its own columns, so it rounds in other places. Keys and values are in fp8 too."""
    vocab_size = case.fields["vocab_size"]
    prompts, completions = ([random_prompt(40, seed + i, vocab_size) for i in range(8)] for seed in (0, 8))
    expected = torch.stack([case.reference.logprobs(*pair) for pair in zip(prompts, completions, strict=True)])
    errors = []
    for num_ranks in (1, 2):
        with make_llm_of_ranks(case.path, num_ranks, quantization="fp8", kv_cache_dtype="fp8") as llm:
            scores = llm.score(prompts, completions, use_tqdm=False)
            errors.append((torch.tensor([score["logprobs"] for score in scores]) - expected).norm())
            assert len(complete(llm, prompts[:1], greedy(4))[0]) == 4
    assert 0.75 < errors[1] / errors[0] < 1.25


# -- what a checkpoint may look like ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "prefixes"),
    [
        pytest.param(name, prefixes, marks=needs_family(name), id=f"{name} {prefixes[0]}")
        for name, row in FAMILIES.items()
        if row.larger
        for prefixes in row.prefixes
    ],
)
def test_the_text_part_of_a_larger_model(family, prefixes, tmp_path):
    """Of a checkpoint whose names and configuration are part of others', and that holds other parts as well."""
    architecture, model_type = FAMILIES[family].larger
    path = make_checkpoint(tmp_path / "text", family=family, **fields_of(family))
    with make_llm(path) as llm:
        expected = {name: parameter.clone() for name, parameter in llm.model_runner.model.named_parameters()}
    larger = nest(path, tmp_path / "larger", architecture, model_type, prefixes)
    with make_llm(larger) as llm:
        assert llm.config.eos == (1, 106)
        found = dict(llm.model_runner.model.named_parameters())
        assert found.keys() == expected.keys()
        assert all(torch.equal(dense(found[name]), dense(tensor)) for name, tensor in expected.items())
        assert len(complete(llm, [[1, 2, 3]], greedy(2))[0]) == 2
    edit_tensors(larger, lambda tensors: tensors.pop(f"{prefixes[0]}norm.weight"))
    with pytest.raises(ValueError, match=r"lacks 'model\.norm\.weight'"):
        make_llm(larger)


def dense(tensor):
    """Of a weight that is packed for the CPU."""
    return tensor.to_dense() if tensor.is_mkldnn else tensor


def nest(path, larger, architecture, model_type, prefixes):
    """Write a text checkpoint as one with a vision tower, of layers that predict further tokens, and of experts in one
    tensor, as the larger ones are published."""
    shutil.copytree(path, larger)
    text = AutoConfig.from_pretrained(path).to_dict()
    text = {name: value for name, value in text.items() if value is not None}

    def edit(tensors):
        for folder in sorted({name.split(".experts.")[0] for name in tensors if ".experts.0." in name}):
            parts = [
                torch.stack([tensors.pop(f"{folder}.experts.{i}.{part}.weight") for i in range(text["num_experts"])])
                for part in ("gate_proj", "up_proj", "down_proj")
            ]
            tensors[f"{folder}.experts.gate_up_proj"] = torch.cat(parts[:2], 1)
            tensors[f"{folder}.experts.down_proj"] = parts[2]
        for name in list(tensors):
            ours = "lm_head." if name.startswith("lm_head.") else "model."
            tensors[prefixes[ours == "lm_head."] + name.removeprefix(ours)] = tensors.pop(name)
        others = ("vision_tower.norm.bias", "visual.patch_embed.proj.weight", "multi_modal_projector.norm.weight")
        tensors |= {f"model.{name}": torch.zeros(8) for name in others} | {"mtp.fc.weight": torch.zeros(2, 2)}

    edit_tensors(larger, edit)
    content = {"model_type": model_type, "architectures": [architecture], "eos_token_id": [1, 106]}
    content |= {"tie_word_embeddings": text["tie_word_embeddings"], "text_config": text}
    (larger / "config.json").unlink()
    edit_json(larger / "config.json", **content)
    return larger


def respell(file) -> None:
    """Write a config.json with the names of the other transformers, 4 or 5."""
    config = json.loads(file.read_text())
    if "rope_parameters" in config:
        rope = config.pop("rope_parameters")
        if "sliding_attention" in rope:
            config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
            rope = rope["full_attention"]
        names = ("rope_theta", "partial_rotary_factor")
        config |= {name: rope.pop(name) for name in names if name in rope}
        config |= {"rope_scaling": rope if rope.get("rope_type") != "default" else None}
        config["torch_dtype"] = config.pop("dtype")
    else:
        rope = config.pop("rope_scaling", None) or {"rope_type": "default"}
        rope.setdefault("rope_type", rope.get("type"))
        names = ("rope_theta", "partial_rotary_factor")
        config["rope_parameters"] = rope | {name: config.pop(name) for name in names if name in config}
        config["dtype"] = config.pop("torch_dtype", config.get("dtype"))  # From 4.56 on it has the newer name already.
    file.write_text(json.dumps(config))


# Gemma 4 is not in transformers 4.
@pytest.mark.parametrize(
    "family", [pytest.param(n, marks=needs_family(n)) for n in FAMILIES if not n.startswith("gemma4")]
)
def test_both_spellings_of_the_configuration(family, tmp_path):
    """Of RoPE's settings and of the dtype, in transformers 4 and 5."""
    path = make_checkpoint(tmp_path, family=family, **fields_of(family))
    specs = []
    for _ in range(2):
        config = Config(str(path), device="cpu").hf_config
        specs.append(model_class(config).checked_spec(config))
        respell(path / "config.json")
    assert specs[0] == specs[1]


# -- the table -------------------------------------------------------------------------------------------------------


def test_every_registered_architecture_has_a_row():
    """docs/adding-a-model.md says how to write one."""
    larger = {row.larger[0] for row in FAMILIES.values() if row.larger}
    seeing = {row.architecture for row in VISION_FAMILIES.values()}
    assert {row.architecture for row in FAMILIES.values()} | larger | seeing == set(registry.ARCHITECTURES)
