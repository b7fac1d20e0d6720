"""LLM(data_parallel_size=N) is an LLM: the same calls with the same answers as one engine. The replicas are threads."""

import dataclasses

import pytest
import torch
from checkpoints import complete, complete_by_steps, generate, greedy, make_llm
from job_files import ReadHere
from leaving import LEAVING
from script import Script
from thread_replicas import ThreadReplicas

from nanovllm import LLM, NO_PROMPT, SamplingParams, StructuredOutputsParams
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.replicas import replicated_engine
from nanovllm.engine.replicas.messages import GIVE_BACK, WORK, PackedTensor
from nanovllm.engine.replicas.replicated_engine import ReplicatedEngine
from nanovllm.jobs import run_batch, work

OPTIONS = {"skip_tokenizer_init": False, "max_model_len": 200, "max_num_seqs": 4, "seed": 7}
PROMPTS = [f"{'the same beginning of some prompts ' * (i % 3)}number {i}" for i in range(18)]


@pytest.fixture(scope="module")
def make_replicated(path):
    """make_replicated(**options): an LLM of replicas that are threads."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replicated_engine, "Replicas", ThreadReplicas)
        yield lambda num=2, **options: make_llm(path, data_parallel_size=num, **OPTIONS | options)


@pytest.fixture(scope="module")
def shared(make_replicated):
    with make_replicated() as llm:
        yield llm


@pytest.fixture
def llm(shared):
    yield shared
    assert shared.is_finished()
    stats = shared.stats()
    assert stats["running"] == stats["waiting"] == 0
    assert not shared.scheduler._placement.moved
    assert not any(lane.load or lane.given or lane.queue for lane in shared.scheduler._placement.lanes)


@pytest.fixture(scope="module")
def one(path):
    with make_llm(path, **OPTIONS) as llm:
        yield llm


def answer(output):
    """All of a result that does not depend on how busy the engine was. Log-probabilities are those of another batch."""
    samples = [
        [sample[key] for key in ("text", "token_ids", "finish_reason", "stop_reason")]
        + [None if sample["logprobs"] is None else [list(token) for token in sample["logprobs"]]]
        for sample in output.get("samples", [output])
    ]
    return samples, output["num_prompt_tokens"], "samples" in output, output.get("error")


def mixed_params():
    """For PROMPTS, all kinds of them."""
    form = StructuredOutputsParams(regex="[ab]{3}")
    kinds = [
        SamplingParams(max_tokens=12),
        SamplingParams(max_tokens=9, n=3, temperature=0.7, top_k=20),
        SamplingParams(max_tokens=7, logprobs=2, seed=5),
        SamplingParams(max_tokens=20, stop=["e", "<|im_end|>"], temperature=1.3),
        SamplingParams(max_tokens=6, structured_outputs=form),
        SamplingParams(max_tokens=5, prompt_logprobs=1, bad_words=["a"], repetition_penalty=1.2),
    ]
    return [dataclasses.replace(kinds[i % 6], max_tokens=kinds[i % 6].max_tokens + i) for i in range(len(PROMPTS))]


@pytest.mark.parametrize("num", [2, pytest.param(3, marks=pytest.mark.nightly)])
def test_answers_are_those_of_one_engine_whatever_their_number(make_replicated, path, num):
    """Also the seeds, which are those of the engine's own and the requests' order."""
    with make_llm(path, **OPTIONS) as one, make_replicated(num) as llm:
        assert complete(llm, [[1]], SamplingParams()) == complete(one, [[1]], SamplingParams())
        expected, found = (generate(each, PROMPTS, mixed_params()) for each in (one, llm))
        assert [*map(answer, found)] == [*map(answer, expected)]
        assert all(llm.model_runner.told), "each replica has answered"
        of_prompt = [next(iter(token)) for token in found[5]["prompt_logprobs"][1:]]
        assert of_prompt == [next(iter(token)) for token in expected[5]["prompt_logprobs"][1:]]
        metrics = found[0]["metrics"]
        assert 0 <= metrics["queued"] <= metrics["time_to_first_token"] <= metrics["total"]
        assert llm.stats()["generated_tokens"] == one.stats()["generated_tokens"]
        assert llm.stats()["prompt_tokens"] == one.stats()["prompt_tokens"]
        assert [*llm.stats()] == [*one.stats()]


def test_a_stop_string_that_is_a_token(llm, one):
    """Its name is the reason, and not its number."""
    name = "<|endoftext|>"
    token = llm.get_tokenizer().convert_tokens_to_ids(name)
    params = SamplingParams(max_tokens=5, stop=[name], logit_bias={token: 100}, temperature=0)
    assert [generate(each, ["a prompt"], params)[0]["stop_reason"] for each in (llm, one)] == [name, name]


def test_llm_is_a_replicated_engine_only_if_asked(llm, one):
    assert isinstance(llm, LLM)
    assert isinstance(llm, ReplicatedEngine)
    assert type(one) is LLM
    assert type(llm).__name__ == "LLM"


def test_a_class_of_ones_own(make_replicated, path):
    """Its __init__ runs, and its methods are its own."""

    class Mine(LLM):
        def __init__(self, path, name, **options):
            super().__init__(path, device="cpu", num_kvcache_blocks=8, kvcache_block_size=16, **options)
            self.name = name

        def stats(self):
            return {"name": self.name, **super().stats()}

    with Mine(str(path), "a", data_parallel_size=2) as llm:
        assert isinstance(llm, ReplicatedEngine)
        assert llm.stats()["name"] == "a"
        assert llm.stats()["kv_blocks_total"] == 16
    with Mine(str(path), "b") as llm:
        assert type(llm) is Mine


def test_one_engine_is_not_made_where_several_are_asked_for(path):
    class Hidden(LLM):
        def __init__(self):
            super().__init__(str(path), device="cpu", data_parallel_size=2)

    for make in (Hidden, lambda: LLMEngine(str(path), device="cpu", data_parallel_size=2)):
        with pytest.raises(ValueError, match=r"data_parallel_size=2: must be 1 .*LLM\(model, data_parallel_size=2\)"):
            make()


def test_generate_iter_in_order_and_not(llm, one):
    params = [greedy(3 + i) for i in range(len(PROMPTS))]
    expected = complete(one, PROMPTS, params)
    in_order = [*llm.generate_iter(iter(PROMPTS), iter(params), ordered=True)]
    assert [i for i, _ in in_order] == [*range(len(PROMPTS))]
    assert [output["token_ids"] for _, output in in_order] == expected
    found = dict(llm.generate_iter(iter(PROMPTS), iter(params)))
    assert [found[i]["token_ids"] for i in range(len(PROMPTS))] == expected


def test_generate_iter_keeps_every_replica_busy(llm):
    """Twice as many prompts are under way as with one engine."""
    taken, most = [], 0

    def prompts():
        for i in range(40):
            taken.append(i)
            yield [1 + i, 2]
        while True:
            yield NO_PROMPT

    for num_done, _ in enumerate(llm.generate_iter(prompts(), greedy(8))):
        most = max(most, len(taken) - num_done)
    assert 16 <= most <= 28


def test_a_wrong_prompt_is_refused_before_any_work(llm):
    with pytest.raises(ValueError, match=r"prompts\[1\]"):
        generate(llm, [[1, 2], [1000]], greedy(3))
    outputs = llm.generate([[1, 2], [1000], [3] * 300], greedy(3), use_tqdm=False, on_error="return")
    assert [output["finish_reason"] for output in outputs] == ["length", "error", "error"]


def test_streams(llm, one):
    params = [SamplingParams(max_tokens=15, temperature=0, n=1 + i % 2, logprobs=0, stop=["r"]) for i in range(6)]
    expected = generate(one, PROMPTS[:6], params)
    found, num_deltas = {}, 0
    for delta in llm.stream(PROMPTS[:6], params):
        text, tokens, logprobs, *_ = found.get((delta["index"], delta["sample"]), ("", [], [], None))
        key = delta["index"], delta["sample"]
        found[key] = text + delta["text"], tokens + delta["token_ids"], logprobs + delta["logprobs"], delta
        num_deltas += 1
    assert num_deltas > 3 * len(found), "they come token by token"
    for i, output in enumerate(expected):
        for k, sample in enumerate(output.get("samples", [output])):
            text, tokens, logprobs, last = found[i, k]
            assert [text, tokens] == [sample["text"], sample["token_ids"]]
            assert [*map(list, logprobs)] == [*map(list, sample["logprobs"])]
            assert [last["finish_reason"], last["stop_reason"]] == [sample["finish_reason"], sample["stop_reason"]]


@pytest.mark.parametrize("leave", LEAVING)
def test_a_stream_may_be_left(llm, one, leave):
    stream = llm.stream(PROMPTS, greedy(50))
    leave(stream)
    del stream
    assert complete(llm, PROMPTS[:3], greedy(5)) == complete(one, PROMPTS[:3], greedy(5))


def test_chat_and_score(llm, one):
    template = "{% for m in messages %}{{ m['content'] }}|{% endfor %}"
    chats = [[{"role": "user", "content": f"question {i}"}] for i in range(5)]
    found, expected = (each.chat(chats, greedy(6), use_tqdm=False, chat_template=template) for each in (llm, one))
    assert [*map(answer, found)] == [*map(answer, expected)]
    scores, same = (each.score(PROMPTS[:5], [f" {i}" for i in range(5)], use_tqdm=False) for each in (llm, one))
    assert [score["total"] for score in scores] == pytest.approx([score["total"] for score in same], abs=1e-4)


def test_requests_by_hand(llm, one):
    assert complete_by_steps(llm, PROMPTS, greedy(6))[0] == complete(one, PROMPTS, greedy(6))
    first = llm.add_request(PROMPTS[0], greedy(9), streams=True)
    second = llm.add_request(PROMPTS[1], greedy(150))
    deltas = []
    while not any(delta["finish_reason"] for delta in deltas):
        deltas += llm.step_deltas()
    assert {delta["request_id"] for delta in deltas} <= {first, second}
    text = "".join(delta["text"] for delta in deltas if delta["request_id"] == first)
    assert text == one.generate(PROMPTS[0], greedy(9), use_tqdm=False)[0]["text"]
    llm.abort_request(second)
    assert llm.is_finished()
    with pytest.raises(ValueError, match="there is no such request"):
        llm.abort_request(second + 1)


def test_an_aborted_request_is_returned_with_what_it_has(llm):
    def abort(stats):
        if stats["generated_tokens"] > before + 80:
            llm.abort_request(first)

    before = llm.stats()["generated_tokens"]
    first = llm._sequences.num_requests
    outputs = llm.generate(PROMPTS, [greedy(150), *[greedy(20)] * 17], use_tqdm=False, on_step=abort)
    assert [output["finish_reason"] for output in outputs] == ["abort", *["length"] * 17]
    assert 0 < len(outputs[0]["token_ids"]) < 150
    assert outputs[0]["text"] is not None


def test_all_requests_are_aborted(llm):
    """Those that no replica has yet, too: four times as many as two batches."""
    outputs = llm.generate(PROMPTS * 4, greedy(150), use_tqdm=False, on_step=lambda stats: llm.abort_request())
    assert {output["finish_reason"] for output in outputs} == {"abort"}
    assert outputs[-1]["token_ids"] == []
    assert outputs[-1]["text"] == ""


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_after_an_exception_the_engine_is_usable(llm, one, error):
    def fail(stats):
        raise error

    with pytest.raises(error):
        llm.generate(PROMPTS * 3, greedy(150), use_tqdm=False, on_step=fail)
    assert llm.is_finished()
    assert complete(llm, PROMPTS, greedy(4)) == complete(one, PROMPTS, greedy(4))


def test_an_idle_replica_takes_work_of_a_busy_one(make_replicated):
    """Whose answers are long, which nobody knew."""
    with make_replicated(features=[Script()], max_num_seqs=2) as llm:
        end = llm.config.eos[0]
        scripts = [[end] if i % 2 else [5] * 100 + [end] for i in range(8)]
        params = [SamplingParams(max_tokens=150, extra_args={"script": script}) for script in scripts]
        outputs = generate(llm, [[i + 1, 2] for i in range(8)], params)
        assert [output["token_ids"] for output in outputs] == scripts
        sent = llm.model_runner.sent
        assert any(kind == GIVE_BACK for _, kind, _ in sent)
        ids = [seq_id for _, kind, work in sent if kind == WORK for seq_id in work.ids.tolist()]
        assert len(ids) > len(set(ids)) == 8, "some were sent to one replica, and then to the other"


def test_weights_change_in_every_replica(make_replicated, path):
    with make_llm(path, **OPTIONS) as one, make_replicated() as llm:
        before = complete(one, PROMPTS, greedy(6))
        generator = torch.Generator().manual_seed(3)
        name = "model.layers.1.mlp.down_proj.weight"
        weights = [(name, torch.randn(64, 96, generator=generator).to(torch.bfloat16))]
        for each in (one, llm):
            each.update_weights(weights)
        after = complete(one, PROMPTS, greedy(6))
        assert after != before
        assert complete(llm, PROMPTS, greedy(6)) == after
        with pytest.raises(ValueError, match="has shape"):
            llm.update_weights([(name, torch.zeros(3, 3))])
        for level in (1, 2):
            llm.sleep(level)
            with pytest.raises(RuntimeError, match="sleeps"):
                generate(llm, PROMPTS, greedy(3))
            llm.wake_up()
        assert complete(llm, PROMPTS, greedy(6)) == before, "level 2 takes the checkpoint's"
        llm.reset_prefix_cache()
        assert not any(lane.known for lane in llm.scheduler._placement.lanes)


def test_prefixes_are_shared_within_a_replica(make_replicated):
    with make_replicated(max_num_seqs=8) as llm:
        prompts = [[*[10 + i % 5] * 96, 100 + i, 5] for i in range(20)]
        complete(llm, prompts, greedy(3))
        num_computed = 20 - llm.stats()["prefix_cache_hits"] / 96
        assert 5 <= num_computed <= 7, "not by both, apart from what one has taken of the other"


def test_a_job_goes_on_with_another_number_of_replicas(llm, one, tmp_path, monkeypatch):
    monkeypatch.setattr(work, "ReadAhead", ReadHere)
    file, answers = tmp_path / "prompts.jsonl", tmp_path / "answers"
    file.write_text("".join(f'{{"id": {i}, "prompt": "number {i}"}}\n' for i in range(30)))
    run_batch(file, answers, one, temperature=0, max_tokens=5)
    part = next(answers.glob("part-*.jsonl"))
    expected = sorted(part.read_text().splitlines())
    part.write_text("".join(f"{line}\n" for line in expected[:11]))
    assert run_batch(file, answers, llm, temperature=0, max_tokens=5).num_answered == 30
    lines = [line for part in answers.glob("part-*.jsonl") for line in part.read_text().splitlines()]
    assert sorted(lines) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(), (0,), (3, 5)])
def test_a_tensor_is_sent_as_it_is(dtype, shape):
    tensor = torch.rand(shape).mul(100).to(dtype)
    packed = PackedTensor.of(tensor).tensor()
    assert packed.dtype is dtype
    assert packed.shape == tensor.shape
    assert packed.float().equal(tensor.float())


def test_the_end(make_replicated):
    llm = make_replicated()
    llm.exit()
    llm.exit()
    with pytest.raises(RuntimeError, match="exited"):
        generate(llm, PROMPTS, greedy(2))
