"""The numbers and the figure that say how well an order mixes a table."""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from datasets import interleave_datasets, load_dataset
from datasets.distributed import split_dataset_by_node
from helpers import ids, make_table
from scipy.stats import pearsonr, spearmanr

import hf_lance_stream as hls
from hf_lance_stream.quality import quality_of_positions

ROWS, ROWS_PER_FILE = 4100, 500


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """T(4100, 500) without its data files, so that nothing can be read of it."""
    path = make_table(tmp_path_factory.mktemp("table") / "t.lance", ROWS, ROWS_PER_FILE)
    shutil.rmtree(Path(path) / "data")
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The same with them; the id of a row is its position."""
    directory = tmp_path_factory.mktemp("whole")
    return make_table(directory / "t.lance", ROWS, ROWS_PER_FILE, ["id", "label"])


def oracle(order, batch_size, clump_size, rows=ROWS, rows_per_file=ROWS_PER_FILE):
    """The numbers of `shuffle_quality`, each by its definition."""
    count = len(order) // batch_size * batch_size
    order = [int(row) for row in order[:count]]
    batches = [order[i : i + batch_size] for i in range(0, count, batch_size)]
    means = [sum(batch) / batch_size for batch in batches]
    centre = (rows - 1) / 2
    variance_of_rows = sum((row - centre) ** 2 for row in range(rows)) / rows
    variance = variance_of_rows / batch_size * (rows - batch_size) / (rows - 1)
    together = sum(row - 1 in set(batch) for batch in batches for row in batch)

    def distinct(size):
        return sum(len({row // size for row in batch}) for batch in batches) / len(batches)

    return {
        "rows": count,
        "batch_size": batch_size,
        "neighbour_correlation": pearsonr(order[:-1], order[1:]).statistic,
        "rank_correlation": spearmanr(range(count), order).statistic,
        "batch_correlation": pearsonr(means[:-1], means[1:]).statistic,
        "batch_variance": sum((m - centre) ** 2 for m in means) / len(means) / variance,
        "neighbour_fraction": together / count,
        "clumps_per_batch": None if clump_size is None else distinct(clump_size),
        "fragments_per_batch": distinct(rows_per_file),
    }


def values(quality):
    return {name: getattr(quality, name) for name in quality.__dataclass_fields__}


@pytest.mark.parametrize("clump_size", [1, 16, 64, 1000])
@pytest.mark.parametrize("num_splits", [1, 8])
def test_the_numbers_are_those_of_their_definitions_and_nothing_is_read(
    path, whole, clump_size, num_splits
):
    options = {"num_splits": num_splits, "shuffle_seed": 3, "shuffle_clump_size": clump_size}
    order = ids(hls.from_lance(whole, **options, epoch=2))
    ds = hls.from_lance(path, **options, epoch=2)
    found = values(hls.shuffle_quality(ds, batch_size=100))
    assert found == pytest.approx(oracle(order, 100, clump_size), abs=1e-9)
    assert ds.stats().requests == 0
    with pytest.raises(Exception, match="data"):  # the files really are not there
        next(iter(ds))


def test_table_order_is_as_bad_as_can_be(path):
    quality = hls.shuffle_quality(hls.from_lance(path), batch_size=50)
    assert quality.rank_correlation == quality.neighbour_correlation == 1
    assert quality.neighbour_fraction == 49 / 50
    assert quality.fragments_per_batch == 1  # 500 is a multiple of 50
    assert quality.clumps_per_batch is None
    assert quality.batch_correlation > 0.999
    assert quality.batch_variance == pytest.approx(50, rel=0.05)


def test_single_rows_are_as_good_as_a_random_permutation(path):
    found = [
        hls.shuffle_quality(hls.from_lance(path, shuffle_seed=seed, num_splits=4), batch_size=100)
        for seed in range(40)
    ]
    rng = np.random.default_rng(0)
    random = [
        quality_of_positions(
            rng.permutation(ROWS),
            table_rows=ROWS,
            batch_size=100,
            fragment_rows=[*[500] * 8, 100],
            clump_size=1,
        )
        for _ in range(40)
    ]
    for name, expected, within in (
        ("batch_variance", 1, 0.1),
        ("neighbour_correlation", 0, 0.01),
        ("rank_correlation", 0, 0.01),
        ("batch_correlation", 0, 0.1),
        ("neighbour_fraction", 99 / ROWS, 0.002),
    ):
        for qualities in (found, random):
            mean = float(np.mean([getattr(quality, name) for quality in qualities]))
            assert mean == pytest.approx(expected, abs=within), name
    means = [np.mean([quality.fragments_per_batch for quality in q]) for q in (found, random)]
    assert means[0] == pytest.approx(means[1], abs=0.05)


def test_it_looks_at_this_rank_this_epoch_and_so_many_rows(whole):
    ds = hls.from_lance(whole, num_splits=8, shuffle_seed=3, shuffle_clump_size=10)
    seen = []
    for rank in range(2):
        part = split_dataset_by_node(ds, rank, 2)
        part.set_epoch(1)
        order = ids(part)[:500]
        quality = hls.shuffle_quality(part, batch_size=40, rows=500)
        assert quality.rows == 480
        assert values(quality) == pytest.approx(oracle(order, 40, 10), abs=1e-9)
        seen.append(quality)
        part.set_epoch(2)
        assert hls.shuffle_quality(part, batch_size=40, rows=500) != quality
    assert seen[0] != seen[1]
    assert hls.shuffle_quality(ds.shard(2, 0), batch_size=40) == hls.shuffle_quality(
        split_dataset_by_node(ds, 0, 2), batch_size=40
    )


def test_steps_that_keep_one_row_per_row_change_nothing_and_a_filter_counts_matching_rows(whole):
    ds = hls.from_lance(whole, filter="label < 2", num_splits=4, shuffle_seed=1)
    quality = hls.shuffle_quality(ds, batch_size=50)
    steps = ds.map(lambda row: {"two": 2 * row["id"]}).with_format("torch").select_columns(["two"])
    assert hls.shuffle_quality(steps, batch_size=50) == quality
    matching = [row for row in range(ROWS) if row % 5 < 2]
    order = [matching.index(row) for row in ids(ds)]
    assert values(quality) == pytest.approx(
        oracle(order, 50, 1, rows=len(matching), rows_per_file=200), abs=1e-9
    )


@pytest.mark.parametrize("num_shards", [1, 4])
def test_the_buffer_is_that_of_datasets_on_files(tmp_path, num_shards):
    files = []
    for shard in range(num_shards):
        rows = np.arange(2000 // num_shards) + shard * (2000 // num_shards)
        files.append(str(tmp_path / f"{shard}.jsonl"))
        Path(files[-1]).write_text("".join(f'{{"row": {row}}}\n' for row in rows))
    ds = load_dataset("json", data_files=files, split="train", streaming=True)
    expected = [row["row"] for row in ds.shuffle(seed=7, buffer_size=100)]
    order = hls.buffer_shuffle_positions(2000, 100, seed=7, num_shards=num_shards)
    assert order.dtype == np.int64
    assert order.tolist() == expected
    assert sorted(expected) == list(range(2000))


def test_a_buffer_drifts_through_the_table_and_clumps_do_not(path):
    buffer = quality_of_positions(
        hls.buffer_shuffle_positions(ROWS, 100), table_rows=ROWS, batch_size=50
    )
    clumps = hls.shuffle_quality(
        hls.from_lance(path, num_splits=8, shuffle_seed=1, shuffle_clump_size=16), batch_size=50
    )
    assert buffer.rank_correlation > 0.99
    assert buffer.batch_variance > 40
    assert abs(clumps.rank_correlation) < 0.1
    assert clumps.batch_variance < 8


def test_case_22_small_clumps_in_many_splits_mix_a_hundred_thousand_rows(tmp_path):
    path = make_table(tmp_path / "t.lance", 100_000, 1000)
    ds = hls.from_lance(path, num_splits=48, shuffle_seed=1, shuffle_clump_size=16)
    quality = hls.shuffle_quality(ds, batch_size=256)
    assert abs(quality.rank_correlation) < 0.05
    assert quality.fragments_per_batch > 10


def test_the_figure_shows_every_order_with_its_numbers_and_reads_nothing(path, whole):
    ds = hls.from_lance(path, num_splits=8, shuffle_seed=3)
    figure = hls.plot_shuffles(ds, batch_size=64, buffer_size=200)
    axes = np.array(figure.axes).reshape(2, 5)
    assert [axis.get_title() for axis in axes[0]] == [
        "buffer of 200 rows",
        "clumps of 16",
        "clumps of 64",
        "clumps of 1,024",
        "single rows",
    ]
    assert len({axis.get_xlim() for axis in axes[0]}) == 1
    assert len({axis.get_ylim() for axis in axes.flat}) == 1
    for column, clump_size in enumerate((16, 64, 1024, None), start=1):
        shuffled = ds.shuffle(seed=3, shuffle_clump_size=clump_size)
        order = np.array(
            ids(hls.from_lance(whole, num_splits=8, shuffle_seed=3, shuffle_clump_size=clump_size))
        )
        for axis in axes[:, column]:
            batches, positions = axis.lines[0].get_data()
            times = np.rint(batches * 64).astype(int)
            assert positions.tolist() == order[times].tolist()
        assert len(positions) == 8 * 64  # the lower panel leaves nothing out
        quality = hls.shuffle_quality(shuffled, batch_size=64)
        caption = axes[1, column].get_xlabel()
        assert f"batch variance {quality.batch_variance:.2f}" in caption
    buffer = hls.buffer_shuffle_positions(ROWS, 200, seed=3, num_shards=9)
    assert axes[1, 0].lines[0].get_data()[1].tolist() == buffer[:512].tolist()
    assert figure._repr_png_().startswith(b"\x89PNG")  # a notebook can show it
    assert len(hls.plot_shuffles(ds, [None], buffer_size=None, rows=600).axes) == 2


def test_without_matplotlib_the_figure_says_what_to_install(path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r'pip install "hf_lance_stream\[notebooks\]"'):
        hls.plot_shuffles(hls.from_lance(path))
    assert hls.shuffle_quality(hls.from_lance(path), batch_size=50).rows == ROWS


def test_bad_arguments_are_refused(path):
    ds = hls.from_lance(path, shuffle_seed=1)
    with pytest.raises(ValueError, match="`batch_size` must be an integer in"):
        hls.shuffle_quality(ds, batch_size=1)
    with pytest.raises(ValueError, match="got batch_size=3000, rows=4100; use at most 2050"):
        hls.shuffle_quality(ds, batch_size=3000)
    with pytest.raises(ValueError, match="at least two batches of two rows: got 3 rows"):
        hls.shuffle_quality(ds, batch_size=2, rows=3)
    with pytest.raises(ValueError, match="got a dataset with filter; give the dataset as it is"):
        hls.shuffle_quality(ds.filter(lambda row: True))
    with pytest.raises(ValueError, match="got a dataset with a mix of sources"):
        hls.shuffle_quality(interleave_datasets([ds, ds]))
    with pytest.raises(ValueError, match="`ds` must be a dataset of a Lance table"):
        hls.shuffle_quality([1, 2, 3])
    with pytest.raises(ValueError, match="`num_shards` must be an integer in"):
        hls.buffer_shuffle_positions(3, num_shards=4)
    with pytest.raises(ValueError, match="`clump_sizes` must have 1 to 7 clump sizes"):
        hls.plot_shuffles(ds, [])


# How datasets and numbers look in a notebook.


def cells(html):
    """Names and values of a table, read by a parser of its own."""
    from html.parser import HTMLParser

    class Parser(HTMLParser):
        def __init__(self):
            super().__init__()
            self.tags, self.texts = [], []

        def handle_starttag(self, tag, attrs):
            self.tags.append(tag)
            if tag in ("th", "td"):
                self.texts.append("")

        def handle_data(self, data):
            self.texts[-1] += data

    parser = Parser()
    parser.feed(html)
    assert set(parser.tags) == {"table", "tr", "th", "td"}
    return dict(zip(parser.texts[::2], parser.texts[1::2], strict=True))


def test_a_dataset_is_shown_as_a_table_of_what_describe_says(whole):
    ds = hls.from_lance(whole, num_splits=8, shuffle_seed=3)
    lines = dict(line.split(": ", 1) for line in str(ds.describe()).splitlines())
    assert cells(ds._repr_html_()) == cells(ds.describe()._repr_html_()) == lines
    assert lines["Splits"] == "8 of 512 rows each"
    assert isinstance(ds.describe(), str)
    assert json.loads(json.dumps(ds.describe())) == ds.describe()
    both = interleave_datasets([ds, hls.from_lance(whole)])._repr_html_()
    assert both.count("<table>") == 2


def test_names_and_filters_are_escaped(tmp_path):
    path = make_table(tmp_path / "<script>&.lance", 100, 50, ["id", "text"])
    ds = hls.from_lance(path, filter="text != '<b>&amp;\"'", columns=["id"])
    html = ds._repr_html_()
    assert "<script>" not in html
    assert "<b>" not in html
    shown = cells(html)
    assert shown["Table"].startswith(f"{path}, version")
    assert "<b>&amp;" in shown["Rows"]


def test_stats_and_quality_are_shown_as_tables(whole):
    ds = hls.from_lance(whole, num_splits=8, shuffle_seed=3)
    list(ds)
    shown = cells(ds.stats()._repr_html_())
    assert shown["Rows"] == "4,096"
    assert shown["Waiting"].endswith("%")
    quality = hls.shuffle_quality(ds, batch_size=64)
    shown = cells(quality._repr_html_())
    assert shown["rows, batch size"] == "4,096, 64"
    assert str(quality).splitlines()[0] == "rows, batch size: 4,096, 64"
    assert shown["clumps per batch"] == "64"
