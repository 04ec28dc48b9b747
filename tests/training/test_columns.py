import numpy as np
import pytest

from lehr.errors import InputError
from lehr.training import columns


def rows(begin, count, members=3):
    update = np.arange(begin + 1, begin + count + 1)
    return {"update": update, "loss": update[:, None] * np.ones(members), "other": np.zeros((count, members))}


def test_rows_of_several_files_are_one_table(tmp_path):
    columns.write(tmp_path / "m", 0, rows(0, 4))
    columns.write(tmp_path / "m", 4, rows(4, 3))
    found = columns.read(tmp_path / "m", ["update", "loss"])
    assert found["update"].tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert found["loss"][:, 2].tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert list(found) == ["update", "loss"]


def test_rows_after_a_checkpoint_are_cut(tmp_path):
    for begin in (0, 4, 8):
        columns.write(tmp_path, begin, rows(begin, 4))
    (tmp_path / "000000000012.npz.tmp").write_text("torn")
    columns.cut(tmp_path, 8)
    assert columns.read(tmp_path, ["update"])["update"].tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000000000000.npz", "000000000004.npz"]
    columns.cut(tmp_path, 0)
    assert columns.read(tmp_path, ["update"])["update"].tolist() == []


@pytest.mark.parametrize("content", [b"", b"no archive"])
def test_a_damaged_file_is_one_sentence(tmp_path, content):
    (tmp_path / "000000000000.npz").write_bytes(content)
    with pytest.raises(InputError, match="has no readable metrics"):
        columns.read(tmp_path, ["update"])


def test_a_missing_metric_is_one_sentence(tmp_path):
    columns.write(tmp_path, 0, rows(0, 2))
    with pytest.raises(InputError, match="has no readable metrics"):
        columns.read(tmp_path, ["reward"])
