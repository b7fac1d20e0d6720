"""Structured outputs: the form always holds, whatever the sampling and the batch, and a bad one is refused at once."""

import dataclasses
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import VOCAB_SIZE, Reference, assert_idle, greedy, make_llm
from draws import sample_torch
from sampling_reference import completions, run

from nanovllm import SamplingParams, StructuredOutputsParams
from nanovllm.engine.features.logits import structured
from nanovllm.engine.features.logits.structured import Grammars
from nanovllm.layers.sampling.token_masks import num_mask_words

CHOICES = ("red", "green", "dark red", 'a "quoted"\n\\line', "größe", "red and green", "a DEL: \x7f")
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["block", "slot"]}, "free": {"type": "boolean"}, "ids": {"const": [1, 2]}},
    "required": ["name", "free", "ids"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def llm(path):
    with make_llm(path, skip_tokenizer_init=False) as llm:
        yield llm


def form(temperature=1.0, max_tokens=200, **fields) -> SamplingParams:
    names = ("seed", "min_tokens", "ignore_eos", "top_k", "repetition_penalty")
    others = {name: fields.pop(name) for name in names if name in fields}
    return SamplingParams(temperature, max_tokens, structured_outputs=StructuredOutputsParams(**fields), **others)


def texts(llm, seqs) -> list[str]:
    return [llm.tokenizer.decode(seq.completion_token_ids, skip_special_tokens=True) for seq in seqs]


def test_all_forms_in_one_batch(llm):
    params = [
        form(choice=CHOICES),
        form(temperature=0, choice=CHOICES),
        form(regex=r"[a-c]{3}/[0-9]+\.[0-9]{2}", seed=3, max_tokens=None),
        form(json=SCHEMA, top_k=5),
        form(temperature=0, json=json.dumps(SCHEMA), repetition_penalty=1.3),
        greedy(10),
        form(temperature=0, regex="(ab|c)x?", ignore_eos=True),
    ]
    for _ in range(2):
        seqs = run(llm, [[1, 2, 3 + i] for i in range(len(params))], params)
        found = texts(llm, seqs)
        assert {found[0], found[1]} <= set(CHOICES)
        assert re.fullmatch(r"[a-c]{3}/[0-9]+\.[0-9]{2}", found[2])
        for text in found[3:5]:
            value = json.loads(text)
            assert set(value) == {"name", "free", "ids"}
            assert value["ids"] == [1, 2]
        assert re.fullmatch("(ab|c)x?", found[6])
        assert {seq.completion.finish_reason for seq in seqs} == {"stop", "length"}
        assert [seq.completion.finish_reason for seq in seqs].count("length") == 1
        assert all(seq.token_ids[-1] in llm.scheduler.eos for i, seq in enumerate(seqs) if i != 5)
        assert_idle(llm)


def allowed_tokens(llm, params, completion) -> list[int]:
    """What the library allows after a completion, asked afresh."""
    grammars = Grammars(llm.tokenizer, VOCAB_SIZE, llm.config.eos)
    grammar = grammars.start(params.structured_outputs)
    grammar.advance(completion, len(completion))
    bitmask = np.zeros((1, num_mask_words(VOCAB_SIZE)), np.int32)
    grammars.fill_masks([(grammar, 0)], bitmask)
    return np.flatnonzero(np.unpackbits(bitmask.view(np.uint8), bitorder="little")).tolist()


def test_the_draw_is_the_races_among_the_allowed_tokens(llm, path):
    reference = Reference(path)
    choices = ("abba", "abacus", "block", "blocks", "bro")
    for seed in range(4):
        params = form(1.5, choice=choices, seed=seed)
        prompt, completion = [5, 6, 7 + seed], []
        while not completion or completion[-1] not in llm.config.eos:
            scores = torch.full((1, VOCAB_SIZE), -torch.inf)
            allowed = allowed_tokens(llm, params, completion)
            for token in allowed:
                text = llm.tokenizer.decode([*completion, token], skip_special_tokens=True)
                assert any(choice.startswith(text) for choice in choices)
            scores[0, allowed] = reference.logits(prompt, [*completion, 0])[-1, allowed]
            position = torch.tensor([len(prompt) + len(completion) - 1])
            completion.append(int(sample_torch(scores, torch.tensor([1.5]), torch.tensor([seed]), position)))
        assert completions(run(llm, [prompt], params)) == [completion]


FORMS = [
    form(choice=CHOICES, seed=1),
    form(temperature=0.7, json=SCHEMA, seed=2, max_tokens=55),
    form(regex="[a-z ]{30,40}", seed=3, max_tokens=55),
    form(temperature=0, regex="[0-9]{25}"),
]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"overlap_steps": False},
        {"max_num_batched_tokens": 24},
        {"num_kvcache_blocks": 5},
        {"num_kvcache_blocks": 5, "max_num_batched_tokens": 24, "overlap_steps": False},
    ],
    ids=["one-batch", "one-by-one", "chunked", "preempted", "preempted-one-by-one"],
)
def test_however_the_steps_are_cut(path, llm, options):
    prompts = [list(range(10 + i, 30 + i)) for i in range(4)]
    expected = [completions(run(llm, [prompt], each))[0] for prompt, each in zip(prompts, FORMS, strict=True)]
    with make_llm(path, skip_tokenizer_init=False, **options) as other:
        assert completions(run(other, prompts, FORMS)) == expected
        assert ("num_kvcache_blocks" in options) == (other.scheduler.num_preemptions > 0)
        assert_idle(other)


def can_be(llm, text: str, **fields) -> bool:
    """Whether a form allows a text as the whole completion."""
    grammar = Grammars(llm.tokenizer, VOCAB_SIZE, llm.config.eos).start(StructuredOutputsParams(**fields))
    return grammar.matcher.consume_tokens(llm.tokenizer.encode(text)) and grammar.matcher.is_accepting()


@pytest.mark.parametrize(
    "grammar",
    [
        'start: sum\nsum: NUMBER | "(" sum "+" sum ")"\nNUMBER: /[0-9]/',
        'root ::= sum\nsum ::= [0-9] | "(" sum "+" sum ")"',
    ],
    ids=["lark", "gbnf"],
)
def test_a_grammar_knows_what_no_regular_expression_does(llm, grammar):
    assert can_be(llm, "((1+2)+(3+4))", grammar=grammar)
    assert not can_be(llm, "((1+2)+(3+4)", grammar=grammar)
    for seed in range(4):
        (output,) = llm.generate(["a"], form(grammar=grammar, seed=seed, max_tokens=64))
        if output["finish_reason"] == "stop":
            assert can_be(llm, output["text"], grammar=grammar)


@pytest.mark.parametrize("grammar", ["hello", "start: missing", "root ::= (", "start: " + "(" * 10_000])
def test_what_is_no_grammar(llm, grammar):
    with pytest.raises(ValueError, match=r"grammar='.*: cannot be enforced: "):
        llm.generate(["a"], form(grammar=grammar))


def test_json_is_compact_unless_whitespace_is_asked_for(llm):
    schema = {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2}
    for seed in range(4):
        (text,) = texts(llm, run(llm, [[1, 2, 3]], form(5.0, json=schema, seed=seed)))
        assert [type(each) for each in json.loads(text)] == [bool, bool]
        assert text == json.dumps(json.loads(text), separators=(",", ":"))
    assert can_be(llm, "[true,false]", json=schema)
    assert not can_be(llm, "[true, false]", json=schema)
    for pattern, allowed in ((" ?", True), (r"[ \n]{0,3}", True), ("", False), ("\n", False)):
        assert can_be(llm, "[true, false]", json=schema, whitespace_pattern=pattern) == allowed
    # A schema may say so itself, in the library's own terms.
    assert can_be(llm, "[true, false]", json=schema | {"x-guidance": {"whitespace_pattern": " ?"}})
    assert not can_be(llm, '{"a":{"b": 1}}', json={"const": {"a": {"b": 1}}})


@pytest.mark.parametrize(
    ("regex", "matches", "others"),
    [
        (r"\d+", ["0129"], ["٣", "３", "1٣", "a"]),
        (r"[\d.]+", ["1.5"], ["٣", ""]),
        (r"[^\d]", ["a", "é"], ["3"]),
        (r"\D", ["a"], ["3"]),
        (r"[\D]x", ["ax"], ["3x"]),
        (r"\\d", [r"\d"], [r"\3", "3"]),
        (r"\\\d", [r"\3"], [r"\٣", r"\d"]),
        (r"\d/\d", ["1/2"], ["12"]),
        (r"(?i)a\d", ["A1"], ["A٣"]),
        (r"\w+", ["größe", "漢1"], ["-"]),
        (r"a\sb", ["a b", "a\tb"], ["ab"]),
    ],
)
def test_digits_are_ascii(llm, regex, matches, others):
    assert [text for text in matches + others if can_be(llm, text, regex=regex)] == matches


def test_a_pydantic_model(llm):
    pydantic = pytest.importorskip("pydantic")

    class Block(pydantic.BaseModel):
        number: int = pydantic.Field(ge=0, le=9)
        free: bool

    (text,) = texts(llm, run(llm, [[1, 2, 3]], form(json=Block, seed=1)))
    Block.model_validate_json(text)


def test_max_tokens_and_min_tokens(llm):
    (cut,) = run(llm, [[1, 2]], form(regex="[ab]{50}", max_tokens=3))
    assert (len(cut.completion_token_ids), cut.completion.finish_reason) == (3, "length")
    (longer,) = run(llm, [[1, 2]], form(temperature=0, regex="[ab]*", max_tokens=20, min_tokens=8))
    assert 8 <= len(longer.completion_token_ids) <= 20
    # A complete form has nothing to go on with.
    (short,) = run(llm, [[1, 2]], form(regex="a", min_tokens=20))
    assert (texts(llm, [short]), short.completion.finish_reason) == (["a"], "error")
    assert short.completion.error == "min_tokens=20: after 1 tokens nothing but an end may follow"
    assert cut.completion.error is longer.completion.error is None


def test_min_tokens_that_no_choice_has(llm):
    says = r"^sampling_params\[0\]: min_tokens=8: the longest choice has no more than 7 tokens"
    with pytest.raises(ValueError, match=says):
        llm.generate([[1]], [form(choice=["größe", "a"], min_tokens=8)], use_tqdm=False)
    llm._sequences.make_one([1], form(choice=["größe", "a"], min_tokens=7))


def test_forms_with_tokens_that_may_and_may_not_be_drawn(llm):
    (eos,) = llm.scheduler.eos
    letters = {letter: llm.tokenizer.encode(letter)[0] for letter in "abcd"}
    limits = [
        {"allowed_token_ids": [letters["a"], letters["b"], eos]},
        {"bad_words": ["c", "d"]},
        {"bad_words": ["aa", "bb", "c", "d"]},
        {"logit_bias": {letters["d"]: 100}},
    ]
    params = [dataclasses.replace(form(regex="[a-d]{12}", seed=i), **each) for i, each in enumerate(limits)]
    seqs = run(llm, [[1, 2, 3]] * 4, params)
    found = texts(llm, seqs)
    assert re.fullmatch("[ab]{12}", found[0])
    assert re.fullmatch("[ab]{12}", found[1])
    assert found[2] in ("ab" * 6, "ba" * 6)
    assert found[3] == "d" * 12
    assert [seq.completion.error for seq in seqs] == [None] * 4
    assert_idle(llm)
    # Beside a mask without a form, in the row before.
    lone = SamplingParams(max_tokens=9, seed=1, ignore_eos=True, allowed_token_ids=[letters["c"]])
    seqs = run(llm, [[1, 2, 3]] * 3, [lone, form(regex="[ab]{9}", seed=2), form(regex="d{9}", seed=3)])
    assert [bool(re.fullmatch(*each)) for each in zip(("c{9}", "[ab]{9}", "d{9}"), texts(llm, seqs), strict=True)] == (
        [True] * 3
    )
    stuck = dataclasses.replace(form(regex="ab|aab|d"), bad_words=["ab", "d"])
    (output, free) = llm.generate([[1, 2, 3], [1, 2, 3]], [stuck, form(regex="ab")], use_tqdm=False)
    assert (output["finish_reason"], free["finish_reason"], free["text"]) == ("error", "stop", "ab")
    assert "no token is left to draw" in output["error"]
    assert_idle(llm)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"regex": "a(b"}, r"regex='a\(b'.*unclosed group"),
        ({"regex": "(?=a)b"}, "look-ahead"),
        ({"json": {"type": "foo"}}, r"json=.*Invalid type: foo"),
        ({"json": {"type": "integer", "minimum": 3, "maximum": 2}}, "minimum"),
        ({"json": {"type": "array"}, "whitespace_pattern": "("}, r"json=.*cannot be enforced"),
        ({"json": "[1]"}, r"sampling_params.*json='\[1\]': cannot be enforced: .*object schema"),
    ],
    ids=["regex", "look-ahead", "type", "unsatisfiable", "whitespace", "no schema"],
)
def test_a_bad_form_is_refused_before_any_work(llm, fields, says):
    with pytest.raises(ValueError, match=f"(?s){says}"):
        llm.add_request([1, 2], form(**fields))
    with pytest.raises(ValueError, match=f"(?s){says}"):
        llm.generate([[1], [2]], [greedy(3), form(**fields)], use_tqdm=False)
    assert_idle(llm)


NOWHERE = {"$ref": "#/$defs/loop", "$defs": {"loop": {"$ref": "#/$defs/loop"}}}


@pytest.mark.parametrize("fields", [{"json": {"$ref": "#"}}, {"json": NOWHERE}, {"regex": r"[^\s\S]"}])
def test_a_form_that_no_text_has_is_refused(llm, fields):
    with pytest.raises(ValueError, match="cannot be enforced: no text has this form"):
        llm.generate([[1]], form(**fields), use_tqdm=False)
    assert_idle(llm)
    # One that the empty text has is no such form.
    assert llm.generate([[1]], form(regex="a?", temperature=0), use_tqdm=False)[0]["finish_reason"] == "stop"


def test_a_form_that_leads_nowhere_ends_as_an_error(llm):
    schema = {"type": "array", "items": NOWHERE["$defs"]["loop"], "minItems": 1, "$defs": NOWHERE["$defs"]}
    (output,) = llm.generate([[1]], form(json=schema), use_tqdm=False)
    assert (output["finish_reason"], output["text"]) == ("error", "[")
    assert output["error"] == "structured_outputs: no text that begins like this one has the form"
    assert_idle(llm)


@pytest.mark.parametrize("kind", ["choice", "json"])
def test_thousands_of_choices(llm, kind):
    numbers = [f"{i:05}" for i in range(60_000)]
    params = form(**{kind: numbers if kind == "choice" else {"enum": numbers}})
    for output in llm.generate([[i] for i in range(1, 5)], params, use_tqdm=False):
        assert output["finish_reason"] == "stop"
        assert (output["text"] if kind == "choice" else json.loads(output["text"])) in numbers


@pytest.mark.parametrize(
    ("choice", "says"),
    [
        ([str(i) for i in range(100_001)], r"at most 100000 texts; there are 100001$"),
        (["a", "é" * 40_000], r"of up to 65536 bytes, 16777216 bytes together; the longest has 80000 bytes"),
        (["x" * 65_536 + str(i) for i in range(2)], r"the longest has 65537 bytes"),
        ([f"{i:060000}" for i in range(300)], r"all have 18000000$"),
    ],
)
def test_more_choices_than_can_be_compiled(choice, says):
    with pytest.raises(ValueError, match=f"^choice=.*{says}"):
        StructuredOutputsParams(choice=choice)


def test_compiled_forms_are_bounded_by_their_size_and_use(llm, monkeypatch):
    compiled = []
    grammars = Grammars(llm.tokenizer, VOCAB_SIZE, llm.config.eos)
    original = grammars._source
    monkeypatch.setattr(grammars, "_source", lambda form: compiled.append(form.regex) or original(form))
    large = [StructuredOutputsParams(regex="a" * 20_000 + letter) for letter in "bcd"]
    monkeypatch.setattr(grammars._compiled, "_max_bytes", 2_500_000)
    for each in (large[0], large[1], large[0], large[2], large[0], large[1]):
        grammars.start(each)
    assert [regex[-1] for regex in compiled] == ["b", "c", "d", "c"]
    # What it remembers of the texts that it has read grows, so that it is made anew after a while.
    monkeypatch.setattr(structured, "_MAX_TOKENS_READ", 10)
    small = StructuredOutputsParams(regex="[ab]*")
    for _ in range(5):
        grammars.start(small).advance(llm.tokenizer.encode("abba"), 4)
    assert compiled[4:] == ["[ab]*"] * 2


def test_without_the_library_or_a_tokenizer(path, monkeypatch):
    with make_llm(path) as llm, pytest.raises(ValueError, match="skip_tokenizer_init"):
        llm.add_request([1], form(choice=["a"]))
    with make_llm(path, skip_tokenizer_init=False) as llm:
        monkeypatch.setitem(sys.modules, "llguidance", None)
        with pytest.raises(ImportError, match=r"pip install llguidance"):
            llm.add_request([1], form(choice=["a"]))
        assert len(completions(run(llm, [[1]], greedy(2)))[0]) == 2


INTEGER = {"type": "integer"}


def keyed(*names: str, **more) -> dict:
    """An object of integers, all of them required."""
    return {"type": "object", "properties": dict.fromkeys(names, INTEGER), "required": list(names), **more}


NODE = keyed(properties={"next": {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]}}, required=["next"])
KEYS = {
    "plain": (keyed("a"), ['{"a":1}'], ['{"a":1,"b":2}']),
    "optional": ({"properties": {"a": INTEGER, "b": INTEGER}}, ["{}", '{"b":1}'], ['{"c":1}']),
    "no keys": (keyed(), ["{}"], ['{"a":1}']),
    "any object": ({"type": "object"}, ['{"a":1}', "{}"], []),
    "required alone": ({"type": "object", "required": ["a"]}, ['{"a":1,"b":2}'], ["{}"]),
    "required, not described": (
        keyed("a", required=["b"]),
        ['{"a":1,"b":[2]}', '{"b":3}'],
        ['{"a":1}', '{"b":1,"c":1}'],
    ),
    "said so": (keyed("a", additionalProperties=True), ['{"a":1,"b":2}'], []),
    "of strings": (keyed("a", additionalProperties={"type": "string"}), ['{"a":1,"b":"c"}'], ['{"a":1,"b":2}']),
    "in an array": ({"type": "array", "items": keyed("a")}, ['[{"a":1}]'], ['[{"a":1,"b":2}]']),
    "in a tuple": (
        {"type": "array", "prefixItems": [keyed("a")], "items": False, "minItems": 1},
        ['[{"a":1}]'],
        ['[{"a":1,"b":2}]'],
    ),
    "of more objects": (
        {"type": "object", "additionalProperties": keyed("a")},
        ['{"x":{"a":1},"y":{"a":2}}'],
        ['{"x":{"a":1,"b":2}}'],
    ),
    "by patterns": (
        {"type": "object", "patternProperties": {"^x": INTEGER}, "properties": {"y": INTEGER}},
        ['{"xa":1,"xb":2}', '{"y":1,"xa":2}'],
        ['{"a":1}', '{"xa":"b"}'],
    ),
    "a reference": (
        {"$ref": "#/$defs/A", "$defs": {"A": keyed("a")}, "description": "of A"},
        ['{"a":1}'],
        ['{"a":1,"b":2}'],
    ),
    "itself": (
        {"$ref": "#/$defs/Node", "$defs": {"Node": NODE}},
        ['{"next":{"next":null}}'],
        ['{"next":{"next":null,"a":1}}', '{"next":null,"a":1}'],
    ),
    "the whole": (
        keyed(properties={"in": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, required=["in"]),
        ['{"in":{"in":null}}'],
        ['{"in":{"in":null,"a":1}}'],
    ),
    "any of": (
        {"anyOf": [keyed("a"), keyed("b"), {"type": "null"}]},
        ['{"a":1}', '{"b":1}', "null"],
        ['{"a":1,"b":2}'],
    ),
    "any of, beside keys": (
        {
            "properties": {"a": INTEGER},
            "anyOf": [{"required": ["a"]}, keyed("b"), {"$ref": "#/$defs/C"}],
            "$defs": {"C": keyed("c")},
        },
        ['{"a":1}', '{"a":1,"b":2}', '{"b":2}', '{"a":1,"c":2}', '{"c":2}'],
        ['{"a":1,"d":2}', '{"b":1,"c":2}', "{}"],
    ),
    "constants among keys": ({"properties": {"a": INTEGER}, "anyOf": [{"const": {"z": 1}}]}, ['{"z":1}'], ['{"a":1}']),
    "one of": (
        {
            "oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}],
            "discriminator": {"propertyName": "kind"},
            "$defs": {
                "A": keyed(properties={"kind": {"const": "a"}, "x": INTEGER}, required=["kind"]),
                "B": keyed(properties={"kind": {"const": "b"}, "y": INTEGER}, required=["kind"]),
            },
        },
        ['{"kind":"a","x":1}', '{"kind":"b","y":1}'],
        ['{"kind":"a","y":1}'],
    ),
    "all of": (
        {"allOf": [keyed("a"), keyed("b")]},
        ['{"a":1,"b":2}'],
        ['{"a":1}', '{"a":1,"b":2,"c":3}', '{"a":"x","b":2}'],
    ),
    "all of one": (
        {"allOf": [{"$ref": "#/$defs/A"}], "default": {}, "$defs": {"A": keyed("a")}},
        ['{"a":1}'],
        ['{"a":1,"b":2}'],
    ),
    "all of what stands alone elsewhere": (
        keyed(
            properties={
                "one": {"$ref": "#/$defs/A"},
                "both": {"allOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}]},
            },
            required=["one", "both"],
            **{"$defs": {"A": keyed("a"), "B": keyed("b"), "variant-1": INTEGER}},
        ),
        ['{"one":{"a":1},"both":{"a":1,"b":2}}'],
        ['{"one":{"a":1,"b":2},"both":{"a":1,"b":2}}', '{"one":{"a":1},"both":{"a":1,"b":2,"c":3}}'],
    ),
    "all of a recursion": (
        {"allOf": [{"$ref": "#/$defs/Node"}, keyed("a")], "$defs": {"Node": NODE}},
        ['{"next":{"next":null},"a":1}'],
        ['{"next":{"next":null,"a":1},"a":1}', '{"next":null}'],
    ),
    "all of, and one says so": (
        {"allOf": [keyed("a", additionalProperties=True), keyed("b")]},
        ['{"a":1,"b":2,"c":3}'],
        ['{"a":1}'],
    ),
    "a reference beside keys": (
        {"$ref": "#/$defs/A", "properties": {"c": INTEGER}, "$defs": {"A": keyed("a")}},
        ['{"a":1,"c":2}', '{"a":1}'],
        ['{"a":1,"c":2,"d":3}'],
    ),
    "keys called as keywords": (
        keyed(
            properties={"properties": INTEGER, "format": {"enum": [{"format": "x"}]}}, required=["properties", "format"]
        ),
        ['{"properties":1,"format":{"format":"x"}}'],
        ['{"properties":1,"format":{"format":"x"},"a":1}'],
    ),
}


@pytest.mark.parametrize("name", KEYS)
def test_objects_take_no_keys_that_nobody_has_described(llm, name):
    """Unless they say so, or the request does: that is the standard's meaning."""
    schema, right, wrong = KEYS[name]
    assert [text for text in right if not can_be(llm, text, json=schema)] == []
    assert [text for text in wrong if can_be(llm, text, json=schema)] == []
    assert [text for text in right if not can_be(llm, text, json=json.dumps(schema), additional_properties=True)] == []


def test_the_standards_meaning(llm):
    others = {"plain": 0, "optional": 0, "no keys": 0, "in an array": 0, "itself": 1, "all of": 1, "by patterns": 0}
    for name, place in others.items():
        schema, _, wrong = KEYS[name]
        assert can_be(llm, wrong[place], json=schema, additional_properties=True), name
    with pytest.raises(ValueError, match="additional_properties=True: must be False where json is not given"):
        StructuredOutputsParams(regex="a", additional_properties=True)


@pytest.mark.parametrize("name", ["binary", "path", "password", "iri", "json-pointer", "x-of-mine", "regex"])
def test_formats_that_are_not_known_are_remarks(llm, name):
    schema = {"type": "object", "properties": {"a": {"type": "string", "format": name}}, "required": ["a"]}
    for each in (schema, {"$ref": "#/$defs/A", "$defs": {"A": schema}}, {"anyOf": [schema]}, {"allOf": [schema]}):
        assert can_be(llm, '{"a":"any text"}', json=each)
        assert can_be(llm, '{"a":"any text"}', json=each, additional_properties=True)
    assert can_be(llm, "5", json={"type": "integer", "format": "int32"})
    assert not can_be(llm, '"any text"', json={"type": "string", "format": "date"})
    assert can_be(llm, '"2026-11-27"', json={"type": "string", "format": "date"})


def test_pydantics_types_of_texts(llm):
    pydantic = pytest.importorskip("pydantic")

    class Account(pydantic.BaseModel):
        password: pydantic.SecretStr
        folder: Path
        picture: bytes

    text = '{"password":"x","folder":"/a","picture":"b"}'
    assert can_be(llm, text, json=Account)
    assert not can_be(llm, text[:-1] + ',"more":1}', json=Account)
    Account.model_validate_json(text)


def test_one_of_says_what_can_be_done(llm):
    says = "cannot be enforced: oneOf: schemas of which exactly one may fit must exclude each other plainly.*use anyOf"
    with pytest.raises(ValueError, match=says):
        llm.generate([[1]], form(json={"oneOf": [{"type": "integer"}, {"type": "number"}]}), use_tqdm=False)


def test_a_schema_that_is_nested_too_deeply(llm):
    depth = 3000
    schema = '{"items":' * depth + "{}" + "}" * depth
    with pytest.raises(ValueError, match=r"cannot be enforced|is not JSON"):
        llm.generate([[1]], form(json=schema), use_tqdm=False)
