import contextlib
import itertools
import threading

import pytest

from transformer_flax.prefetch import prefetch


def test_values_come_in_order():
    assert list(prefetch(lambda key: key**2, range(50), threads=3)) == [key**2 for key in range(50)]
    assert list(prefetch(str, [])) == []


def test_the_next_are_made_before_they_are_asked_for_and_no_more_of_them():
    made = []
    third_is_made = threading.Event()

    def make(key):
        made.append(key)
        if key == 2:
            third_is_made.set()
        return key

    with contextlib.closing(prefetch(make, itertools.count())) as values:
        assert next(values) == 0
        assert third_is_made.wait(timeout=60)  # nobody has asked for it
        assert made == [0, 1, 2]


def test_what_goes_wrong_goes_wrong_where_it_is_asked_for():
    values = prefetch(lambda key: 1 // (3 - key), range(10))
    assert [next(values) for _ in range(3)] == [0, 0, 1]
    with pytest.raises(ZeroDivisionError):
        next(values)
