"""Plain types for those that features cannot hold, also of slices and of several chunks."""

import pyarrow as pa
import pytest
from arrow_types import COLUMNS, OTHER, SAME, UNSTORABLE, with_nulls

from hf_lance_stream.plain_types import plain_column, plain_type

PLAIN = [name for name in OTHER if "view" not in name and name != "json in large strings"]


@pytest.mark.parametrize("nulls", [[], [0, 3], range(6)], ids=["no nulls", "nulls", "only nulls"])
@pytest.mark.parametrize("name", PLAIN)
def test_slices_and_chunks_are_made_plain_without_loss(name, nulls):
    stored, given = (with_nulls(array, nulls) for array in OTHER[name])
    assert plain_type(stored.type) == given.type
    chunks = [stored.slice(0, 2), stored.slice(2, 3), stored.slice(5), stored.slice(6)]
    plain = plain_column(pa.chunked_array(chunks), given.type)
    plain.validate(full=True)
    assert repr(plain.to_pylist()) == repr(given.to_pylist())


@pytest.mark.parametrize("name", [*SAME, "json", "struct of json", *UNSTORABLE])
def test_other_types_stay_and_are_not_copied(name):
    array = (COLUMNS | {n: (a, a) for n, a in UNSTORABLE.items()})[name][0]
    column = pa.chunked_array([array])
    assert plain_type(array.type) == array.type
    assert plain_column(column, array.type) is column


@pytest.mark.parametrize("shape", [[], [6], [2, 3], [1, 2, 3, 1]], ids=str)
def test_tensors_of_any_shape_are_nested_lists(shape):
    kind = pa.fixed_shape_tensor(pa.int8(), shape)
    size = kind.storage_type.list_size
    storage = pa.array([None, list(range(size)), list(range(size))], kind.storage_type)
    tensors = pa.ExtensionArray.from_storage(kind, storage)
    plain = plain_column(pa.chunked_array([tensors.slice(1)]), plain_type(kind))
    plain.validate(full=True)
    found = plain.to_pylist()[0]
    for length in shape or [1]:
        assert len(found) == length
        found = found[-1]
    assert found == size - 1


def test_tensors_with_permuted_dimensions_stay():
    kind = pa.fixed_shape_tensor(pa.int8(), [2, 3], permutation=[1, 0])
    assert plain_type(kind) == kind
    plain = plain_type(pa.fixed_shape_tensor(pa.int8(), [2, 3], permutation=[0, 1]))
    assert plain == pa.list_(pa.list_(pa.int8(), 3), 2)
