"""What is in the state of torchdata's loader: that of the dataset in each worker."""

from collections.abc import Mapping
from typing import Any

from hf_lance_stream.dataset import LanceIterableDataset
from hf_lance_stream.state import check_count, check_steps, differences, find_states, mapping
from hf_lance_stream.versions import accept_moved
from hf_lance_stream.wrappers import sources


def saved_workers(state: Mapping[str, Any]) -> int | None:
    """Number of workers of the loader a state is of; None for a dataset's or a portable one."""
    if isinstance(state.get("loader"), Mapping):
        return check_count(state["loader"], "num_workers")
    if "_snapshot" in state:
        return len(_worker_states(state))
    return 0 if "dataset_state" in state else None


def _worker_states(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The dataset's state in each worker, in a state of torchdata's loader with workers."""
    snapshot = state.get("_snapshot")
    snapshots = snapshot.get("_worker_snapshots") if isinstance(snapshot, Mapping) else None
    if not isinstance(snapshots, Mapping) or not snapshots:
        raise ValueError(
            f"the state is not that of a loader with workers: got {str(state)[:100]!r}"
        )
    states = [mapping(snapshots, name).get("dataset_state") for name in snapshots]
    return [state if isinstance(state, dict) else {} for state in states]


def epoch_of(state: Mapping[str, Any]) -> int:
    """Epoch in a state of torchdata's loader with workers."""
    return check_count(_worker_states(state)[0], "epoch")


def check_worker_states(
    state: Mapping[str, Any], ds: LanceIterableDataset, allow_moved: bool
) -> None:
    """Refuse workers' states of other steps, or of another table, before a process starts.

    Args:
        state: the state of the loader; with `allow_moved` it is changed in place.
        ds: the dataset, which goes to the versions of the state; unchanged where that is refused.
        allow_moved: accept states of the same table at another place.
    """
    with ds.unchanged_on_failure():
        _check_worker_states(state, ds, allow_moved)


def _check_worker_states(
    state: Mapping[str, Any], ds: LanceIterableDataset, allow_moved: bool
) -> None:
    for worker in _worker_states(state)[:1]:  # the others are refused below if theirs differ
        ds.go_to_versions_of(worker, allow_moved)
    prepared = ds.prepared_source()
    fingerprints = [examples.fingerprint for examples in sources(prepared)]
    for worker in _worker_states(state):
        nested = mapping(worker, "examples_iterable")
        check_steps(nested, prepared._state_dict)
        if allow_moved:
            accept_moved(find_states(nested), fingerprints)
        for found in find_states(nested):
            differing = [
                differences({**found}, {**one, "epoch": mapping(found, "fingerprint").get("epoch")})
                for one in fingerprints
            ]
            if all(differing):
                raise ValueError(
                    "the state does not fit this dataset: "
                    + "; ".join(sorted(differing, key=len)[0])
                )
