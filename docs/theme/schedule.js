// The text form of a schedule, parsed and evaluated as lehr.schedule does; a test compares the two on many texts.
//
// A port of src/lehr/schedules: text.py (the parser), phases.py (positions and checks) and schedule.py (bind, call).
"use strict";

const Lehr = (() => {
  const MOST_STEPS = 2 ** 48, MOST_CYCLES = 10000;
  const SMALLEST = 1.1754943508222875e-38, LARGEST = 3.4028234663852886e38; // of float32
  const SHAPES = ["constant", "linear", "cosine", "exponential", "polynomial"];
  const WORDS = ["warmup", "from", "over", "until", "repeat", "at", "step", ...SHAPES];
  const WARMUP_FIRST = "'warmup' comes first, as in 'warmup 5%, 1e-3 -> 1e-4 linear'";
  const STEPS = ["steps", "timesteps", "env_steps"];
  const CONTROLLERS = /^\s*[\w.]+(:\w+)?\s*\(.*\)\s*$/s;
  const UNITS = { "": 0, k: 3, K: 3, M: 6, B: 9 };
  const AMOUNT = "(?:\\d[\\d_]*\\.?[\\d_]*|\\.\\d[\\d_]*)(?:[eE][+-]?\\d+)?";
  const TOKEN = new RegExp(
    `\\s*(?:(?<amount>${AMOUNT})(?<unit>\\s*%|[A-Za-z]+)?|(?<arrow>->|→)|(?<word>[A-Za-z_][\\p{L}\\p{N}_]*)|(?<sign>[-+(),=]))`,
    "uy",
  );
  const THOUSANDS = /[1-9]\d*(?:,\d{3})+(?!\d)/y;

  class ScheduleError extends Error {}

  // Numbers -----------------------------------------------------------------------------------------------------------

  /** A number written in decimal, times ten to a power: exact, as no product of two binary numbers is. */
  function decimal(digits, power) {
    const [mantissa, exponent = "0"] = digits.replaceAll("_", "").toLowerCase().split("e");
    return Number(`${mantissa}e${Number(exponent) + power}`);
  }

  /** A number without an exponent, times ten to a power, with the fewest digits that mean it. */
  function plain(value, power = 0) {
    const [mantissa, exponent = "0"] = String(Math.abs(value)).split("e");
    const [whole, part = ""] = mantissa.split(".");
    const point = whole.length + Number(exponent) + power;
    const digits = (whole + part).padEnd(point, "0");
    const padded = point > 0 ? digits : "0".repeat(1 - point) + digits;
    const place = Math.max(point, 1);
    const text = `${padded.slice(0, place)}.${padded.slice(place)}`.replace(/\.?0*$/, "").replace(/^0+(?=\d)/, "");
    return (value < 0 ? "-" : "") + text;
  }

  /** As Python's format(value, "g") writes it. */
  function short(value) {
    if (value === 0) return "0";
    const [mantissa, exponent] = value.toExponential(5).split("e");
    const power = Number(exponent);
    if (power < -4 || power >= 6) {
      const digits = String(Math.abs(power)).padStart(2, "0");
      return `${mantissa.replace(/\.?0+$/, "")}e${power < 0 ? "-" : "+"}${digits}`;
    }
    return plain(Number(value.toPrecision(6)));
  }

  function stepsText(value) {
    for (const [unit, power] of [["B", 9], ["M", 6], ["k", 3], ["", 0]]) {
      if (10 ** power <= Math.abs(value)) {
        const scaled = plain(value, -power);
        if (scaled.length <= 6 || !unit) return scaled + unit;
      }
    }
    return Math.abs(value) < 1e-4 && value !== 0 ? short(value) : plain(value);
  }

  // Positions: a number of steps plus a share of the budget -------------------------------------------------------------

  const position = (steps = 0, share = 0) => ({ steps, share });
  const END = position(0, 1);
  const plus = (one, other, times = 1) => position(one.steps + times * other.steps, one.share + times * other.share);
  const scaled = (one, factor) => position(factor * one.steps, factor * one.share);
  const same = (one, other) => one.steps === other.steps && one.share === other.share;
  const bound = (one, total) => one.steps + one.share * total;

  /** 1, 0 or -1 if the sign is the same for every budget, or null. */
  function sign({ steps, share }) {
    const low = Math.min(steps, share), high = Math.max(steps, share);
    return low < 0 && high > 0 ? null : Number(high > 0) - Number(low < 0);
  }

  const notAbove = (one) => [0, -1].includes(sign(one));

  function positionText({ steps, share }) {
    const percent = `${plain(share, 2)}%`;
    if (!share) return stepsText(steps);
    if (!steps) return percent;
    if (share < 0) return stepsText(steps) + percent;
    return percent + (steps < 0 ? "" : "+") + stepsText(steps);
  }

  // Parsing -----------------------------------------------------------------------------------------------------------

  const quoted = (text) => (text.includes("'") && !text.includes('"') ? `"${text}"` : `'${text}'`);

  class Parser {
    constructor(text) {
      this.text = text;
      if (!text.trim()) {
        throw new ScheduleError(
          "The schedule is an empty string; give a number or phases, for example '0.03 -> 0.001 cosine'.",
        );
      }
      this.tokens = this.split();
      this.next = 0;
    }

    split() {
      const text = this.text.trimEnd(), tokens = [];
      let place = 0;
      while (place < text.length) {
        TOKEN.lastIndex = place;
        const match = TOKEN.exec(text);
        if (match === null) {
          place += text.slice(place).length - text.slice(place).trimStart().length;
          const hint = ">⇒".includes(text[place]) ? "; did you mean '->'?" : "";
          throw this.error(`unexpected character ${quoted(text[place])}${hint}`, place);
        }
        const found = match.groups;
        const kind = ["amount", "arrow", "word", "sign"].find((name) => found[name] !== undefined);
        const begin = place + match[0].length - match[0].trimStart().length;
        place += match[0].length;
        tokens.push({ kind, text: text.slice(begin, place), place: begin });
      }
      return [...tokens, { kind: "end", text: "the end", place: text.length }];
    }

    error(what, place) {
      const stop = what.endsWith("?") ? "" : ".";
      return new ScheduleError(`In the schedule ${quoted(this.text)}, character ${place + 1}: ${what}${stop}`);
    }

    fail(what) {
      throw this.error(what, this.token.place);
    }

    get token() {
      return this.tokens[this.next];
    }

    take(...texts) {
      const token = this.token;
      if (!texts.includes(token.text) || token.kind === "end") return null;
      this.next += 1;
      return token.text;
    }

    expect(kind, wanted) {
      const token = this.token;
      if (token.kind !== kind) this.unexpected(wanted);
      this.next += 1;
      return token;
    }

    unexpected(wanted) {
      const found = this.token.kind === "end" ? "but the schedule ends here" : `got ${quoted(this.token.text)}`;
      this.fail(`expected ${wanted}, ${found}`);
    }

    amount(wanted) {
      const token = this.expect("amount", wanted);
      const digits = token.text.match(new RegExp(`^${AMOUNT}`))[0];
      const unit = token.text.slice(digits.length).trim();
      THOUSANDS.lastIndex = token.place;
      const grouped = THOUSANDS.exec(this.text);
      if (grouped !== null) {
        const plain = grouped[0].replaceAll(",", "");
        const what = `has a comma for its thousands; write ${plain}, or a space after a comma that ends a phase`;
        throw this.error(`${quoted(grouped[0])} ${what}`, token.place);
      }
      if (unit !== "%" && !(unit in UNITS)) {
        const known = ["m", "b"].includes(unit) ? `did you mean '${unit.toUpperCase()}'?` : "known: k, M, B, %";
        const what = WORDS.includes(unit)
          ? `needs a space before ${quoted(unit)}`
          : `has the unknown unit ${quoted(unit)}; ${known}`;
        throw this.error(`${quoted(token.text)} ${what}`, token.place);
      }
      const isShare = unit === "%";
      const number = decimal(digits, isShare ? 0 : UNITS[unit]);
      if (!Number.isFinite(number)) throw this.error(`${quoted(token.text)} is too large for a number`, token.place);
      return { number, isShare, share: isShare ? decimal(digits, -2) : 0 };
    }

    value(wanted = "a value") {
      const negative = this.take("-", "+") === "-";
      if (this.token.kind === "word" && ["nan", "inf", "infinity"].includes(this.token.text.toLowerCase())) {
        this.fail(`${quoted(this.token.text)} is not a finite number`);
      }
      if (SHAPES.includes(this.token.text)) {
        const name = this.token.text;
        this.fail(`expected ${wanted}, got ${quoted(name)}; a shape comes last, as in '0.1 -> 0 ${name}'`);
      }
      const token = this.token;
      const { number, isShare } = this.amount(wanted);
      if (isShare) {
        throw this.error(`expected ${wanted}, got the share of the budget ${quoted(token.text)}`, token.place);
      }
      return negative ? -number : number;
    }

    position() {
      let total = position(), times = 1;
      for (;;) {
        const token = this.token;
        const { number, isShare, share } = this.amount("a number of steps or a percentage");
        if (isShare && number > 100 + 1e-9) {
          throw this.error(`${quoted(token.text)} is more than 100% of the budget`, token.place);
        }
        total = plus(total, isShare ? position(0, share) : position(number, 0), times);
        const word = this.token.text;
        if (STEPS.includes(word)) this.fail(`positions are env steps; leave out the word ${quoted(word)}`);
        const following = this.take("+", "-");
        if (following === null) return total;
        times = following === "+" ? 1 : -1;
      }
    }

    curve() {
      const name = this.token.text;
      this.next += 1;
      let power = 1;
      if (name === "cosine" || name === "polynomial") {
        if (this.take("(")) {
          power = this.value(name === "cosine" ? "an exponent" : "a power");
          if (!this.take(")")) this.unexpected("')'");
        } else if (name === "polynomial") {
          this.fail("'polynomial' needs a power, for example polynomial(2)");
        }
      }
      return [name, power];
    }

    schedule() {
      if (this.tokens.some((token) => token.text === "at")) return this.points();
      const warmup = this.take("warmup") ? this.position() : null;
      const phases = [];
      let begin = position();
      if (warmup !== null) {
        if (!this.take(",")) this.unexpected("a comma and a phase after the warm-up");
        begin = warmup;
      }
      do begin = this.phase(phases, begin);
      while (this.take(","));
      this.expect("end", "a comma or the end");
      if (warmup !== null) {
        phases.unshift({ begin: position(), length: warmup, start: 0, end: phases[0].start, shape: "linear", power: 1 });
      }
      return phases;
    }

    phase(phases, begin) {
      if (this.token.text === "warmup") this.fail(WARMUP_FIRST);
      const first = this.token;
      const start = this.value();
      let end = start, shape = "constant", power = 1;
      if (this.take("->", "→")) {
        end = this.value("a value after '->'");
        shape = "linear";
      }
      if (SHAPES.includes(this.token.text)) {
        let named;
        [named, power] = this.curve();
        if ((named === "constant") !== (shape === "constant")) {
          const what = named === "constant" ? "takes one value, without '->'" : "needs two values, start -> end";
          throw this.error(`'${named}' ${what}`, first.place);
        }
        shape = named;
      }
      const extent = this.extent();
      if (this.token.text === "," && shape === "constant" && !("over" in extent || "until" in extent)) {
        this.fail("the value before this comma needs 'over' or 'until' to say when the next phase begins");
      }
      if (this.token.kind === "end" && "over" in extent && "until" in extent) {
        this.fail(
          "'until' together with 'over' says where the next phase begins, but no phase follows; remove one of them",
        );
      }
      try {
        const [laid, following] = lay({ begin, length: position(), start, end, shape, power }, extent);
        phases.push(...laid);
        return following;
      } catch (error) {
        if (error instanceof ScheduleError) throw this.error(error.message.replace(/\.$/, ""), first.place);
        throw error;
      }
    }

    extent() {
      const extent = {};
      while (this.token.kind === "word") {
        const word = this.token.text;
        if (!["from", "over", "until", "repeat"].includes(word)) {
          this.misplaced(word);
        }
        if (word in extent) this.fail(`${quoted(word)} appears twice in one phase; remove one of them`);
        this.next += 1;
        extent[word] = word === "repeat" ? this.value("a number of cycles") : this.position();
      }
      return extent;
    }

    misplaced(word) {
      if (word === "warmup") this.fail(WARMUP_FIRST);
      if (word === "step") this.fail("'step' is only for points, as in '0.1 at 0, 0.01 at 20% step'");
      if (SHAPES.includes(word)) {
        this.fail(`${quoted(word)} comes right after the values, and only once, as in '0.1 -> 0 linear over 20%'`);
      }
      this.fail(`unknown word ${quoted(word)}; known: ${WORDS.join(", ")}`);
    }

    points() {
      const pairs = [];
      do {
        const value = this.value();
        if (!this.take("at")) {
          this.fail("expected 'at'; write the schedule either as points, 'value at step', or as phases, not both");
        }
        pairs.push([this.position(), value]);
      } while (this.take(","));
      let shape = "linear", power = 1;
      if (this.take("step")) shape = "step";
      else if (SHAPES.includes(this.token.text)) [shape, power] = this.curve();
      this.expect("end", "a comma, a shape or the end");
      return phasesOfPoints(pairs, shape, power);
    }
  }

  /** Place a phase on the step axis: it, or its cycles, and where the next phase begins. */
  function lay(phase, { from, over, until, repeat = 1 }) {
    if (!Number.isInteger(repeat) || repeat < 1 || repeat > MOST_STEPS) {
      throw new ScheduleError(`a phase cannot repeat ${short(repeat)} times; give a whole number, 1 or more.`);
    }
    if (repeat > MOST_CYCLES) {
      throw new ScheduleError(`a phase cannot repeat ${short(repeat)} times; the maximum is ${MOST_CYCLES}.`);
    }
    if (repeat > 1 && over && until) throw new ScheduleError("a repeated phase takes 'over' or 'until', not both.");
    if (from) {
      if (sign(plus(from, phase.begin, -1)) === -1) {
        throw new ScheduleError(
          `a phase begins at ${positionText(from)}, before the previous one ends at ${positionText(phase.begin)}; ` +
            "phases must not overlap.",
        );
      }
      phase = { ...phase, begin: from };
    }
    const room = plus(until ?? END, phase.begin, -1);
    if (until && notAbove(room)) {
      throw new ScheduleError(
        `a phase begins at ${positionText(phase.begin)} and ends at ${positionText(until)}; it must end after it begins.`,
      );
    }
    let length = position();
    if (over) {
      if (notAbove(over)) throw new ScheduleError(`a phase has length ${positionText(over)}; it must be above 0.`);
      length = over;
    } else if (phase.shape !== "constant" || until) {
      if (notAbove(room)) {
        throw new ScheduleError(
          "a phase begins when no budget is left; begin it earlier, or end the previous phase earlier.",
        );
      }
      length = scaled(room, 1 / repeat);
    }
    const cycles = Array.from({ length: repeat }, (_, cycle) => ({ ...phase, begin: plus(phase.begin, length, cycle), length }));
    return [cycles, until ?? plus(phase.begin, length, repeat)];
  }

  function phasesOfPoints(pairs, shape, power) {
    pairs.slice(1).forEach(([there], index) => {
      const here = pairs[index][0];
      if (notAbove(plus(there, here, -1))) {
        throw new ScheduleError(
          `The point at ${positionText(there)} comes after the point at ${positionText(here)}; list points in ` +
            "increasing order of steps, without duplicates.",
        );
      }
    });
    const constant = (begin, length, value) => ({ begin, length, start: value, end: value, shape: "constant", power: 1 });
    if (pairs.length === 1) return [constant(position(), position(), pairs[0][1])];
    const phases = [];
    for (let index = 0; index + 1 < pairs.length; index++) {
      const [[here, start], [there, end]] = [pairs[index], pairs[index + 1]];
      if (shape === "step") {
        const begin = index ? here : position();
        phases.push(constant(begin, plus(there, begin, -1), start));
      } else phases.push({ begin: here, length: plus(there, here, -1), start, end, shape, power });
    }
    const [place, value] = pairs.at(-1);
    if (shape === "step") phases.push(constant(place, position(), value));
    return phases;
  }

  // Checks, the budget, and values ----------------------------------------------------------------------------------------

  function checkPhases(phases) {
    const checked = phases.map((phase, index) => checkPhase(index + 1, phase));
    for (let index = 0; index + 1 < checked.length; index++) {
      const [phase, following] = [checked[index], checked[index + 1]];
      if (notAbove(plus(following.begin, phase.begin, -1))) {
        throw new ScheduleError(
          `Phase ${index + 2} begins at ${positionText(following.begin)}, but phase ${index + 1} begins at ` +
            `${positionText(phase.begin)}; each phase must begin after the previous one.`,
        );
      }
    }
    return checked.map((phase, index) => {
      if (phase.shape !== "constant") return phase;
      const following = checked[index + 1];
      return { ...phase, length: following ? plus(following.begin, phase.begin, -1) : position() };
    });
  }

  function checkPhase(number, phase) {
    for (const side of ["start", "end", "power"]) {
      const size = Math.abs(phase[side]);
      if (size && !(SMALLEST <= size && size <= LARGEST)) {
        throw new ScheduleError(
          `The ${side} of phase ${number} is ${short(phase[side])}, outside the range of float32; it must be 0 or have a ` +
            `magnitude between ${short(SMALLEST)} and ${short(LARGEST)}.`,
        );
      }
    }
    if (phase.start === phase.end) phase = { ...phase, shape: "constant", power: 1 };
    if (!(phase.power > 0)) {
      throw new ScheduleError(`The power of phase ${number} is ${short(phase.power)}; it must be above 0.`);
    }
    const fromTo = `from ${short(phase.start)} to ${short(phase.end)}`;
    if (phase.shape === "constant" && phase.start !== phase.end) {
      throw new ScheduleError(`Phase ${number} is constant but goes ${fromTo}; give one value or another shape.`);
    }
    if (phase.shape === "exponential") {
      if (phase.start === 0 || phase.end === 0 || phase.start > 0 !== phase.end > 0) {
        throw new ScheduleError(
          `Phase ${number} is exponential ${fromTo}, but an exponential cannot reach 0 or change sign; use nonzero ` +
            "values of the same sign, or another shape.",
        );
      }
      const ratio = phase.end / phase.start;
      if (!(SMALLEST < ratio && ratio < LARGEST)) {
        throw new ScheduleError(
          `Phase ${number} is exponential ${fromTo}, and the ratio of the two is outside the range of float32; split it ` +
            "into two phases.",
        );
      }
    }
    const stop = plus(phase.begin, phase.length);
    for (const place of [phase.begin, phase.length, stop]) {
      if (!(Math.abs(place.steps) <= MOST_STEPS)) {
        throw new ScheduleError(
          `Phase ${number} reaches ${short(place.steps)} env steps; positions go up to 2^48, about 2.8e14.`,
        );
      }
    }
    if (sign(phase.begin) === -1) {
      throw new ScheduleError(`Phase ${number} begins at ${positionText(phase.begin)}; it must begin at 0 or later.`);
    }
    const long = sign(phase.length);
    if (long === -1 || (phase.shape !== "constant" && long === 0)) {
      throw new ScheduleError(`The length of phase ${number} is ${positionText(phase.length)}; it must be above 0.`);
    }
    if (stop.steps === 0 && stop.share > 1 + 1e-9) {
      throw new ScheduleError(
        `Phase ${number} ends at ${positionText(stop)} of the budget; the lengths may add up to at most 100%.`,
      );
    }
    return phase;
  }

  /** Round away noise in a position. */
  const tidy = (steps) => Number(steps.toPrecision(13));

  /** Turn shares of the budget into env steps. */
  function bind(phases, total) {
    if (!phases.some(({ begin, length }) => begin.share || length.share)) return phases;
    const begins = phases.map((phase) => tidy(bound(phase.begin, total)));
    const made = phases.map((phase, index) => {
      const touches = index + 1 < phases.length && same(plus(phase.begin, phase.length), phases[index + 1].begin);
      const length = tidy(touches ? begins[index + 1] - begins[index] : bound(phase.length, total));
      if (length < 0 || (phase.shape !== "constant" && length === 0)) {
        throw new ScheduleError(
          `Phase ${index + 1} would last ${short(length)} steps with a budget of ${short(total)}; give a larger budget, or ` +
            "positions that leave room for the phase.",
        );
      }
      return { ...phase, begin: position(begins[index]), length: position(length) };
    });
    begins.slice(1).forEach((begin, index) => {
      if (!(begins[index] < begin)) {
        throw new ScheduleError(
          `Phase ${index + 2} would begin at step ${short(begin)}, but phase ${index + 1} begins at ` +
            `${short(begins[index])}, with a budget of ${short(total)}; each phase must begin after the previous one.`,
        );
      }
    });
    return checkPhases(made);
  }

  const CURVES = {
    constant: (done, left, start, end) => end,
    linear: (done, left, start, end) => end + (start - end) * left,
    cosine: (done, left, start, end, power) => end + (start - end) * (Math.sin(0.5 * Math.PI * left) ** 2) ** power,
    exponential: (done, left, start, end) =>
      done > left ? end * Math.exp(-left * Math.log(end / start)) : start * Math.exp(done * Math.log(end / start)),
    polynomial: (done, left, start, end, power) => end + (start - end) * left ** power,
  };

  /** The value of bound phases at a step. */
  function valueAt(phases, step) {
    const phase = phases.findLast(({ begin }) => begin.steps <= step) ?? phases[0];
    const elapsed = step - phase.begin.steps, length = phase.length.steps;
    if (elapsed >= length) return phase.end;
    if (elapsed <= 0) return phase.start;
    const left = (phase.begin.steps + length - step) / length;
    const value = CURVES[phase.shape](elapsed / length, left, phase.start, phase.end, phase.power);
    return Math.min(Math.max(value, Math.min(phase.start, phase.end)), Math.max(phase.start, phase.end));
  }

  /** A budget such as 500k, in env steps. */
  function parseSteps(text) {
    const parser = new Parser(text);
    const total = parser.value("a number of env steps");
    parser.expect("end", "the end");
    if (!(total > 0 && total <= MOST_STEPS)) {
      throw new ScheduleError(`The budget is ${text.trim()}; it must be above 0 and at most 2^48 env steps.`);
    }
    return total;
  }

  /** A schedule from its text: its bound phases, and a function of the env step. */
  function schedule(text, total) {
    if (CONTROLLERS.test(text)) {
      throw new ScheduleError(`'${text.trim()}' is a controller: it follows a metric of the run, so there is no curve to draw.`);
    }
    if (SHAPES.includes(text.trim())) {
      throw new ScheduleError(
        `The schedule ${quoted(text)} is a shape without values; add them, for example '0.03 -> 0.001 ${text.trim()}'.`,
      );
    }
    const phases = bind(checkPhases(new Parser(text).schedule()), total);
    return { phases, at: (step) => valueAt(phases, step) };
  }

  return { schedule, parseSteps, stepsText, short, ScheduleError };
})();
