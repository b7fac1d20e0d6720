"""lm-evaluation-harness with our model, against its own `hf` model: scores, truncation, chats and wrong calls.

The tasks are in tasks/. Their data is local.
"""

import json
import random
from functools import partialmethod
from pathlib import Path

import pytest
import real_model
import transformers
from checkpoints import make_checkpoint

from nanovllm import SamplingParams
from nanovllm.cli import main

lm_eval = pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness: pip install '.[eval]'")
pytest.importorskip("accelerate", reason="the harness's hf model needs accelerate")
Instance = pytest.importorskip("lm_eval.api.instance").Instance
TaskManager = pytest.importorskip("lm_eval.tasks").TaskManager
get_model = pytest.importorskip("lm_eval.api.registry").get_model
pytest.importorskip("nanovllm.integrations.lm_eval")  # which registers the model

TASKS = Path(__file__).parent / "tasks"
CHOICES, TEXTS, CAPITALS = NAMES = ["local_choices", "local_texts", "local_capitals"]
WORDS = ["a", "block", "is", "row", "of", "slots", "and", "table", "names", "the", "blocks", "sequence"]
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'system' and refuse %}{{ raise_exception('no system') }}"
    "{% endif %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module", autouse=True)
def datasets_cache(tmp_path_factory):
    import datasets

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
        patch.chdir(TASKS)  # where the tasks' data is
        yield


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    path = make_checkpoint(tmp_path_factory.mktemp("tiny"), "llama", tokenizer=True, eos_token_id=1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def models(tiny):
    """(ours, theirs), for texts of at most 200 tokens."""
    ours = get_model("nanovllm")(str(tiny), max_length=200, device="cpu", kvcache_block_size=16, kvcache_gib=0.1)
    yield ours, get_model("hf")(str(tiny), max_length=200, device="cpu", dtype="float32", batch_size=4)
    ours.llm.exit()


def evaluate(model, tasks=NAMES, **options):
    manager = TaskManager(include_path=str(TASKS), include_defaults=False)
    options = {"bootstrap_iters": 100, "log_samples": True} | options
    return lm_eval.simple_evaluate(model, tasks=tasks, task_manager=manager, **options)


def assert_same(ours, theirs):
    for task in theirs["results"]:
        for metric, value in theirs["results"][task].items():
            # Their sum over a text is rounded to float32, ours is not.
            same = pytest.approx(value, rel=2e-5) if task == TEXTS and isinstance(value, float) else value
            assert ours["results"][task][metric] == same, (task, metric)
        for own, other in zip(ours["samples"][task], theirs["samples"][task], strict=True):
            assert own["arguments"] == other["arguments"], "the same prompts"
            if task == CAPITALS:
                assert own["resps"] == other["resps"]


def instances(kind: str, *arguments: tuple) -> list:
    return [Instance(kind, {}, each, i) for i, each in enumerate(arguments)]


@pytest.mark.parametrize(
    "options",
    [
        {"num_fewshot": 2},  # The contexts of half of these requests are too long.
        {"apply_chat_template": True, "fewshot_as_multiturn": True, "system_instruction": "Be short."},
    ],
    ids=["text", "chat"],
)
def test_scores_equal_those_of_the_hf_model(models, options):
    ours, theirs = (evaluate(model, limit=8, **options) for model in models)
    assert_same(ours, theirs)


def test_log_likelihoods_equal_those_of_the_hf_model(models):
    long = "a table names the blocks of a sequence " * 20
    pairs = [
        ("", "a block"),
        ("a block is", " a row"),
        (long, " of slots"),
        ("ends with a space ", "b"),
        (long, long[:60]),
        ("a block is", " of"),
        ("a block is", " a row of"),
        (long, " of slots and"),
    ]
    ours, theirs = (model.loglikelihood(instances("loglikelihood", *pairs)) for model in models)
    for own, other in zip(ours, theirs, strict=True):
        assert own[0] == pytest.approx(other[0], rel=1e-5)
        assert own[1] == other[1]


def test_a_greedy_continuation_is_found(models):
    ours, theirs = models
    (answer,) = ours.generate_until(instances("generate_until", ("a block", {"until": [], "max_gen_toks": 1})))
    for model in (ours, theirs):
        assert model.loglikelihood(instances("loglikelihood", ("a block", answer)))[0][1] is True


def test_texts_of_several_windows_equal_those_of_the_hf_model(models):
    # No text that repeats itself: theirs confuses windows of which one is the end of another.
    texts = [(" ".join(random.Random(count).choices(WORDS, k=count)),) for count in (1, 60, 200)]
    ours, theirs = (model.loglikelihood_rolling(instances("loglikelihood_rolling", *texts)) for model in models)
    assert ours == pytest.approx(theirs, rel=1e-5)


def test_answers_equal_those_of_the_hf_model(models):
    options = [
        {"until": ["e"], "max_gen_toks": 20},
        {"until": "a b", "max_new_tokens": 40, "do_sample": False},
        {"max_gen_toks": 150},
        {"until": ["\n\n"], "temperature": 0.0, "max_gen_toks": 10},
    ]
    texts = ["a block", "a row of slots, and " * 20]
    requests = [(text, each) for text in texts for each in options]
    ours, theirs = (model.generate_until(instances("generate_until", *requests)) for model in models)
    assert ours == theirs


def test_sampled_answers_come_again(models):
    given = {"do_sample": True, "temperature": 1.0, "top_k": 20, "max_gen_toks": 20, "seed": 3}
    requests = instances("generate_until", ("a block", given))
    assert models[0].generate_until(requests) == models[0].generate_until(requests)


def test_every_request_of_a_task_goes_to_the_engine_in_one_call(models, monkeypatch):
    calls, generate = [], models[0].llm.generate
    monkeypatch.setattr(
        models[0].llm, "generate", lambda *args, **kw: calls.append(len(args[0])) or generate(*args, **kw)
    )
    evaluate(models[0])
    assert len(calls) == 3, "one for each kind of request"
    assert 26 in calls
    assert any(24 <= num_prompts < 24 * 4 for num_prompts in calls), "choices of one token are one prompt"


def test_thinking_is_not_judged(tiny, models):
    ours = models[0]
    (whole,) = ours.generate_until(instances("generate_until", ("a block", {"max_gen_toks": 30})))
    mark = whole[5]
    ours._think_end_token = mark
    try:
        (answer,) = ours.generate_until(
            instances("generate_until", ("a block", {"until": [whole[0]], "max_gen_toks": 30}))
        )
    finally:
        ours._think_end_token = None
    assert answer == whole.split(mark)[-1].lstrip().split(whole[0])[0]


def test_thinking_ends_at_a_token(tiny, models, monkeypatch):
    """Given by its id, as in the hf model: what follows the last such token is judged."""
    theirs, request = models[1], ("a block is", {"until": [], "max_gen_toks": 30})
    options = {"max_length": 200, "device": "cpu", "kvcache_block_size": 16, "kvcache_gib": 0.1}
    ours = get_model("nanovllm")(str(tiny), think_end_token="0", **options)
    try:
        assert ours._think_end_token == 0
        (whole,) = ours.generate_until(instances("generate_until", request))
        tokens = ours.llm.generate([request[0]], SamplingParams(temperature=0, max_tokens=30), use_tqdm=False)
        answer = tokens[0]["token_ids"]
        end = next(token_id for token_id in answer[:-1] if answer.count(token_id) > 1)
        ours._think_end_token = theirs.think_end_token = end
        (own,), (other,) = (model.generate_until(instances("generate_until", request)) for model in (ours, theirs))
        assert own == other
        assert len(own) < len(whole.split(ours.tokenizer.decode([end]), 1)[-1]), "after the last one"
        # A stop string of the task in the thinking does not end the answer.
        stopped = (request[0], request[1] | {"until": [whole[0]]})
        assert ours.generate_until(instances("generate_until", stopped)) == [own.split(whole[0])[0]]
        ours._think_end_token, generate, stops = 0, ours.llm.generate, []
        spy = lambda prompts, params, **kw: stops.append(params[0].stop) or generate(prompts, params, **kw)  # noqa: E731
        monkeypatch.setattr(ours.llm, "generate", spy)
        ours.generate_until(instances("generate_until", stopped))
        assert not stops[0], "a token's id may be 0"
    finally:
        theirs.think_end_token = None
        ours.llm.exit()


def test_one_beam_is_greedy(models):
    texts = [{"max_gen_toks": 10}, {"max_gen_toks": 10, "num_beams": 1}]
    plain, beam = models[0].generate_until(instances("generate_until", *(("a block", each) for each in texts)))
    assert plain == beam


def test_a_template_without_system_messages(models):
    ours = models[0]
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    assert ours.apply_chat_template(chat) == "<system>s\n<user>u\n<assistant>"
    ours._template_args = {"refuse": True}
    try:
        assert ours.apply_chat_template(chat) == "<user>u\n<assistant>"
    finally:
        ours._template_args = {}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_length": 10, "max_model_len": 10}, "give one of them"),
        ({"dtyp": "float32"}, "dtype"),
        ({"dtype": "float31"}, "float31"),
        ({"enable_thinking": True}, "enable_thinking=True needs think_end_token"),
    ],
)
def test_wrong_model_arguments(tiny, arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        get_model("nanovllm").create_from_arg_obj({"pretrained": str(tiny)} | arguments, {"batch_size": 1})


def test_wrong_requests(models):
    ours = models[0]
    with pytest.raises(ValueError, match="max_gen_toks=200"):
        ours.generate_until(instances("generate_until", ("a", {"max_gen_toks": 200})))
    with pytest.raises(TypeError, match="num_beams"):
        ours.generate_until(instances("generate_until", ("a", {"max_gen_toks": 2, "num_beams": 2})))
    with pytest.raises(ValueError, match="1 to 200 can be scored"):
        ours.loglikelihood(instances("loglikelihood", ("a", "a block of slots " * 100)))
    ours._thinks = True
    try:
        with pytest.raises(ValueError, match="enable_thinking"):
            ours.loglikelihood(instances("loglikelihood", ("a", "b")))
    finally:
        ours._thinks = False
    assert ours.generate_until([]) == []


def test_the_command_line(tiny, tmp_path, monkeypatch):
    # To read the harness's own tasks, of which there are thousands, takes most of the time.
    monkeypatch.setattr(TaskManager, "__init__", partialmethod(TaskManager.__init__, include_defaults=False))
    model_args = "max_length=300,kvcache_block_size=16,kvcache_gib=0.1"
    command = ["eval", str(tiny), "--model_args", model_args, "--tasks", CHOICES, "--include_path", "."]
    assert main([*command, "--limit", "4", "--output_path", str(tmp_path / "out.json")]) == 0
    (file,) = tmp_path.rglob("*.json")
    result = json.loads(file.read_text())
    assert result["config"]["model"] == "nanovllm"
    assert 0 <= result["results"][CHOICES]["acc,none"] <= 1


# -- a model with real weights -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real():
    return str(real_model.default_folder())


@pytest.mark.nightly
@pytest.mark.real
def test_scores_of_real_weights_in_float32(real):
    ours, theirs = (
        evaluate(name, model_args={"pretrained": real, "dtype": "float32"}, device="cpu", batch_size=16, limit=6)
        for name in ("nanovllm", "hf")
    )
    assert_same(ours, theirs)
    assert ours["results"][CAPITALS]["exact_match,answer"] > 0.9
    assert ours["results"][CHOICES]["acc_norm,none"] > 0.8


@pytest.mark.real
@pytest.mark.nightly
def test_scores_of_real_weights_in_bfloat16(real):
    """Within the standard error that the harness states."""
    ours, theirs = (
        evaluate(name, model_args={"pretrained": real, "dtype": "bfloat16"}, device="cpu", batch_size=16)["results"]
        for name in ("nanovllm", "hf")
    )
    for task, metric, kind in (
        (CHOICES, "acc", "none"),
        (CHOICES, "acc_norm", "none"),
        (CAPITALS, "exact_match", "answer"),
    ):
        error = theirs[task][f"{metric}_stderr,{kind}"]
        assert ours[task][f"{metric},{kind}"] == pytest.approx(theirs[task][f"{metric},{kind}"], abs=error)
    # The harness states none for perplexities. Theirs sums bfloat16's log-probabilities.
    assert ours[TEXTS]["byte_perplexity,none"] == pytest.approx(theirs[TEXTS]["byte_perplexity,none"], rel=0.01)
