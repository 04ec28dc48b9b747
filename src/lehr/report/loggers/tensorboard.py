"""TensorBoard's event files, written without TensorBoard.

A file is a sequence of records (TFRecord), each a protocol-buffer message `Event`. Scalars need these fields:

    Event    1: double wall_time   2: int64 step   3: string file_version   5: Summary   7: SessionLog
    Summary  1: repeated Value     Value  1: string tag   2: float simple_value     SessionLog  1: enum status
"""

import functools
import struct
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from lehr.files import make_directory

_BLOCK = 1024
_SESSION_START = b"\x3a\x02\x08\x01"  # field 7 of an Event, 2 bytes long: field 1, status START


class TensorBoard:
    """Write each number of a row as a scalar at the row's `env_steps`; strings are skipped.

    Args:
        directory: where to put the event file; each instance writes its own file.
        after: for a resumed run, the env steps of the last row to keep; TensorBoard hides later rows in earlier files.
    """

    def __init__(self, directory: Path, after: int | None = None) -> None:
        make_directory(directory)
        self._file = (directory / f"events.out.tfevents.{time.time_ns()}").open("xb")
        self._write(0, _field(3, b"brain.Event:2"))
        if after is not None:
            self._write(after + 1, _SESSION_START)

    def log(self, row: Mapping[str, float | str]) -> None:
        """Append one event with all numbers of a row."""
        scalars = {name: value for name, value in row.items() if name != "env_steps" and not isinstance(value, str)}
        with np.errstate(over="ignore"):
            values = np.array(list(scalars.values()), np.float64).astype("<f4")
        summary = [_value_field(name) + value.tobytes() for name, value in zip(scalars, values, strict=True)]
        self._write(int(row["env_steps"]), _field(5, b"".join(summary)))

    def flush(self) -> None:
        """Write all events to the operating system."""
        self._file.flush()

    def close(self) -> None:
        """Flush and close the file."""
        self._file.close()

    def _write(self, step: int, what: bytes) -> None:
        event = b"\x09" + struct.pack("<d", time.time()) + b"\x10" + _varint(step) + what
        length = struct.pack("<Q", len(event))
        self._file.write(length + _masked_checksum(length) + event + _masked_checksum(event))


# Protocol buffers --------------------------------------------------------------------------------------------------


def _varint(number: int) -> bytes:
    """Encode with seven bits per byte, lowest first; the high bit marks that more bytes follow."""
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*encoded, number])


def _field(number: int, content: bytes) -> bytes:
    """Encode a string or message field."""
    return bytes([number << 3 | 2]) + _varint(len(content)) + content


@functools.lru_cache(4096)
def _value_field(tag: str) -> bytes:
    """Encode field 1 of a Summary up to its last four bytes, which are the value."""
    return _field(1, _field(1, tag.encode()) + b"\x15" + bytes(4))[:-4]


# CRC-32C -----------------------------------------------------------------------------------------------------------


def _masked_checksum(data: bytes) -> bytes:
    """Return the checksum as TFRecord stores it: rotated by 15 bits, plus a constant."""
    checksum = crc32c(data)
    return struct.pack("<I", ((checksum >> 15 | checksum << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def crc32c(data: bytes) -> int:
    """Compute CRC-32C (Castagnoli).

    The remainder is linear: that of a block is the XOR of the remainders of its bytes at their positions, which are
    looked up for all bytes at once. The remainder of the previous blocks is XORed into the first four bytes.

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    table = _remainders()
    remainder = 0xFFFFFFFF
    for start in range(0, len(data), _BLOCK):
        block = np.frombuffer(data[start : start + _BLOCK], np.uint8).copy()
        block[:4] ^= np.frombuffer(remainder.to_bytes(4, "little")[: len(block)], np.uint8)
        places = np.arange(len(block))[::-1]
        remainder = remainder >> 8 * len(block) ^ int(np.bitwise_xor.reduce(table[places, block]))
    return remainder ^ 0xFFFFFFFF


@functools.cache
def _remainders() -> np.ndarray:
    """Return the remainder of each byte followed by 0 to `_BLOCK` − 1 zero bytes, uint32 `[_BLOCK, 256]`."""
    alone = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        alone = np.where(alone & 1, alone >> 1 ^ np.uint32(0x82F63B78), alone >> 1)
    rows = [alone]
    while len(rows) < _BLOCK:
        rows.append(alone[rows[-1] & 0xFF] ^ rows[-1] >> 8)
    return np.stack(rows)
