"""Scrambled Sobol sequences, point for point those of SciPy, whose module for them takes a second to import.

The direction numbers are those of Joe and Kuo (2008), "Constructing Sobol sequences with better two-dimensional
projections"; the scrambling is that of Matoušek (1998): a random lower triangular matrix of bits for each dimension,
and a random shift.
"""

from collections.abc import Iterator

import numpy as np

BITS = 30
"""Of each number."""
_DIRECTIONS: tuple[tuple[int, tuple[int, ...]], ...] = (
    (1, ()),
    (3, (1,)),
    (7, (1, 3)),
    (11, (1, 3, 1)),
    (13, (1, 1, 1)),
    (19, (1, 1, 3, 3)),
    (25, (1, 3, 5, 13)),
    (37, (1, 1, 5, 5, 17)),
    (41, (1, 1, 5, 5, 5)),
    (47, (1, 1, 7, 11, 19)),
    (55, (1, 1, 5, 1, 1)),
    (59, (1, 1, 1, 3, 11)),
    (61, (1, 3, 5, 5, 31)),
    (67, (1, 3, 3, 9, 7, 49)),
    (91, (1, 1, 1, 15, 21, 21)),
    (97, (1, 3, 1, 13, 27, 49)),
    (103, (1, 1, 1, 15, 7, 5)),
    (109, (1, 3, 1, 15, 13, 25)),
    (115, (1, 1, 5, 5, 19, 61)),
    (131, (1, 3, 7, 11, 23, 15, 103)),
    (137, (1, 3, 7, 13, 13, 15, 69)),
    (143, (1, 1, 3, 13, 7, 35, 63)),
    (145, (1, 3, 5, 9, 1, 25, 53)),
    (157, (1, 3, 1, 13, 9, 35, 107)),
    (167, (1, 3, 1, 5, 27, 61, 31)),
    (171, (1, 1, 5, 11, 19, 41, 61)),
    (185, (1, 3, 5, 3, 3, 13, 69)),
    (191, (1, 1, 7, 13, 1, 19, 1)),
    (193, (1, 3, 7, 5, 13, 19, 59)),
    (203, (1, 1, 3, 9, 25, 29, 41)),
    (211, (1, 3, 5, 13, 23, 1, 55)),
    (213, (1, 3, 7, 3, 13, 59, 17)),
    (229, (1, 3, 1, 3, 5, 53, 69)),
    (239, (1, 1, 5, 5, 23, 33, 13)),
    (241, (1, 1, 7, 7, 1, 61, 123)),
    (247, (1, 1, 7, 9, 13, 61, 49)),
    (253, (1, 3, 3, 5, 3, 55, 33)),
    (285, (1, 3, 1, 15, 31, 13, 49, 245)),
    (299, (1, 3, 5, 15, 31, 59, 63, 97)),
    (301, (1, 3, 1, 11, 11, 11, 77, 249)),
    (333, (1, 3, 1, 11, 27, 43, 71, 9)),
)
"""For each dimension a primitive polynomial over GF(2), its coefficients as bits, and the first direction numbers."""
MOST_DIMENSIONS = len(_DIRECTIONS)


def sobol(dimensions: int, count: int, generator: np.random.Generator) -> Iterator[np.ndarray]:
    """A scrambled Sobol sequence in endless blocks `[count, dimensions]`, each of which continues the last.

    Args:
        dimensions: at most `MOST_DIMENSIONS`.
        count: points in a block.
        generator: of the scrambling.

    >>> next(sobol(2, 4, np.random.default_rng(0))).round(3).tolist()
    [[0.41, 0.964], [0.722, 0.108], [0.905, 0.529], [0.217, 0.414]]
    """
    (generator,) = generator.spawn(1)  # as SciPy does
    shift = generator.integers(2, size=(dimensions, BITS), dtype=np.uint32) @ (1 << np.arange(BITS, dtype=np.uint32))
    lower = np.tril(generator.integers(2, size=(dimensions, BITS, BITS), dtype=np.uint32))
    directions = _scrambled(np.stack([_directions(d) for d in range(dimensions)]), lower)
    last, drawn = shift, 0
    while True:
        # Point n differs from point n − 1 in the direction of the lowest bit of n − 1 that is 0.
        numbers = np.arange(max(drawn - 1, 0), drawn + count - 1)
        lowest = [int(~number & (number + 1)).bit_length() - 1 for number in numbers.tolist()]
        changes = directions[:, lowest].T
        points = np.bitwise_xor.accumulate(np.concatenate([last[None], changes]), axis=0)
        yield (points if drawn == 0 else points[1:]) * 2.0**-BITS
        last, drawn = points[-1], drawn + count


def _directions(dimension: int) -> np.ndarray:
    """The direction numbers of one dimension, uint32 `[BITS]`, the highest bit first."""
    polynomial, first = _DIRECTIONS[dimension]
    degree, found = len(first), list(first) or [1] * BITS
    for number in range(len(found), BITS):
        following = found[number - degree]
        for k in range(1, degree + 1):
            if polynomial >> (degree - k) & 1:
                following ^= found[number - k] << k
        found.append(following)
    return np.array([value << (BITS - 1 - place) for place, value in enumerate(found)], np.uint32)


def _scrambled(directions: np.ndarray, lower: np.ndarray) -> np.ndarray:
    """Multiply the bits of direction numbers `[D, BITS]` by matrices `[D, BITS, BITS]`, whose diagonals become 1."""
    lower = np.where(np.eye(BITS, dtype=bool), 1, lower)
    places = np.arange(BITS - 1, -1, -1, dtype=np.uint32)
    bits = directions[..., None] >> places & 1  # [D, BITS, BITS], the highest bit first
    mixed = np.einsum("dpk,djk->djp", lower, bits) & 1
    return (mixed << places).sum(axis=-1, dtype=np.uint32)
