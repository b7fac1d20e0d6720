"""What a checkpoint's files say of its embeddings, and what is refused of texts and arguments."""

import numpy as np
import pytest
from checkpoints import EOS, assert_idle, edit_json, make_checkpoint, make_llm
from vector_checkpoints import TOLERANCE, VectorReference, add_sentence_files, make_pooling_checkpoint

from nanovllm import PoolingParams

TEXTS = ["a block", "a row of slots", "a table names the blocks"]


def embed(llm, texts, **options):
    return [each["embedding"] for each in llm.embed(texts, use_tqdm=False, **options)]


@pytest.fixture(scope="module")
def sentence_model(tmp_path_factory):
    path = make_checkpoint(tmp_path_factory.mktemp("sentences"), tokenizer=True)
    add_sentence_files(path, prompts={"query": "a row: ", "document": ""}, default_prompt_name=None)
    return path


def test_modules_say_how_hidden_states_are_pooled(sentence_model):
    reference = VectorReference(sentence_model)
    with make_llm(sentence_model, skip_tokenizer_init=False) as llm:
        assert llm.config.task == "embed"
        tokenizer = llm.get_tokenizer()
        for options, texts in (
            ({}, TEXTS),
            ({"prompt_name": "query"}, [f"a row: {text}" for text in TEXTS]),
            ({"prompt_name": "document"}, TEXTS),
        ):
            expected = [reference.pooled(tokenizer(text)["input_ids"], "mean").numpy() for text in texts]
            for found, vector in zip(embed(llm, TEXTS, **options), expected, strict=True):
                np.testing.assert_allclose(found, vector / np.linalg.norm(vector), atol=TOLERANCE)
        (found,) = embed(llm, TEXTS[:1], pooling="cls", normalize=False)
        expected = reference.pooled(tokenizer(TEXTS[0])["input_ids"], "cls")
        np.testing.assert_allclose(found, expected, atol=TOLERANCE)
    with make_llm(sentence_model, task="generate") as llm:
        assert llm.generate([[1, 2]], use_tqdm=False)


def test_a_default_prompt_is_put_before_texts(tmp_path):
    path = make_pooling_checkpoint(tmp_path, tokenizer=True)
    add_sentence_files(path, "pooling_mode_lasttoken", prompts={"query": "a row: "}, default_prompt_name="query")
    with make_llm(path, skip_tokenizer_init=False) as llm:
        token_ids = [llm.get_tokenizer()(f"a row: {text}")["input_ids"] for text in TEXTS]
        for found, expected in zip(embed(llm, TEXTS), embed(llm, token_ids), strict=True):
            np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("adds", [True, False])
def test_a_text_ends_with_the_token_that_the_tokenizers_settings_name(tmp_path, adds):
    """Some tokenizers have the setting and do not obey it."""
    path = make_pooling_checkpoint(tmp_path, tokenizer=True)
    add_sentence_files(path, "pooling_mode_lasttoken")
    edit_json(path / "tokenizer_config.json", add_eos_token=adds)
    with make_llm(path, skip_tokenizer_init=False) as llm:
        eos = llm.get_tokenizer().convert_tokens_to_ids(EOS)
        plain = [llm.get_tokenizer()(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
        ended = [[*token_ids, eos] if adds else token_ids for token_ids in plain]
        found = llm.embed(TEXTS, use_tqdm=False)
        assert [each["num_prompt_tokens"] for each in found] == list(map(len, ended))
        for each, expected in zip(found, embed(llm, ended), strict=True):
            np.testing.assert_array_equal(each["embedding"], expected)
        assert llm.embed(plain, use_tqdm=False)[0]["num_prompt_tokens"] == len(plain[0]), "as given"


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"modules": ("Transformer", "Pooling", "Dense")}, r"modules.json: module 'Dense' is not supported"),
        ({"flag": "pooling_mode_max_tokens"}, r"1_Pooling/config.json: pooling by pooling_mode_max_tokens is not supp"),
        ({"prompts": {"query": 5}}, r"config_sentence_transformers.json: prompts={'query': 5}: must be an object"),
        ({"default_prompt_name": "no", "prompts": {"q": ""}}, "default_prompt_name='no': must be one of q"),
    ],
)
def test_files_that_ask_for_what_is_not_there_are_refused(tmp_path, files, says):
    path = make_pooling_checkpoint(tmp_path)
    add_sentence_files(path, **files)
    with pytest.raises(ValueError, match=says):
        make_llm(path)


def test_wrong_arguments_are_named_and_nothing_is_computed(sentence_model):
    with make_llm(sentence_model, skip_tokenizer_init=False) as llm:
        for options, says in (
            ({"pooling": "max"}, "pooling='max': must be one of auto, last, mean, cls"),
            ({"dimensions": 0}, "dimensions=0: must be an integer in 1..the model's hidden_size"),
            ({"dimensions": 65}, "dimensions=65: must be in 1..64, the model's hidden_size, or None"),
            ({"normalize": "yes"}, "normalize='yes': must be True or False"),
            ({"prompt_name": "qery"}, "prompt_name='qery': the model's names are 'query', 'document'"),
            ({"on_error": "skip"}, "on_error='skip': must be one of raise, return"),
        ):
            with pytest.raises(ValueError, match=says):
                llm.embed(TEXTS, **options)
            if "on_error" not in options:
                with pytest.raises(ValueError, match=says):
                    llm.embed_iter(TEXTS, **options)
        with pytest.raises(ValueError, match=r"prompts\[1\]: is empty: it must hold at least one token"):
            llm.embed(["a", "", "b"])
        with pytest.raises(ValueError, match=r"prompts\[0\]: is empty"):
            llm.embed([[]])
        with pytest.raises(ValueError, match=r"prompts\[0\]: is token ids: prompt_name puts a text before texts"):
            llm.embed([[1]], prompt_name="query")
        with pytest.raises(TypeError, match=r"sampling_params: must be a SamplingParams or a PoolingParams, not dict"):
            llm.add_request("a", {"task": "embed"})
        with pytest.raises(ValueError, match=r"sampling_params: dimensions=65: must be in 1..64"):
            llm.add_request("a", PoolingParams(dimensions=65))
        with pytest.raises(TypeError, match="unknown option 'dimension': did you mean 'dimensions'"):
            PoolingParams(dimension=3)
        assert llm.stats()["prompt_tokens"] == 0
        found = llm.embed(["a", "", 5, "b"], use_tqdm=False, on_error="return")
        assert [i for i, each in enumerate(found) if each["embedding"] is None] == [1, 2]
        assert "error" not in found[0]
        assert found[1]["error"] == "prompts[1]: is empty: it must hold at least one token"
        again = dict(llm.embed_iter(["a", "", 5, "b"], on_error="return"))
        assert [i for i in sorted(again) if again[i]["embedding"] is None] == [1, 2]
        with pytest.raises(ValueError, match=r"prompts\[1\]: is empty"):
            list(llm.embed_iter(["a", "", "b"]))
        assert_idle(llm)


def test_vectors_that_are_no_numbers_are_errors(tmp_path):
    from checkpoints import edit_tensors

    path = make_checkpoint(tmp_path, tokenizer=True)
    edit_tensors(path, lambda tensors: tensors["model.embed_tokens.weight"][7].fill_(float("nan")))
    for options in ({}, {"task": "embed"}):
        with make_llm(path, **options) as llm:
            for pooling in ("last", "mean"):
                found = llm.embed([[1, 2], [3, 7, 4], [5]], pooling=pooling, use_tqdm=False, on_error="return")
                assert [each["embedding"] is None for each in found] == [False, True, False]
                assert "hidden states for the prompt hold NaN or infinity" in found[1]["error"]
            with pytest.raises(RuntimeError, match=r"prompts\[1\]: the model's hidden states"):
                llm.embed([[1, 2], [3, 7, 4]], use_tqdm=False)
            with pytest.raises(RuntimeError, match=r"prompts\[1\]: the model's hidden states"):
                list(llm.embed_iter([[1, 2], [3, 7, 4]], ordered=True))
            assert_idle(llm)
