"""Which replica gets which sequence, without any replica."""

import random
from itertools import chain, count

import pytest

from nanovllm import SamplingParams
from nanovllm.engine.replicas.placement import Placement
from nanovllm.engine.sequence import Sequence

BLOCK = 16
_numbers = count()


def seq(num_tokens=4, max_tokens=10, beginning=()):
    """A prompt like no other, after a beginning."""
    own = [next(_numbers) % 1000 + 1000 * (i % 7) for i in range(num_tokens - len(beginning))]
    return Sequence([*beginning, *own], SamplingParams(max_tokens=max_tokens), seed=0)


def placement(num=2, max_num_seqs=4, num_blocks=64, shares=True):
    return Placement(num, max_num_seqs, 1000, BLOCK, num_blocks, shares)


def lanes_of(placed, seqs):
    return [placed.lane_of(each) for each in seqs]


def test_the_rest_goes_where_the_fewest_tokens_are_outstanding():
    placed = placement(3)
    seqs = [seq(max_tokens=n) for n in (100, 50, 40, 20, 5, 1)]
    for each in seqs:
        placed.add(each)
    assert lanes_of(placed, seqs) == [0, 1, 2, 2, 1, 1]
    assert [lane.load for lane in placed.lanes] == [104, 54 + 9 + 5, 44 + 24]


def test_what_has_ended_is_no_load():
    placed = placement()
    first, second = seq(max_tokens=100), seq(max_tokens=90)
    for each in (first, second):
        placed.add(each)
    placed.remove(first)
    placed.remove(first)
    assert placed.lanes[0].load == 0
    third = seq(max_tokens=80)
    placed.add(third)
    assert placed.lane_of(third) == 0


def test_sequences_that_share_a_beginning_go_to_one_replica():
    placed = placement()
    beginnings = [list(range(100, 100 + 10 * BLOCK)), list(range(500, 500 + 10 * BLOCK))]
    seqs = [seq(10 * BLOCK + 4, 10, beginnings[i % 2]) for i in (0, 1, 1, 0, 1, 0, 0, 1)]
    for each in seqs:
        placed.add(each)
    assert lanes_of(placed, seqs) == [0, 1, 1, 0, 1, 0, 0, 1]


def test_one_beginning_of_all_is_computed_by_each_replica_rather_than_leave_one_idle():
    placed = placement()
    beginning = list(range(100, 100 + 4 * BLOCK))
    seqs = [seq(4 * BLOCK + 4, 20, beginning) for _ in range(200)]
    for each in seqs:
        placed.add(each)
    assert 100 <= lanes_of(placed, seqs).count(0) <= 112
    assert lanes_of(placed, seqs)[:15] == [0] * 15, "to compute it again is not worth the wait for a few"
    assert abs(placed.lanes[0].load - placed.lanes[1].load) <= 8 * 4 * BLOCK


def test_questions_about_one_document_after_the_other_are_not_torn_apart():
    placed = placement(3)
    documents = [list(range(1000 * i, 1000 * i + 10 * BLOCK)) for i in range(30)]
    seqs = [[seq(10 * BLOCK + 4, 20, document) for _ in range(10)] for document in documents]
    for each in chain.from_iterable(seqs):
        placed.add(each)
    assert all(len(set(lanes_of(placed, of_document))) == 1 for of_document in seqs)
    loads = [lane.load for lane in placed.lanes]
    assert max(loads) - min(loads) <= 10 * BLOCK + 10 * 24


@pytest.mark.parametrize("shares", [False, True])
def test_a_beginning_counts_only_if_there_is_a_prefix_cache(shares):
    placed = placement(shares=shares)
    beginning = list(range(100, 100 + 4 * BLOCK))
    seqs = [seq(4 * BLOCK + 4, 10, beginning) for _ in range(2)]
    for each in seqs:
        placed.add(each)
    assert lanes_of(placed, seqs) == ([0, 0] if shares else [0, 1])


def test_prefixes_that_the_cache_cannot_hold_any_more_are_forgotten():
    placed = placement(num_blocks=6)
    old, new = list(range(100, 100 + 4 * BLOCK)), list(range(900, 900 + 4 * BLOCK))
    placed.add(seq(4 * BLOCK + 1, 1, old))
    placed.lanes[1].load += 10_000
    placed.add(seq(4 * BLOCK + 1, 1, new))
    assert len(placed.lanes[0].known) == 6
    placed.forget_prefixes()
    assert not placed.lanes[0].known


def test_a_replica_has_two_batches_at_most():
    placed = placement(1, max_num_seqs=4)
    seqs = [seq() for _ in range(10)]
    for each in seqs:
        placed.add(each)
    assert placed.take(0) == seqs[:8]
    assert placed.take(0) == []
    placed.remove(seqs[3])
    assert placed.take(0) == [seqs[8]]


def given(placed, i, num, **options):
    """Sequences that replica i has been sent, and has heard of, none of which has begun."""
    for lane in placed.lanes:
        lane.load += 10_000 * (lane is not placed.lanes[i])
    seqs = [seq(**options) for _ in range(num)]
    for each in seqs:
        placed.add(each)
    for lane in placed.lanes:
        lane.load -= 10_000 * (lane is not placed.lanes[i])
    assert placed.take(i) == seqs
    placed.report(i, placed.lanes[i].num_given, num, num)
    return seqs


def test_an_idle_replica_gets_half_of_what_a_busy_one_has_not_begun():
    placed = placement()
    seqs = given(placed, 0, 5)
    assert placed.balance() == [(0, 3)]
    assert placed.balance() == [], "asked already"
    back = [each.seq_id for each in seqs[2:]]
    placed.take_back(0, back)
    assert lanes_of(placed, seqs) == [0, 0, 1, 1, 1]
    assert placed.take(1) == seqs[2:]
    assert placed.moved == set(back)
    assert [lane.load for lane in placed.lanes] == [28, 42]


def test_what_was_dropped_while_it_was_asked_for_does_not_come_again():
    placed = placement()
    seqs = given(placed, 0, 4)
    assert placed.balance() == [(0, 2)]
    placed.remove(seqs[3])
    placed.take_back(0, [seqs[3].seq_id, seqs[2].seq_id])
    assert placed.take(1) == [seqs[2]]
    for each in seqs[:3]:
        placed.remove(each)
    assert [lane.load for lane in placed.lanes] == [0, 0]
    assert not placed.moved


def test_a_replica_that_has_not_heard_of_its_work_asks_for_no_other():
    placed = placement()
    given(placed, 0, 4)
    one = seq()
    placed.add(one)
    assert placed.take(1) == [one]
    assert placed.balance() == []
    placed.report(1, 1, 0, 0)
    assert placed.balance() == [(0, 2)]


def test_a_replica_with_a_full_batch_asks_for_nothing():
    placed = placement(max_num_seqs=2)
    given(placed, 0, 3)
    given(placed, 1, 2)
    placed.report(1, 2, 0, 0)
    assert placed.balance() == []


def test_work_that_has_not_been_sent_is_moved_without_asking():
    placed = placement(max_num_seqs=2)
    seqs = given(placed, 0, 4)
    queued = [seq() for _ in range(6)]
    for each in queued:
        placed.lanes[1].load += 10_000
        placed.add(each)
        placed.lanes[1].load -= 10_000
    assert lanes_of(placed, queued) == [0] * 6
    assert placed.balance() == []
    assert lanes_of(placed, queued).count(1) >= 4, "until both have the same load"
    assert len(placed.take(1)) == 4
    assert not placed.moved
    assert sum(lane.load for lane in placed.lanes) == 14 * len(seqs + queued)


@pytest.mark.parametrize("case", range(8))
def test_nothing_is_lost_and_nobody_idles_while_work_waits(case):
    """Replicas that complete a sequence of a batch at a time, of unequal speeds, and hear late."""
    rng = random.Random(case)
    num, max_num_seqs = rng.randint(2, 4), rng.randint(1, 4)
    placed = placement(num, max_num_seqs)
    speeds = [rng.randint(1, 4) for _ in range(num)]
    left = {}
    inboxes, running, waiting, received = ([[] for _ in range(num)] for _ in range(4))
    for _ in range(rng.randint(1, 60)):
        each = seq(rng.randint(1, 60), rng.randint(1, 50))
        left[each.seq_id] = each
        placed.add(each)
    idle_rounds = 0
    for _ in range(10_000):
        for donor, many in placed.balance():
            back = [x for x in reversed(waiting[donor]) if x.seq_id not in placed.moved][:many]
            waiting[donor] = [x for x in waiting[donor] if x not in back]
            placed.take_back(donor, [x.seq_id for x in back])
        for i in range(num):
            inboxes[i] += placed.take(i)
        for i in range(num):
            waiting[i] += inboxes[i]
            received[i] += inboxes[i]
            inboxes[i] = []
            while waiting[i] and len(running[i]) < max_num_seqs:
                running[i].append(waiting[i].pop(0))
            if not running[i] and any(len(each) > 1 for each in waiting):
                idle_rounds += 1
            for _ in range(speeds[i]):
                if running[i]:
                    done = running[i].pop(rng.randrange(len(running[i])))
                    placed.remove(left.pop(done.seq_id))
            movable = sum(x.seq_id not in placed.moved for x in waiting[i])
            placed.report(i, len(received[i]), len(waiting[i]), movable)
        if not left:
            break
    assert not left
    assert [lane.load for lane in placed.lanes] == [0] * num
    assert not any(lane.given or lane.queue for lane in placed.lanes)
    assert idle_rounds <= 3 * num, "an idle replica waits for an answer, and no longer"
