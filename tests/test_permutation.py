import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_lance_stream.permutation import MAX_LENGTH, Permutation, derive_key, mix64

untimed = settings(deadline=None)
keys = st.integers(0, 2**64 - 1)
words = st.integers(0, 2**64 - 1)

POWERS = sorted({2**k + d for k in range(1, 63) for d in (-1, 0, 1) if 2**k + d <= MAX_LENGTH})


@untimed
@given(n=st.integers(1, 5000), key=keys)
def test_maps_the_range_onto_itself_and_back(n: int, key: int) -> None:
    permutation = Permutation(n, key)
    image = permutation(np.arange(n))
    assert sorted(image.tolist()) == list(range(n))
    assert permutation.inverse(image).tolist() == list(range(n))


@pytest.mark.parametrize("n", range(1, 70))
def test_every_small_length_is_a_bijection(n: int) -> None:
    for key in range(20):
        assert set(Permutation(n, key)(np.arange(n)).tolist()) == set(range(n))


@pytest.mark.parametrize("n", [2**16, 2**16 + 1, 200_003])
def test_a_range_longer_than_one_block_is_a_bijection(n: int) -> None:
    permutation = Permutation(n, 5)
    image = permutation(np.arange(n))
    assert np.array_equal(np.sort(image), np.arange(n))
    assert np.array_equal(permutation.inverse(image), np.arange(n))


@untimed
@given(data=st.data(), n=st.integers(1, MAX_LENGTH) | st.sampled_from(POWERS), key=keys)
def test_walks_stay_in_range_at_every_length(data: st.DataObject, n: int, key: int) -> None:
    positions = data.draw(st.lists(st.integers(0, n - 1), max_size=20))
    positions += [0, n // 2, n - 1]
    permutation = Permutation(n, key)
    image = permutation(positions)
    assert all(0 <= value < n for value in image.tolist())
    assert permutation.inverse(image).tolist() == positions
    assert permutation(permutation.inverse(positions)).tolist() == positions


@pytest.mark.parametrize("n", [10**12, 2**40 + 1, MAX_LENGTH])
def test_different_positions_of_a_huge_range_have_different_images(n: int) -> None:
    positions = np.unique(np.linspace(0, n - 1, 50_000).astype(np.int64).clip(0, n - 1))
    assert np.unique(Permutation(n, 1)(positions)).size == positions.size


@untimed
@given(data=st.data(), n=st.integers(1, 500), key=keys)
def test_positions_are_mapped_one_by_one(data: st.DataObject, n: int, key: int) -> None:
    whole = Permutation(n, key)(np.arange(n))
    picked = data.draw(st.lists(st.integers(0, n - 1), max_size=50))
    assert Permutation(n, key)(picked).tolist() == [whole[i] for i in picked]


@pytest.mark.parametrize("shape", [(), (0,), (6,), (2, 3), (3, 0), (1, 2, 3)])
def test_keeps_the_shape_and_gives_int64(shape: tuple[int, ...]) -> None:
    permutation = Permutation(10, 3)
    positions = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    image = permutation(positions)
    assert image.shape == shape
    assert image.dtype == np.int64
    assert np.array_equal(permutation.inverse(image), positions)


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.uint64, np.int64])
def test_any_integer_dtype_is_taken_and_left_unchanged(dtype: type) -> None:
    positions = np.arange(100, dtype=dtype)
    image = Permutation(100, 3)(positions)
    assert np.array_equal(image, Permutation(100, 3)(list(range(100))))
    assert np.array_equal(positions, np.arange(100))


def test_a_trillion_elements_take_no_memory() -> None:
    tracemalloc.start()
    try:
        permutation = Permutation(10**12, 42)
        permutation(np.array([0, 10**12 - 1]))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 100_000


def test_temporaries_do_not_grow_with_the_number_of_positions() -> None:
    permutation, positions = Permutation(10**12, 42), np.arange(10**6)
    tracemalloc.start()
    try:
        image = permutation(positions)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2 * image.nbytes


@pytest.mark.parametrize("n", [0, -1, MAX_LENGTH + 1, 2**64])
def test_refuses_a_length_out_of_range(n: int) -> None:
    with pytest.raises(ValueError, match=rf"`n` must be between 1 and 2\*\*62: got n={n}$"):
        Permutation(n, 0)


@untimed
@given(n=st.integers(30, 5000), key=keys, bit=st.integers(0, 63))
def test_every_bit_of_the_key_matters(n: int, key: int, bit: int) -> None:
    positions = np.arange(n)
    assert not np.array_equal(
        Permutation(n, key)(positions), Permutation(n, key ^ (1 << bit))(positions)
    )


@untimed
@given(seed=st.integers(0, 2**64 - 2), epoch=st.integers(1, 2**64 - 1))
def test_the_next_seed_one_epoch_earlier_has_another_order(seed: int, epoch: int) -> None:
    positions = np.arange(100)
    this = Permutation(100, derive_key(1, seed, epoch))(positions)
    other = Permutation(100, derive_key(1, seed + 1, epoch - 1))(positions)
    assert not np.array_equal(this, other)


def test_no_two_of_many_seeds_and_epochs_share_a_key() -> None:
    assert len({derive_key(1, s, e) for s in range(200) for e in range(200)}) == 200 * 200


@untimed
@given(first=words, second=words)
def test_the_order_of_the_words_of_a_key_matters(first: int, second: int) -> None:
    assert (derive_key(first, second) == derive_key(second, first)) == (first == second)


def test_the_number_of_words_of_a_key_matters() -> None:
    assert len({derive_key(), derive_key(0), derive_key(0, 0), derive_key(0, 0, 0)}) == 4


@untimed
@given(words=st.lists(words, max_size=5))
def test_a_key_fits_in_64_bits(words: list[int]) -> None:
    assert 0 <= derive_key(*words) < 2**64


def test_mix64_agrees_with_the_published_splitmix64_stream() -> None:
    # The first outputs of Vigna's splitmix64.c for the seed 1234567, as in Rosetta Code.
    state, outputs = 1234567, []
    for _ in range(5):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        outputs.append(mix64(state))
    assert outputs == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


@untimed
@given(value=words)
def test_mix64_can_be_undone(value: int) -> None:
    def undo_xorshift(mixed: int, shift: int) -> int:
        value = mixed
        for _ in range(64 // shift):
            value = mixed ^ (value >> shift)
        return value

    back = undo_xorshift(mix64(value), 31)
    back = undo_xorshift(back * pow(0x94D049BB133111EB, -1, 2**64) % 2**64, 27)
    back = undo_xorshift(back * pow(0xBF58476D1CE4E5B9, -1, 2**64) % 2**64, 30)
    assert back == value
