"""Event files, read back by TensorBoard itself."""

import math
import zlib

import numpy as np
import pytest

from lehr.report.loggers import tensorboard
from lehr.report.loggers.tensorboard import TensorBoard, crc32c


def scalars(directory):
    """What TensorBoard shows: the steps and values by tag."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator").EventAccumulator(
        str(directory), size_guidance={"scalars": 0}
    )
    accumulator.Reload()
    tags = accumulator.Tags()["scalars"]
    return {tag: [(event.step, event.value) for event in accumulator.Scalars(tag)] for tag in tags}


def test_values_and_steps_equal_what_was_logged(tmp_path):
    rng = np.random.default_rng(0)
    rows = [
        {
            "env_steps": step,
            "update": number,
            "loss/total": rng.normal() * 10.0 ** rng.integers(-40, 38),
            "coef/größe": 0.1,
        }
        for number, step in enumerate([0, 127, 128, 2**31, 10**11])
    ]
    log = TensorBoard(tmp_path)
    for row in rows:
        log.log(row | {"problem": "a text has no place here"})
    log.close()
    shown = scalars(tmp_path)
    assert set(shown) == {"update", "loss/total", "coef/größe"}
    for tag, events in shown.items():
        assert events == [(row["env_steps"], float(np.float32(row[tag]))) for row in rows]


def test_numbers_beyond_float32_are_shown_as_what_they_are(tmp_path):
    log = TensorBoard(tmp_path)
    for step, value in enumerate([math.inf, -math.inf, math.nan, 1e300, -1e300, np.float32(1e-45)]):
        log.log({"env_steps": step, "x": value})
    log.close()
    values = [value for _, value in scalars(tmp_path)["x"]]
    np.testing.assert_array_equal(values, [math.inf, -math.inf, math.nan, math.inf, -math.inf, np.float32(1e-45)])


def test_a_resumed_run_goes_on_in_a_new_file_and_hides_what_was_given_up(tmp_path):
    log = TensorBoard(tmp_path)
    for step in (100, 200, 300, 400):
        log.log({"env_steps": step, "x": 1.0})
    log.flush()  # and then the process is killed
    resumed = TensorBoard(tmp_path, after=200)
    for step in (300, 400, 500):
        resumed.log({"env_steps": step, "x": 2.0})
    resumed.close()
    assert len(list(tmp_path.iterdir())) == 2
    assert scalars(tmp_path)["x"] == [(100, 1.0), (200, 1.0), (300, 2.0), (400, 2.0), (500, 2.0)]
    log.close()


def test_events_can_be_seen_after_a_flush(tmp_path):
    log = TensorBoard(tmp_path)
    log.log({"env_steps": 1, "x": 1.0})
    assert "x" not in scalars(tmp_path)
    log.flush()
    assert scalars(tmp_path)["x"] == [(1, 1.0)]
    log.close()


def test_the_checksum_equals_its_definition():
    """Bit by bit, over lengths around the ends of a block; the same bits check zlib's CRC-32 with its polynomial."""

    def bitwise(data, polynomial):
        remainder = 0xFFFFFFFF
        for byte in data:
            remainder ^= byte
            for _ in range(8):
                remainder = remainder >> 1 ^ (polynomial if remainder & 1 else 0)
        return remainder ^ 0xFFFFFFFF

    block = tensorboard._BLOCK
    data = np.random.default_rng(0).bytes(3 * block)
    assert bitwise(data[:50], 0xEDB88320) == zlib.crc32(data[:50])
    for length in (0, 1, 2, 3, 4, 5, 8, 100, block - 1, block, block + 1, block + 3, 3 * block):
        assert crc32c(data[:length]) == bitwise(data[:length], 0x82F63B78)
