"""The sub-command ``inspect``: what a table holds, and how to stream it."""

import argparse
import math
from dataclasses import asdict
from typing import Any

import numpy as np
from datasets import Features

from hf_lance_stream.commands.common import add_json, add_table, new_parser, open_tables, show
from hf_lance_stream.commands.report import Report
from hf_lance_stream.features import features_of
from hf_lance_stream.source import Source
from hf_lance_stream.suggest import suggest_clump_size, suggest_num_splits
from hf_lance_stream.table_facts import TableFacts, facts_of

_DESCRIPTION = """\
Say what a table holds: rows, fragments, deletions, columns with their sizes and
their features as datasets sees them, tags, branches and indices; and suggest a
number of splits and a clump size for training from it.
Reads the manifest and the footers of the data files; of columns whose size is
not known there (blobs, old file formats), or whose feature or memory must be
found (binary and text columns), up to 32 rows.
"""

_USUAL_GPUS = (1, 2, 4, 8)
_USUAL_BATCH = 64  # of which most global batches are multiples


def add(commands: Any) -> None:
    """Add its parser."""
    parser = new_parser(commands, "inspect", "say what a table holds", _DESCRIPTION)
    add_table(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run it."""
    source = open_tables(arguments)
    document = inspect_table(source)
    show(arguments, document, _report(document))
    return 0


def inspect_table(source: Source) -> dict[str, Any]:
    """What ``inspect --json`` prints, of the one table of `source`."""
    (table,) = source.tables
    facts = facts_of(table)
    rows = int(facts.fragment_rows.sum())
    features, problems = _features(source)
    return {
        "table": source.name,
        "version": source.version,
        "latest_version": facts.latest_version,
        "rows": rows,
        "deleted_rows": facts.deleted_rows,
        "fragments": _fragments(facts),
        "data_files": facts.data_files,
        "data_bytes": facts.data_bytes,
        "storage_version": facts.storage_version,
        "has_stable_row_ids": facts.has_stable_row_ids,
        "columns": [_column(source, facts, name, features, problems) for name in source.columns],
        "row_bytes": source.row_bytes,
        "features": Features(features).to_dict(),
        "tags": facts.tags,
        "branches": list(facts.branches),
        "indices": [asdict(index) for index in facts.indices],
        "suggestions": {
            "num_splits": _suggested_splits(rows),
            "shuffle_clump_size": asdict(suggest_clump_size(source.row_bytes, rows)),
        },
    }


def _fragments(facts: TableFacts) -> dict[str, Any]:
    counts = facts.fragment_rows
    if not counts.size:
        return {"count": 0, "min_rows": None, "median_rows": None, "max_rows": None}
    return {
        "count": int(counts.size),
        "min_rows": int(counts.min()),
        "median_rows": float(np.median(counts)),
        "max_rows": int(counts.max()),
    }


def _features(source: Source) -> tuple[dict[str, Any], dict[str, str]]:
    """The features, and why a column has none."""
    try:
        return dict(features_of(source)), {}
    except ValueError:
        features: dict[str, Any] = {}
        problems = {}
        for name in source.columns:
            try:
                features.update(features_of(source.select([name])))
            except ValueError as error:
                problems[name] = str(error)
        return features, problems


def _column(
    source: Source,
    facts: TableFacts,
    name: str,
    features: dict[str, Any],
    problems: dict[str, str],
) -> dict[str, Any]:
    rows = int(facts.fragment_rows.sum())
    size = facts.column_bytes[name]
    is_estimate = size is None
    if size is None:
        size = source.select([name]).row_bytes * rows if rows else 0
    all_rows = rows + (0 if is_estimate else facts.deleted_rows)
    return {
        "name": name,
        "type": str(source.tables[0].schema.field(name).type),
        "feature": repr(features[name]) if name in features else None,
        "problem": problems.get(name),
        "bytes": size,
        "bytes_per_row": size / all_rows if all_rows else None,
        "is_estimate": is_estimate,
    }


def _suggested_splits(rows: int) -> dict[str, Any]:
    try:
        return asdict(suggest_num_splits(_USUAL_GPUS, _USUAL_BATCH, rows))
    except ValueError as error:
        return {"num_splits": None, "reason": str(error)}


# In words.


def _report(found: dict[str, Any]) -> Report:
    report = Report()
    report.heading("Table")
    latest = "" if found["version"] == found["latest_version"] else f" of {found['latest_version']}"
    report.line(f"{found['table']}, version {found['version']}{latest}", "Table")
    deleted = found["deleted_rows"]
    report.line(f"{found['rows']:,}" + (f", and {deleted:,} deleted" if deleted else ""), "Rows")
    fragments = found["fragments"]
    text = f"{fragments['count']:,}"
    if fragments["count"]:
        text += (
            f", of {fragments['min_rows']:,} to {fragments['max_rows']:,} rows, "
            f"median {fragments['median_rows']:,.0f}"
        )
    report.line(text, "Fragments")
    size = found["data_bytes"]
    text = f"{found['data_files']:,}, " + ("of unknown size" if size is None else _size(size))
    report.line(f"{text}, format {found['storage_version']}", "Data files")
    report.line("stable" if found["has_stable_row_ids"] else "change in a compaction", "Row ids")
    tags = ", ".join(f"{name} (version {place})" for name, place in found["tags"].items())
    report.line(tags or "none", "Tags")
    report.line(", ".join(found["branches"]) or "none", "Branches")
    for index in found["indices"]:
        columns = ", ".join(index["columns"])
        report.line(
            f"{index['name']}: {index['kind']} on {columns}, {index['rows']:,} rows", "Index"
        )
    _add_columns(report, found)
    _add_suggestions(report, found)
    return report


def _add_columns(report: Report, found: dict[str, Any]) -> None:
    report.heading("Columns")
    rows = []
    for column in found["columns"]:
        about = "about " if column["is_estimate"] else ""
        per_row = column["bytes_per_row"]
        rows.append(
            [
                column["name"],
                column["type"],
                column["feature"] or "none: see below",
                about + _size(column["bytes"]),
                "" if per_row is None else about + _size(per_row),
            ]
        )
    report.table(["column", "type", "feature", "size", "per row"], rows)
    if any(column["is_estimate"] for column in found["columns"]):
        report.line("sizes with 'about' are estimates from a sample of rows in memory")
    for column in found["columns"]:
        if column["problem"]:
            report.line(column["problem"], column["name"])


def _add_suggestions(report: Report, found: dict[str, Any]) -> None:
    report.heading("Suggestions")
    splits = found["suggestions"]["num_splits"]
    number = splits["num_splits"]
    report.line(f"{number}: {splits['reason']}" if number else splits["reason"], "num_splits")
    report.line("for your own numbers: plan TABLE --gpus N,N --global-batch ROWS")
    clump = found["suggestions"]["shuffle_clump_size"]
    report.line(f"{clump['shuffle_clump_size']}: {clump['reason']}", "shuffle_clump_size")


def _size(size: float) -> str:
    if size < 1000:
        return f"{size:.0f} bytes"
    power = min(4, int(math.log10(size)) // 3)
    return f"{size / 1000**power:.1f} {'KMGT'[power - 1]}B"
