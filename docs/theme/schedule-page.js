// The page "Try a schedule": draws what is typed, with the parser in schedule.js.
"use strict";

(() => {
  const COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"];
  const [HEIGHT, LEFT, BOTTOM, TOP, RIGHT] = [320, 64, 30, 12, 16];
  const [NARROWEST, WIDEST] = [320, 900];
  const POINTS = 600;
  const form = document.getElementById("schedules");
  const drawn = document.getElementById("schedules-drawn");

  function element(name, attributes = {}, ...children) {
    const space = ["svg", "path", "text", "line"].includes(name) ? "http://www.w3.org/2000/svg" : "http://www.w3.org/1999/xhtml";
    const made = document.createElementNS(space, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children);
    return made;
  }

  /** Some round numbers between two others. */
  function ticks(low, high) {
    const rough = (high - low) / 5, unit = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 2.5, 5, 10].map((factor) => factor * unit).find((size) => size >= rough);
    const first = Math.ceil(low / step - 1e-9);
    const count = Math.floor(high / step + 1e-9) - first + 1;
    return Array.from({ length: count }, (_, index) => (first + index) * step);
  }

  /** Steps at which to evaluate a schedule: evenly, and on both sides of every place where a phase begins or ends. */
  function stepsOf(phases, total) {
    const even = Array.from({ length: POINTS + 1 }, (_, index) => (index / POINTS) * total);
    const edges = phases.flatMap(({ begin, length }) => [begin.steps, begin.steps + length.steps]);
    const around = edges.flatMap((edge) => [edge - total * 1e-9, edge]).filter((step) => step > 0 && step < total);
    return [...even, ...around].sort((one, other) => one - other);
  }

  function chart(rows, total) {
    const curves = rows.map((row) => stepsOf(row.phases, total).map((step) => [step, row.at(step)]));
    const values = curves.flat().map(([, value]) => value);
    let [low, high] = [Math.min(0, ...values), Math.max(...values)];
    if (low === high) high = low + 1;
    const width = Math.min(Math.max(drawn.clientWidth, NARROWEST), WIDEST); // so that letters keep their size
    const x = (step) => LEFT + (step / total) * (width - LEFT - RIGHT);
    const y = (value) => HEIGHT - BOTTOM - ((value - low) / (high - low)) * (HEIGHT - BOTTOM - TOP);
    const svg = element("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": "The schedules over env steps" });
    for (const value of ticks(low, high)) {
      svg.append(
        element("line", { x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value), class: "grid" }),
        element("text", { x: LEFT - 8, y: y(value) + 4, "text-anchor": "end" }, Lehr.short(value)),
      );
    }
    for (const step of ticks(0, total).filter((_, index) => width > 500 || index % 2 === 0)) {
      svg.append(element("text", { x: x(step), y: HEIGHT - 8, "text-anchor": "middle" }, Lehr.stepsText(step)));
    }
    curves.forEach((curve, index) => {
      const path = curve.map(([step, value], place) => `${place ? "L" : "M"}${x(step).toFixed(2)} ${y(value).toFixed(2)}`);
      svg.append(element("path", { d: path.join(""), stroke: rows[index].colour, class: "curve" }));
    });
    return svg;
  }

  function table(rows, total) {
    const shares = [0, 0.25, 0.5, 0.75, 1];
    const head = element("tr", {}, element("th", {}, "schedule"), ...shares.map((share) => element("th", {}, Lehr.stepsText(share * total))));
    const lines = rows.map((row) => {
      const swatch = element("span", { class: "swatch", style: `background: ${row.colour}` });
      const cells = shares.map((share) => element("td", {}, Lehr.short(row.at(share * total))));
      return element("tr", {}, element("td", {}, swatch, element("code", {}, row.text)), ...cells);
    });
    return element("table", {}, element("thead", {}, head), element("tbody", {}, ...lines));
  }

  function draw() {
    const rows = [], problems = [];
    let total = 0;
    try {
      total = Lehr.parseSteps(form.elements.total.value);
    } catch (error) {
      problems.push(error.message);
    }
    const texts = form.elements.texts.value.split("\n").map((text) => text.trim()).filter(Boolean);
    for (const text of total ? texts : []) {
      try {
        const made = Lehr.schedule(text, total);
        rows.push({ ...made, text, colour: COLOURS[rows.length % COLOURS.length] });
      } catch (error) {
        if (!(error instanceof Lehr.ScheduleError)) throw error;
        problems.push(error.message);
      }
    }
    const parts = problems.map((problem) => element("p", { class: "problem" }, problem));
    if (rows.length) parts.push(chart(rows, total), table(rows, total));
    drawn.replaceChildren(...parts);
  }

  form.addEventListener("input", draw);
  window.addEventListener("resize", draw);
  form.addEventListener("submit", (event) => event.preventDefault());
  draw();
})();
