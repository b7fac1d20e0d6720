"""Classification heads are transformers', and ranks are what their heads or their yes and no say."""

import json

import numpy as np
import pytest
import torch
from checkpoints import EOS, assert_idle, edit_json, greedy, make_checkpoint, make_llm, make_tokenizer, random_prompt
from transformers import AutoModelForCausalLM, AutoTokenizer
from vector_checkpoints import TOLERANCE, make_pooling_checkpoint, reference_logits

from nanovllm import NO_PROMPT, PoolingParams

PROMPTS = [random_prompt(length, seed=length) for length in (1, 5, 16, 24, 33, 70)]
LABELS = {"0": "bad", "1": "middling", "2": "good"}


@pytest.mark.parametrize(
    ("family", "num_labels", "bias"),
    [
        ("qwen3", 3, False),
        ("llama", 3, True),
        pytest.param("qwen2", 2, False, marks=pytest.mark.nightly),
        pytest.param("llama", 1, False, marks=pytest.mark.nightly),
    ],
)
def test_logits_are_those_of_transformers(tmp_path, family, num_labels, bias):
    path = make_pooling_checkpoint(tmp_path, family, num_labels, bias)
    names = {str(i): LABELS[str(i)] for i in range(num_labels)}
    edit_json(path / "config.json", id2label=names, label2id={name: int(i) for i, name in names.items()})
    expected = reference_logits(path, PROMPTS, bias)
    with make_llm(path, max_num_batched_tokens=24) as llm:
        assert llm.config.task == "classify"
        found = llm.classify(PROMPTS, use_tqdm=False)
        for each, logits in zip(found, expected, strict=True):
            np.testing.assert_allclose(each["logits"], logits, atol=TOLERANCE)
            probs = logits.softmax(0) if num_labels > 1 else logits.sigmoid()
            np.testing.assert_allclose(each["probs"], probs, atol=TOLERANCE)
            assert each["label"] == names[str(int(logits.argmax()))]
        again = dict(llm.classify_iter(iter(PROMPTS)))
        assert [again[i]["label"] for i in range(len(PROMPTS))] == [each["label"] for each in found]
        request = llm.add_request(PROMPTS[0], PoolingParams())
        (delta,) = [delta for _ in range(2) if not llm.is_finished() for delta in llm.step_deltas()]
        assert (delta["request_id"], delta["output"]["label"]) == (request, found[0]["label"])
        assert_idle(llm)
        with pytest.raises(ValueError, match=r"has a classification head with .* labels here: it can classify\(\)"):
            llm.embed(PROMPTS)
        with pytest.raises(ValueError, match=r"it can classify\(\)"):
            llm.generate(PROMPTS)


def test_what_a_model_cannot_do_is_refused_with_what_it_can(path, tmp_path):
    with make_llm(path) as llm:
        with pytest.raises(ValueError, match=r"task='classify': Qwen3ForCausalLM has a head that generates, .*embed"):
            llm.classify(PROMPTS)
        assert_idle(llm)
    with pytest.raises(ValueError, match="task='classify': must be generate or embed or rerank: Qwen3ForCausalLM has"):
        make_llm(path, task="classify")
    bare = make_pooling_checkpoint(tmp_path / "bare")
    with pytest.raises(ValueError, match="task='generate': must be embed: Qwen3Model has no head"):
        make_llm(bare, task="generate")
    three = make_pooling_checkpoint(tmp_path / "three", num_labels=3)
    with pytest.raises(ValueError, match="task='rerank': must be classify: the model has 3 labels"):
        make_llm(three, task="rerank")
    with pytest.raises(ValueError, match="task='embed': must be classify or rerank: Qwen3ForSequenceClassification"):
        make_llm(three, task="embed")
    edit_json(bare / "config.json", architectures=["Qwen3ForTokenClassification"])
    with pytest.raises(ValueError, match=r"Qwen3ForTokenClassification.*label each token are not supported"):
        make_llm(bare)


# -- ranks -------------------------------------------------------------------------------------------------------------

MARKS = "<|endoftext|>", EOS, "<|im_start|>", "yes", "no"
DOCUMENTS = ["a block", "a row of slots", "a table names the blocks", "of a sequence"]


@pytest.fixture(scope="module")
def reranker(tmp_path_factory):
    path = make_checkpoint(tmp_path_factory.mktemp("reranker"))
    make_tokenizer(path, MARKS)
    return path


def yes_of_transformers(path, query, document, instruction) -> float:
    """The probability of yes beside no, from the model card's prompt."""
    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModelForCausalLM.from_pretrained(path).float()
    text = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
        f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n"
        "<think>\n\n</think>\n\n"
    )
    with torch.inference_mode():
        logits = model(torch.tensor([tokenizer(text)["input_ids"]])).logits[0, -1]
    no, yes = (logits[tokenizer.convert_tokens_to_ids(name)] for name in ("no", "yes"))
    return torch.stack((no, yes)).softmax(0)[1].item()


USUAL = "Given a web search query, retrieve relevant passages that answer the query"


@pytest.mark.parametrize("task", ["generate", "rerank"])
@pytest.mark.parametrize("instruction", [None, "find the slot"])
def test_yes_and_no_rank_documents(reranker, task, instruction):
    expected = [yes_of_transformers(reranker, "what is a block?", each, instruction or USUAL) for each in DOCUMENTS]
    with make_llm(reranker, task=task, skip_tokenizer_init=False) as llm:
        found = llm.rerank("what is a block?", DOCUMENTS, instruction, use_tqdm=False)
        order = sorted(range(len(expected)), key=lambda i: -expected[i])
        assert [each["index"] for each in found] == order
        assert [each["document"] for each in found] == [DOCUMENTS[i] for i in order]
        scores = [each["relevance_score"] for each in found]
        assert scores == pytest.approx([expected[i] for i in order], abs=TOLERANCE)
        pairs = [("what is a block?", each) for each in DOCUMENTS]
        ranked = list(llm.rerank_iter(iter(pairs), instruction, ordered=True))
        assert [each["relevance_score"] for _, each in ranked] == pytest.approx(expected, abs=TOLERANCE)
        assert all(each["num_cached_tokens"] > 0 for _, each in ranked), "the beginnings are equal"
        assert_idle(llm)
        if task == "rerank":
            assert llm.model_runner.model.lm_head is not None
            with pytest.raises(ValueError, match=r"its task is 'rerank': it can embed\(\), rerank\(\)"):
                llm.generate([[1]])
        else:
            (prompt,) = llm.rank_prompts("what is a block?", DOCUMENTS[:1], instruction)
            llm.add_request(prompt, PoolingParams(task="rerank"))
            llm.add_request([1, 2, 3], greedy(2))
            outputs = []
            while not llm.is_finished():
                outputs += [each["output"] for each in llm.step_deltas() if "output" in each]
            assert outputs[0]["relevance_score"] == pytest.approx(expected[0], abs=TOLERANCE)


def test_a_head_with_one_label_ranks(tmp_path):
    """A pair is what the tokenizer makes of two texts; of Qwen3 with its marks, the prompt of Qwen3-Reranker."""
    for marks, family in ((MARKS[:2], "llama"), (MARKS, "qwen3")):
        path = make_pooling_checkpoint(tmp_path / family, family, num_labels=1)
        make_tokenizer(path, marks)
        with make_llm(path, skip_tokenizer_init=False) as llm:
            prompts = llm.rank_prompts("a query", DOCUMENTS)
            expected = [logits.sigmoid().item() for logits in reference_logits(path, prompts)]
            found = llm.rerank("a query", DOCUMENTS, use_tqdm=False)
            scores = {each["index"]: each["relevance_score"] for each in found}
            assert [scores[i] for i in range(4)] == pytest.approx(expected, abs=TOLERANCE)
            text = llm.get_tokenizer().decode(prompts[0])
            if family == "llama":
                assert text == "a querya block"
                with pytest.raises(ValueError, match="instruction='x': must be None: the model's prompts have none"):
                    llm.rerank("a query", DOCUMENTS, "x")
            else:
                assert text.startswith("<|im_start|>system\nJudge whether")
            logits = [each["logits"][0] for each in llm.classify(prompts, use_tqdm=False)]
            assert list(1 / (1 + np.exp(-np.array(logits)))) == pytest.approx(expected, abs=TOLERANCE)


def test_wrong_pairs_are_refused_and_others_served(reranker, path):
    with make_llm(reranker, skip_tokenizer_init=False) as llm:
        pairs = [("a", "b"), ("a", ""), ("a", 5), "ab", ("a", "b")]
        found = dict(llm.rerank_iter(pairs, on_error="return"))
        assert [i for i in found if "error" in found[i]] == [1, 2, 3]
        assert found[1]["error"] == "prompts[1]: document='': must not be empty"
        assert found[0]["relevance_score"] == found[4]["relevance_score"]
        with pytest.raises(ValueError, match=r"prompts\[1\]: document='': must not be empty"):
            list(llm.rerank_iter(pairs))
        assert_idle(llm)
        with pytest.raises(TypeError, match=r"documents\[1\]: document=None: must be a text"):
            llm.rerank("a", ["b", None])
        with pytest.raises(TypeError, match="documents='b': must be a list of texts"):
            llm.rerank("a", "b")
        feed = llm.rerank_iter([("a", "b"), NO_PROMPT, ("a", "b")])
        assert [index for index, _ in feed] == [0, 1]
    says = "the tokenizer lacks one of the tokens yes, no"
    with make_llm(path, skip_tokenizer_init=False) as llm, pytest.raises(ValueError, match=says):
        llm.rerank("a", ["b"])
    says = "needs the model's tokenizer, but skip_tokenizer_init is set"
    with make_llm(path) as llm, pytest.raises(ValueError, match=says):
        llm.rerank("a", ["b"])


# -- choices -----------------------------------------------------------------------------------------------------------


def test_choices_have_the_log_probabilities_of_whole_completions(path, reference):
    choices = [[3, 4], [5], [6, 7, 8]]
    with make_llm(path) as llm:
        found = llm.score_choices(PROMPTS, choices, use_tqdm=False)
        for prompt, each in zip(PROMPTS, found, strict=True):
            expected = [reference.logprobs(prompt, choice).sum().item() for choice in choices]
            assert each["logprobs"] == pytest.approx(expected, abs=5e-3)
            assert each["best"] == int(np.argmax(expected))
        own = llm.score_choices(PROMPTS[:2], [[[3], [4]], [[5]]], use_tqdm=False)
        assert [len(each["logprobs"]) for each in own] == [2, 1]
        # The second choice begins with what the first has computed of its prompt.
        llm.reset_prefix_cache()
        before = llm.stats()["prefix_cache_hits"]
        llm.score_choices([PROMPTS[5]], choices, use_tqdm=False)
        assert llm.stats()["prefix_cache_hits"] - before >= 2 * 48
        with pytest.raises(ValueError, match="choices: 1 lists for 2 prompts"):
            llm.score_choices(PROMPTS[:2], [[[3], [4]]])
        with pytest.raises(ValueError, match=r"choices=\[\]: is empty"):
            llm.score_choices(PROMPTS, [])
        with pytest.raises(TypeError, match="choices='yes': must be a list of texts"):
            llm.score_choices(PROMPTS, "yes")
        assert_idle(llm)


def test_labels_without_names_have_numbers(tmp_path):
    path = make_pooling_checkpoint(tmp_path, num_labels=3)
    assert json.loads((path / "config.json").read_text())["id2label"]["2"] == "LABEL_2"
    with make_llm(path) as llm:
        assert llm.classify([[1, 2]], use_tqdm=False)[0]["label"].startswith("LABEL_")
