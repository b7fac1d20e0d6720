"""LoRA adapters: the merged model is that of PEFT and that of plain torch, in every format; and what is refused."""

import json
import shutil

import pytest
import torch
from checkpoints import Reference, complete, edit_json, greedy, make_checkpoint, make_llm, needs_family, poisoned_model
from families import fields_of
from lora_adapters import LINEAR, PREFIX, QKVO, edit_adapter, merged_copy, write_adapter
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from nanovllm.config import Config
from nanovllm.layers.backends.torch_backend import TorchBackend
from nanovllm.layers.matmul.matmul import Matmul
from nanovllm.layers.parallel.tensor_parallel import TensorParallel
from nanovllm.models.loader import load_model
from nanovllm.models.lora import read_settings
from nanovllm.models.registry import model_class

PROMPTS = [[5, 9, 200, 31], [7] * 20]
SIZES = {"hidden_size": 128, "intermediate_size": 192}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model"), **SIZES)


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("tied"), tie_word_embeddings=True)


@pytest.fixture(scope="module")
def adapter(path, tmp_path_factory):
    return write_adapter(tmp_path_factory.mktemp("adapter"), path)


@pytest.fixture(scope="module")
def merged(path, adapter, tmp_path_factory):
    return merged_copy(tmp_path_factory.mktemp("merged") / "model", path, adapter)


def parameters(path, lora=None, **options):
    with make_llm(path, lora=None if lora is None else str(lora), **options) as llm:
        llm.model_runner.model.unpack_weights()
        return {name: parameter.clone() for name, parameter in llm.model_runner.model.named_parameters()}


def assert_equal(ours, expected):
    assert ours.keys() == expected.keys()
    for name, parameter in expected.items():
        assert torch.equal(ours[name], parameter), name


# -- PEFT itself -------------------------------------------------------------------------------------------------------

CASES = {
    "alpha": {"lora_alpha": 32, "target_modules": "all-linear"},
    "rslora": {"use_rslora": True, "target_modules": ["q_proj", "down_proj"]},
    "patterns": {
        "target_modules": [*LINEAR],
        "rank_pattern": {"v_proj": 2, "layers.1.mlp.up_proj": 8},
        "alpha_pattern": {"^model.layers.0.self_attn.k_proj": 40, "o_proj": 3, ".*_proj": 5},
    },
    "patterns-rslora": {"use_rslora": True, "target_modules": ["q_proj", "o_proj"], "rank_pattern": {"q_proj": 16}},
    "saved": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens", "norm"]},
    "embedding": {"target_modules": ["embed_tokens", "lm_head", "v_proj"]},
    "biases": {"target_modules": ["q_proj", "k_proj"], "bias": "all"},
}
TIED = {"head": ["lm_head"], "embedding": ["embed_tokens"], "both": ["lm_head", "embed_tokens"]}


def train(path, folder, **config):
    """A random adapter of PEFT's, saved, and the model with it before it is merged."""
    peft = pytest.importorskip("peft", reason="needs peft: pip install '.[test]'")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, **config))
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.add_(torch.empty_like(parameter).normal_(0, 0.1, generator=generator))
    model.save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return peft.PeftModel.from_pretrained(model, folder)


def continued(model, prompt):
    tokens = torch.tensor([prompt])
    with torch.inference_mode():
        for _ in range(12):
            tokens = torch.cat((tokens, model(tokens).logits[:, -1:].argmax(-1)), 1)
    return tokens[0, len(prompt) :].tolist()


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_peft(case, path, tmp_path):
    if case == "biases":
        path = make_checkpoint(tmp_path / "model", attention_bias=True)
    model = train(path, tmp_path / "a", **CASES[case]).merge_and_unload()
    expected = [continued(model, prompt) for prompt in PROMPTS]
    with make_llm(path, lora=tmp_path / "a") as llm:
        assert complete(llm, PROMPTS, greedy(12)) == expected
    with make_llm(path) as llm:
        assert complete(llm, PROMPTS, greedy(12)) != expected


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", ["modules_to_save", "target_modules"])
@pytest.mark.parametrize("case", TIED)
def test_a_tied_head_is_that_of_peft_before_it_merges(case, kind, tied, tmp_path):
    """It adds both to the one matrix when it merges, and so changes what was trained."""
    config = {"target_modules": ["q_proj"]} | {kind: TIED[case]}
    model = train(tied, tmp_path / "a", **config)
    expected = [continued(model, prompt) for prompt in PROMPTS]
    with make_llm(tied, lora=str(tmp_path / "a")) as llm:
        assert complete(llm, PROMPTS, greedy(12)) == expected
        assert not llm.config.hf_config.tie_word_embeddings
    if kind == "modules_to_save":
        merged = model.merge_and_unload()
        assert [continued(merged, prompt) for prompt in PROMPTS] == expected


# -- plain torch -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "module", "scaling"),
    [
        ({"r": 8, "lora_alpha": 4}, "model.layers.0.self_attn.q_proj", 0.5),
        ({"r": 16, "lora_alpha": 8, "use_rslora": True}, "a.q_proj", 2.0),
        ({"r": 4, "lora_alpha": 8, "rank_pattern": {"q_proj": 16}}, "a.q_proj", 0.5),
        ({"r": 4, "lora_alpha": 8, "rank_pattern": {"q_proj": 16}, "use_rslora": True}, "a.q_proj", 2.0),
        ({"r": 4, "lora_alpha": 8, "alpha_pattern": {"q_proj": 2, "a.q_proj": 1}}, "a.q_proj", 0.5),
        ({"r": 4, "lora_alpha": 8, "alpha_pattern": {"_proj": 2, "q": 1, "^q_proj": 1}}, "a.q_proj", 2.0),
        ({"r": 4, "lora_alpha": 8, "alpha_pattern": {r"^a\.\d+\.q_proj": 2}}, "a.11.q_proj", 0.5),
        ({}, "a.q_proj", 1.0),  # PEFT's defaults
    ],
)
def test_scaling(config, module, scaling, path, tmp_path):
    """The first pattern counts that matches the whole name of a module, or its end after a dot."""
    write_adapter(tmp_path, path, targets=())
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"} | config))
    assert read_settings(str(tmp_path)).scaling(module) == scaling


EMBEDDING = "model.embed_tokens.weight"


TIED_CASES = ["saved head", "saved embedding", "lora of the head", "lora of the embedding", "layers"]


@pytest.mark.parametrize("case", TIED_CASES)
def test_a_tied_head_becomes_its_own(case, tied, tmp_path):
    """If the adapter changes it or the embedding, and only then."""
    saved = case.rpartition(" ")[2] if case.startswith("saved") else ""
    names = {"head": "lm_head", "embedding": "embed_tokens"}
    config = {"modules_to_save": [names[saved]]} if saved else {}
    adapter = write_adapter(tmp_path / "a", tied, ("q_proj",), **config)
    base = load_file(tied / "model.safetensors")[EMBEDDING]
    head = embedding = base
    A, B = torch.randint(-2, 3, (4, base.shape[1])) / 8, torch.randint(-2, 3, (base.shape[0], 4)) / 8
    if case == "saved head":
        changes, head = {"lm_head.weight": base + 1}, base + 1
    elif case == "saved embedding":
        changes, embedding = {EMBEDDING: base + 1}, base + 1
    elif case == "lora of the head":
        changes, head = {"lm_head.lora_A.weight": A, "lm_head.lora_B.weight": B}, base + 2 * (B @ A)
    elif case == "lora of the embedding":
        embedding = base + 2 * (B @ A)
        changes = {"model.embed_tokens.lora_embedding_A": B.t(), "model.embed_tokens.lora_embedding_B": A.t()}
    else:
        changes = {}
    edit_adapter(adapter, lambda t: t.update({PREFIX + name: value.contiguous() for name, value in changes.items()}))
    with make_llm(tied, lora=str(adapter)) as llm:
        model = llm.model_runner.model
        model.unpack_weights()
        assert torch.equal(model.model.embed_tokens.weight, embedding)
        assert torch.equal(model.lm_head.weight, head)
        assert llm.config.hf_config.tie_word_embeddings == (case == "layers")


def test_tokens_are_those_of_the_merged_checkpoint(path, adapter, merged):
    expected = Reference(merged).greedy(PROMPTS, 12)
    assert Reference(path).greedy(PROMPTS, 12) != expected
    with make_llm(path, lora=str(adapter)) as llm:
        assert complete(llm, PROMPTS, greedy(12)) == expected
        llm.sleep(2)
        llm.wake_up()
        assert complete(llm, PROMPTS, greedy(12)) == expected
        # New weights replace the merged ones, with no adapter.
        llm.update_weights(load_file(path / "model.safetensors").items())
        assert complete(llm, PROMPTS, greedy(12)) == Reference(path).greedy(PROMPTS, 12)


FORMATS = {
    "fp8": {"quantization": "fp8", "dtype": "bfloat16"},
    "int4": {"quantization": "int4"},
    "bfloat16": {"dtype": "bfloat16"},
    "plain": {"plain": True},
}


@pytest.mark.parametrize("options", FORMATS.values(), ids=FORMATS)
def test_weights_are_merged_before_they_are_rounded(options, path, adapter, merged):
    assert_equal(parameters(path, adapter, **options), parameters(merged, **options))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_merges_its_part(rank, path, adapter, merged):
    """Rows of some weights, columns of others."""
    config, models = AutoConfig.from_pretrained(path), []
    for place, lora in ((path, str(adapter)), (merged, None)):
        models.append(model_class(config)(config, 64, TorchBackend(), TensorParallel(rank, 2), Matmul()))
        load_model(models[-1], str(place), lora)
    assert_equal(*(dict(model.named_parameters()) for model in models))


FAMILIES = {
    "qwen3_moe": (LINEAR, {}),
    "phi3": (("qkv_proj", "o_proj", "gate_up_proj", "down_proj"), {}),
    "granite": (LINEAR, {}),
    "gemma3_text": (QKVO, {}),
}


@pytest.mark.parametrize("family", [pytest.param(family, marks=needs_family(family)) for family in FAMILIES])
def test_families(family, tmp_path):
    """Experts, fused weights of the checkpoint, factors, and norms less one."""
    path = make_checkpoint(tmp_path / "model", family=family, **fields_of(family))
    adapter = write_adapter(tmp_path / "adapter", path, FAMILIES[family][0])
    merged = merged_copy(tmp_path / "merged", path, adapter)
    ours, expected = poisoned_model(path), poisoned_model(path)
    load_model(ours, str(path), str(adapter))
    load_model(expected, str(merged))
    assert_equal(dict(ours.named_parameters()), dict(expected.named_parameters()))


@needs_family("gemma3_text")
def test_the_text_part_of_a_larger_model(tmp_path):
    """The adapter calls it as the larger model does, or as the text model alone; its vision tower is not read."""
    path = make_checkpoint(tmp_path / "text", "gemma3_text", **fields_of("gemma3_text"))
    model = poisoned_model(path)
    if not model.checkpoint_prefixes:
        pytest.fail("the test needs a family whose checkpoint may be a part")
    adapter = write_adapter(tmp_path / "adapter", path, QKVO)
    expected = poisoned_model(path)
    load_model(expected, str(merged_copy(tmp_path / "merged", path, adapter)))
    tensors = load_file(path / "model.safetensors")
    save_file({f"language_model.{name}": each for name, each in tensors.items()}, path / "model.safetensors")
    for prefix in ("", "language_model."):
        other = tmp_path / f"adapter{len(prefix)}"
        shutil.copytree(adapter, other)

        def rename(tensors, prefix=prefix):
            old = dict(tensors)
            tensors.clear()
            tensors |= {PREFIX + prefix + name.removeprefix(PREFIX): each for name, each in old.items()}
            tensors[f"{PREFIX}model.vision_tower.layers.0.q_proj.lora_A.weight"] = torch.ones(4, 8)

        edit_adapter(other, rename)
        load_model(model, str(path), str(other))
        assert_equal(dict(model.named_parameters()), dict(expected.named_parameters()))
    edit_adapter(other, lambda tensors: [tensors.pop(name) for name in list(tensors) if "vision" not in name])
    with pytest.raises(ValueError, match="holds no tensor of the language model"):
        load_model(model, str(path), str(other))


# -- what is refused ---------------------------------------------------------------------------------------------------

REFUSED = [
    ({"peft_type": "LOHA"}, r"adapter_config\.json: peft_type='LOHA': must be 'LORA'; merge it with peft"),
    ({"peft_type": None}, "peft_type=None: must be 'LORA'"),
    ({"use_dora": True}, "use_dora=True: not supported; merge it with peft: AutoPeft"),
    ({"lora_bias": True}, "lora_bias=True: not supported; merge it with peft"),
    ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters=.*not supported; merge it"),
    ({"trainable_token_indices": [1]}, "trainable_token_indices=.*not supported; merge it"),
    ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens=.*cannot be merged"),
    ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'.*path_initial_model_for_weight_conversion"),
    ({"r": 0}, "r=0: must be an integer >= 1"),
    ({"lora_alpha": "8"}, "lora_alpha='8': must be a number"),
    ({"rank_pattern": {"q": 0}}, "rank_pattern=.*regular expressions to integers >= 1"),
    ({"alpha_pattern": {"(q": 4}}, r"alpha_pattern: '\(q' is no regular expression"),
    ({"modules_to_save": "lm_head"}, "modules_to_save='lm_head': must be a list of names"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[str(changes) for changes, _ in REFUSED])
def test_settings_that_are_refused(changes, message, path, adapter, tmp_path):
    """Before anything is loaded."""
    shutil.copytree(adapter, tmp_path / "a")
    edit_json(tmp_path / "a/adapter_config.json", **changes)
    with pytest.raises(ValueError, match=message):
        Config(str(path), lora=str(tmp_path / "a"), device="cpu", skip_tokenizer_init=True)


def first(tensors, ending):
    return next(name for name in tensors if name.endswith(ending))


Q = f"{PREFIX}model.layers.0.self_attn.q_proj"
WRONG_TENSORS = [
    (lambda t: t.pop(f"{Q}.lora_B.weight"), "of 'model.layers.0.self_attn.q_proj' there is A: must"),
    (lambda t: t.update({f"{Q}.lora_A.weight": torch.ones(8, 128)}), r"shapes \[8, 128\] and .*r=4 they must have \[4"),
    (lambda t: t.update({f"{Q}.lora_A.weight": torch.ones(4, 128).int()}), "q_proj.lora_A.weight' has dtype I32"),
    (
        lambda t: t.update({f"{PREFIX}model.layers.7.mlp.up_proj.lora_A.weight": torch.ones(4, 128)}),
        r"has no 'model\.layers\.7\.mlp\.up_proj\.weight'; it was trained with '.*': is this the same model",
    ),
    (
        lambda t: t.update({f"{PREFIX}lm_head.weight": torch.ones(321, 128)}),
        r"adapter_model\.safetensors: tensor 'lm_head.weight' has shape \[321, 128\], the model needs \[320, 128\]",
    ),
]


@pytest.mark.parametrize(("edit", "message"), WRONG_TENSORS, ids=range(len(WRONG_TENSORS)))
def test_tensors_that_are_refused(edit, message, path, adapter, tmp_path):
    shutil.copytree(adapter, tmp_path / "a")
    edit_adapter(tmp_path / "a", edit)
    with pytest.raises(ValueError, match=message):
        make_llm(path, lora=str(tmp_path / "a"))


def test_files_that_are_refused(path, adapter, tmp_path):
    def config(name):
        return Config(str(path), lora=str(tmp_path / name), device="cpu", skip_tokenizer_init=True)

    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"lora='.*empty': holds no adapter_config\.json: must be a PEFT"):
        config("empty")
    shutil.copytree(adapter, tmp_path / "pickle")
    (tmp_path / "pickle/adapter_model.safetensors").rename(tmp_path / "pickle/adapter_model.bin")
    with pytest.raises(FileNotFoundError, match=r"adapter_model\.bin is a pickle.*never opened.*save_pretrained"):
        config("pickle")
    shutil.copytree(adapter, tmp_path / "cut")
    file = tmp_path / "cut/adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-7])
    with pytest.raises(ValueError, match=r"cut/adapter_model\.safetensors: damaged or truncated"):
        make_llm(path, lora=str(tmp_path / "cut"))


def test_a_rounded_checkpoint_is_refused(path, adapter, tmp_path):
    shutil.copytree(path, tmp_path / "model")
    edit_json(tmp_path / "model/config.json", quantization_config={"quant_method": "awq", "bits": 4, "group_size": 32})
    with pytest.raises(ValueError, match=r"lora=.*rounded already, here to int4: use the unquantized checkpoint"):
        Config(str(tmp_path / "model"), lora=str(adapter), device="cpu", skip_tokenizer_init=True)
