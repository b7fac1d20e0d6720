"""Thinking: forms that begin behind it, and budgets that end it, held to a plain loop of one token at a time."""

import dataclasses
import json
import pickle
import re
from array import array
from contextlib import contextmanager

import numpy as np
import pytest
from channels import ANALYSIS, make_channels_checkpoint
from checkpoints import VOCAB_SIZE, Reference, assert_idle, greedy, make_checkpoint, make_llm
from replay import Replay
from thinking_models import CLOSING, MESSAGES, OPENING, complete, forced_token, make_thinking_checkpoint

from nanovllm import SamplingParams, StructuredOutputsParams, split_reasoning
from nanovllm.engine.features.logits.structured import Grammars
from nanovllm.engine.features.logits.thinking import FormStart, Thinking, ThinkingTags
from nanovllm.engine.features.speculation import speculative_scheduler
from nanovllm.engine.llm_engine import BY_HAND
from nanovllm.engine.sequence import Sequence
from nanovllm.layers.sampling.token_masks import num_mask_words, unpack_mask

pytest.importorskip("llguidance", reason="needs the extra structured")

WAYS = {
    "one batch": {},
    "one by one": {"overlap_steps": False},
    "chunks": {"max_num_batched_tokens": 24},
    "preempted": {"num_kvcache_blocks": 9},
    "preempted one by one": {"num_kvcache_blocks": 9, "max_num_batched_tokens": 24, "overlap_steps": False},
    "mixed": {"mixed_step_rows": 40, "max_num_batched_tokens": 40, "max_num_seqs": 16},
    "speculative": {"speculation": "suffix"},
    "two ranks": {"tensor_parallel_size": 2},
}
ways = pytest.mark.parametrize(
    "way", [pytest.param(way, marks=pytest.mark.slow if "ranks" in way else ()) for way in WAYS]
)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_thinking_checkpoint(tmp_path_factory.mktemp("thinking"))


@pytest.fixture(scope="module")
def reference(path):
    return Reference(path)


@pytest.fixture(scope="module")
def shared_llm(path):
    with make_llm(path, skip_tokenizer_init=False, max_model_len=200) as llm:
        yield llm


def prompt_of(tokenizer, kind: str, text: str = "") -> list[int]:
    """A prompt in which the thinking is "open", "closed", or for the model to begin ("turn"); or a "text"."""
    if kind == "text":
        return tokenizer.encode("a table of blocks" + text, add_special_tokens=False)
    variables = {"open": {"opens": True}, "closed": {"enable_thinking": False}, "turn": {}}[kind]
    messages = [{"role": "user", "content": MESSAGES[0]["content"] + text}]
    return tokenizer.apply_chat_template(messages, return_dict=False, **variables)


def asked(budget, kind="open", temperature=0.0, max_tokens=16, seed=1, **fields):
    """A kind of prompt, and what is asked."""
    params = {"thinking_token_budget": budget, "temperature": temperature, "max_tokens": max_tokens, "seed": seed}
    return kind, SamplingParams(**params | {"ignore_eos": "structured_outputs" not in fields} | fields)


BUDGETS = [
    asked(0),
    asked(0, "turn", 0.9),
    asked(1, temperature=0.7, top_k=30),
    asked(5, temperature=1.0, n=3),
    asked(5, thinking_end_text="so a row.\n", max_tokens=24),
    asked(7, temperature=1.0, seed=5, n=4, max_tokens=20),
    asked(8, "turn", 1.0, seed=3, n=4, max_tokens=20),
    asked(9, "turn", logit_bias={3: 60.0}, max_tokens=20),
    asked(6, repetition_penalty=1.3, presence_penalty=0.5),
    asked(6, min_tokens=12, ignore_eos=False, temperature=1.0),
    asked(3, logprobs=2, temperature=0.8),
    asked(100, temperature=1.0, seed=9),
    asked(2, "closed"),
    asked(2, "text", 0.5),
    asked(16),
    (("open", greedy(12))),
]


def requests_of(tokenizer, wanted):
    prompts = [prompt_of(tokenizer, kind, f" {i % 3}" * (i % 5)) for i, (kind, _) in enumerate(wanted)]
    return prompts, [params for _, params in wanted]


def tags_of(tokenizer) -> tuple[int, int]:
    return tuple(tokenizer.convert_tokens_to_ids([OPENING, CLOSING]))


def rule_of(llm, kind: str, params: SamplingParams):
    """The only tokens that may follow a completion, by a plain reading of all of it."""
    opening, closing = tags = tags_of(llm.tokenizer)
    text, form = params.thinking_end_text, params.structured_outputs
    ending = [*llm.tokenizer.encode(text, add_special_tokens=False), closing]

    def answer(completion: list[int]) -> list[int] | None:
        """The completion behind its thinking; None while it thinks."""
        if kind in ("closed", "text") or (kind == "turn" and completion[:1] != [opening]):
            return completion
        return completion[completion.index(closing) + 1 :] if closing in completion else None

    def rule(completion: list[int]) -> list[int] | None:
        if params.thinking_token_budget is not None and (kind in ("open", "turn") or (kind == "text" and form is None)):
            token = forced_token(completion, kind == "open", params.thinking_token_budget, ending, tags)
            if token is not None:
                return [token]
        if form is None:
            return None
        rest = answer(completion)
        if rest is None:
            return [token for token in range(VOCAB_SIZE) if token not in llm.config.eos]
        allowed = allowed_tokens(llm, form, rest)
        return [*allowed, opening] if kind == "turn" and not completion else allowed

    return rule


def allowed_tokens(llm, form: StructuredOutputsParams, completion: list[int]) -> list[int]:
    """What the library allows after a completion, asked afresh."""
    grammars = Grammars(llm.tokenizer, VOCAB_SIZE, llm.config.eos)
    grammar = grammars.start(form)
    grammar.advance(completion, len(completion))
    bitmask = np.zeros((1, num_mask_words(VOCAB_SIZE)), np.int32)
    grammars.fill_masks([(grammar, 0)], bitmask)
    return np.flatnonzero(unpack_mask(bitmask[0], VOCAB_SIZE)).tolist()


def expected_of(llm, reference, wanted) -> list[list[int] | None]:
    """What each sample has to be."""
    prompts, params = requests_of(llm.tokenizer, wanted)
    found = []
    for (kind, _), prompt, each in zip(wanted, prompts, params, strict=True):
        samples = llm._sequences.make_one(prompt, each)
        rule = rule_of(llm, kind, each)
        found += [
            complete(reference, prompt, dataclasses.replace(each, seed=seq.seed, n=1), rule, llm.config.eos)
            for seq in samples
        ]
    return found


@pytest.fixture(scope="module")
def budgets(shared_llm, reference):
    return expected_of(shared_llm, reference, BUDGETS)


def found_of(path, wanted, expected, way: str) -> list[list[int]]:
    """What an engine of this kind gives; twice, so that the second time the prompts' beginnings are cached."""
    with (
        make_llm(path, skip_tokenizer_init=False, max_model_len=200, **WAYS[way]) as llm,
        pytest.MonkeyPatch.context() as patch,
    ):
        prompts, params = requests_of(llm.tokenizer, wanted)
        found = [seq.completion_token_ids for seq in serve(llm, prompts, params)]
        if way == "speculative":
            samples, index = {}, 0
            for i, each in enumerate(params):
                samples |= {(i, j): found[index + j] for j in range(each.n)}
                index += each.n
            patch.setattr(speculative_scheduler, "choose_counts", lambda chances, num, pace: [len(c) for c in chances])
            for wrong in (0.0, 0.3, 1.0):
                patch.setattr(llm.scheduler, "proposer", Replay(samples, wrong, VOCAB_SIZE))
                assert [seq.completion_token_ids for seq in serve(llm, prompts, params)] == found
            assert llm.stats()["accepted_tokens"] > 50
        assert [seq.completion_token_ids for seq in serve(llm, prompts, params)] == found
        assert ("num_kvcache_blocks" in WAYS[way]) == (llm.scheduler.num_preemptions > 0)
        assert_idle(llm)
    return found


def serve(llm, prompts, params):
    """The sequences of requests. They know the indices of the prompts, by which `Replay` knows them."""
    requests = llm._sequences.make_all(prompts, params)
    llm._queue(BY_HAND, requests)
    while not llm.is_finished():
        llm.step()
    return [seq for request in requests for seq in request]


def assert_same(found, expected) -> None:
    assert len(found) == len(expected)
    for each, right in zip(found, expected, strict=True):
        assert right is None or each == right


@ways
def test_budgets(path, budgets, way):
    assert sum(each is None for each in budgets) <= 3
    assert_same(found_of(path, BUDGETS, budgets, way), budgets)


def test_the_cases_have_all_ends(shared_llm, budgets):
    """Thinking that the budget ends, that the model ends before, and that never begins."""
    opening, closing = tags_of(shared_llm.tokenizer)
    kinds = [(kind, params.thinking_token_budget) for kind, params in BUDGETS for _ in range(params.n)]
    ends = set()
    for (kind, budget), tokens in zip(kinds, budgets, strict=True):
        if tokens is None or budget is None:
            continue
        if kind == "turn":
            ends.add("opened" if tokens[0] == opening else "never opened")
        if closing in tokens:
            length = tokens.index(closing) - (kind == "turn")
            ends.add("by itself" if length < budget else "forced")
    assert ends == {"opened", "never opened", "by itself", "forced"}


SCHEMA = {"type": "object", "properties": {"free": {"type": "boolean"}, "of": {"enum": ["row", "slot"]}}}
SCHEMA["required"] = ["free", "of"]
REGEX, CHOICE, JSON = (
    {"structured_outputs": StructuredOutputsParams(**form)}
    for form in ({"regex": "[ab]{3}x?"}, {"choice": ["red", "a block", "blocks"]}, {"json": SCHEMA})
)
FORMS = [
    asked(None, temperature=1.0, max_tokens=40, n=2, **REGEX),
    asked(None, "turn", 1.0, max_tokens=40, n=3, **REGEX),
    asked(None, "turn", max_tokens=20, logit_bias={3: 60.0}, **CHOICE),
    asked(None, "closed", 1.0, **CHOICE),
    asked(None, "text", 1.0, **CHOICE),
    asked(0, max_tokens=40, **JSON),
    asked(4, temperature=1.0, max_tokens=60, n=2, **JSON),
    asked(4, "turn", 1.0, seed=7, max_tokens=60, n=3, **JSON),
    asked(5, temperature=0.9, thinking_end_text="a row", max_tokens=30, **CHOICE),
    asked(9, temperature=1.0, max_tokens=30, min_tokens=12, **REGEX),
    asked(6, temperature=1.0, **REGEX),
    (("open", greedy(12))),
]


@pytest.fixture(scope="module")
def forms(shared_llm, reference):
    return expected_of(shared_llm, reference, FORMS)


@ways
def test_forms_after_thinking(path, forms, way):
    assert sum(each is None for each in forms) <= 3
    assert_same(found_of(path, FORMS, forms, way), forms)


def test_the_content_has_the_form(llm):
    """In whole answers and in streams, with thinking on and off; and a number of tokens that ends it has no form."""
    for kind in ("open", "turn", "closed"):
        variables = {"open": {"opens": True}, "closed": {"enable_thinking": False}, "turn": {}}[kind]
        for form, has_form in ((JSON, is_json), (REGEX, re.compile("[ab]{3}x?").fullmatch)):
            (_, params) = asked(6, temperature=1.0, max_tokens=80, n=4, **form)
            options = {"chat_template_kwargs": variables, "split_reasoning": True, "use_tqdm": False}
            (output,) = llm.chat(MESSAGES, params, **options)
            prompt = llm.prompt_encoder.encode_chat(MESSAGES, kwargs=variables)
            texts = dict.fromkeys(range(4), "")
            for delta in llm.stream([prompt], params):
                texts[delta["sample"]] += delta["text"]
            for i, sample in enumerate(output["samples"]):
                assert sample["finish_reason"] == "stop"
                assert has_form(sample["content"]), (kind, sample)
                assert (sample["reasoning"] is None) == (
                    kind == "closed" or (kind == "turn" and OPENING not in sample["text"])
                )
                assert texts[i] == sample["text"]
    # Without a budget, a model that does not end its thinking has no room for an answer.
    (_, params) = asked(None, max_tokens=5, logit_bias={4: -100.0}, **JSON)
    (output,) = llm.chat(MESSAGES, params, **options | {"chat_template_kwargs": {"opens": True}})
    assert (output["content"], output["finish_reason"]) == ("", "length")


def is_json(text: str) -> bool:
    return json.loads(text)["of"] in ("row", "slot")


def test_an_answer_that_is_continued(llm):
    """Its thinking goes on, or has ended."""
    for begun, thinks in ((f"{OPENING}a row of", True), (f"{OPENING}a row{CLOSING}so", False), ("so", False)):
        messages = [*MESSAGES, {"role": "assistant", "content": begun}]
        text = (
            "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
            "{% if not loop.last %}<|im_end|>\n{% endif %}{% endfor %}"
        )
        options = {"add_generation_prompt": False, "continue_final_message": True, "split_reasoning": True}
        (_, params) = asked(3, temperature=1.0, max_tokens=20, logit_bias={3: -100.0, 4: -100.0}, **REGEX)
        (output,) = llm.chat(messages, params, use_tqdm=False, chat_template=text, **options)
        assert output["token_ids"][3:4] == [4] if thinks else 4 not in output["token_ids"]
        assert re.fullmatch("[ab]{3}x?", output["content"])


def test_a_text_that_only_mentions_the_tag_does_not_think(llm):
    prompt = llm.tokenizer.encode(f"What does {OPENING} mean? a", add_special_tokens=False)
    (output,) = llm.generate([prompt], SamplingParams(**REGEX), use_tqdm=False)
    assert re.fullmatch("[ab]{3}x?", output["text"])
    conversation = [{"role": "user", "content": f"What does {OPENING} mean?"}]
    (output,) = llm.chat(
        conversation, SamplingParams(**REGEX), use_tqdm=False, chat_template_kwargs={"enable_thinking": False}
    )
    assert re.fullmatch("[ab]{3}x?", output["text"])


def test_log_probabilities_of_forced_tokens_are_the_models(llm):
    prompt = prompt_of(llm.tokenizer, "open")
    ask = {"temperature": 0, "ignore_eos": True, "max_tokens": 8, "logprobs": 1}
    (output,) = llm.generate([prompt], SamplingParams(thinking_token_budget=3, **ask), use_tqdm=False)
    assert output["token_ids"][3] == 4
    assert len(output["logprobs"]) == 8
    scored = llm.score([prompt], [output["token_ids"]], use_tqdm=False)[0]["logprobs"]
    found = [entry[token] for token, entry in zip(output["token_ids"], output["logprobs"], strict=True)]
    assert found == pytest.approx(scored, abs=1e-4)
    assert found[3] < -0.1


def test_the_end_may_be_a_stop(llm):
    prompt = prompt_of(llm.tokenizer, "open")
    for stop in ({"stop": [CLOSING]}, {"stop_token_ids": [4]}):
        params = SamplingParams(temperature=0, thinking_token_budget=3, ignore_eos=True, **stop)
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        assert (len(output["token_ids"]), output["finish_reason"]) == (4, "stop")
        assert output["stop_reason"] == next(iter(stop.values()))[0]
    stop = SamplingParams(
        temperature=0, thinking_token_budget=3, thinking_end_text="That is all. So", ignore_eos=True, stop="all"
    )
    (output,) = llm.generate([prompt], stop, use_tqdm=False)
    assert output["text"].endswith("That is ")


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (
            {"allowed_token_ids": [50, 51, 2]},
            r"thinking ends with </think>, and allowed_token_ids or bad_words exclude token 4 of its end, '</think>'",
        ),
        ({"bad_words": ["</think>"]}, "exclude token 4 of its end"),
        ({"bad_words": ["row"], "thinking_end_text": "a row"}, "bad_words exclude token"),
        (
            {"thinking_end_text": "so</think>so"},
            r"thinking_end_text='so</think>so': must be a text that is followed by </think>",
        ),
    ],
)
def test_an_end_that_cannot_come_is_refused(llm, fields, says):
    for kind in ("open", "turn"):
        with pytest.raises(ValueError, match=rf"^sampling_params\[0\]: .*{says}"):
            llm.generate(
                [prompt_of(llm.tokenizer, kind)], [SamplingParams(thinking_token_budget=5, **fields)], use_tqdm=False
            )
    # Where there is no thinking there is nothing to end.
    llm._sequences.make_one(prompt_of(llm.tokenizer, "closed"), SamplingParams(thinking_token_budget=5, **fields))


def test_a_form_that_could_never_begin_is_refused(llm):
    """Where the model need not think, it does not."""
    params = SamplingParams(allowed_token_ids=[*range(5, 319), 2], temperature=1.0, **REGEX)
    with pytest.raises(ValueError, match="structured_outputs: thinking ends with </think>, and allowed_token_ids"):
        llm.generate([prompt_of(llm.tokenizer, "open")], params, use_tqdm=False)
    (output,) = llm.generate([prompt_of(llm.tokenizer, "turn")], params, use_tqdm=False)
    assert re.fullmatch("[ab]{3}x?", output["text"])


def test_only_the_end_of_a_budget_needs_more_than_a_plain_step(llm, monkeypatch):
    """Before it and after it requests with a budget cost the batch nothing."""
    needed, prepare = [], llm.model_runner.prepare
    monkeypatch.setattr(llm.model_runner, "prepare", lambda step: (prepare(step), needed.append(step.needs_logits))[0])
    biased = SamplingParams(
        temperature=0, thinking_token_budget=6, thinking_end_text="a", max_tokens=20, ignore_eos=True
    )
    prompts = [prompt_of(llm.tokenizer, "open")] * 3
    outputs = llm.generate(prompts, [biased, greedy(20), greedy(20)], use_tqdm=False)
    assert outputs[0]["token_ids"][7] == 4
    assert sum(needed) == 2 + 1, "the two forced tokens, and the step that was launched before the last was read"
    needed.clear()
    llm.generate(
        prompts, [dataclasses.replace(biased, thinking_token_budget=None, thinking_end_text="")] * 3, use_tqdm=False
    )
    assert not any(needed)


def test_what_a_worker_gets_of_such_a_sequence(llm):
    (seq,) = llm._sequences.make_one(prompt_of(llm.tokenizer, "open"), SamplingParams(thinking_token_budget=5))
    copied = pickle.loads(pickle.dumps(seq))
    assert type(copied) is Sequence
    assert (copied.token_ids, copied.is_plain) == (seq.token_ids, True)


def test_a_model_that_does_not_think_has_no_budget(tmp_path):
    path = make_checkpoint(tmp_path, tokenizer=True)
    says = "thinking_token_budget=5: this model does not think between tags"
    with make_llm(path, skip_tokenizer_init=False) as llm, pytest.raises(ValueError, match=says):
        llm.generate(["a"], SamplingParams(thinking_token_budget=5), use_tqdm=False)
    with make_llm(path) as llm, pytest.raises(ValueError, match="thinking_token_budget: needs the model's tokenizer"):
        llm.generate([[5]], SamplingParams(thinking_token_budget=5), use_tqdm=False)


# -- tags that are several tokens ------------------------------------------------------------------------------------


def test_tags_that_are_no_tokens(tmp_path):
    path = make_thinking_checkpoint(tmp_path, with_tokens=False)
    with make_llm(path, skip_tokenizer_init=False, max_model_len=200) as llm:
        for kind in ("open", "closed", "turn"):
            (_, params) = asked(6, temperature=1.0, max_tokens=60, n=3, thinking_end_text="so\n", **JSON)
            (output,) = llm.generate([prompt_of(llm.tokenizer, kind)], params, use_tqdm=False)
            for sample in output["samples"]:
                reasoning, content = split_reasoning(sample["text"], kind == "open")
                assert is_json(content)
                assert (kind == "open") == (reasoning is not None)
                assert reasoning is None or reasoning.endswith("so")
        # A form that has the closing tag itself describes the thinking too.
        form = StructuredOutputsParams(regex="[a-c]{4}</think>[0-9]")
        params = SamplingParams(structured_outputs=form)
        (output,) = llm.generate([prompt_of(llm.tokenizer, "open")], params, use_tqdm=False)
        assert re.fullmatch("[a-c]{4}</think>[0-9]", output["text"])
        says = "thinking_token_budget=3: the form has </think> and so describes the thinking"
        with pytest.raises(ValueError, match=says):
            llm.add_request("a", SamplingParams(structured_outputs=form, thinking_token_budget=3))
        closing = llm.tokenizer.encode(CLOSING)
        assert len(closing) > 3
        # A tag that the model has begun is completed.
        for num in (1, 3):
            prompt = prompt_of(llm.tokenizer, "open")
            begun = [*llm.tokenizer.encode("ab"), *closing[:num]]
            with say(llm, len(prompt), begun):
                params = SamplingParams(
                    thinking_token_budget=len(begun), thinking_end_text="so", max_tokens=20, ignore_eos=True
                )
                (output,) = llm.generate([prompt], params, use_tqdm=False)
            assert output["token_ids"][: len(begun) + len(closing) - num] == [*begun, *closing[num:]]


@contextmanager
def say(llm, first: int, tokens: list[int]):
    """The model's first tokens behind a prompt of `first` tokens are these."""
    sampler = llm.model_runner.sampler

    def replaced(logits, temperatures, seeds, positions, thresholds=None, out=None):
        found = sampler(logits, temperatures, seeds, positions, thresholds)
        for row, position in enumerate(positions.tolist()):
            if 0 <= position + 1 - first < len(tokens):
                found[row] = tokens[position + 1 - first]
        return found if out is None else out.copy_(found)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm.model_runner, "sampler", replaced)
        yield


def test_a_form_in_channels(tmp_path):
    """Of gpt-oss: what the model thinks is in the channel analysis, and the form is that of the channel final."""
    path = make_channels_checkpoint(tmp_path)
    messages = [{"role": "user", "content": "ab"}]
    for speculation in (None, "suffix"):
        with make_llm(path, skip_tokenizer_init=False, max_model_len=200, speculation=speculation) as llm:
            (end,) = llm.tokenizer.encode("<|end|>")
            by_itself = SamplingParams(max_tokens=150, logit_bias={end: 4.0}, seed=1, **JSON)
            by_budget = SamplingParams(max_tokens=60, thinking_token_budget=5, thinking_end_text="so", seed=2, **JSON)
            none = SamplingParams(max_tokens=60, thinking_token_budget=0, seed=3, **JSON)
            for params in (by_itself, by_budget, none):
                (output,) = llm.chat(messages, params, use_tqdm=False, split_reasoning=True)
                assert is_json(output["content"]), output
                assert output["finish_reason"] == "stop"
                assert output["text"].startswith(ANALYSIS)
                assert params is not by_budget or output["reasoning"].endswith("so")
                assert params is not none or output["reasoning"] == ""
            # Without a form nothing is forced but the end of the channel.
            free = SamplingParams(temperature=0, max_tokens=20, thinking_token_budget=3, ignore_eos=True)
            prompt = [*llm.prompt_encoder.encode_chat(messages), *llm.tokenizer.encode(ANALYSIS)]
            (output,) = llm.generate([prompt], free, use_tqdm=False)
            assert output["token_ids"][3] == end
            # Nobody knows where an answer begins in a text.
            (output,) = llm.generate(["a block"], SamplingParams(max_tokens=60, **JSON), use_tqdm=False)
            assert is_json(output["text"])


PIECES = ["</", "think", ">\n\n", ">{", "x", "<think>\n", " "]


def test_tokens_that_join_a_tag_and_what_follows():
    tags = ThinkingTags(OPENING, CLOSING, None, None, [0, 1, 2], PIECES.__getitem__, len(PIECES))
    thinking = Thinking(tags, 0, True, form_start=FormStart([], []))
    tokens = array("i", [4, 0, 1])
    thinking.read(tokens, 3)
    assert thinking.is_on
    assert thinking.before_form() == [3], "a form may not allow the brace"
    thinking.read(array("i", [*tokens, 2]), 4)
    assert (thinking.end, thinking.before_form()) == (4, [])
    own = Thinking(tags, 0, False, budget=1)
    own.read(array("i", [6, 5, 4]), 3)
    assert (own.begin, own.is_on) == (2, True)
