"""Hypothesis strategies for schedules and their texts."""

from hypothesis import strategies as st

from lehr.schedules import Schedule, parse
from lehr.schedules.phases import Phase, Position

values = st.floats(1e-6, 10.0).map(lambda x: float(f"{x:.4g}"))
any_values = st.one_of(values, values.map(lambda x: -x), st.just(0.0))
powers = st.sampled_from([0.5, 1.0, 1.7, 2.0, 3.0])
lengths = st.integers(1, 10**7)


@st.composite
def curves(draw):
    """(start, end, shape, power), legal for its shape."""
    shape = draw(st.sampled_from(["constant", "linear", "cosine", "exponential", "polynomial"]))
    if shape == "exponential":
        return draw(values), draw(values), shape, 1.0
    start = draw(any_values)
    end = start if shape == "constant" else draw(any_values)
    return start, end, shape, draw(powers) if shape in ("cosine", "polynomial") else 1.0


@st.composite
def bound_schedules(draw, most_phases=5):
    """Bound schedules with holds between phases and phases that the next one cuts short."""
    phases, begin = [], float(draw(st.one_of(st.just(0), lengths)))
    for _ in range(draw(st.integers(1, most_phases))):
        start, end, shape, power = draw(curves())
        length = draw(lengths)
        phases.append(Phase(Position(begin), Position(float(length)), start, end, shape, power))
        begin += draw(st.one_of(st.just(length), lengths))
    return Schedule(phases)


@st.composite
def texts(draw):
    """Lines of the grammar, unbound ones among them."""
    shares = sorted(draw(st.sets(st.integers(1, 99), max_size=4)))
    pieces = [f"warmup {shares.pop(0)}%"] if shares and draw(st.booleans()) else []
    extents = [f" until {share}%" for share in shares] + [
        draw(st.sampled_from(["", " over 1k", " repeat 3", " over 2.5k repeat 2"]))
    ]
    for extent in extents:
        start, end, shape, power = draw(curves())
        if shape == "constant":
            extent = extent.split(" repeat")[0]
            pieces.append(f"{start}{extent}")
            continue
        name = {"linear": draw(st.sampled_from(["", " linear"])), "exponential": " exponential"}
        named = name.get(shape) if shape in name else f" {shape}({power})"
        pieces.append(f"{start} -> {end}{named}{extent}" if start != end else f"{start}{extent.split(' repeat')[0]}")
    return ", ".join(pieces)


def unbound_schedules():
    """Schedules from texts of the grammar."""
    return texts().map(parse)
