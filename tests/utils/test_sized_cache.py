"""SizedCache: bounded by bytes, the least recently used goes first."""

import pytest

from nanovllm.utils.sized_cache import SizedCache


@pytest.fixture
def made():
    return []


@pytest.fixture
def cache(made):
    def make(key):
        made.append(key)
        return key.upper()

    return SizedCache(make, lambda key, value: len(value), max_bytes=10)


def test_values_are_made_once(cache, made):
    assert [cache.get(key) for key in ("aa", "b", "aa", "b", "b")] == ["AA", "B", "AA", "B", "B"]
    assert made == ["aa", "b"]


def test_the_least_recently_used_goes_first(cache, made):
    for key in ("aaaa", "bbbb", "aaaa", "cccc", "aaaa", "bbbb"):
        cache.get(key)
    assert made == ["aaaa", "bbbb", "cccc", "bbbb"]


def test_one_that_is_too_large_is_kept_alone(cache, made):
    for key in ("a", "b" * 50, "b" * 50, "a", "b" * 50):
        assert cache.get("".join(key)) == key.upper()
    assert made == ["a", "b" * 50, "a", "b" * 50]


def test_a_dropped_value_is_made_again(cache, made):
    for _ in range(2):
        cache.get("a")
        cache.drop("a")
    cache.drop("unknown")
    assert made == ["a", "a"]


def test_what_fails_is_not_kept():
    cache = SizedCache(lambda key: 1 / key, lambda key, value: 1, max_bytes=10)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            cache.get(0)
    assert cache.get(2) == 0.5
