"""Texts of megabytes are refused by their beginning, wherever they are passed in."""

import logging

import pytest
from checkpoints import assert_idle, complete, greedy, make_llm

from nanovllm import PromptEncoder
from nanovllm.engine.text.prompt_encoder import CHARACTERS_PER_TOKEN

MAX_LEN = 200  # of shared_llm
LONG = "a row of slots " * 100_000


@pytest.fixture
def tokenized(llm, monkeypatch):
    """The characters of each text that the tokenizer gets."""
    lengths = []
    original = type(llm.tokenizer).__call__

    def count(self, texts, *args, **options):
        lengths.extend(map(len, [texts] if isinstance(texts, str) else texts))
        return original(self, texts, *args, **options)

    monkeypatch.setattr(type(llm.tokenizer), "__call__", count)
    return lengths


def test_a_text_of_megabytes_is_refused_by_its_beginning(llm, tokenized):
    """Wherever it is passed in: test_prompts.py has the other ways."""
    chats = [[{"role": "user", "content": text}] for text in ("a", LONG)]
    template = "{{ messages[0]['content'] }}"
    for where, call in (
        (r"prompts\[1\]", lambda: llm.generate(["a", LONG], greedy(1), use_tqdm=False)),
        (r"completions\[0\]", lambda: llm.score(["a"], [LONG], use_tqdm=False)),
        ("conversation 1", lambda: llm.chat(chats, use_tqdm=False, chat_template=template)),
    ):
        says = f"^{where}: the text has 1500000 characters, of which the first 2000 have \\d+ tokens: "
        says += "the longest sequence has 200 tokens, which is max_model_len: shorten the prompt"
        with pytest.raises(ValueError, match=says):
            call()
        assert max(tokenized) == CHARACTERS_PER_TOKEN * MAX_LEN
        assert_idle(llm)


@pytest.mark.parametrize("characters_per_token", [11, 39, 41, 1000])
def test_a_text_of_long_tokens_may_fit(characters_per_token):
    text, sizes = "x" * (100 * characters_per_token), []

    def tokenize(part, **options):
        sizes.append(len(part))
        return {"input_ids": range(len(part) // characters_per_token)}

    encoder = PromptEncoder(tokenize, max_len=100)
    encoder.check_text(text)
    assert sum(sizes) <= 2 * len(text)
    with pytest.raises(ValueError, match="of which the first"):
        encoder.check_text(text * 5)


def test_nothing_is_said_of_the_length_that_a_tokenizer_was_made_for(path, caplog, capfd):
    with make_llm(path, skip_tokenizer_init=False) as llm, caplog.at_level(logging.INFO):
        llm.tokenizer.model_max_length = 8
        conversation = [{"role": "user", "content": "a b c d e f g h i j k"}]
        llm.chat(conversation, greedy(1), use_tqdm=False, chat_template="{{ messages[0]['content'] }}")
        llm.generate("a b c d e f g h i j k", greedy(1, bad_words=["never more than that many tokens"]), use_tqdm=False)
        llm.score("a b c d e f g h i j k", "a b c d e f g h i j k", use_tqdm=False)
        assert len(complete(llm, [[1]], greedy(1))[0]) == 1
    assert "Token indices" not in caplog.text + "".join(capfd.readouterr())
