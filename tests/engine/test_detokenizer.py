"""Text as its tokens come: the same as of the whole, never half a character, never a piece of a stop string."""

from functools import cache
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from nanovllm.engine.requests.detokenizer import TextStream
from nanovllm.sampling_params import SamplingParams

DEMO_MODEL = Path(__file__).parents[2] / "assets" / "demo-model"
WORDS = ["one", "two", "three", "END", "<eos>"]


@cache
def demo_tokenizer():
    return AutoTokenizer.from_pretrained(DEMO_MODEL)


@cache
def word_tokenizer():
    """Not byte-level: what a token adds to a text depends on what is before it."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="one"))
    options = {"eos_token": "<eos>", "clean_up_tokenization_spaces": False}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options)


class PythonTokenizer:
    """What a tokenizer without a part in Rust offers."""

    def batch_decode(self, token_ids, **options):
        return demo_tokenizer().batch_decode(token_ids, **options)


def encode(text: str) -> list[int]:
    return demo_tokenizer()(text)["input_ids"]


def read(tokenizer, token_ids: list[int], **params) -> tuple[list[str], str, int, str | None]:
    """What each token adds, the whole text, the tokens read, and the stop string found."""
    stream = TextStream(tokenizer, SamplingParams(max_tokens=None, **params))
    pieces = []
    for token_id in token_ids:
        stopped = stream.push(token_id)
        pieces.append(stream.take())
        if stopped:
            break
    text = stream.finish()
    pieces.append(stream.take())
    return pieces, text, len(stream.token_ids), stream.stop_reason


def whole(token_ids: list[int], skip_special_tokens: bool = True) -> str:
    return demo_tokenizer().decode(token_ids, skip_special_tokens=skip_special_tokens)


# Tokens of texts, cut anywhere, between tokens that may be anything: halves of characters, special ones, none at all.
TEXT_IDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8).map(encode)
EMOJI_IDS = st.text(st.sampled_from("👩‍🚀🏳️‍🌈🙂漢字語é\u0301ß\ufffd"), max_size=6).map(encode)
ANY_IDS = st.lists(st.integers(0, 3071) | st.integers(0, 4) | st.sampled_from([3072, 4000]), max_size=8)
TOKEN_IDS = st.lists(TEXT_IDS | EMOJI_IDS | ANY_IDS, max_size=4).map(lambda parts: [i for part in parts for i in part])


@given(TOKEN_IDS, st.booleans())
def test_the_pieces_make_the_text_of_the_whole(token_ids, skip_special_tokens):
    pieces, text, num_tokens, _ = read(demo_tokenizer(), token_ids, skip_special_tokens=skip_special_tokens)
    assert "".join(pieces) == text == whole(token_ids, skip_special_tokens)
    assert num_tokens == len(token_ids)
    pieces, text, *_ = read(PythonTokenizer(), token_ids, skip_special_tokens=skip_special_tokens)
    assert "".join(pieces) == text == whole(token_ids, skip_special_tokens)


@given(st.text(st.sampled_from("a🙂漢é🏳️‍🌈ß "), max_size=20))
def test_never_half_a_character(text):
    pieces, *_ = read(demo_tokenizer(), encode(text))
    assert "\ufffd" not in "".join(pieces)
    # Not late either: after each token stand all the characters that are whole.
    token_ids = encode(text)
    for i in range(len(token_ids)):
        assert "".join(pieces[: i + 1]) == whole(token_ids[: i + 1]).rstrip("\ufffd")


@given(TOKEN_IDS, st.lists(st.text(st.sampled_from("ab \n漢字🙂"), min_size=1, max_size=3), min_size=1, max_size=3))
@example(encode("say END now"), ["ND n", "END"])
@example(encode("aaab"), ["aab"])
def test_text_ends_at_the_first_stop_string_that_its_tokens_complete(token_ids, stop):
    cut, reason, num_tokens = whole(token_ids), None, len(token_ids)
    for i in range(len(token_ids)):
        # A half character at the end is not text yet, and no stop string here has one.
        text = whole(token_ids[: i + 1])
        found = [(text.find(s), len(s), s) for s in stop if s in text]
        if found:
            start, _, reason = min(found)
            cut, num_tokens = text[:start], i + 1
            break
    pieces, text, num_read, found_reason = read(demo_tokenizer(), token_ids, stop=stop)
    assert (text, found_reason, num_read) == (cut, reason, num_tokens)
    # Whoever reads along gets just that, no piece of which a stop string took back.
    assert "".join(pieces) == text
    kept = read(demo_tokenizer(), token_ids, stop=stop, include_stop_str_in_output=True)[1]
    assert kept == text + (reason or "")


def test_what_may_become_a_stop_string_is_held_back_until_it_did_not():
    token_ids = [i for char in "x\n\ny\n" for i in encode(char)]
    pieces, text, _, reason = read(demo_tokenizer(), token_ids, stop="\n\n\n")
    assert pieces == ["x", "", "", "\n\ny", "", "\n"]
    assert (text, reason) == ("x\n\ny\n", None)


@pytest.mark.parametrize(("min_tokens", "expected"), [(0, "a"), (1, "a"), (2, "aba"), (3, "aba"), (4, "ababa")])
def test_within_min_tokens_nothing_stops(min_tokens, expected):
    token_ids = [encode(char)[0] for char in "ababab"]
    _, text, _, reason = read(demo_tokenizer(), token_ids, stop="b", min_tokens=min_tokens)
    assert (text, reason) == (expected, "b")


def test_a_stop_string_that_begins_within_min_tokens():
    token_ids = [encode(char)[0] for char in "aabc"]
    _, text, _, reason = read(demo_tokenizer(), token_ids, stop="ab", min_tokens=2)
    assert (text, reason) == ("a", "ab")


def test_a_stop_string_within_min_tokens_that_was_held_back_for_a_longer_one():
    token_ids = [encode(char)[0] for char in "xabzq"]
    _, text, _, reason = read(demo_tokenizer(), token_ids, stop=("ab", "xabyy"), min_tokens=3)
    assert (text, reason) == ("xabzq", None)


def test_special_tokens_count_as_text_where_they_are_kept():
    token_ids = [*encode("hello"), 2, *encode("more")]
    assert read(demo_tokenizer(), token_ids, stop="<|im_end|>")[1] == "hellomore"
    _, text, _, reason = read(demo_tokenizer(), token_ids, stop="<|im_end|>", skip_special_tokens=False)
    assert (text, reason) == ("hello", "<|im_end|>")


@given(st.lists(st.integers(0, len(WORDS) - 1), max_size=12), st.booleans())
def test_a_tokenizer_that_is_not_byte_level(token_ids, skip_special_tokens):
    pieces, text, *_ = read(word_tokenizer(), token_ids, skip_special_tokens=skip_special_tokens)
    assert "".join(pieces) == text == word_tokenizer().decode(token_ids, skip_special_tokens=skip_special_tokens)


@pytest.mark.parametrize("make", [demo_tokenizer, PythonTokenizer])
def test_no_half_character_of_a_tokenizer_in_python_either(make):
    token_ids = encode("a🙂 is x, é is y")
    pieces, text, num_tokens, reason = read(make(), token_ids, stop=" y")
    assert "\ufffd" not in "".join(pieces)
    assert (text, reason, num_tokens) == ("a🙂 is x, é is", " y", len(token_ids))


@cache
def byte_fallback_tokenizer():
    """As Llama 2 has it: a character that is no token is one token for each of its bytes."""
    vocabulary = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "a", "b"]
    model = models.BPE({token: i for i, token in enumerate(vocabulary)}, [], unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_bytes_as_tokens():
    tokenizer = byte_fallback_tokenizer()
    token_ids = tokenizer("a漢b")["input_ids"]
    assert len(token_ids) == 5
    assert read(tokenizer, token_ids)[0] == ["a", "", "", "漢", "b", ""]
    # A wrong byte takes the character before it back. The text goes on.
    pieces, *_ = read(tokenizer, [*token_ids[:4], token_ids[1], token_ids[4], token_ids[0]])
    assert "".join(pieces).endswith("ba")


def test_stop_strings_of_a_tokenizer_that_is_not_byte_level():
    _, text, num_tokens, reason = read(word_tokenizer(), [0, 1, 3, 2], stop="END")
    assert (text, num_tokens, reason) == ("one two ", 3, "END")
