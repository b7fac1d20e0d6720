"""A completion's text: what it adds to its prompt's, at once or as its tokens come, up to stop strings."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers_of_families import FAMILIES, byte_level, gemma_like, python_words, sentencepiece_like, words

from nanovllm.engine.sequence import Sequence
from nanovllm.engine.text.detokenizer import Detokenizer
from nanovllm.engine.text.text_stream import StopStrings, TextStream
from nanovllm.sampling_params import SamplingParams


def encode(text: str) -> list[int]:
    return byte_level()(text)["input_ids"]


def decode(tokenizer, token_ids: list[int], skip_special_tokens: bool = True) -> str:
    known = [token_id for token_id in token_ids if token_id < len(tokenizer)]
    return tokenizer.decode(known, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)


def prefix(a: str, b: str) -> str:
    return next(a[:n] for n in range(len(a), -1, -1) if b.startswith(a[:n]))


def expected_text(tokenizer, prompt, completion, skip_special_tokens=True) -> str:
    """By definition, from all tokens."""
    before, both = (decode(tokenizer, ids, skip_special_tokens) for ids in (prompt, prompt + completion))
    return both[len(prefix(before, both)) :]


def read(tokenizer, token_ids: list[int], prompt=(0,), **params) -> tuple[list[str], str, int, str | None]:
    """What each token adds, the whole text, the tokens read, and the stop string found."""
    params = SamplingParams(max_tokens=None, **params)
    detokenizer = Detokenizer(tokenizer)
    stream = TextStream(detokenizer, params, StopStrings(params.stop) if params.stop else None)
    seq = Sequence(prompt, params)
    seq.completion.text_stream = stream
    pieces = []
    for token_id in token_ids:
        seq.append_token(token_id)
        stopped = stream.read(seq)
        pieces.append(stream.take())
        if stopped:
            break
    text = stream.finish(seq)
    pieces.append(stream.take())
    return pieces, text, stream.num_tokens, stream.stop_reason


def plain_text(tokenizer, prompt, completion, **params) -> str:
    seq = Sequence(prompt, SamplingParams(max_tokens=None, **params))
    for token_id in completion:
        seq.append_token(token_id)
    return Detokenizer(tokenizer).text(seq)


def token_ids(tokenizer) -> st.SearchStrategy[list[int]]:
    """Random ones, and such that often stand side by side: of texts, halves of characters, bytes, special tokens."""
    any_id = st.integers(0, len(tokenizer) + 3)
    low = st.integers(0, 6)
    bytes_ = [i for i in range(len(tokenizer)) if str(tokenizer.convert_ids_to_tokens(i)).startswith("<0x")]
    some_bytes = st.sampled_from(bytes_[8:12] + bytes_[0x7E:] or bytes_ or [0])
    texts = st.text(st.sampled_from("ab \n\né漢🙂\u0301\ufffd"), max_size=5).map(
        lambda text: tokenizer.encode(text, add_special_tokens=False)
    )
    one = st.lists(any_id, max_size=6) | st.lists(low, max_size=5) | st.lists(some_bytes, max_size=5) | texts
    return st.lists(one, max_size=5).map(lambda parts: [token_id for part in parts for token_id in part])


@pytest.mark.parametrize("make", FAMILIES.values(), ids=FAMILIES)
@settings(max_examples=120, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_text_is_what_a_completion_adds_however_it_is_asked_for(make, data, skip):
    tokenizer = make()
    prompt = data.draw(token_ids(tokenizer).map(lambda ids: ids or [0]))
    completion = data.draw(token_ids(tokenizer))
    text = plain_text(tokenizer, prompt, completion, skip_special_tokens=skip)
    assert text == expected_text(tokenizer, prompt, completion, skip)
    for stop in ((), ("no such text",)):
        pieces, streamed, num_tokens, _ = read(tokenizer, completion, prompt, skip_special_tokens=skip, stop=stop)
        assert "".join(pieces) == streamed == text
        assert num_tokens == len(completion)


@pytest.mark.parametrize("make", FAMILIES.values(), ids=FAMILIES)
@settings(max_examples=60, deadline=None)
@given(data=st.data(), repeats=st.integers(2, 12))
def test_long_texts_in_short_windows(make, data, repeats):
    tokenizer = make()
    prompt = data.draw(token_ids(tokenizer).map(lambda ids: ids or [0])) * repeats
    completion = data.draw(token_ids(tokenizer)) * repeats
    pieces, streamed, *_ = read(tokenizer, completion, prompt)
    assert "".join(pieces) == streamed == expected_text(tokenizer, prompt, completion)


@pytest.mark.parametrize("make", FAMILIES.values(), ids=FAMILIES)
@settings(max_examples=60, deadline=None)
@given(data=st.data(), keep=st.booleans(), min_tokens=st.sampled_from([0, 0, 3]))
def test_a_stop_string_ends_the_text_with_the_first_token_that_completes_one(make, data, keep, min_tokens):
    tokenizer = make()
    prompt = data.draw(token_ids(tokenizer).map(lambda ids: ids or [0]))
    completion = data.draw(token_ids(tokenizer))
    stop = data.draw(st.lists(st.text(st.sampled_from("ab o\n漢."), min_size=1, max_size=3), min_size=1, max_size=3))
    cut, reason, num_tokens = expected_text(tokenizer, prompt, completion), None, len(completion)
    before = ""
    for i in range(len(completion)):
        text = expected_text(tokenizer, prompt, completion[: i + 1]).rstrip("\ufffd")
        old = len(prefix(before, text))
        before = text
        ends = [(b, len(s), s) for s in stop for b in range(len(text)) if text.startswith(s, b) and b + len(s) > old]
        if ends and i + 1 > min_tokens:
            begin, _, reason = min(ends)
            cut, num_tokens = text[:begin] + (reason if keep else ""), i + 1
            break
    options = {"stop": stop, "include_stop_str_in_output": keep, "min_tokens": min_tokens}
    pieces, text, num_read, found_reason = read(tokenizer, completion, prompt, **options)
    assert (text, found_reason, num_read) == (cut, reason, num_tokens)
    # Whoever reads along gets just that, no piece of which a stop string took back.
    assert "".join(pieces) == text


def test_a_space_at_the_beginning_is_the_completions():
    tokenizer = sentencepiece_like()
    prompt = tokenizer.encode("The capital of France is")
    paris = tokenizer.convert_tokens_to_ids("▁Paris")
    assert plain_text(tokenizer, prompt, [paris]) == " Paris"
    assert read(tokenizer, [paris], prompt)[0] == [" Paris", ""]
    assert read(tokenizer, [paris], prompt, stop=" Paris")[1:] == ("", 1, " Paris")
    spaces = tokenizer.convert_tokens_to_ids(["▁▁▁", "▁"])
    assert plain_text(tokenizer, tokenizer.encode("def f():\n"), spaces * 2) == " " * 8


def test_a_wrong_byte_gives_up_a_line_feed_that_nobody_was_shown():
    tokenizer = sentencepiece_like()
    completion = tokenizer.convert_tokens_to_ids(["▁the", "<0x0A>", "<0xF0>", "<0x9F>", *"cdefgh"])
    pieces, text, *_ = read(tokenizer, completion, [1, 300])
    assert pieces == [" the", "", "", "", "\ufffd\ufffd\ufffdc", *"defgh", ""]
    assert text == " the\ufffd\ufffd\ufffdcdefgh"


def test_a_line_feed_stops_at_once_though_a_wrong_byte_may_follow():
    tokenizer = sentencepiece_like()
    completion = tokenizer.convert_tokens_to_ids(["▁the", "<0x0A>", "<0xF0>"])
    assert read(tokenizer, completion, [1, 300], stop="\n")[1:] == (" the", 2, "\n")


@given(st.text(st.sampled_from("a🙂漢é🏳️‍🌈ß "), max_size=20))
def test_never_half_a_character(text):
    pieces, *_ = read(byte_level(), encode(text))
    assert "\ufffd" not in "".join(pieces)
    # Not late either: after each token stand all the characters that are whole.
    ids = encode(text)
    for i in range(len(ids)):
        assert "".join(pieces[: i + 1]) == decode(byte_level(), ids[: i + 1]).rstrip("\ufffd")


def test_a_prompt_that_ends_within_a_character():
    ids = encode("🙂")
    assert len(ids) > 1
    assert plain_text(byte_level(), ids[:1], ids[1:]) == "🙂"
    assert plain_text(byte_level(), ids[:1], encode("a")) == "a"


@pytest.mark.parametrize("make", FAMILIES.values(), ids=FAMILIES)
def test_few_tokens_of_a_long_prompt_are_decoded(make, monkeypatch):
    tokenizer = make()
    detokenizer = Detokenizer(tokenizer)
    ids = [i for i in range(len(tokenizer)) if not tokenizer.convert_ids_to_tokens(i).startswith("<0x")]
    ids = sorted(ids, key=lambda i: len(decode(tokenizer, [i]).strip()) or 9)[:2] * 4
    context, _ = detokenizer.context(ids * 10_000, len(ids) * 10_000, True)
    assert len(context) <= 8
    # Neither do many tokens of a completion that came before.
    longest = []
    real = Detokenizer.decode

    def spy(self, ids, skip_special_tokens):
        longest.append(len(ids))
        return real(self, ids, skip_special_tokens)

    monkeypatch.setattr(Detokenizer, "decode", spy)
    read(tokenizer, ids * 40, ids * 10)
    assert sorted(longest)[-2] <= 32, "all but the last, of the whole completion"


@pytest.mark.parametrize(
    ("make", "text"), [(byte_level, "the end "), (sentencepiece_like, "the no "), (gemma_like, "漢é")]
)
def test_streams_decode_few_tokens_again(make, text, monkeypatch):
    tokenizer = make()
    ids = tokenizer.encode(text * 200, add_special_tokens=False)
    decoded = []
    real = Detokenizer.decode

    def spy(self, ids, skip_special_tokens):
        decoded.append(len(ids))
        return real(self, ids, skip_special_tokens)

    monkeypatch.setattr(Detokenizer, "decode", spy)
    assert read(tokenizer, ids, tokenizer.encode("x"), stop=("no such text",))[2] == len(ids)
    assert sum(decoded[:-1]) < 100, "all but the whole completion at the end"


def test_what_may_become_a_stop_string_is_held_back_until_it_did_not():
    ids = [i for char in "x\n\ny\n" for i in encode(char)]
    pieces, text, _, reason = read(byte_level(), ids, stop="\n\n\n")
    assert pieces == ["x", "", "", "\n\ny", "", "\n"]
    assert (text, reason) == ("x\n\ny\n", None)


@given(st.text("ab", max_size=8), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=6))
@example("aaab", ["aab"])
def test_stop_strings_are_found_and_expected(text, texts):
    stops = StopStrings(tuple(texts))
    for start in range(len(text) + 1):
        ends = [(b, len(s), s) for s in texts for b in range(len(text)) if text.startswith(s, b)]
        found = [match for match in ends if match[0] + match[1] > start]
        assert stops.find(text, start) == min(((b, s) for b, _, s in sorted(found)[:1]), default=None)
    begun = [n for n in range(1, len(text) + 1) if any(len(s) > n and s.startswith(text[-n:]) for s in texts)]
    assert stops.num_undecided(text) == max(begun, default=0)


@pytest.mark.parametrize(("min_tokens", "expected"), [(0, "a"), (1, "a"), (2, "aba"), (3, "aba"), (4, "ababa")])
def test_within_min_tokens_nothing_stops(min_tokens, expected):
    ids = [encode(char)[0] for char in "ababab"]
    _, text, _, reason = read(byte_level(), ids, stop="b", min_tokens=min_tokens)
    assert (text, reason) == (expected, "b")


def test_a_stop_string_that_begins_within_min_tokens():
    ids = [encode(char)[0] for char in "aabc"]
    _, text, _, reason = read(byte_level(), ids, stop="ab", min_tokens=2)
    assert (text, reason) == ("a", "ab")


def test_a_stop_string_within_min_tokens_that_was_held_back_for_a_longer_one():
    ids = [encode(char)[0] for char in "xabzq"]
    _, text, _, reason = read(byte_level(), ids, stop=("ab", "xabyy"), min_tokens=3)
    assert (text, reason) == ("xabzq", None)


def test_stop_strings_of_a_tokenizer_that_is_not_byte_level():
    assert read(words(), [0, 1, 3, 2], [1], stop="END")[1:] == (" one two ", 3, "END")


def test_a_tokenizer_in_python_shows_text_when_it_is_certain():
    pieces, text, *_ = read(python_words(), [1, 2, 3, 4, 5, 1, 1, 1], [1])
    assert text == " one two three one one one"
    assert pieces[:5] == ["", "", "", "", " one"]
    assert "@" not in "".join(pieces)


@pytest.mark.parametrize("make", [byte_level, sentencepiece_like, gemma_like], ids=lambda make: make.__name__)
@pytest.mark.parametrize("text", ["Paris", " Paris", "  x", "\nreturn 1", "é🙂", "a\n"])
def test_tokens_of_a_text_in_the_middle_of_another(make, text):
    tokenizer = make()
    prompt = tokenizer.encode("The capital of France is")
    assert expected_text(tokenizer, prompt, Detokenizer(tokenizer).encode(text)) == text
