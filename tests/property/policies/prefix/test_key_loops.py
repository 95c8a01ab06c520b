"""Property tests of the loops over block keys, against definitions that read one key at a time."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from policies.prefix.key_loops import count_places, find_last_counted, scramble_keys

WORDS = st.integers(0, (1 << 64) - 1)


@given(st.lists(WORDS, max_size=40), st.lists(st.integers(0, 15), max_size=20), st.data())
def test_the_last_key_with_a_count_is_found(
    keys: list[int], counted: list[int], data: st.DataObject
) -> None:
    counts = array("I", [counted.count(place) for place in range(16)])
    end = data.draw(st.integers(0, len(keys)))
    wanted = [
        index for index in range(end) if all(counts[at] for at in count_places(keys[index], 16))
    ]
    assert find_last_counted(array("Q", keys), counts, end) == max(wanted, default=-1)


@given(st.lists(WORDS, max_size=40), st.integers(1, 9), WORDS, WORDS)
def test_every_step_th_key_gives_48_bits_of_its_product(
    keys: list[int], step: int, offset: int, factor: int
) -> None:
    scrambled = scramble_keys(array("Q", keys), step, offset, factor | 1)
    wanted = [(key ^ offset) * (factor | 1) % 2**64 // 2**16 for key in keys[step - 1 :: step]]
    assert scrambled.tolist() == wanted
