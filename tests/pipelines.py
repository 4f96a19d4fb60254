"""The transformations of `datasets` that a Lance dataset must behave under, as named functions.

Each takes a dataset with the columns `id` (int64), `text` (string) and `vec` (3 float32) and
returns a transformed one. They are module-level, so that they pickle.
"""

import copy
import pickle

from datasets import Features, Value, concatenate_datasets, interleave_datasets
from datasets.distributed import split_dataset_by_node


def _double(row):
    return {"double": row["id"] * 2}


def _double_batch(batch):
    return {"double": [i * 2 for i in batch["id"]]}


def _with_index(row, index):
    return {"index": index}


def _with_indices(batch, indices):
    return {"index": indices}


def _arrow_identity(table):
    return table


def _arrow_repeat(table):
    return table.take([i for i in range(table.num_rows) for _ in range(2)])


def _repeat_rows(batch):
    return {"id": [i for i in batch["id"] for _ in range(2)]}


def _is_odd(row):
    return row["id"] % 2 == 1


def _are_odd(batch):
    return [i % 2 == 1 for i in batch["id"]]


def _arrow_mask(table):
    return [i % 2 == 1 for i in table.column("id").to_pylist()]


async def _async_double(row):
    return {"double": row["id"] * 2}


PIPELINES = {
    "none": lambda ds: ds,
    "map": lambda ds: ds.map(_double),
    "map_no_function": lambda ds: ds.map(),
    "map_features": lambda ds: ds.map(
        _double, features=Features({**ds.features, "double": Value("int32")})
    ),
    "map_input_columns": lambda ds: ds.map(lambda i: {"n": i + 1}, input_columns="id"),
    "map_remove": lambda ds: ds.map(_double, remove_columns=["text", "vec"]),
    "map_async": lambda ds: ds.map(_async_double),
    "map_batched": lambda ds: ds.map(_double_batch, batched=True, batch_size=7),
    "map_batched_drop": lambda ds: ds.map(
        _double_batch, batched=True, batch_size=7, drop_last_batch=True
    ),
    "map_batched_more_rows": lambda ds: ds.map(
        _repeat_rows, batched=True, batch_size=7, remove_columns=["text", "vec"]
    ),
    "map_with_indices": lambda ds: ds.map(_with_index, with_indices=True),
    "map_batched_with_indices": lambda ds: ds.map(
        _with_indices, with_indices=True, batched=True, batch_size=7
    ),
    "map_map": lambda ds: ds.map(_double).map(_with_index, with_indices=True),
    "map_numpy": lambda ds: ds.with_format("numpy").map(_double),
    "map_torch_batched": lambda ds: ds.with_format("torch").map(
        lambda b: {"double": b["id"] * 2}, batched=True, batch_size=7
    ),
    "map_arrow": lambda ds: ds.with_format("arrow").map(_arrow_identity),
    "map_arrow_batched": lambda ds: ds.with_format("arrow").map(
        _arrow_identity, batched=True, batch_size=7
    ),
    "map_arrow_more_rows": lambda ds: ds.with_format("arrow").map(
        _arrow_repeat, batched=True, batch_size=7
    ),
    "map_arrow_then_python": lambda ds: (
        ds.with_format("arrow").map(_arrow_identity, batched=True, batch_size=7).with_format(None)
    ),
    "map_pandas_batched": lambda ds: ds.with_format("pandas").map(
        lambda df: df.assign(double=df["id"] * 2), batched=True, batch_size=7
    ),
    "filter": lambda ds: ds.filter(_is_odd),
    "filter_batched": lambda ds: ds.filter(_are_odd, batched=True, batch_size=7),
    "filter_arrow": lambda ds: ds.with_format("arrow").filter(
        _arrow_mask, batched=True, batch_size=7
    ),
    "filter_map": lambda ds: ds.filter(_is_odd).map(_double),
    "select_columns": lambda ds: ds.select_columns(["id"]),
    "remove_columns": lambda ds: ds.remove_columns("text"),
    "rename_column": lambda ds: ds.rename_column("id", "key"),
    "rename_columns": lambda ds: ds.rename_columns({"id": "key", "text": "words"}),
    "add_column": lambda ds: ds.add_column("extra", list(range(2000))),
    "cast_column": lambda ds: ds.cast_column("id", Value("float64")),
    "cast": lambda ds: ds.cast(Features({**ds.features, "id": Value("int32")})),
    "format_torch": lambda ds: ds.with_format("torch"),
    "format_numpy": lambda ds: ds.with_format("numpy"),
    "format_arrow": lambda ds: ds.with_format("arrow"),
    "format_pandas": lambda ds: ds.with_format("pandas"),
    "format_torch_then_none": lambda ds: ds.with_format("torch").with_format(None),
    "select_format_torch": lambda ds: ds.select_columns(["id", "vec"]).with_format("torch"),
    "map_format_torch": lambda ds: ds.map(_double).with_format("torch"),
    "take": lambda ds: ds.take(137),
    "skip": lambda ds: ds.skip(137),
    "take_format_torch": lambda ds: ds.take(137).with_format("torch"),
    "skip_map": lambda ds: ds.skip(137).map(_double),
    "repeat": lambda ds: ds.repeat(2),
    "repeat_map": lambda ds: ds.repeat(2).map(_double),
    "repeat_format_numpy": lambda ds: ds.repeat(2).with_format("numpy"),
    "batch": lambda ds: ds.batch(7),
    "batch_drop": lambda ds: ds.batch(7, drop_last_batch=True),
    "batch_format_torch": lambda ds: ds.with_format("torch").batch(7),
    "batch_format_arrow": lambda ds: ds.with_format("arrow").batch(7),
    "batch_by_column": lambda ds: ds.select_columns(["id", "text"]).batch(by_column="text"),
    "shard": lambda ds: ds.shard(2, 1),
    "shard_map": lambda ds: ds.map(_double).shard(2, 1),
    "reshard": lambda ds: ds.reshard(),
    "reshard_map": lambda ds: ds.map(_double).reshard(),
    "split_by_node": lambda ds: split_dataset_by_node(ds, rank=1, world_size=2),
    "split_by_node_map": lambda ds: split_dataset_by_node(ds.map(_double), rank=1, world_size=2),
    "split_by_node_format_torch": lambda ds: split_dataset_by_node(
        ds.with_format("torch"), rank=1, world_size=2
    ),
    "interleave": lambda ds: interleave_datasets([ds, ds.skip(30)]),
    "interleave_weighted": lambda ds: interleave_datasets(
        [ds, ds.skip(300)], probabilities=[0.7, 0.3], seed=5
    ),
    "interleave_all_exhausted": lambda ds: interleave_datasets(
        [ds, ds.take(100)], stopping_strategy="all_exhausted"
    ),
    "concatenate_rows": lambda ds: concatenate_datasets([ds, ds.take(50)]),
    "concatenate_columns": lambda ds: concatenate_datasets(
        [ds, ds.select_columns("id").rename_column("id", "again")], axis=1
    ),
    "concatenate_columns_arrow": lambda ds: concatenate_datasets(
        [ds.select_columns("id"), ds.select_columns(["text", "vec"])], axis=1
    ),
    "pickle": lambda ds: pickle.loads(pickle.dumps(ds)),
    "deepcopy": copy.deepcopy,
}
