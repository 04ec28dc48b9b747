"""metrics.jsonl: every number reads back exactly, and a torn or outdated end is cut."""

import json
import math
import struct

import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest

from lehr.errors import InputError
from lehr.report.loggers import jsonl


def write(path, *rows):
    log = jsonl.JsonLines(path)
    for row in rows:
        log.log(row)
    log.close()
    return path


names = st.sampled_from(["update", "loss/total", "coef/entropy_coef"])


@hypothesis.settings(max_examples=50)
@hypothesis.given(
    st.lists(st.dictionaries(names, st.floats(width=32) | st.floats()), min_size=1).filter(lambda rows: any(rows))
)
def test_every_float_reads_back_bit_for_bit(tmp_path_factory, rows):
    columns = jsonl.read(write(tmp_path_factory.mktemp("any") / "m.jsonl", *rows))
    assert set(columns) == set().union(*rows)
    for name, column in columns.items():
        expected = [float(row.get(name, math.nan)) for row in rows]
        assert column.dtype == np.float64
        assert [_bits(value) for value in column] == [_bits(value) for value in expected]


def _bits(value):
    return "NaN" if math.isnan(value) else struct.pack("<d", value)


def test_float32_values_of_any_origin_read_back_exactly(tmp_path):
    value = np.float32(0.1)
    path = write(
        tmp_path / "m.jsonl", {"numpy": value, "jax": jnp.float32(0.1), "float": float(value), "count": np.int64(7)}
    )
    columns = jsonl.read(path)
    assert [np.float32(columns[name][0]) for name in ("numpy", "jax", "float")] == [value] * 3
    assert columns["numpy"][0] == float(value)
    assert columns["count"].dtype == np.int64


def test_each_line_is_strict_json(tmp_path):
    path = write(tmp_path / "m.jsonl", {"update": 1, "x": math.nan, "y": math.inf, "z": -math.inf, "why": "loss: ∞"})

    def refuse(constant):
        raise AssertionError(constant)

    assert json.loads(path.read_text("utf-8"), parse_constant=refuse) == {
        "update": 1,
        "x": "NaN",
        "y": "Infinity",
        "z": "-Infinity",
        "why": "loss: ∞",
    }


def test_rows_may_have_different_keys(tmp_path):
    path = write(
        tmp_path / "m.jsonl",
        {"update": 1, "env_steps": 10**11},
        {"update": 2, "env_steps": 2 * 10**11, "evaluate/return": 5, "problem": "the loss is NaN"},
        {"update": 3, "env_steps": 3 * 10**11, "late": 1},
    )
    columns = jsonl.read(path)
    assert columns["update"].tolist() == [1, 2, 3]
    assert columns["env_steps"].tolist() == [10**11, 2 * 10**11, 3 * 10**11]
    assert columns["env_steps"].dtype == np.int64
    np.testing.assert_array_equal(columns["evaluate/return"], [np.nan, 5, np.nan])
    np.testing.assert_array_equal(columns["late"], [np.nan, np.nan, 1])
    assert columns["problem"].tolist() == ["", "the loss is NaN", ""]


def test_texts_among_numbers_keep_both(tmp_path):
    columns = jsonl.read(write(tmp_path / "m.jsonl", {"x": 1.5}, {"x": "text"}))
    assert columns["x"].tolist() == [1.5, "text"]


def test_rows_wait_for_the_flush(tmp_path):
    log = jsonl.JsonLines(tmp_path / "m.jsonl")
    log.log({"update": 1})
    assert jsonl.read(tmp_path / "m.jsonl") == {}
    log.flush()
    assert jsonl.read(tmp_path / "m.jsonl")["update"].tolist() == [1]
    log.close()


def test_a_torn_last_line_does_not_count(tmp_path):
    path = write(tmp_path / "m.jsonl", {"update": 1}, {"update": 2})
    for cut in range(1, len('{"update": 2}\n') + 1):
        torn = tmp_path / "torn.jsonl"
        torn.write_bytes(path.read_bytes()[:-cut])
        assert jsonl.read(torn)["update"].tolist() == [1]
    path.write_bytes(path.read_bytes() + b"\0\0\0\n")
    assert jsonl.read(path)["update"].tolist() == [1, 2]


def test_a_broken_line_elsewhere_is_named(tmp_path):
    (tmp_path / "m.jsonl").write_text('{"update": 1}\n{"upd\n{"update": 3}\n')
    with pytest.raises(InputError, match=r"Line 2 of '.*m\.jsonl' is not a JSON object"):
        jsonl.read(tmp_path / "m.jsonl")


@pytest.mark.parametrize(
    "tail",
    [
        b"",
        b'{"update": 4, "x',
        b'{"update": 3}',
        b"\0\0\0",
        b"\n",
        b'"text"\n',
        b'{"x": 1}\n',
        b'{"update": "x"}\n',
        b'{"update": [1]}\n',
    ],
)
def test_a_resume_drops_later_rows_and_the_torn_end(tmp_path, tail):
    path = write(tmp_path / "m.jsonl", *({"update": update, "x": 0.5} for update in (1, 2, 2, 3, 4)))
    expected = path.read_bytes()[: -2 * len('{"update": 3, "x": 0.5}\n')]
    path.write_bytes(path.read_bytes() + tail)
    jsonl.truncate_after(path, 2)
    assert path.read_bytes() == expected
    write(path, {"update": 3, "x": 1.5})
    assert jsonl.read(path)["update"].tolist() == [1, 2, 2, 3]


def test_a_resume_at_the_last_row_changes_nothing_and_at_none_empties_the_file(tmp_path):
    path = write(tmp_path / "m.jsonl", {"update": 1}, {"update": 2})
    whole = path.read_bytes()
    jsonl.truncate_after(path, 2)
    assert path.read_bytes() == whole
    jsonl.truncate_after(path, 0)
    assert path.read_bytes() == b""
    jsonl.truncate_after(path, 0)
    jsonl.truncate_after(tmp_path / "missing.jsonl", 0)
    assert not (tmp_path / "missing.jsonl").exists()
