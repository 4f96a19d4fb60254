"""The `datasets` builder ``"lance_stream"`` and its registration."""

import difflib
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import datasets
import datasets.load
import pyarrow as pa
from datasets import packaged_modules
from datasets.builder import Key
from datasets.data_files import DataFilesDict, DataFilesList
from datasets.load import DatasetModule, PackagedDatasetModuleFactory

from hf_lance_stream.bad_rows import OnBadRows, Transform
from hf_lance_stream.blobs import Blobs
from hf_lance_stream.dataset import LanceIterableDataset
from hf_lance_stream.examples import DEFAULT_READ_BUDGET, LanceExamplesIterable
from hf_lance_stream.factory import dataset_of, examples_of
from hf_lance_stream.features import features_of
from hf_lance_stream.plan import Options, check_int
from hf_lance_stream.refs import Version
from hf_lance_stream.source import Source, open_source
from hf_lance_stream.splits import Tail
from hf_lance_stream.tables import table_of_database, tables_of_data_files

NAME = "lance_stream"
"""Name of the builder: ``load_dataset("lance_stream", …)``."""


@dataclass
class LanceStreamConfig(datasets.BuilderConfig):  # type: ignore[misc]
    """Options of the builder; all but these are those of `from_lance`.

    Attributes:
        table: name of a table of the LanceDB database at `data_dir`.
        table_version: `version` of `from_lance`; `load_dataset` takes it as ``version=``.
    """

    table: str | None = None
    table_version: Version | None = None
    features: datasets.Features | None = None
    columns: list[str] | None = None
    filter: str | None = None
    num_splits: int | None = None
    shuffle_seed: int | None = None
    shuffle_clump_size: int | None = None
    epoch: int = 0
    tail: Tail | None = None
    with_row_id: bool = False
    blobs: Blobs = "bytes"
    pickle_credentials: bool = False
    rank: int | None = None
    world_size: int | None = None
    batch_size: int | None = None
    read_budget: int = DEFAULT_READ_BUDGET
    transform: Transform | None = None
    on_bad_rows: OnBadRows = "raise"


class LanceStream(datasets.ArrowBasedBuilder):  # type: ignore[misc]
    """Streams Lance tables; see `from_lance` for the options.

    With ``streaming=False`` the rows of the epoch are written to the cache of `datasets`, in
    their order, and make a map-style dataset.
    """

    BUILDER_CONFIG_CLASS = LanceStreamConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("data_dir") is not None:
            kwargs["data_dir"] = os.fspath(kwargs["data_dir"])
        if "version" in kwargs:  # `datasets` means the version of a config by this name
            kwargs["table_version"] = kwargs.pop("version")
        super().__init__(*args, **kwargs)
        self.name = self.info.builder_name = NAME

    def _create_builder_config(
        self, config_name: str | None = None, **kwargs: Any
    ) -> tuple[LanceStreamConfig, str]:
        known = {field.name for field in fields(LanceStreamConfig)}
        for name in kwargs:
            if name not in known | {"custom_features", "config_id"}:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"; did you mean `{near[0]}`?" if near else f"; it has {sorted(known)}"
                raise ValueError(f"the builder {NAME!r} has no option `{name}`{hint}")
        config, config_id = super()._create_builder_config(config_name, **kwargs)
        if kwargs.get("custom_features") is not None:
            config.features = kwargs["custom_features"]
        self._options = Options(
            num_splits=config.num_splits,
            shuffle_seed=config.shuffle_seed,
            shuffle_clump_size=config.shuffle_clump_size,
            tail=config.tail,
            batch_size=config.batch_size,
        )
        self._sources = self._open(config)
        # The cache of a map-style dataset must not outlive a change of a table.
        versions = {
            split: [s.name, s.version, s.files_digest] for split, s in self._sources.items()
        }
        digest = hashlib.sha256(repr(versions).encode()).hexdigest()[:16]
        return config, f"{config_id}-{digest}"

    def _open(self, config: LanceStreamConfig) -> dict[str, Source]:
        if config.data_files:
            if config.table is not None:
                raise ValueError(
                    f"`table` needs `data_dir`, not `data_files`: got {config.table!r}"
                )
            tables = tables_of_data_files(dict(config.data_files))
        elif config.data_dir is not None:
            tables = {"train": [table_of_database(config.data_dir, config.table)]}
        else:
            raise ValueError(
                "name a table with `data_files`, or a LanceDB database with `data_dir` and `table`"
            )
        return {
            split: open_source(
                uris,
                columns=config.columns,
                filter=config.filter,
                version=config.table_version,
                storage_options=_lance_options(self.storage_options, uris[0]),
                with_row_id=config.with_row_id,
                blobs=config.blobs,
                pickle_credentials=config.pickle_credentials,
                argument="data_files" if config.data_files else "data_dir",
            )
            for split, uris in tables.items()
        }

    def _info(self) -> datasets.DatasetInfo:
        first = next(iter(self._sources.values()))
        return datasets.DatasetInfo(features=features_of(first, self.config.features))

    def _split_generators(self, dl_manager: Any) -> list[datasets.SplitGenerator]:
        return [
            datasets.SplitGenerator(name=split, gen_kwargs={"examples": self._examples(source)})
            for split, source in self._sources.items()
        ]

    def _examples(self, source: Source) -> LanceExamplesIterable:
        config = self.config
        return examples_of(
            source,
            self._options,
            config.features,
            config.rank,
            config.world_size,
            config.read_budget,
            config.on_bad_rows,
        )

    def _as_streaming_dataset_single(
        self, splits_generator: datasets.SplitGenerator, decode_num_threads: int | None = None
    ) -> LanceIterableDataset:
        return dataset_of(
            splits_generator.gen_kwargs["examples"],
            transform=self.config.transform,
            info=self.info,
            split=splits_generator.name,
            epoch=check_int("epoch", self.config.epoch, 0, 2**63),
            token_per_repo_id={self.repo_id: self.token} if self.repo_id else {},
        )

    def _prepare_split(self, split_generator: datasets.SplitGenerator, **kwargs: Any) -> None:
        if self.config.transform is not None:
            raise ValueError(
                "`transform` needs streaming=True: call map() on a map-style dataset instead"
            )
        features = split_generator.gen_kwargs["examples"].table_features
        if features != self.info.features:
            raise ValueError(
                f"the splits of a map-style dataset must have the same features: "
                f"{split_generator.name!r} has {features}, not {self.info.features}; choose "
                "`columns` they share, load one `split`, or use streaming=True"
            )
        super()._prepare_split(split_generator, **kwargs)

    def _generate_tables(self, examples: LanceExamplesIterable) -> Iterator[tuple[Key, pa.Table]]:
        options = replace(examples.options, epoch=check_int("epoch", self.config.epoch, 0, 2**63))
        for index, (_, table) in enumerate(examples.with_options(options).iter_arrow()):
            yield Key(0, index), table


def _lance_options(storage_options: dict[str, Any], uri: str) -> dict[str, str] | None:
    """What of ``storage_options`` is for Lance: `datasets` adds dicts for other protocols."""
    nested = storage_options.get(uri.partition("://")[0])
    options = {**storage_options, **(nested if isinstance(nested, dict) else {})}
    return {k: v for k, v in options.items() if isinstance(v, str)} or None


def register(default: bool | None = None) -> None:
    """Make ``load_dataset("lance_stream", …)`` known to `datasets`; importing the package does.

    Args:
        default: True makes this the builder of every ``.lance`` directory that `load_dataset`
            finds by itself, False gives that back to the builder of `datasets`. Default: leave
            it as it is.
    """
    # Private: the registry of packaged builders, and that `load_dataset` imports their module
    # by name; there is no entry point for builders.
    packaged_modules._PACKAGED_DATASETS_MODULES[NAME] = (__name__, _code_hash())
    builtin = "lance"
    for registry in (
        packaged_modules._MODULE_TO_EXTENSIONS,
        packaged_modules._MODULE_TO_METADATA_EXTENSIONS,
        packaged_modules._MODULE_TO_METADATA_FILE_NAMES,
    ):
        registry[NAME] = registry[builtin]
    if default is not None:
        packaged_modules._EXTENSION_TO_MODULE[".lance"] = (NAME if default else builtin, {})
    # Private: `get_module` is where `load_dataset` resolves `data_files` to files. It would find
    # none for the directory of a table, list all files of a glob, and need a driver for a URI.
    if PackagedDatasetModuleFactory.get_module is not _get_module:
        PackagedDatasetModuleFactory.get_module = _get_module


def _code_hash() -> str:
    from hf_lance_stream import __version__

    return hashlib.sha256(f"{NAME} {__version__}".encode()).hexdigest()


_original_get_module = PackagedDatasetModuleFactory.get_module


def _get_module(self: PackagedDatasetModuleFactory) -> DatasetModule:
    """`PackagedDatasetModuleFactory.get_module`, but for our builder tables, not files."""
    if self.name != NAME:
        return _original_get_module(self)
    tables: dict[str, list[str]] = {}
    if self.data_files is not None:
        base = None if self.data_dir is None else os.fspath(self.data_dir)
        tables = tables_of_data_files(self.data_files, base)
    elif self.data_dir is None:
        raise ValueError(
            'name a table with data_files, such as load_dataset("lance_stream", '
            'data_files="pets.lance"), or a LanceDB database with data_dir and table'
        )
    module_path, code_hash = packaged_modules._PACKAGED_DATASETS_MODULES[NAME]
    data_files = DataFilesDict({s: DataFilesList(uris, []) for s, uris in tables.items()})
    return DatasetModule(module_path, code_hash, {"data_files": data_files, "dataset_name": NAME})
