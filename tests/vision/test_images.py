"""Prompts with images, held to transformers: float32 on the CPU, token for token, on tiny random checkpoints."""

import json
import math
import pickle
import re
import shutil
import threading
from copy import copy
from functools import cache
from types import SimpleNamespace

import pytest
import torch
import transformers
from checkpoints import (
    VOCAB_SIZE,
    assert_idle,
    complete,
    edit_json,
    edit_tensors,
    generate,
    greedy,
    make_llm,
    needs_family,
    needs_transformers,
    random_prompt,
    skip_unless_known,
)
from fp8_checkpoints import BLOCKS, rounded
from replay import Replay
from thread_ranks import make_llm_of_ranks
from vision_checkpoints import (
    BEGIN,
    END,
    IMAGE,
    VISION_FAMILIES,
    VisionReference,
    draw_image,
    make_vision_checkpoint,
    turn_experts,
)

from nanovllm import LLM, find_image_reader, reads_images
from nanovllm.config import Config
from nanovllm.engine.features.images.image_sequence import ThinkingImageSequence
from nanovllm.engine.features.speculation import speculative_scheduler
from nanovllm.engine.images import ImageInput, ImagePrompt, load_processor
from nanovllm.engine.start.memory import largest_prefill
from nanovllm.engine.text import image_prompts, image_reader
from nanovllm.fit import needs
from nanovllm.models import qwen3_vl, vision
from nanovllm.models.gemma3 import Gemma3Vision
from nanovllm.models.model_size import meta_model
from nanovllm.models.presets import preset_config
from nanovllm.models.registry import find_vision

pytest.importorskip("PIL", reason="needs Pillow")
pytestmark = needs_transformers("5")

NUM_TOKENS = 20
# Of 9, 64, 24 and 4 rows.
SIZES = {"square": (48, 48), "large": (128, 128), "wide": (128, 48), "small": (16, 32)}
ONE, SEVERAL = ["square"], ["wide", "small", "square"]


class Case:
    """A checkpoint, transformers' model of it, images, and prompts with one, several, none and a large one."""

    def __init__(self, family, directory):
        self.path = make_vision_checkpoint(directory, family)
        self.reference = VisionReference(self.path)
        self.images = {name: draw_image(*size, seed=i) for i, (name, size) in enumerate(SIZES.items())}
        self.prompts = [self.draw(names, seed=i) for i, names in enumerate([ONE, SEVERAL, [], ["large"]])]
        self.expected = self.reference.greedy(self.prompts, NUM_TOKENS)

    def draw(self, names, **options):
        return self.reference.draw_prompt([self.images[name] for name in names], NUM_TOKENS, **options)


@pytest.fixture(scope="module")
def make_case(tmp_path_factory):
    return cache(lambda family: Case(family, tmp_path_factory.mktemp(family)))


def each_family(*nightly):
    """A test for each family; a nightly one of these."""
    nightly = {family: [pytest.mark.nightly] for family in nightly}
    marks = {family: [needs_family(family), *nightly.get(family, ())] for family in VISION_FAMILIES}
    return pytest.mark.parametrize("family", [pytest.param(family, marks=marks[family]) for family in marks])


@pytest.fixture
def case(request, make_case):
    """Of the test's family, or of Qwen3-VL."""
    family = request.node.callspec.params.get("family") if hasattr(request.node, "callspec") else None
    if family is None:
        skip_unless_known("qwen3_vl")
    return make_case(family or "qwen3_vl")


@each_family("qwen3_5_moe")
def test_one_image_and_several_beside_a_text_and_again_from_the_cache(case, family):
    with make_llm(case.path) as llm:
        assert complete(llm, case.prompts, greedy(NUM_TOKENS)) == case.expected
        outputs = generate(llm, case.prompts[::-1], greedy(NUM_TOKENS))
        assert [output["token_ids"] for output in outputs] == case.expected[::-1]
        assert outputs[0]["num_cached_tokens"] >= (16 if family == "gemma3" else 64)  # blocks, or a chunk of states
        assert_idle(llm)


@each_family("qwen3_5_moe", "qwen3_vl_moe")
@pytest.mark.parametrize("overlap_steps", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_chunks_that_cut_images_and_preemption(case, family, overlap_steps):
    encoded = []
    limits = {"num_kvcache_blocks": 8, "max_num_batched_tokens": 23, "max_num_seqs": 4, "max_model_len": 112}
    if family.startswith("gemma4"):  # whose images have 70 rows, small ones too
        limits |= {"num_kvcache_blocks": 20, "max_num_batched_tokens": 75, "max_model_len": 300}
    with make_llm(case.path, **limits, overlap_steps=overlap_steps, enable_prefix_caching=False) as llm:
        llm.model_runner.model.vision.register_forward_hook(lambda tower, given, _: encoded.append(len(given[0])))
        assert complete(llm, case.prompts * 2, greedy(NUM_TOKENS)) == case.expected * 2
        assert llm.scheduler.num_preemptions > 0
        assert_idle(llm)
    if family.startswith("qwen"):  # Chunks of the others cut no image.
        # Three chunks have the 64 rows of the large image, but the tower computes it once for each of the two prompts.
        assert encoded.count(4 * 64) == 2


@each_family("qwen3_5_moe", "qwen3_vl_moe")
def test_equal_tokens_of_other_images_are_not_shared(case, family):
    """Nor what follows them; what precedes them is."""
    image, other = (draw_image(128, 128, seed) for seed in (10, 11))
    tokens = [*random_prompt(20, 1, 300), BEGIN, IMAGE, END, *random_prompt(6, 2, 300)]
    prompts = [{"prompt": tokens, "images": [each]} for each in (image, other)]
    expected = case.reference.greedy(prompts, 6)
    assert expected[0] != expected[1]
    with make_llm(case.path) as llm:
        # Whole blocks, or chunks of states. Gemma's images have 16 rows.
        known = {"gemma3": (0, 16, 32, 32), "qwen3_5": (0, 0, 64, 64), "qwen3_5_moe": (0, 0, 64, 64)}
        counts = known.get(family, (0, 16, 80, 80))
        for prompt, completion, num_cached in zip(prompts * 2, expected * 2, counts, strict=True):
            (output,) = generate(llm, [prompt], greedy(6))
            assert (output["token_ids"], output["num_cached_tokens"]) == (completion, num_cached)
        # At once: the second of each waits for the blocks of the first.
        llm.reset_prefix_cache()
        outputs = generate(llm, prompts * 2, greedy(6))
        assert [output["token_ids"] for output in outputs] == expected * 2
        assert sorted(output["num_cached_tokens"] for output in outputs) == sorted(counts)


def test_equal_images_in_other_places_are_computed_once_a_step(case):
    encoded = []
    prompts = [case.draw(ONE, seed=seed, num_texts=seed) for seed in (3, 5)]
    with make_llm(case.path) as llm:
        llm.model_runner.model.vision.register_forward_hook(lambda tower, given, _: encoded.append(len(given[0])))
        assert complete(llm, prompts, greedy(NUM_TOKENS)) == case.reference.greedy(prompts, NUM_TOKENS)
    assert encoded == [4 * 9]


def test_batches_of_patches(case):
    """Of up to 140 patches at once, and of a larger image alone."""
    encoded = []
    with make_llm(case.path) as llm:
        llm.model_runner.decode_inputs.columns[-1].max_patches = 140
        llm.model_runner.model.vision.register_forward_hook(lambda tower, given, _: encoded.append(len(given[0])))
        assert complete(llm, case.prompts, greedy(NUM_TOKENS)) == case.expected
    # The square image is in two prompts.
    assert encoded == [36 + 96 + 8, 256]


@each_family("qwen3_5_moe", "qwen3_5", "gemma3")
def test_two_ranks(case, family):
    with make_llm_of_ranks(case.path, 2, max_num_batched_tokens=75 if family.startswith("gemma4") else 50) as llm:
        assert complete(llm, case.prompts, greedy(NUM_TOKENS)) == case.expected


@each_family("qwen3_5_moe", "qwen3_vl_moe", "gemma3", "gemma4", "gemma4_unified")
def test_speculation(case, family, monkeypatch):
    """Proposed tokens have positions too."""
    choose = lambda chances, num_seqs, pace: [len(each) for each in chances]  # noqa: E731
    monkeypatch.setattr(speculative_scheduler, "choose_counts", choose)
    monkeypatch.setattr(speculative_scheduler, "_MAX_LOOKING_SHARE", math.inf)  # on a busy machine too
    known = {(i, 0): tokens for i, tokens in enumerate(case.expected)}
    with make_llm(case.path, speculation="suffix", max_speculative_tokens=5) as llm:
        llm.scheduler.proposer = Replay(known, 0.2, VOCAB_SIZE)
        assert complete(llm, case.prompts, greedy(NUM_TOKENS)) == case.expected
        stats = llm.stats()
        assert 0 < stats["accepted_tokens"] < stats["proposed_tokens"]


def test_mixed_steps_leave_images_to_prefills(case):
    """A text of the same model is computed beside a decode step whose sequence has an image."""
    with make_llm(case.path, mixed_step_rows=16) as llm:
        ids, done = [llm.add_request(case.prompts[0], greedy(NUM_TOKENS))], {}
        while not llm.is_finished():
            done |= dict(llm.step()[0])
            if len(ids) == 1:
                ids += [llm.add_request(prompt, greedy(8)) for prompt in (case.prompts[2], case.prompts[1])]
        assert [done[i] for i in ids] == [case.expected[0], case.expected[2][:8], case.expected[1][:8]]


def test_samples_and_logprobs(case):
    with make_llm(case.path) as llm:
        (output,) = generate(llm, case.prompts[:1], greedy(NUM_TOKENS, n=2, logprobs=0, prompt_logprobs=0))
        assert [sample["token_ids"] for sample in output["samples"]] == case.expected[:1] * 2
        assert len(output["prompt_logprobs"]) == len(case.prompts[0]["prompt"]) + 8
        assert_idle(llm)


# -- what may come -------------------------------------------------------------------------------------------------


def test_a_path_and_what_a_reader_has_prepared(case, tmp_path):
    prompt, expected = case.prompts[0], case.expected[0]
    file = tmp_path / "page.png"
    prompt["images"][0].save(file)
    with make_llm(case.path) as llm:
        reader = llm._sequences.image_prompts
        tokens = reader.read(prompt)
        images = [placed.image for placed in tokens.images.each]
        prepared = ImagePrompt(list(tokens), images)
        assert complete(llm, prepared, greedy(NUM_TOKENS)) == [expected]
        assert complete(llm, {"prompt": prompt["prompt"], "images": [str(file)]}, greedy(NUM_TOKENS)) == [expected]
        assert llm.scheduler.num_prefix_hits > 0  # The hash is of what was decoded.


def test_threads_read_the_images_of_a_call_side_by_side(case, tmp_path, monkeypatch):
    """Each waits until the others are read as well. What is wrong with one is its prompt's error."""
    monkeypatch.setattr(image_prompts, "image_threads", lambda: 3)
    all_three, read_image = threading.Barrier(3), image_reader.read_image

    def read(source, rules):
        all_three.wait(timeout=60)
        return read_image(source, rules=rules)

    monkeypatch.setattr(image_reader, "read_image", read)
    one, several, text, _ = case.prompts
    with make_llm(case.path) as llm:
        assert complete(llm, [several, text], greedy(NUM_TOKENS)) == case.expected[1:3]
        wrong = one | {"images": ["/nowhere.png"]}
        outputs = llm.generate([several, wrong, text, one, one], greedy(NUM_TOKENS), False, on_error="return")
        assert "prompts[1]: images[0]: image '/nowhere.png': it cannot be read" in outputs[1]["error"]
        assert [outputs[i]["token_ids"] for i in (0, 2, 3, 4)] == [case.expected[i] for i in (1, 2, 0, 0)]
        request, done = llm.add_request(several, greedy(NUM_TOKENS)), {}
        while not llm.is_finished():
            done |= dict(llm.step()[0])
        assert done[request] == case.expected[1]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"images": "page.png"}, TypeError, r"images='page.png': must be a list of paths, URLs or Pillow's images"),
        ({"images": [3]}, TypeError, r"images\[0\]: image 3: must be a path, .* not int"),
        ({"images": ["/nowhere.png"]}, ValueError, r"images\[0\]: image '/nowhere.png': it cannot be read"),
        ({"prompt": [1, 2]}, ValueError, "its prompt has 0 places for images, and it has 1 image"),
        ({"prompt": [IMAGE, 5, IMAGE]}, ValueError, "has 2 places for images"),
        ({"prompt": "text"}, ValueError, "skip_tokenizer_init"),
        ({"images": [draw_image(128, 128, 1)]}, ValueError, r"images\[0\]: takes 64 tokens, .* images of 60 at most"),
    ],
)
def test_wrong_images_are_errors_of_their_request(case, change, error, message):
    with make_llm(case.path, max_model_len=60) as llm:
        with pytest.raises(error, match=rf"prompts\[1\]: .*{message}"):
            generate(llm, [case.prompts[2], case.prompts[0] | change], greedy(2))
        outputs = llm.generate([case.prompts[0] | change, case.prompts[2]], greedy(2), False, on_error="return")
        assert "error" in outputs[0]
        assert outputs[1]["token_ids"] == case.expected[2][:2]


@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=needs_family(family)) for family in ("gemma4", "gemma4_unified")]
)
def test_an_image_that_the_tower_has_no_positions_for(case, family):
    """It costs the prompts beside it nothing, also if a caller has processed it."""
    size = (2000, 10) if family == "gemma4" else (4000, 10)
    long = case.prompts[0] | {"images": [draw_image(*size, seed=0)]}
    spec = find_vision(Config(str(case.path), device="cpu").hf_config)
    processed = spec.process(load_processor(spec, str(case.path)), long["images"][0])
    given = ImageInput.of(processed, bytes(32))
    prepared = ImagePrompt(spec.expand(long["prompt"], [given.num_rows]), [given])
    said = r"it becomes \d+ x \d patches, and the vision tower knows 64 positions a side"
    with make_llm(case.path) as llm:
        prompts = [case.prompts[0], long, case.prompts[2], prepared]
        outputs = llm.generate(prompts, greedy(NUM_TOKENS), False, on_error="return")
    assert [outputs[i]["token_ids"] for i in (0, 2)] == [case.expected[i] for i in (0, 2)]
    assert re.search(rf"prompts\[1\]: images\[0\]: image of {size[0]} x 10 pixels: {said}", outputs[1]["error"])
    assert re.search(rf"prompts\[3\]: images\[0\]: {said}", outputs[3]["error"])


@needs_family("gemma3")
def test_an_image_that_no_step_has_room_for(make_case):
    case = make_case("gemma3")
    with make_llm(case.path, max_num_batched_tokens=15) as llm:
        with pytest.raises(ValueError, match=r"takes 16 tokens, .* in one step: raise max_num_batched_tokens=15"):
            generate(llm, case.prompts[:1], greedy(2))
        assert complete(llm, case.prompts[2:3], greedy(NUM_TOKENS)) == case.expected[2:3]


@needs_family("gemma3")
def test_gemmas_text_around_an_image():
    class Tokenizer:
        convert_ids_to_tokens = staticmethod({BEGIN: "<begin>", IMAGE: "<row>", END: "<end>"}.get)

    fields = {"image_token_index": IMAGE, "boi_token_index": BEGIN, "eoi_token_index": END, "mm_tokens_per_image": 16}
    config = SimpleNamespace(vision=fields | {"vision_config": {"image_size": 64, "patch_size": 8}}, hidden_size=64)
    spec = Gemma3Vision(config)
    assert spec.write_images("a <begin> b <begin>", Tokenizer) == (
        "a \n\n<begin><row><end>\n\n b \n\n<begin><row><end>\n\n"
    )


@needs_family("gemma3")
def test_gemmas_marker_without_an_image(make_case):
    """Only around images it becomes a placeholder."""
    case = make_case("gemma3")
    with make_llm(case.path) as llm:
        for places in ([BEGIN], [IMAGE], [BEGIN, IMAGE, END]):
            outputs = llm.generate([case.prompts[2], [5, *places]], greedy(2), False, on_error="return")
            assert outputs[0]["token_ids"] == case.expected[2][:2]
            assert "prompts[1]: its prompt has 1 place for images, and it has no image" in outputs[1]["error"]


@needs_family("qwen3_vl_moe")
def test_experts_in_both_layouts(make_case, tmp_path):
    """Checkpoints have the matrices of a layer's experts transposed, and transformers 5 has them as they are used:
    weights that are handed over while an engine runs come like that, and some releases have saved them so."""
    case = make_case("qwen3_vl_moe")
    path, shapes = shutil.copytree(case.path, tmp_path / "model"), []

    def turn(tensors):
        names = [f"model.language_model.layers.0.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")]
        shapes.append([list(tensors[name].shape) for name in names])
        turn_experts(tensors, as_published=False)
        shapes.append([list(tensors[name].shape) for name in names])

    edit_tensors(path, turn)
    assert shapes == [[[4, 64, 96], [4, 48, 64]], [[4, 96, 64], [4, 64, 48]]]
    prompts, expected = case.prompts[:1], case.expected[:1]
    with make_llm(path) as llm:
        assert complete(llm, prompts, greedy(NUM_TOKENS)) == expected
    with make_llm(case.path) as llm:
        assert complete(llm, prompts, greedy(NUM_TOKENS)) == expected
        experts = {name: x for name, x in case.reference.model.named_parameters() if ".experts." in name}
        llm.update_weights((name, torch.zeros_like(x)) for name, x in experts.items())
        assert complete(llm, prompts, greedy(NUM_TOKENS)) != expected
        llm.update_weights(experts.items())
        assert complete(llm, prompts, greedy(NUM_TOKENS)) == expected


@needs_family("qwen3_vl_moe")
def test_experts_in_fp8_with_scales_of_blocks(tmp_path):
    """As Qwen3-VL-30B-A3B-Instruct-FP8 has them, those of a layer in one tensor, transposed, and their scales alike;
    the same not transposed; and each expert's matrices apart, as other families' checkpoints have them."""
    sizes = {"hidden_size": 128, "moe_intermediate_size": 384, "intermediate_size": 128, "head_dim": 64}
    plain = make_vision_checkpoint(tmp_path / "plain", "qwen3_vl_moe", **sizes)
    prompt = {"prompt": [5, BEGIN, IMAGE, END, 6, 7], "images": [draw_image(48, 48, seed=0)]}
    answers, layout = {}, ""

    def quantize(tensors):
        for name in [name for name in tensors if ".language_model." in name and name.endswith(("proj", "proj.weight"))]:
            matrix = tensors.pop(name)
            if matrix.dim() == 2:
                tensors[name], tensors[name + "_scale_inv"] = rounded(matrix, 128, 128)
                continue
            found = [rounded(each.t(), 128, 128) for each in matrix]  # [rows, columns] of each expert
            if layout != "apart":
                turned = [[x.t() if layout == "published" else x for x in each] for each in found]
                values, scales = (torch.stack(x) for x in zip(*turned, strict=True))
                tensors |= {name: values, name + "_scale_inv": scales}
                continue
            folder, _, stem = name.rpartition(".")
            names = ["down_proj"] if stem == "down_proj" else ["gate_proj", "up_proj"]
            for expert, (values, scales) in enumerate(found):
                halves = zip(names, values.chunk(len(names)), scales.chunk(len(names)), strict=True)
                for projection, part, scale in halves:
                    own = f"{folder}.{expert}.{projection}.weight"
                    tensors |= {own: part.contiguous(), own + "_scale_inv": scale.contiguous()}

    for layout in ("published", "as transformers 5 holds them", "apart"):
        path = shutil.copytree(plain, tmp_path / layout)
        edit_tensors(path, quantize)
        edit_json(
            path / "config.json", quantization_config=BLOCKS | {"modules_to_not_convert": ["lm_head", "model.visual"]}
        )
        with make_llm(path) as llm:
            (output,) = generate(llm, [prompt], greedy(8, logprobs=0))
            answers[layout] = output["token_ids"], output["logprobs"]
    assert answers["published"] == answers["as transformers 5 holds them"] == answers["apart"]
    with make_llm(plain) as llm:  # Rounding to 8 bits changes little.
        (output,) = generate(llm, [prompt], greedy(1, logprobs=0))
    first, other = (next(iter(each[0].values())) for each in (output["logprobs"], answers["published"][1]))
    assert first == pytest.approx(other, abs=0.5)


def test_only_completions_can_be_asked_for(case):
    with make_llm(case.path) as llm, pytest.raises(TypeError, match=r"prompts\[0\]: has images: only completions"):
        llm.score(case.prompts[:1], [[1, 2]])


def test_a_completion_may_have_the_token_of_an_images_place(case):
    """Scored as in an engine of texts: a model may sample it."""
    scores = []
    with make_llm(case.path) as llm:
        place = find_vision(llm.config.hf_config).placeholder_id
        scores += llm.score([[5, 6, 7]], [[8, place, 9]], use_tqdm=False)
    with make_llm(case.path, text_only=True) as llm:
        scores += llm.score([[5, 6, 7]], [[8, place, 9]], use_tqdm=False)
    scores = [score["logprobs"] for score in scores]
    assert len(scores[0]) == 3
    assert scores[0] == pytest.approx(scores[1], abs=1e-5)


def test_a_checkpoint_of_the_text_model_alone(case, tmp_path):
    """Its configuration may still describe the tower."""
    path = shutil.copytree(case.path, tmp_path / "text")
    edit_tensors(path, lambda tensors: [tensors.pop(name) for name in list(tensors) if ".visual." in name])
    with make_llm(path) as llm:
        assert complete(llm, case.prompts[2:3], greedy(NUM_TOKENS)) == case.expected[2:3]
        said = r"prompts\[0\]: images: this model reads no images: Qwen3VL\w+ is loaded without a vision tower"
        with pytest.raises(ValueError, match=said):
            generate(llm, case.prompts[:1], greedy(2))


def test_an_engine_for_texts_alone_leaves_the_tower_out(case):
    with make_llm(case.path, text_only=True) as llm:
        assert not any("visual" in name or "vision" in name for name, _ in llm.model_runner.model.named_parameters())
        assert complete(llm, case.prompts[2:3], greedy(NUM_TOKENS)) == case.expected[2:3]
        with pytest.raises(ValueError, match=r"prompts\[0\]: images: need text_only=False"):
            generate(llm, case.prompts[:1], greedy(2))


def test_a_start_counts_the_tower_and_its_largest_images(case, monkeypatch):
    """As an engine on a GPU does: by a prefill of images alone. `fit` counts the same from shapes."""
    monkeypatch.setattr(vision, "_MIN_PATCHES", 400)
    with make_llm(case.path, max_model_len=64, max_num_batched_tokens=32) as llm:
        runner, config = llm.model_runner, llm.config
        spec = runner.model.vision_spec
        encoded = []
        runner.model.vision.register_forward_hook(lambda tower, given, _: encoded.append(len(given[0])))
        with torch.inference_mode():
            inputs = largest_prefill(config, runner.device, runner.decode_inputs.columns)
            assert inputs.context.images.rows.shape == (32, spec.row_size)
            runner._compute(inputs)
        assert encoded == [spec.limits(64)[1]] == [400]
        counted, of_text = needs(config), needs(config, without_tower(config))
        tower = sum(parameter.nbytes for parameter in runner.model.vision.parameters())
        assert counted.weights >= of_text.weights + tower
        assert counted.activations > of_text.activations + 64 * spec.row_size * 4


@each_family()
def test_the_largest_images_are_some_that_the_tower_reads(case, family):
    """A GPU's start computes them. 8,200 patches are more than one image of the tiny towers has."""
    spec = find_vision(Config(str(case.path), device="cpu").hf_config)
    with torch.inference_mode():
        images = spec.largest_images(8200, torch.float32, torch.device("cpu"))
        rows = spec.encode(spec.make_tower().eval(), images)
    assert rows.shape == (sum(image.num_rows for image in images), spec.row_size)
    assert 7800 < sum(spec.num_patches(image) for image in images) <= 8200


def without_tower(config):
    config = copy(config)
    config.hf_config = copy(config.hf_config)
    config.hf_config.vision = None
    return meta_model(config)


def test_what_a_tower_is_told_of_the_sizes_changes_nothing(case, monkeypatch):
    """On a GPU it would wait for them."""
    tower = case.reference.model.model.visual
    grids = torch.tensor([[1, 4, 6], [1, 8, 2]])
    pixels = torch.randn(24 + 16, 3 * 2 * 8 * 8, generator=torch.Generator().manual_seed(0))
    told = qwen3_vl._of_grids(tower, grids, torch.device("cpu"))
    if not told:
        pytest.skip("this transformers cannot be told")
    expected, found = (tower(pixels, grid_thw=grids, **each).pooler_output for each in ({}, told))
    assert torch.equal(found, expected)


@each_family("qwen3_5_moe", "qwen3_vl_moe", "qwen3_5")
def test_image_processors(case, family, tmp_path):
    """As the checkpoint describes it, or its family's usual one. Either says how many rows an image has before it is
    decoded."""
    path = shutil.copytree(case.path, tmp_path / "model")
    spec = find_vision(Config(str(path), device="cpu").hf_config)
    described = load_processor(spec, path)
    file = path / "preprocessor_config.json"
    content = json.loads(file.read_text())
    file.unlink()
    newer_file = path / "processor_config.json"  # Newer checkpoints have it here.
    edit_json(newer_file, image_processor=content | {"resample": 2})
    newer = load_processor(spec, path)
    assert (newer.resample, newer.size) == (2, described.size)
    newer_file.unlink()
    for processor in (described, newer, load_processor(spec, path)):
        image = case.images["wide"]
        assert spec.num_rows(processor, image.height, image.width) == spec.process(processor, image).num_rows
    name, value = next(iter(spec.processor_options().items()))
    wrong = dict.fromkeys(value, 32) if isinstance(value, dict) else value + 1
    type(described)(**spec.processor_options() | {name: wrong}).save_pretrained(path)
    with pytest.raises(ValueError, match=rf"preprocessor_config\.json: {name}=.*vision_config says"):
        load_processor(spec, path)


def test_an_image_processor_without_torchvision(case, tmp_path, monkeypatch):
    """Older releases of transformers look for no processor without it."""
    path = shutil.copytree(case.path, tmp_path / "model")
    spec = find_vision(Config(str(path), device="cpu").hf_config)

    def refuse(*args, **options):
        raise ImportError("AutoImageProcessor requires the Torchvision library")

    monkeypatch.setattr(transformers.AutoImageProcessor, "from_pretrained", refuse)
    pixels = spec.process(load_processor(spec, path), case.images["wide"]).pixel_values
    assert pixels.shape == (96, 3 * 2 * 8 * 8)
    edit_json(path / "preprocessor_config.json", image_processor_type="AnotherImageProcessor")
    with pytest.raises(ImportError, match="Torchvision"):
        load_processor(spec, path)


def test_a_published_shape_reads_images_without_a_file(no_network):
    """Pages in the size that its published processor gives them, which transformers' own would make smaller."""
    skip_unless_known("qwen3_vl")
    image = draw_image(1000, 1400, seed=0)
    for name in ("Qwen3-VL-2B", "Qwen/Qwen3.5-0.8B"):
        packed = find_image_reader(name, None, None).read(image)
        assert (packed.grid, packed.num_rows) == ((1, 88, 62), 1364)
        pixels = packed.arrays["pixel_values"].values
        assert (pixels.min(), pixels.max()) == (-1, 1)
    assert not reads_images("Qwen3-0.6B")


@pytest.mark.parametrize(
    ("name", "num_rows", "shape"),
    [
        pytest.param("gemma-3-4b", 256, (1, 3, 896, 896), marks=needs_family("gemma3")),
        # Proportions are kept: of up to 280 rows, 19 lines of 14, which are 57 lines of 42 patches.
        pytest.param("gemma-4-31B", 266, (1, 2520, 768), marks=needs_family("gemma4")),
        pytest.param("gemma-4-12B", 266, (266, 6912), marks=needs_family("gemma4_unified")),
    ],
)
def test_so_do_those_of_gemma(name, num_rows, shape, no_network):
    packed = find_image_reader(name, None, None).read(draw_image(1000, 1400, seed=0))
    assert (packed.num_rows, packed.arrays["pixel_values"].values.shape) == (num_rows, shape)


def test_a_published_shape_answers_token_ids_with_images(no_network):
    skip_unless_known("qwen3_vl")
    config = preset_config("Qwen3-VL-2B")
    tower = config.vision["vision_config"]
    sizes = {"num_hidden_layers": 3, "vocab_size": 151936, "hidden_size": 64, "intermediate_size": 64}
    for name, value in (sizes | {"num_attention_heads": 8}).items():
        setattr(config, name, value)
    tower |= {"depth": 3, "deepstack_visual_indexes": [0, 1], "out_hidden_size": 64}
    tower |= {"hidden_size": 64, "intermediate_size": 64, "num_heads": 2}
    options = {"load_format": "dummy", "hf_config": config, "device": "cpu", "max_model_len": 300, "seed": 0}
    options["skip_tokenizer_init"] = True
    prompts = [
        {"prompt": [1, config.vision["image_token_id"], 2], "images": [draw_image(288, 256, seed)]} for seed in (0, 1)
    ]
    with LLM("Qwen3-VL-2B", **options, kvcache_gib=0.1) as llm:
        outputs = llm.generate(prompts, greedy(3), use_tqdm=False)
    assert [output["num_prompt_tokens"] for output in outputs] == [2 + 9 * 8] * 2
    assert [len(output["token_ids"]) for output in outputs] == [3, 3]


def test_thinking_budgets_and_images(case):
    """One sequence may have both."""
    tokens = case.prompts[0]["prompt"]
    with make_llm(case.path) as llm:
        images = llm._sequences.image_prompts.read(case.prompts[0])
        seq = ThinkingImageSequence(images, greedy(4), images=images.images)
        assert seq.images is images.images
        assert len(seq.token_ids) == len(tokens) + 8
        with pytest.raises(TypeError, match="a step by hand on several ranks has no images"):
            pickle.dumps(seq)
