"""Random texts of schedules, valid and not, to compare two implementations of their grammar."""

import random

SHAPES = [
    "",
    "",
    " linear",
    " cosine",
    " cosine(2)",
    " cosine(0.5)",
    " exponential",
    " polynomial(2)",
    " polynomial(.5)",
]
POSITIONS = [
    "20%",
    "12.5%",
    "33.3%",
    "80%",
    "100%",
    "100%-50k",
    "10%+1k",
    "500k",
    "0.25M",
    "1e5",
    "1_000",
    "1.005k",
    "1.5B",
]
BROKEN = [
    "%",
    "->",
    "->",
    " cosin",
    "polynomial",
    "(",
    ",",
    "- ",
    "nan",
    "5x",
    "repeat 2.5",
    "until",
    " at 5%",
    "warmup 3%",
]


def texts(count, seed=0):
    """So many texts; about a fifth of them has a mistake put into it."""
    draw = random.Random(seed)
    found = [_points(draw) if draw.random() < 0.2 else _phases(draw) for _ in range(count)]
    return [_broken(draw, text) if draw.random() < 0.2 else text for text in found]


def _value(draw):
    value = draw.choice([0, 1, -1, 3, 1e-5, 2.5e-4, draw.uniform(0, 1), draw.uniform(-3, 3), 10 ** draw.uniform(-6, 3)])
    return draw.choice([f"{value:.3g}", f"{value:.6g}", repr(float(value))])


def _position(draw):
    return draw.choice(
        [*POSITIONS, f"{draw.randint(1, 99)}%", f"{draw.randint(1, 2000)}k", f"{draw.uniform(0, 100):.3g}%"]
    )


def _phases(draw):
    count = draw.choice([1, 1, 1, 2, 2, 3, 4])
    shares = sorted(draw.sample(range(1, 100), count))
    pieces = [f"warmup {draw.choice([f'{shares[0]}%', _position(draw)])}"] if draw.random() < 0.2 else []
    for index, share in enumerate(shares):
        start, end = _value(draw), _value(draw)
        curve = draw.choice([start, f"{start} -> {end}{draw.choice(SHAPES)}", f"{start}→{end}"])
        if index + 1 < count:
            extent = draw.choice([f" until {share}%", f" until {share}%", f" over {_position(draw)}"])
            if draw.random() < 0.15:
                extent = f" over {_position(draw)} until {share}%"
        else:
            extent = draw.choice(["", "", f" over {_position(draw)}", f" until {_position(draw)}", f" from {share}%"])
        if draw.random() < 0.15:
            extent += f" repeat {draw.choice([1, 2, 3, 7, 0, 20000])}"
        pieces.append(curve + extent)
    return draw.choice([", ", ",", " , "]).join(pieces)


def _points(draw):
    shares = sorted(draw.sample(range(0, 101), draw.randint(1, 5)))
    unit = draw.choice(["%", "%", "k"])
    ending = draw.choice(["", "", " step", " cosine", " polynomial(3)"])
    return ", ".join(f"{_value(draw)} at {share}{unit}" for share in shares) + ending


def _broken(draw, text):
    place = draw.randint(0, len(text))
    return text[:place] + draw.choice([*BROKEN, ""]) + text[place + draw.randint(0, 3) :]
