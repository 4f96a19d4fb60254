"""A dataset in words: its `repr` and `describe()`."""

from typing import Any

from hf_lance_stream.examples import LanceExamplesIterable
from hf_lance_stream.html import Description
from hf_lance_stream.plan import Plan
from hf_lance_stream.splits import Layout, divisors
from hf_lance_stream.wrappers import only_source, sources


def representation(dataset: Any) -> str:
    """A few lines in the style of `datasets`."""
    names = dataset.column_names
    lines = [f"features: {names if names is not None else 'Unknown'}"]
    lines.append(f"num_shards: {dataset.num_shards}")
    try:
        lines.append(f"num_rows: {len(dataset)}")
    except TypeError:
        lines.append("num_rows: Unknown")
    examples = only_source(dataset._ex_iterable)
    if examples is not None:
        lines.append(f"table: {examples.source.name} (version {examples.source.version})")
        lines.append(f"order: {_order(examples.plan, dataset.epoch)}")
    return "LanceIterableDataset({\n    " + ",\n    ".join(lines) + "\n})"


def description(dataset: Any) -> Description:
    """A paragraph for each table the dataset reads."""
    return Description(
        "\n\n".join(
            "\n".join(lines_of(examples, dataset.epoch))
            for examples in sources(dataset._ex_iterable)
        )
    )


def lines_of(examples: LanceExamplesIterable, epoch: int) -> list[str]:
    """What a source reads, in which order and in which parts; each line has a label."""
    source, plan = examples.source, examples.plan
    names = source.name if isinstance(source.name, list) else [source.name]
    versions = source.version if isinstance(source.version, list) else [source.version]
    lines = [
        f"Table: {name}, version {version}" for name, version in zip(names, versions, strict=True)
    ]
    matching = f" that match {source.filter!r}" if source.filter else ""
    lines.append(f"Rows: {plan.order.rows:,}{matching}")
    lines.append(f"Columns: {', '.join(source.schema.names)}")
    lines.append(f"Order: {_order(plan, epoch)}")
    if plan.layout is None:
        lines.append(
            f"Splits: none; natural shards: {plan.stream.num_shards}, in table order, nothing "
            "dropped"
        )
    else:
        lines += _split_lines(plan.layout)
        if len(plan) != plan.layout.epoch_rows:
            lines.append(
                f"This reader: splits {plan.part()['start']} to {plan.part()['stop'] - 1}, "
                f"{len(plan):,} rows per epoch"
            )
    return lines


def _split_lines(layout: Layout) -> list[str]:
    tail = {
        "drop": f"{layout.dropped} rows dropped per epoch",
        "pad": f"{layout.padded} rows repeated per epoch",
        "keep": f"{layout.surplus} splits have one row more" if layout.surplus else "all equal",
    }[layout.tail]
    worlds = ", ".join(map(str, divisors(layout.num_splits)))
    return [
        f"Splits: {layout.num_splits} of {layout.rows_per_split:,} rows each",
        f"Tail: {layout.tail!r}, {tail}",
        f"Compatible world sizes: {worlds}",
    ]


def _order(plan: Plan, epoch: int) -> str:
    if plan.order.seed is None:
        return "table order"
    size = plan.order.clump_size
    clump = "single rows" if size == 1 else f"clumps of {size} rows"
    return f"shuffled with seed {plan.order.seed}, {clump}, epoch {epoch}"
