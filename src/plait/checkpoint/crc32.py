"""CRC-32 of data of which several readers each read a part.

[Note: CRC of parts]
Apart from its initial and final XOR, CRC-32 is linear over GF(2): it is the remainder of the message, as a
polynomial, modulo one of degree 32 (W. W. Peterson, D. T. Brown, "Cyclic Codes for Error Detection", 1961,
section II). A message is the sum (XOR) of its parts, each padded with zeros, and so is its remainder;
appending a zero byte to a message multiplies the remainder by x^8. So readers of disjoint parts compute the
remainders of their parts, and the sum of these verifies the complete message. No reader has to read a byte
that it does not need.
"""

import functools
import zlib

_POLYNOMIAL = 0xEDB88320  # zlib's, lowest bit first: bit 31 is the coefficient of x^0
_ONES = 0xFFFFFFFF


class Remainder:
    """The remainder of one part of a message, or of several added in order, padded with zeros."""

    def __init__(self) -> None:
        self._at = 0
        self._value = 0

    def add(self, at: int, data: "bytes | bytearray | memoryview") -> None:
        """Add `data`, which starts `at` bytes into the message, after everything added before."""
        assert at >= self._at, f"byte {at} after byte {self._at}"
        self._value = zlib.crc32(data, _multiply_by_x8n(self._value, at - self._at) ^ _ONES) ^ _ONES
        self._at = at + len(data)

    def in_message_of(self, num_bytes: int) -> int:
        """Return the remainder, padded to a message of `num_bytes`."""
        return _multiply_by_x8n(self._value, num_bytes - self._at)


def crc_of_remainder(remainder: int, num_bytes: int) -> int:
    """Return the CRC-32 of a message from the XOR of its parts' remainders."""
    return remainder ^ _multiply_by_x8n(_ONES, num_bytes) ^ _ONES


def _multiply_by_x8n(value: int, num_bytes: int) -> int:
    if not (value and num_bytes):
        return value
    first, second, third, fourth = _table(num_bytes)
    return first[value & 255] ^ second[value >> 8 & 255] ^ third[value >> 16 & 255] ^ fourth[value >> 24]


@functools.lru_cache(maxsize=1024)  # 1024 numbers each; the rows of a box have equal distances
def _table(num_bytes: int) -> tuple[list[int], list[int], list[int], list[int]]:
    factor, power, left = 1 << 31, 1 << 23, num_bytes  # x^0, x^8
    while left:
        factor = _multiply(factor, power) if left & 1 else factor
        power, left = _multiply(power, power), left >> 1
    bits = [_multiply(1 << bit, factor) for bit in range(32)]
    first, second, third, fourth = ([0] * 256 for _ in range(4))
    for byte, table in enumerate((first, second, third, fourth)):
        for value in range(1, 256):
            low = value & -value
            table[value] = table[value ^ low] ^ bits[8 * byte + low.bit_length() - 1]
    return first, second, third, fourth


def _multiply(one: int, other: int) -> int:
    result = 0
    for bit in range(31, -1, -1):
        if one >> bit & 1:
            result ^= other
        other = other >> 1 ^ (_POLYNOMIAL if other & 1 else 0)
    return result
