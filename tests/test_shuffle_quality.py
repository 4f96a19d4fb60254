"""Statistical tests of the shuffle, with fixed seeds: what passes once passes always.

Each check gives the probability that true random permutations look as extreme, on either side.
A right shuffle stays above `THRESHOLD` in all of them; the tests at the end show that weakened
ones, such as a network of three rounds, do not, and that numpy's shuffle does.
"""

from collections.abc import Callable, Iterable
from itertools import permutations
from math import factorial

import numpy as np
import numpy.typing as npt
import pytest
from scipy.stats import chi2

from hf_lance_stream import permutation
from hf_lance_stream.permutation import ORDER_VERSION, Permutation, derive_key
from hf_lance_stream.splits import Order

THRESHOLD = 1e-4

ORDERS = {16: 1000, 64: 600, 100: 600, 1000: 300, 5000: 150}
"""Lengths of the orders tested, and how many of each."""

GROUPS = {16: 16, 64: 16, 100: 20, 1000: 25, 5000: 50}
"""Equal groups that positions and rows are sorted into, for each length."""

ORDERS_OF_A_FEW = {2: 500, 3: 1000, 4: 1500, 5: 2000, 6: 4000}
"""The same for orders so short that all their permutations are counted."""

Orders = npt.NDArray[np.int64]  # shape (number of orders, rows), each row a permutation


def shuffled(rows: int, keys: Iterable[int]) -> Orders:
    return np.stack([Permutation(rows, key)(np.arange(rows)) for key in keys])


def over_seeds(rows: int, count: int, *, epoch: int = 0, first: int = 0) -> Orders:
    seeds = range(first, first + count)
    return shuffled(rows, (derive_key(ORDER_VERSION, seed, epoch) for seed in seeds))


def over_epochs(rows: int, count: int) -> Orders:
    return shuffled(rows, (derive_key(ORDER_VERSION, 7, epoch) for epoch in range(count)))


def relation(first: Orders, second: Orders) -> Orders:
    """The permutations that lead from one order to the other; random if both are, and unrelated."""
    return np.take_along_axis(second, np.argsort(first, axis=1), axis=1)


def p_value(deviation: float, freedom: int) -> float:
    return float(2 * min(chi2.sf(deviation, freedom), chi2.cdf(deviation, freedom)))


def placement(orders: Orders, group_of: Orders) -> float:
    """Whether the rows of every group land in every group of positions equally often.

    The counts of one random permutation have the covariance size**2 / (n - 1) times the
    projection to tables with zero row and column sums, of rank (groups - 1)**2.
    """
    count, n = orders.shape
    groups = int(group_of.max()) + 1
    size = n // groups
    cells = group_of * groups + group_of[orders]
    landed = np.bincount(cells.ravel(), minlength=groups**2)
    deviation = ((landed - count * n / groups**2) ** 2).sum() / (count * size**2 / (n - 1))
    return p_value(deviation, (groups - 1) ** 2)


def displacement(orders: Orders) -> float:
    """Whether rows move by every distance equally often."""
    count, n = orders.shape
    moved = np.bincount(((orders - np.arange(n)) % n).ravel(), minlength=n)
    return p_value(((moved - count) ** 2).sum() / count * (n - 1) / n, n - 1)


def steps(orders: Orders, stride: int) -> float:
    """Whether rows `stride` positions apart differ by every amount equally often."""
    count, n = orders.shape
    amounts = (orders[:, stride:] - orders[:, :-stride]) % n
    seen = np.bincount(amounts.ravel(), minlength=n)[1:]
    expected = count * (n - stride) / (n - 1)
    return p_value(((seen - expected) ** 2).sum() / expected, n - 2)


def checks(orders: Orders) -> dict[str, float]:
    """Probabilities of orders that should be independent random permutations."""
    n = orders.shape[1]
    positions = np.arange(n)
    half_width = ((n - 1).bit_length() + 1) // 2  # of the network: one half differs, one does not
    return {
        "blocks": placement(orders, positions * GROUPS[n] // n),
        "residues": placement(orders, positions % GROUPS[n]),
        "displacement": displacement(orders),
        "neighbours": steps(orders, 1),
        "distant neighbours": steps(orders, 1 << half_width),
    }


def permutation_counts(orders: Orders) -> float:
    """Whether every one of the n! permutations occurs equally often."""
    n = orders.shape[1]
    digits = n ** np.arange(n)
    all_codes = np.sort(np.array(list(permutations(range(n)))) @ digits)
    seen = np.bincount(np.searchsorted(all_codes, orders @ digits), minlength=factorial(n))
    expected = len(orders) / factorial(n)
    return p_value(((seen - expected) ** 2).sum() / expected, factorial(n) - 1)


def assert_random(orders: Orders) -> None:
    found = checks(orders)
    assert min(found.values()) > THRESHOLD, found


@pytest.fixture(scope="module", params=ORDERS)
def seeded(request: pytest.FixtureRequest) -> Orders:
    return over_seeds(request.param, ORDERS[request.param])


@pytest.fixture(scope="module", params=ORDERS)
def epochs(request: pytest.FixtureRequest) -> Orders:
    return over_epochs(request.param, ORDERS[request.param])


@pytest.mark.parametrize(("rows", "count"), ORDERS_OF_A_FEW.items())
def test_all_permutations_of_a_few_rows_are_equally_likely(rows: int, count: int) -> None:
    assert permutation_counts(over_seeds(rows, count)) > THRESHOLD


def test_all_permutations_are_equally_likely_over_epochs() -> None:
    assert permutation_counts(over_epochs(5, 2000)) > THRESHOLD


def test_orders_of_different_seeds_are_random(seeded: Orders) -> None:
    assert_random(seeded)


def test_orders_of_different_epochs_are_random(epochs: Orders) -> None:
    assert_random(epochs)


def test_orders_of_seeds_s_and_s_plus_1_are_unrelated(seeded: Orders) -> None:
    assert_random(relation(seeded[:-1], seeded[1:]))


def test_orders_of_epochs_e_and_e_plus_1_are_unrelated(epochs: Orders) -> None:
    assert_random(relation(epochs[:-1], epochs[1:]))


@pytest.mark.parametrize("rows", [16, 100, 1000])
def test_a_seed_and_the_next_seed_one_epoch_earlier_are_unrelated(rows: int) -> None:
    count = ORDERS[rows] // 2
    this = over_seeds(rows, count, epoch=5)
    assert_random(relation(this, over_seeds(rows, count, epoch=4, first=1)))


@pytest.mark.parametrize("rows", [16, 64])
def test_no_position_prefers_a_row(rows: int) -> None:
    orders = over_seeds(rows, 1500, first=10**9)
    assert placement(orders, np.arange(rows)) > THRESHOLD


@pytest.mark.parametrize("clump_size", [1, 7])
def test_clumps_are_shuffled_like_rows_wherever_the_short_one_lands(clump_size: int) -> None:
    rows = 100 * clump_size - clump_size // 2
    orders = []
    for seed in range(400):
        order = Order(rows=rows, clump_size=clump_size, seed=seed).rows_at(np.arange(rows))
        clump_at = order // clump_size
        orders.append(clump_at[np.flatnonzero(np.diff(clump_at, prepend=-1))])
    assert_random(np.stack(orders))


# That the checks are fair, and that they catch what is weak.


@pytest.mark.parametrize("rows", ORDERS)
def test_shuffles_of_numpy_pass(rows: int) -> None:
    rng = np.random.default_rng(rows)
    orders = np.stack([rng.permutation(rows) for _ in range(ORDERS[rows])])
    assert_random(orders)
    assert_random(relation(orders[:-1], orders[1:]))


@pytest.mark.parametrize("rows", ORDERS)
@pytest.mark.parametrize("orders", [over_seeds, over_epochs])
def test_a_network_of_three_rounds_is_caught(
    monkeypatch: pytest.MonkeyPatch, rows: int, orders: Callable[[int, int], Orders]
) -> None:
    monkeypatch.setattr(permutation, "_num_rounds", lambda bits: 3)
    found = checks(orders(rows, ORDERS[rows]))
    assert min(found.values()) < THRESHOLD**2, found


@pytest.mark.parametrize(("rows", "rounds"), [(4, 3), (4, 4), (5, 8), (6, 8)])
def test_a_few_rounds_for_a_few_rows_are_caught(
    monkeypatch: pytest.MonkeyPatch, rows: int, rounds: int
) -> None:
    monkeypatch.setattr(permutation, "_num_rounds", lambda bits: rounds)
    assert permutation_counts(over_seeds(rows, ORDERS_OF_A_FEW[rows])) < THRESHOLD


def test_epochs_that_are_rotations_of_one_order_are_caught() -> None:
    base = Order(rows=100, seed=1).rows_at(np.arange(100))
    rotated = np.stack([np.roll(base, 7 * epoch) for epoch in range(600)])
    assert min(checks(relation(rotated[:-1], rotated[1:])).values()) < THRESHOLD**2


def test_a_seed_plus_an_epoch_as_the_key_is_caught() -> None:
    this = shuffled(100, (seed + 5 for seed in range(300)))
    other = shuffled(100, (seed + 1 + 4 for seed in range(300)))
    assert min(checks(relation(this, other)).values()) < THRESHOLD**2
