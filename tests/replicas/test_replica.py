"""What a replica does with each message, step by step and in one thread."""

import queue

import numpy as np
import pytest
import torch
from checkpoints import assert_idle, complete, greedy, make_llm
from thread_replicas import ThreadReplicas

from nanovllm import SamplingParams
from nanovllm.engine.replicas import replicated_engine
from nanovllm.engine.replicas.gpu_cores import cores_beside
from nanovllm.engine.replicas.messages import (
    ABORT,
    ANSWER,
    CALL,
    DROP_ALL,
    GIVE_BACK,
    GIVEN_BACK,
    NEWS,
    WORK,
    Work,
    pack,
    unpack,
)
from nanovllm.engine.replicas.replica import Replica
from nanovllm.engine.sequence import Sequence


class Caller:
    """Sends to a replica in this thread, and keeps what it says."""

    def __init__(self, engine):
        self.inbox, self.heard = queue.SimpleQueue(), []
        self.replica = Replica(engine, lambda *message: self.heard.append(unpack(pack(*message))), self.inbox)
        self.engine = engine

    def send(self, kind, content=None):
        self.inbox.put(pack(kind, content))

    def work(self, seqs, **options):
        self.send(WORK, Work.of(seqs, **options))

    def read(self):
        """What it says when it reads what was sent."""
        self.heard.clear()
        while not self.inbox.empty():
            self.replica._handle(*unpack(self.inbox.get()))
        return self.heard

    def step(self):
        self.heard.clear()
        self.replica.step()
        return self.heard


@pytest.fixture(scope="module")
def engine(path):
    with make_llm(path, max_num_seqs=2, seed=1) as llm:
        yield llm


@pytest.fixture
def caller(engine):
    caller = Caller(engine)
    yield caller
    caller.send(DROP_ALL)
    caller.read()
    assert_idle(engine)


def seqs(num, max_tokens=5):
    return [Sequence([1 + i, 2], greedy(max_tokens), seed=i) for i in range(num)]


def ended(heard):
    """{id: its new tokens} of the sequences that news say have ended."""
    found = {}
    for kind, news in heard:
        if kind == NEWS:
            parts = np.split(news.tokens, np.cumsum(news.counts)[:-1]) if len(news.ids) else []
            found |= {i: p.tolist() for i, p, end in zip(news.ids.tolist(), parts, news.ends, strict=True) if end}
    return found


def test_tokens_come_at_the_end_or_with_each_step(caller, engine):
    expected = complete(engine, [[1, 2], [2, 2]], greedy(5))
    for reads_steps in (False, True):
        mine = seqs(2)
        caller.work(mine, reads_steps=reads_steps)
        caller.read()
        heard, counts = [], []
        while not engine.is_finished():
            heard += caller.step()
            counts += [news.counts.tolist() for kind, news in caller.heard if kind == NEWS and len(news.ids)]
        if reads_steps:
            assert len(counts) >= 5
        else:
            assert counts == [[5, 5]]
            assert ended(heard) == dict(zip([seq.seq_id for seq in mine], expected, strict=True))


def test_what_has_begun_is_not_given_back(caller, engine):
    mine = seqs(6)
    caller.work(mine, moved=[mine[4].seq_id])
    caller.read()
    caller.step()
    assert len(engine.scheduler.running) == 2
    engine.scheduler.preempt(engine.scheduler.running.pop())
    caller.send(GIVE_BACK, 9)
    given = [content for kind, content in caller.read() if kind == GIVEN_BACK]
    assert given == [[mine[5].seq_id, mine[3].seq_id, mine[2].seq_id]], "not what had been moved, or preempted"
    heard = []
    while not engine.is_finished():
        heard += caller.step()
    assert set(ended(heard)) == {mine[0].seq_id, mine[1].seq_id, mine[4].seq_id}


def test_news_say_how_much_waits(caller):
    mine = seqs(5)
    caller.work(mine, moved=[mine[4].seq_id])
    caller.read()
    (news,) = [content for kind, content in caller.step() if kind == NEWS]
    assert (news.num_received, news.num_movable, news.stats["waiting"]) == (5, 2, 3)


def test_an_abort_tells_what_there_is(caller, engine):
    mine = seqs(3, max_tokens=50)
    caller.work(mine)
    caller.read()
    for _ in range(4):
        caller.step()
    caller.send(ABORT, [mine[0].seq_id, 10**9])
    (found,) = [content for kind, content in caller.read() if kind == NEWS]
    assert found.ids.tolist() == [mine[0].seq_id]
    assert found.ends[0].finish_reason == "abort"
    assert 1 <= found.counts[0] < 50
    caller.send(ABORT, [mine[0].seq_id])
    assert caller.read() == [], "it has ended before"


def test_after_all_is_dropped_old_sequences_are_not_told_of(caller, engine):
    caller.work(seqs(2))
    caller.read()
    caller.step()
    caller.send(DROP_ALL)
    new = seqs(1)
    caller.work(new)
    caller.read()
    heard = []
    while not engine.is_finished():
        heard += caller.step()
    assert [*ended(heard)] == [new[0].seq_id]
    assert [content.num_received for kind, content in heard if kind == NEWS][-1] == 1


def test_a_call_that_fails_is_answered(caller):
    caller.send(CALL, (7, "update_weights", ({"no such name": None},)))
    ((kind, answer),) = caller.read()
    assert kind == ANSWER
    assert answer[0] == 7
    assert answer[1] == "RuntimeError"
    caller.send(CALL, (8, "reset_prefix_cache", ()))
    assert caller.read() == [(ANSWER, (8, None, None))]


def test_if_one_cannot_wake_up_all_sleep_on(path, monkeypatch):
    monkeypatch.setattr(replicated_engine, "Replicas", ThreadReplicas)
    with make_llm(path, data_parallel_size=2) as llm:
        second = llm.model_runner.engines[1].model_runner
        llm.sleep()
        monkeypatch.setattr(second, "wake_up", lambda: (_ for _ in ()).throw(MemoryError("no room")))
        with pytest.raises(MemoryError, match=r"replica 1 of 2.*: no room"):
            llm.wake_up()
        assert not llm.model_runner.engines[0].model_runner.kv_store.tensors
        with pytest.raises(RuntimeError, match="sleeps"):
            llm.generate([[1]], greedy(2), use_tqdm=False)
        monkeypatch.undo()
        llm.wake_up()
        assert len(complete(llm, [[1, 2]] * 5, greedy(3))) == 5


def test_a_request_in_two_messages_is_one_request_in_each(engine):
    params = SamplingParams(n=3, max_tokens=4, temperature=0.5, seed=9)
    (made,) = engine._sequences.make_all([[3, 4, 5]], [params])
    parts = [Work.of(made[:1]), Work.of(made[1:])]
    found = [seq for work in parts for seq in unpack(pack(WORK, work))[1].make(engine._sequences)]
    assert [seq.seed for seq in found] == [seq.seed for seq in made]
    assert [seq.completion.sample for seq in found] == [0, 1, 2]
    assert [*map(list, (seq.token_ids for seq in found))] == [[3, 4, 5]] * 3
    assert [len(work.lengths) for work in parts] == [1, 1]
    assert parts[1].prompts.tolist() == [3, 4, 5], "sent once for both samples"


@pytest.mark.parametrize(
    ("text", "cores"),
    [("0-3,8-9\n", {0, 1, 2, 3, 8, 9}), ("5", {5}), ("", set()), ("all of them", set()), (None, set())],
)
def test_cores_beside_a_gpu(tmp_path, text, cores):
    if text is not None:
        (tmp_path / "0000:1b:00.0").mkdir()
        (tmp_path / "0000:1b:00.0" / "local_cpulist").write_text(text)
    assert cores_beside("0000:1b:00.0", tmp_path) == cores


def test_weights_come_in_pieces(path, monkeypatch):
    """Each replica has room for a few of them at a time."""
    from nanovllm.engine.replicas import replicas as module

    monkeypatch.setattr(module, "_PIECE_BYTES", 1000)
    tensors = {f"w{i}": torch.full((100,), float(i)) for i in range(7)}
    pieces = [*module._pieces(tensors)]
    assert [len(piece) for piece in pieces] == [3, 3, 1]
    assert {name: each.tensor()[0].item() for piece in pieces for name, each in piece.items()} == {
        f"w{i}": i for i in range(7)
    }
