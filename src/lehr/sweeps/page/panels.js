// Small charts side by side: one per swept coefficient (its schedules), one per parameter (the score by its value).

/** As many chart elements in a grid as there are panels. */
function panelElements(section, count) {
  const grid = section.querySelector(".panels");
  while (grid.children.length < count) grid.appendChild(document.createElement("div")).className = "chart";
  return [...grid.children];
}

/** A logarithmic axis for these values. */
function logAxis(values) {
  const positive = values.filter((value) => value > 0);
  return { type: "log", ...logTicks(Math.min(...positive), Math.max(...positive)) };
}

/** A small title over a panel. */
function heading(name) {
  const font = { size: 14, color: colour("ink") };
  return {
    title: { text: short(name), font, x: 0, xanchor: "left", y: 0.985, yanchor: "top" },
    margin: { l: 10, r: 24, t: 34, b: 10 },
  };
}

function drawSchedules() {
  const section = document.getElementById("schedules"), { steps, panels } = data.schedules;
  section.hidden = panels.length === 0;
  if (section.hidden) return;
  const [low, high] = section.querySelectorAll(".scale span");
  low.textContent = hasScores ? `score ${number(lowest)}${lowest > known[0] ? " or less" : ""}` : "";
  high.textContent = hasScores ? number(highest) : "";
  section.querySelector(".scale").hidden = lowest === highest || !hasScores;
  const cut = panels.some((each) => each.cut) ? " Values below a logarithmic axis are drawn at its bottom." : "";
  section.querySelector(".caption").textContent =
    `The value that was applied, for each configuration${hasScores ? "; the winner's in orange" : ""}.${cut}`;
  const elements = panelElements(section, panels.length);
  return Promise.all(panels.map((panel, i) => {
    const x = panel.ends ? [steps[0], steps[steps.length - 1]] : steps;
    const alone = x.length === 1 || x[0] === x[x.length - 1];
    const hover = "configuration %{customdata}<br>%{x:,} steps: %{y:.3~g}<extra></extra>";
    const traces = lines(x, panel.values, hover);
    if (hasScores) traces.push({
      x, y: panel.values[0], type: "scatter", customdata: x.map(() => winner), hovertemplate: hover,
      line: { color: colour("accent"), width: 2.4 }, marker: { color: colour("accent"), size: 8 },
    });
    for (const each of traces) each.mode = alone ? "markers" : "lines";
    const ends = panel.values.flatMap((curve) => [Math.min(...curve), Math.max(...curve)]);
    return draw(elements[i], traces, {
      ...heading(panel.name), xaxis: { tickformat: "~s", nticks: 6, rangemode: "tozero", title: axisTitle("env steps") },
      yaxis: panel.floor !== null ? logAxis(ends) : { tickformat: ".3~g", rangemode: "tozero" },
    });
  }));
}

function drawMarginals() {
  if (!compares || parameters.length === 0) return;
  const section = document.getElementById("importance");
  section.querySelectorAll(".caption")[1].textContent = "The score of each configuration by the value of one parameter " +
    "(dots), and the mean of each value or range with its 95% interval, whatever the other parameters were.";
  const elements = panelElements(section, parameters.length);
  return Promise.all(parameters.map(({ name, numeric, log }, p) => {
    const bins = data.marginals[p];
    const place = new Map(bins.map(({ label }, i) => [label, i]));
    // Categories are places on a linear axis, so that dots can stand a little beside each other.
    const position = (value, i) => numeric ? value : place.get(value ?? "not set") + (((i * 0.618) % 1) - 0.5) * 0.3;
    const dots = {
      x: configurations.map(({ values }, i) => position(values[p], i)), y: scores, type: "scatter", mode: "markers",
      customdata: configurations.map((_, i) => i),
      marker: { color: colour("scale-2"), size: 4.5, opacity: configurations.length > 200 ? 0.3 : 0.55 },
      hovertemplate: "configuration %{customdata}: %{y:.4~g}<extra></extra>",
    };
    const shown = bins.filter(({ centre }) => !numeric || centre !== null);
    const means = {
      x: shown.map(({ centre }, i) => numeric ? centre : i), y: shown.map(({ score }) => score[0]), type: "scatter",
      mode: numeric ? "lines+markers" : "markers", marker: { color: colour("accent"), size: 8 },
      line: { color: colour("accent"), width: 1.4 },
      error_y: {
        type: "data", symmetric: false, color: colour("accent"), thickness: 1.4, width: 4,
        array: shown.map(({ score }) => score[2] === null ? 0 : score[2] - score[0]),
        arrayminus: shown.map(({ score }) => score[1] === null ? 0 : score[0] - score[1]),
      },
      text: shown.map(({ label, count }) => `${literal(label)}: ${count} configurations`),
      hovertemplate: "%{text}<br>mean %{y:.4~g}<extra></extra>",
    };
    const names = {
      tickvals: bins.map((_, i) => i), ticktext: bins.map(({ label }) => short(label, 16)),
      range: [-0.6, bins.length - 0.4],
    };
    const numbers = log ? logAxis(configurations.map(({ values }) => values[p])) : { tickformat: ".3~g", nticks: 6 };
    const xaxis = numeric ? numbers : names;
    return draw(elements[p], [dots, means], { ...heading(name), xaxis, yaxis: { title: axisTitle("score") } });
  }));
}
