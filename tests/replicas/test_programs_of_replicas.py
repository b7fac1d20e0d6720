"""Jobs, the server, the harness and TRL with data_parallel_size=2 do what they do with one engine.

The replicas are threads.
"""

import json
import socket
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from checkpoints import greedy, make_ascii_checkpoint, make_llm
from job_files import ReadHere
from thread_replicas import ThreadReplicas

from nanovllm.cli import main
from nanovllm.engine.replicas import replicated_engine
from nanovllm.jobs import work

OPTIONS = {"skip_tokenizer_init": False, "max_model_len": 200, "max_num_seqs": 4, "seed": 7}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_ascii_checkpoint(tmp_path_factory.mktemp("programs"))


@pytest.fixture(scope="module", autouse=True)
def made():
    """The engines of replicas that were made, in order. All are threads in this file."""
    made = []

    class Noted(ThreadReplicas):
        def __init__(self, *args):
            super().__init__(*args)
            made.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replicated_engine, "Replicas", Noted)
        yield made


def all_have_worked(replicas):
    return all(replicas.told)


@pytest.fixture
def run(path, tmp_path, monkeypatch):
    """run(*words): a job from the command line, in this process. Returns its answers by id."""
    monkeypatch.setattr(work, "ReadAhead", ReadHere)
    (tmp_path / "prompts.jsonl").write_text("".join(f'{{"id": {i}, "prompt": "number {i}"}}\n' for i in range(40)))
    answers = tmp_path / "answers"
    always = ["run-batch", "-i", str(tmp_path / "prompts.jsonl"), "-o", str(answers), "--model", str(path), "--device"]
    always += ["cpu", "--max-model-len", "200", "--max-num-seqs", "4", "--temperature", "0", "--max-tokens", "6"]

    def run(*words):
        assert main([*always, "--seed", "3", "--quiet", *words]) == 0
        lines = [line for part in answers.glob("part-*.jsonl") for line in part.read_text().splitlines()]
        return {json.loads(line)["id"]: line for line in lines}

    return run


def test_a_job_from_the_command_line_goes_on_with_other_engines(run, made, tmp_path):
    expected = run("--overwrite")
    assert len(expected) == 40
    assert run("--overwrite", "--data-parallel-size", "2") == expected
    assert all_have_worked(made[-1])
    (part,) = (tmp_path / "answers").glob("part-*.jsonl")
    part.write_text("".join(f"{line}\n" for line in part.read_text().splitlines()[:15]))
    assert run() == expected, "one engine goes on where two began"
    part.write_text("".join(f"{line}\n" for line in part.read_text().splitlines()[:15]))
    assert run("--data-parallel-size", "2") == expected, "and two where one did"


def test_the_harness(path, made):
    pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness: pip install '.[eval]'")
    pytest.importorskip("nanovllm.integrations.lm_eval")
    from lm_eval.api.instance import Instance
    from lm_eval.api.registry import get_model

    texts = [f"number {i} of the texts" for i in range(12)]
    scored = [Instance("loglikelihood", {}, (text, " and more"), i) for i, text in enumerate(texts)]
    until = {"until": ["e"], "max_gen_toks": 9}
    asked = [Instance("generate_until", {}, (text, until), i) for i, text in enumerate(texts)]
    found = []
    for num in (1, 2):
        model = get_model("nanovllm")(str(path), device="cpu", max_length=150, data_parallel_size=num, max_batch_size=4)
        found.append((model.loglikelihood(scored), model.generate_until(asked)))
        model.llm.exit()
    (scores, answers), (of_two, answers_of_two) = found
    assert answers_of_two == answers
    assert [is_greedy for _, is_greedy in of_two] == [is_greedy for _, is_greedy in scores]
    assert [score for score, _ in of_two] == pytest.approx([score for score, _ in scores], rel=1e-5)
    assert all_have_worked(made[-1])


def test_the_server(path, made):
    reason = "needs OpenAI's client and the server's packages: pip install '.[test]'"
    openai = pytest.importorskip("openai", reason=reason)
    pytest.importorskip("uvicorn", reason=reason)
    server = pytest.importorskip("nanovllm.integrations.serving.server")
    from nanovllm.integrations.serving.engine_loop import EngineLoop
    from nanovllm.openai_format.openai_batch import Responder

    prompts = [f"number {i}" for i in range(16)]
    with make_llm(path, **OPTIONS) as one:
        expected = [output["text"] for output in one.generate(prompts, greedy(8), use_tqdm=False)]
    with make_llm(path, data_parallel_size=2, **OPTIONS) as llm:
        served = server.Server(EngineLoop(llm), Responder("tiny", llm.get_tokenizer()), None)
        listener = socket.create_server(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread = threading.Thread(target=served.run, kwargs={"sockets": [listener]})
        thread.start()
        with openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=60) as client:
            options = {"model": "tiny", "temperature": 0, "max_tokens": 8, "extra_body": {"ignore_eos": True}}
            with ThreadPoolExecutor(len(prompts)) as pool:
                texts = pool.map(lambda prompt: client.completions.create(prompt=prompt, **options), prompts)
                assert [text.choices[0].text for text in texts] == expected
            parts = client.completions.create(prompt=prompts[3], stream=True, **options)
            assert "".join(part.choices[0].text for part in parts) == expected[3]
            with client.completions.create(prompt="left", stream=True, **options | {"max_tokens": 190}) as left:
                next(iter(left))
            metrics = urllib.request.urlopen(f"{url}/metrics", timeout=60).read().decode()
        served.should_exit = True
        thread.join(60)
        listener.close()
        assert not thread.is_alive()
        assert llm.is_finished(), "what its client has left is dropped in the replicas too"
    assert all_have_worked(made[-1])
    assert "nanovllm" in metrics


def test_rollouts_of_a_trainer(path, made):
    pytest.importorskip("trl", reason="needs TRL: pip install '.[trl]'")
    integration = pytest.importorskip("nanovllm.integrations.trl")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    for parameter in model.parameters():
        parameter.data.mul_(1.1)
    trainer = SimpleNamespace(
        tools=None,
        model=model,
        processing_class=transformers.AutoTokenizer.from_pretrained(path),
        temperature=0.9,
        top_p=1.0,
        top_k=0,
        min_p=None,
        repetition_penalty=1.0,
        max_completion_length=10,
        eos_token_ids=[1],
        args=SimpleNamespace(generation_kwargs=None),
        state=SimpleNamespace(global_step=0),
    )
    with make_llm(path, data_parallel_size=2, logprobs_mode="processed_logprobs", **OPTIONS) as llm:
        output = integration.Rollouts(llm)([f"number {i // 4}" for i in range(24)], trainer)
    assert [len(each) for each in output.values()] == [24, 24, 24]
    assert all_have_worked(made[-1])
    # An engine that kept its old weights would not have sampled with these.
    assert max(map(max, integration.logprob_differences(model, output, 0.9))) < 1e-4
