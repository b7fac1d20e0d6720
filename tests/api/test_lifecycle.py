"""Engines come and go, alone and side by side, and give back their memory."""

import copy
import pickle
import signal
import threading
import weakref

import pytest
from checkpoints import Reference, assert_idle, complete, greedy, make_checkpoint, make_llm, random_prompt

from nanovllm import LLM
from nanovllm.engine.model_runner import ModelRunner


def big_tensors(llm) -> list[weakref.ref]:
    """Weak references to the storages' owners: the KV cache and every parameter."""
    runner = llm.model_runner
    return [weakref.ref(tensor) for tensor in (runner.kv_store.tensors[0], *runner.model.parameters())]


def alive(references) -> int:
    return sum(reference() is not None for reference in references)


def fail_in_a_batch(llm):
    with pytest.MonkeyPatch.context() as patch:
        # Of the class: undone for an instance, it would make the model refer to itself.
        patch.setattr(type(llm.model_runner.model), "forward", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            llm.generate([[1]], greedy(3), use_tqdm=False)


USES = {
    "nothing": lambda llm: None,
    "a batch": lambda llm: complete(llm, [[1, 2, 3]], greedy(3)),
    "unfinished requests": lambda llm: [llm.add_request([1, 2, 3], greedy(8)), llm.step()],
    "an exception": fail_in_a_batch,
    "half of a stream": lambda llm: (stream := llm.stream([[1, 2, 3]], greedy(8)), next(stream)),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("end", ["exit", "exit-twice", "with", "with-error", "del"])
def test_memory_is_given_back(path, end, use):
    llm = make_llm(path)
    kept = USES[use](llm)
    tensors = big_tensors(llm)
    assert alive(tensors) == len(tensors)
    if end.startswith("exit"):
        llm.exit()
        if end == "exit-twice":
            llm.exit()
    elif end == "with":
        with llm as entered:
            assert entered is llm
        del entered
    elif end == "with-error":
        with pytest.raises(ZeroDivisionError), llm:
            raise ZeroDivisionError
    else:
        kept = None  # A stream has its engine.
    del llm
    # No gc.collect() here: the next engine wants the memory now.
    assert alive(tensors) == 0
    del kept


@pytest.mark.parametrize("step", ["warmup_model", "allocate_kv_cache"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_memory_is_given_back_when_init_fails(path, monkeypatch, step, error):
    tensors = []
    original = getattr(ModelRunner, step)

    def failing(self):
        original(self)
        tensors.extend(weakref.ref(p) for p in self.model.parameters())
        if self.kv_store.tensors:
            tensors.append(weakref.ref(self.kv_store.tensors[0]))
        raise error("on purpose")

    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, step, failing)
        with pytest.raises(error, match="on purpose"):
            make_llm(path)
    assert len(tensors) > 10
    assert alive(tensors) == 0
    with make_llm(path) as llm:
        assert len(complete(llm, [[1]], greedy(2))[0]) == 2


def test_the_size_of_the_cache(path):
    with make_llm(path, num_kvcache_blocks=-1, kvcache_gib=2**-10) as llm:
        # A block is 2 layers x 16 slots x 2 heads x 32 x 4 bytes of keys, and as many of values: 16 KiB.
        assert llm.config.num_kvcache_blocks == 2**20 // (2 * 2 * 16 * 2 * 32 * 4)
        assert llm.model_runner.kv_store.tensors[0].nbytes == 2**20
    with pytest.raises(MemoryError, match=r"kvcache_gib is 1e-05"):
        make_llm(path, num_kvcache_blocks=-1, kvcache_gib=1e-5)
    for options in ({"num_kvcache_blocks": 2**27}, {"num_kvcache_blocks": -1, "kvcache_gib": 65536}):
        says = "GiB, and this machine has .* lower num_kvcache_blocks or kvcache_gib"
        with pytest.raises(MemoryError, match=says):
            make_llm(path, **options)
    with pytest.raises(ValueError, match=r"Qwen3-0\.6B.*skip_tokenizer_init=True"):
        LLM("Qwen3-0.6B", load_format="dummy", device="cpu")  # A published shape has no tokenizer.


def test_nothing_works_after_exit(path):
    llm = make_llm(path)
    llm.add_request([1, 2], greedy(4))
    llm.exit()
    for use in (lambda: llm.generate([[1]], greedy(2)), lambda: llm.add_request([1], greedy(2)), llm.step):
        with pytest.raises(RuntimeError, match="exited"):
            use()
    llm.exit()


class InThread(threading.Thread):
    """Runs a function in a thread of its own; `outcome` is what it returned or raised."""

    def __init__(self, run):
        super().__init__(daemon=True)
        self._run = run
        self.start()

    def run(self):
        try:
            self._outcome = self._run()
        except BaseException as error:
            self._outcome = error

    @property
    def outcome(self):
        self.join(60)
        assert not self.is_alive(), "a deadlock"
        return self._outcome


def all_of(llm, name):
    """Read what a method gives for a long batch to its end."""
    return list(getattr(llm, name)([[1, 2], [3]], greedy(900)))


@pytest.fixture
def in_step(monkeypatch):
    """An Event that is set in the middle of a step, and one that lets the step go on."""
    entered, proceed = threading.Event(), threading.Event()
    launch = ModelRunner.launch

    def waiting(self, *args):
        entered.set()
        assert proceed.wait(60)
        return launch(self, *args)

    monkeypatch.setattr(ModelRunner, "launch", waiting)
    return entered, proceed


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("name", ["generate", "stream", "generate_iter"])
def test_exit_while_another_thread_is_in_a_step(path, in_step, name, overlap):
    """It waits for the step, gives the memory back, and ends the other's call."""
    entered, proceed = in_step
    llm = make_llm(path, overlap_steps=overlap)
    tensors = big_tensors(llm)
    worker = InThread(lambda: all_of(llm, name))
    assert entered.wait(60)
    leavers = [InThread(llm.exit) for _ in range(2)]
    leavers[0].join(0.1)
    assert alive(tensors) == len(tensors), "a step needs them"
    proceed.set()
    assert [leaver.outcome for leaver in leavers] == [None, None]
    assert alive(tensors) == 0
    error = worker.outcome
    assert isinstance(error, RuntimeError)
    assert str(error) == "this engine has exited: make a new LLM"


@pytest.mark.parametrize("name", ["stream", "generate_iter"])
def test_exit_while_another_thread_has_read_half(path, name):
    llm = make_llm(path)
    tensors = big_tensors(llm)
    half_read, gone = threading.Event(), threading.Event()

    def read():
        results = getattr(llm, name)([[1], [2]], [greedy(2), greedy(9)])
        next(results)
        half_read.set()
        assert gone.wait(60)
        return list(results)

    reader = InThread(read)
    assert half_read.wait(60)
    llm.exit()
    assert alive(tensors) == 0
    gone.set()
    with pytest.raises(RuntimeError, match="this engine has exited"):
        raise reader.outcome


@pytest.mark.parametrize("thread", [True, False])
def test_exit_between_two_steps(path, thread):
    """From on_step, and from another thread that on_step waits for."""
    llm = make_llm(path)
    tensors, left = big_tensors(llm), []

    def on_step(stats):
        if thread:
            assert InThread(llm.exit).outcome is None
        else:
            llm.exit()
        left.append(alive(tensors))

    with pytest.raises(RuntimeError, match="this engine has exited"):
        llm.generate([[1, 2]], greedy(9), use_tqdm=False, on_step=on_step)
    assert left == [0]


@pytest.mark.parametrize("by_hand", [True, False])
def test_exit_from_a_signal_handler_in_the_middle_of_a_step(path, monkeypatch, by_hand):
    """The step still has its tensors, and then they are given back, also where the handler raises."""
    llm = make_llm(path)
    tensors, seen, launch = big_tensors(llm), [], ModelRunner.launch

    def interrupted(self, *args):
        signal.raise_signal(signal.SIGTERM)
        seen.append(alive(tensors))
        return launch(self, *args)

    def leave(signum, frame):
        llm.exit()
        with pytest.raises(RuntimeError, match="exited"):
            llm.generate([[1]], greedy(1))
        if seen:
            raise SystemExit

    monkeypatch.setattr(ModelRunner, "launch", interrupted)
    before = signal.signal(signal.SIGTERM, leave)
    try:
        if by_hand:
            llm.add_request([1, 2], greedy(9))
        with pytest.raises(RuntimeError, match="this engine has exited"):
            llm.step() if by_hand else llm.generate([[1, 2]], greedy(9), use_tqdm=False)
        assert seen == [len(tensors)]
        assert alive(tensors) == 0
        llm = make_llm(path)
        tensors = big_tensors(llm)
        with pytest.raises(SystemExit):
            llm.generate([[1, 2]], greedy(9), use_tqdm=False)
        assert alive(tensors) == 0
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_signal_handler_cannot_step_in_the_middle_of_a_step(path, monkeypatch, reference):
    prompts, launch, refused = reference.draw_prompts((5,), 4), ModelRunner.launch, []

    def interrupted(self, *args):
        signal.raise_signal(signal.SIGTERM)
        return launch(self, *args)

    def use(signum, frame):
        for call in (llm.step, lambda: llm.generate([[1]], greedy(1))):
            with pytest.raises(RuntimeError) as error:
                call()
            refused.append(str(error.value))

    with make_llm(path) as llm:
        monkeypatch.setattr(ModelRunner, "launch", interrupted)
        before = signal.signal(signal.SIGTERM, use)
        try:
            request = llm.add_request(prompts[0], greedy(4))
            finished = []
            while not finished:
                finished, _ = llm.step()
        finally:
            signal.signal(signal.SIGTERM, before)
    assert finished == [(request, reference.greedy(prompts, 4)[0])]
    assert len(refused) == 8
    assert "a signal handler can exit() an engine in the middle of a step, but not use it" in refused


@pytest.mark.parametrize("take", [pickle.dumps, copy.copy, copy.deepcopy, lambda llm: pickle.dumps(llm.generate)])
def test_an_engine_cannot_be_copied(llm, take):
    with pytest.raises(TypeError, match="an LLM cannot be pickled or copied: make one LLM per process"):
        take(llm)


@pytest.fixture(scope="module")
def pair(path, reference, tmp_path_factory):
    """[(checkpoint, engine options, prompts, greedy completions)] of two different models."""
    other = make_checkpoint(tmp_path_factory.mktemp("other"), "qwen2", seed=1, num_hidden_layers=3, vocab_size=200)
    cases = []
    for checkpoint, ref, options in (
        (path, reference, {"num_kvcache_blocks": 8, "max_num_batched_tokens": 24}),
        (other, Reference(other), {"kvcache_block_size": 32}),
    ):
        prompts = ref.draw_prompts((40, 17, 60), 20)
        cases.append((checkpoint, options, prompts, ref.greedy(prompts, 20)))
    return cases


def test_two_engines_side_by_side(pair):
    """Step by step, and in two threads."""
    engines = [make_llm(checkpoint, **options) for checkpoint, options, _, _ in pair]
    cases = list(zip(engines, pair, strict=True))
    ids = [[llm.add_request(prompt, greedy(20)) for prompt in case[2]] for llm, case in cases]
    done = [{}, {}]
    while not all(llm.is_finished() for llm in engines):
        for llm, results in zip(engines, done, strict=True):
            if not llm.is_finished():
                results |= dict(llm.step()[0])
    threads = [
        InThread(lambda llm=llm, case=case: [complete(llm, case[2], greedy(20)) for _ in range(3)])
        for llm, case in cases
    ]
    for (llm, case), requests, results, thread in zip(cases, ids, done, threads, strict=True):
        assert [results[i] for i in requests] == case[3]
        assert thread.outcome == [case[3]] * 3
        assert_idle(llm)
    # One going takes nothing from the other.
    engines[0].exit()
    assert complete(engines[1], pair[1][2], greedy(20)) == pair[1][3]
    engines[1].exit()


def test_dummy_weights_need_no_files(tmp_path):
    path = make_checkpoint(tmp_path)
    (path / "model.safetensors").unlink()
    outputs = []
    for seed in (0, 0, 1):
        with make_llm(path, load_format="dummy", seed=seed) as llm:
            parameters = [p.to_dense() if p.is_mkldnn else p for p in llm.model_runner.model.parameters()]
            assert all(p.isfinite().all() for p in parameters)
            outputs.append(complete(llm, [random_prompt(9, seed=0)], greedy(8)))
    assert outputs[0] == outputs[1] != outputs[2]
