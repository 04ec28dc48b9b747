"""The string form of a schedule: parsing and printing.

    schedule := phase ("," phase)*
              | point ("," point)* [curve | "step"]
    phase    := "warmup" position
              | value ["->" value [curve]] ("from" position | "over" position | "until" position | "repeat" count)*
    point    := value "at" position
    curve    := "constant" | "linear" | "cosine" ["(" exponent ")"] | "exponential" | "polynomial" "(" power ")"
    position := amount (("+" | "-") amount)*      500k · 2M · 1.5B · 1e6 · 20%

`over` is the length of a phase and `until` the position where it ends; with both, `over` is the length of the curve and
`until` where the next phase begins. A phase with neither takes the rest of the budget; a constant at the end lasts
forever.
"""

import itertools
import math
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any, NamedTuple, NoReturn

from lehr.errors import InputError, closest, quoted, shortened
from lehr.schedules.phases import END, MOST_STEPS, MULTIPLIERS, Phase, Position, number_text
from lehr.schedules.schedule import Schedule
from lehr.schedules.shapes import CODES, NAMES

MOST_CYCLES = 10_000
"""Limit on `repeat`: each cycle is a phase, and each evaluation looks at all phases."""

_WORDS = ("warmup", "from", "over", "until", "repeat", "at", "step", *NAMES)
_OTHER_WORDS = {"to": "->", "for": "over", "in": "over", "within": "over", "after": "from", "by": "until", "then": ","}
"""What users write instead of a word of the grammar."""
_UNITS = ("steps", "timesteps", "env_steps")
"""What users write after a position, whose unit is an env step anyway."""
_AMOUNT = r"(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)(?:[eE][+-]?\d+)?"
_THOUSANDS = re.compile(r"[1-9]\d*(?:,\d{3})+(?!\d)")
_WARMUP_FIRST = "'warmup' comes first, as in 'warmup 5%, 1e-3 -> 1e-4 linear'"
_TOKEN = re.compile(
    rf"\s*(?:(?P<amount>{_AMOUNT})(?P<unit>\s*%|[A-Za-z]+)?|(?P<arrow>->|→)|(?P<word>[A-Za-z_]\w*)|(?P<sign>[-+(),=]))"
)


class Token(NamedTuple):
    """A token of the string: its kind, its text, and its position."""

    kind: str
    text: str
    place: int


def parse(text: str) -> Schedule:
    """Parse a schedule from its string form.

    >>> parse("0 -> 0.03 over 5%, 0.03 -> 0.001 cosine").bind(100)(5)
    0.03
    """
    return Schedule(_Parser(text).schedule())


def parse_number(text: str) -> float:
    """Parse a number, with or without a multiplier.

    >>> parse_number("1.5M")
    1500000.0
    """
    return _whole(text, _Parser.value)


def parse_position(text: str) -> Position:
    """Parse a position.

    >>> parse_position("20%")
    Position(steps=0.0, share=0.2)
    """
    return _whole(text, _Parser.position)


def _whole(text: str, rule: Callable[["_Parser"], Any]) -> Any:
    parser = _Parser(text)
    result = rule(parser)
    parser.expect("end", "the end")
    return result


class _Parser:
    """A recursive-descent parser with one method per rule; every error says what was expected, and where."""

    def __init__(self, text: str) -> None:
        self.text = text
        if not text.strip():
            raise InputError(
                "The schedule is an empty string; give a number or phases, for example '0.03 -> 0.001 cosine'."
            )
        self.tokens = self._split()
        self.next = 0

    def _split(self) -> list[Token]:
        tokens, place = [], 0
        text = self.text.rstrip()
        while place < len(text):
            match = _TOKEN.match(text, place)
            if match is None:
                place += len(text[place:]) - len(text[place:].lstrip())
                hint = "; did you mean '->'?" if text[place] in ">⇒" else ""
                raise self._error(f"unexpected character {text[place]!r}{hint}", place)
            kind = "amount" if match["amount"] else str(match.lastgroup)
            begin = match.start(kind)
            tokens.append(Token(kind, text[begin : match.end()], begin))
            place = match.end()
        return [*tokens, Token("end", "the end", len(text))]

    def _error(self, what: str, place: int) -> InputError:
        stop = "" if what.endswith("?") else "."
        return InputError(f"In the schedule {shortened(self.text, 400)!r}, character {place + 1}: {what}{stop}")

    def fail(self, what: str) -> NoReturn:
        raise self._error(what, self.token.place)

    @property
    def token(self) -> Token:
        return self.tokens[self.next]

    def take(self, *texts: str) -> str | None:
        """Consume the next token if it is one of these; otherwise return `None`."""
        token = self.token
        if token.text in texts and token.kind != "end":
            self.next += 1
            return token.text
        return None

    def expect(self, kind: str, wanted: str) -> Token:
        token = self.token
        if token.kind != kind:
            self.unexpected(wanted)
        self.next += 1
        return token

    def unexpected(self, wanted: str) -> NoReturn:
        found = "but the schedule ends here" if self.token.kind == "end" else f"got {quoted(self.token.text)}"
        self.fail(f"expected {wanted}, {found}")

    # Numbers -----------------------------------------------------------------------------------------------------

    def _amount(self, wanted: str) -> tuple[Decimal, str]:
        """Parse a number and its unit, '' or '%'."""
        token = self.expect("amount", wanted)
        match = re.fullmatch(rf"({_AMOUNT})(.*)", token.text)
        assert match is not None
        digits, unit = match[1].replace("_", ""), match[2].strip()
        if grouped := _THOUSANDS.match(self.text, token.place):
            plain = grouped[0].replace(",", "")
            what = f"has a comma for its thousands; write {plain}, or a space after a comma that ends a phase"
            raise self._error(f"{quoted(grouped[0])} {what}", token.place)
        if unit != "%" and unit not in MULTIPLIERS:
            known = f"did you mean '{unit.upper()}'?" if unit in ("m", "b") else "known: k, M, B, %"
            what = (
                f"needs a space before {quoted(unit)}"
                if unit in _WORDS
                else f"has the unknown unit {quoted(unit)}; {known}"
            )
            raise self._error(f"{quoted(token.text)} {what}", token.place)
        try:
            amount = Decimal(digits) * MULTIPLIERS.get(unit, 1)
        except ArithmeticError:
            amount = Decimal("inf")
        if math.isinf(float(amount)):
            raise self._error(f"{quoted(token.text)} is too large for a number", token.place)
        return amount, "%" if unit == "%" else ""

    def value(self, wanted: str = "a value") -> float:
        negative = self.take("-", "+") == "-"
        if self.token.kind == "word" and self.token.text.lower() in ("nan", "inf", "infinity"):
            self.fail(f"{quoted(self.token.text)} is not a finite number")
        if self.token.text in NAMES:
            name = self.token.text
            self.fail(f"expected {wanted}, got {quoted(name)}; a shape comes last, as in '0.1 -> 0 {name}'")
        token = self.token
        amount, unit = self._amount(wanted)
        if unit:
            raise self._error(f"expected {wanted}, got the share of the budget {quoted(token.text)}", token.place)
        return float(-amount if negative else amount)

    def position(self) -> Position:
        total, sign = Position(), 1
        while True:
            token = self.token
            amount, unit = self._amount("a number of steps or a percentage")
            if unit and amount > 100 + Decimal("1e-9"):
                raise self._error(f"{quoted(token.text)} is more than 100% of the budget", token.place)
            here = Position(share=float(amount / 100)) if unit else Position(steps=float(amount))
            total = total.plus(here, sign)
            if self.token.text in _UNITS:
                self.fail(f"positions are env steps; leave out the word {quoted(self.token.text)}")
            following = self.take("+", "-")
            if following is None:
                return total
            sign = 1 if following == "+" else -1

    # Phases ------------------------------------------------------------------------------------------------------

    def curve(self) -> tuple[str, float]:
        """Parse a shape and its power."""
        name = self.token.text
        self.next += 1
        power = 1.0
        if name in ("cosine", "polynomial"):
            if self.take("("):
                power = self.value("an exponent" if name == "cosine" else "a power")
                if not self.take(")"):
                    self.unexpected("')'")
            elif name == "polynomial":
                self.fail("'polynomial' needs a power, for example polynomial(2)")
        return name, power

    def schedule(self) -> list[Phase]:
        if any(token.text == "at" for token in self.tokens):
            return self.points()
        warmup = self.position() if self.take("warmup") else None
        phases: list[Phase] = []
        begin = Position()
        if warmup is not None:
            if not self.take(","):
                self.unexpected("a comma and a phase after the warm-up")
            begin = warmup
        while True:
            begin = self.phase(phases, begin)
            if not self.take(","):
                break
        self.expect("end", "a comma or the end")
        if warmup is not None:
            phases.insert(0, Phase(Position(), warmup, 0.0, phases[0].start))
        return phases

    def phase(self, phases: list[Phase], begin: Position) -> Position:
        """Parse a phase, append it or its cycles to `phases`, and return where the next phase begins."""
        if self.token.text == "warmup":
            self.fail(_WARMUP_FIRST)
        first = self.token
        start = end = self.value()
        shape, power = "constant", 1.0
        if self.take("->", "→"):
            end, shape = self.value("a value after '->'"), "linear"
        if self.token.text in NAMES:
            named, power = self.curve()
            if (named == "constant") != (shape == "constant"):
                what = "takes one value, without '->'" if named == "constant" else "needs two values, start -> end"
                raise self._error(f"{named!r} {what}", first.place)
            shape = named
        extent = self.extent()
        if self.token.text == "," and shape == "constant" and not extent.keys() & {"over", "until"}:
            self.fail("the value before this comma needs 'over' or 'until' to say when the next phase begins")
        if self.token.kind == "end" and extent.keys() >= {"over", "until"}:
            self.fail(
                "'until' together with 'over' says where the next phase begins, but no phase follows; remove one of "
                "them"
            )
        try:
            laid, following = lay(Phase(begin, Position(), start, end, shape, power), **extent)
        except InputError as error:
            raise self._error(str(error).removesuffix("."), first.place) from None
        phases += laid
        return following

    def extent(self) -> dict[str, Any]:
        extent: dict[str, Any] = {}
        while self.token.kind == "word":
            token = self.token
            if token.text not in ("from", "over", "until", "repeat"):
                self.misplaced()
            name = "begin" if token.text == "from" else token.text
            if name in extent:
                self.fail(f"{quoted(token.text)} appears twice in one phase; remove one of them")
            self.next += 1
            extent[name] = self.value("a number of cycles") if name == "repeat" else self.position()
        return extent

    def misplaced(self) -> NoReturn:
        """Raise an error for a word that cannot stand after a phase's values and shape."""
        word = self.token.text
        if word == "warmup":
            self.fail(_WARMUP_FIRST)
        if word == "step":
            self.fail("'step' is only for points, as in '0.1 at 0, 0.01 at 20% step'")
        if word in NAMES:
            self.fail(f"{quoted(word)} comes right after the values, and only once, as in '0.1 -> 0 linear over 20%'")
        ours = f"did you mean {_OTHER_WORDS[word]!r}?" if word in _OTHER_WORDS else closest(word, _WORDS)
        self.fail(f"unknown word {quoted(word)}; {ours}")

    def points(self) -> list[Phase]:
        pairs: list[tuple[Position, float]] = []
        while True:
            value = self.value()
            if not self.take("at"):
                self.fail("expected 'at'; write the schedule either as points, 'value at step', or as phases, not both")
            pairs.append((self.position(), value))
            if not self.take(","):
                break
        if self.take("step"):
            shape, power = "step", 1.0
        else:
            shape, power = self.curve() if self.token.text in NAMES else ("linear", 1.0)
        self.expect("end", "a comma, a shape or the end")
        return phases_of_points(pairs, shape, power)


def lay(
    phase: Phase,
    begin: Position | None = None,
    over: Position | None = None,
    until: Position | None = None,
    repeat: float = 1,
) -> tuple[list[Phase], Position]:
    """Place a phase on the step axis: return it, or its cycles, and the position where the next phase begins.

    Args:
        phase: the curve; its `begin` is where the previous phase ends.
        begin: where it begins instead; the previous value holds in between.
        over: its length.
        until: where it ends; with `over`, where the next phase begins.
        repeat: the number of cycles; without `over` they divide the available length equally.
    """
    count = int(repeat) if abs(repeat) < MOST_STEPS else MOST_STEPS
    if count != repeat or count < 1:
        raise InputError(f"a phase cannot repeat {repeat:g} times; give a whole number, 1 or more.")
    if count > MOST_CYCLES:
        raise InputError(f"a phase cannot repeat {repeat:g} times; the maximum is {MOST_CYCLES}.")
    if count > 1 and over is not None and until is not None:
        raise InputError("a repeated phase takes 'over' or 'until', not both.")
    if begin is not None:
        if begin.plus(phase.begin, -1).sign() == -1:
            raise InputError(
                f"a phase begins at {begin}, before the previous one ends at {phase.begin}; phases must not overlap."
            )
        phase = phase._replace(begin=begin)
    room = (until or END).plus(phase.begin, -1)
    if until is not None and room.sign() in (0, -1):
        raise InputError(f"a phase begins at {phase.begin} and ends at {until}; it must end after it begins.")
    if over is not None:
        if over.sign() in (0, -1):
            raise InputError(f"a phase has length {over}; it must be above 0.")
        length = over
    elif phase.needs_length or until is not None:
        if room.sign() in (0, -1):
            raise InputError(
                "a phase begins when no budget is left; begin it earlier, or end the previous phase earlier."
            )
        length = room.scaled(1 / count)
    else:
        length = Position()
    cycles = [phase._replace(begin=phase.begin.plus(length, cycle), length=length) for cycle in range(count)]
    return cycles, phase.begin.plus(length, count) if until is None else until


def phases_of_points(pairs: list[tuple[Position, float]], shape: str = "linear", power: float = 1.0) -> list[Phase]:
    """Return phases that interpolate between points; with the shape `step` each value holds until the next point."""
    if not pairs:
        raise InputError("A schedule of points needs at least one point; give, for example, [[0, 0.01]].")
    if shape != "step" and shape not in CODES:
        raise InputError(f"Unknown shape {shape!r} between points; {closest(shape, ('step', *NAMES))}")
    for (here, _), (there, _) in itertools.pairwise(pairs):
        if there.plus(here, -1).sign() in (0, -1):
            raise InputError(
                f"The point at {there} comes after the point at {here}; list points in increasing order of steps, "
                "without duplicates."
            )
    first, last = pairs[0], pairs[-1]
    if len(pairs) == 1:
        return [Phase(Position(), Position(), first[1], first[1], "constant")]
    phases: list[Phase] = []
    for (here, start), (there, end) in itertools.pairwise(pairs):
        if shape == "step":
            here = here if phases else Position()
            phases.append(Phase(here, there.plus(here, -1), start, start, "constant"))
        else:
            phases.append(Phase(here, there.plus(here, -1), start, end, shape, power))
    if shape == "step":
        phases.append(Phase(last[0], Position(), last[1], last[1], "constant"))
    return phases


# Printing ----------------------------------------------------------------------------------------------------------


def to_text(schedule: Schedule) -> str:
    """Return the string form of a schedule; parsing it gives an equal schedule."""
    phases = schedule.phases
    texts = []
    begin, index = Position(), 0
    while index < len(phases):
        phase = phases[index]
        count = _cycles(phases[index:])
        following = phases[index + count].begin if index + count < len(phases) else None
        if count > 1 and following not in (None, phase.begin.plus(phase.length, count)):
            count -= 1  # the last cycle is cut short or held, so it is written separately
            following = phases[index + count].begin
        came_from = f" from {phase.begin}" if phase.begin != begin else ""
        extent, begin = _extent_text(phase, following, count)
        texts.append(_curve_text(phase) + came_from + extent)
        index += count
    return ", ".join(texts)


def _cycles(phases: list[Phase]) -> int:
    """Count the leading phases that are cycles of the first one, as `repeat` would produce them."""
    first, count = phases[0], 1
    if not first.needs_length:
        return 1
    while count < len(phases) and phases[count] == first._replace(begin=first.begin.plus(first.length, count)):
        count += 1
    return count


def _curve_text(phase: Phase) -> str:
    if phase.shape == "constant":
        return number_text(phase.start)
    text = f"{number_text(phase.start)} -> {number_text(phase.end)}"
    if phase.shape == "linear":
        return text
    if phase.shape == "polynomial" or phase.power != 1:
        return f"{text} {phase.shape}({number_text(phase.power)})"
    return f"{text} {phase.shape}"


def _extent_text(phase: Phase, following: Position | None, count: int) -> tuple[str, Position]:
    """Return the extent of a phase or of its cycles as a string, and where the next phase begins."""
    if not phase.needs_length:
        return ("", phase.begin) if following is None else (f" until {following}", following)
    repeat = f" repeat {count}" if count > 1 else ""
    if following is None and END.plus(phase.begin, -1).scaled(1 / count) == phase.length:
        return repeat, END
    stop = phase.begin.plus(phase.length, count)
    target = stop if following is None else following
    over, until = f" over {phase.length}", f" until {target}"
    exact = [over + repeat] if target == stop else []
    if count == 1 and target.plus(phase.begin, -1) == phase.length:
        exact.append(until)
    return min(exact, key=len, default=over + until), target
