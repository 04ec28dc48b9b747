// Charts across the page: returns, importance, performance profile.

function topColour(place) {
  return colour(place === 0 ? "accent" : `top-${place}`);
}

function drawReturns() {
  const { steps, means, low, high } = data.returns;
  const faint = best.length < drawn.length ? lines(steps, means) : [];
  const traces = faint.map((each) => ({ ...each, opacity: each.opacity * 0.6 }));
  best.map((configuration, place) => ({ configuration, place })).reverse().forEach(({ configuration, place }) => {
    const rgb = topColour(place);
    const given = (values) => values.filter((_, row) => low[place][row] !== null);
    traces.push(band(given(steps), given(low[place]), given(high[place]), rgb, place === 0 ? 0.18 : 0.07));
    traces.push({
      x: steps, y: means[place], type: "scatter", mode: steps.length > 1 ? "lines" : "markers",
      name: `${place + 1}. configuration ${configuration}`, connectgaps: true, legendrank: place,
      line: { color: rgb, width: place === 0 ? 2.6 : 1.6 }, marker: { color: rgb, size: 8 }, showlegend: true,
      hovertemplate: `configuration ${configuration}<br>%{x:,} steps: %{y:.4~g}<extra></extra>`,
    });
  });
  const section = document.getElementById("returns");
  const which = hasScores ? "best" : "first";
  const inColour = best.length === 1 ? "The configuration" : `The ${which} ${best.length} in colour`;
  const part = drawn.length < configurations.length ? `${number(drawn.length)} of` : "all";
  const behind = `Faint: ${part} ${number(configurations.length)} configurations; the stronger the colour, the higher ` +
    "the score.";
  section.querySelector(".caption").textContent = `${inColour}: the mean over seeds, and the range from the lowest to ` +
    `the highest seed. ${faint.length > 0 ? behind : ""} Episodes of training, with exploration; the curve of a run ` +
    "that failed or was stopped ends there.";
  return draw(section.querySelector(".chart"), traces, {
    xaxis: { title: axisTitle("env steps"), tickformat: "~s", rangemode: "tozero" },
    yaxis: { title: axisTitle("episode return") }, ...legendAbove(),
  });
}

/** Whether to believe the importances of a forest with this R² out of bag. */
function belief(fit) {
  if (fit === null) return "All scores are equal, so no parameter matters.";
  const told = `Out of bag, the forest has R² = ${fit.toFixed(2).replace("-", "−")}:`;
  if (fit >= 0.7) return `${told} it predicts the score well, so these numbers can be believed.`;
  if (fit >= 0.3) return `${told} it predicts the score roughly, so take these numbers with care.`;
  return `${told} it does not predict the score, so do not believe these numbers.`;
}

function drawImportance() {
  const section = document.getElementById("importance"), element = section.querySelector(".chart");
  const caption = section.querySelector(".caption");
  section.hidden = parameters.length === 0 || !compares;
  element.hidden = data.importance === null;
  if (section.hidden) return;
  if (element.hidden) {
    caption.textContent = "There are too few configurations with a score to tell the parameters' importance.";
    return;
  }
  const { names, drops, deviations, r_squared: fit } = data.importance;
  element.style.height = `${60 + 34 * names.length}px`;
  caption.textContent = "How much of R² a random forest loses, on configurations that it has not seen, when a " +
    `parameter's values are shuffled; with the standard deviation. ${belief(fit)}`;
  return draw(element, [{
    type: "bar", orientation: "h", y: names.map((_, i) => i), x: drops, marker: { color: colour("scale-2") }, width: 0.55,
    error_x: { type: "data", array: deviations, color: colour("soft"), thickness: 1, width: 3 },
    text: names.map(literal), textposition: "none", hovertemplate: "%{text}: %{x:.3~g}<extra></extra>",
  }], {
    xaxis: { title: axisTitle("loss of R²"), showgrid: true, rangemode: "tozero" },
    yaxis: {
      // Places and not names: two long names may be cut to the same text.
      tickvals: names.map((_, i) => i), ticktext: names.map((name) => short(name)), range: [names.length - 0.4, -0.6],
      showgrid: false, zeroline: false, tickfont: { size: 13, color: colour("ink") },
    },
  });
}

function drawProfile() {
  const section = document.getElementById("profile");
  section.hidden = data.profiles === null;
  if (section.hidden) return;
  const { thresholds, lines: profiles } = data.profiles;
  const traces = profiles.flatMap(({ name, share: [value, low, high] }) => {
    const rgb = colour(name === "winner" ? "accent" : name.startsWith("best") ? "scale-3" : "soft");
    return [...(low[0] === null ? [] : [band(thresholds, low, high, rgb, 0.15)]), {
      x: thresholds, y: value, type: "scatter", mode: "lines", name, line: { color: rgb, width: 2.2 }, showlegend: true,
      hovertemplate: `${name}<br>%{y:.0%} of runs score above %{x:.4~g}<extra></extra>`,
    }];
  });
  section.querySelector(".caption").textContent = "The share of runs that score above each value, with its 95% " +
    "interval. Runs that failed or were stopped are above none. A line that is higher everywhere is better, whatever counts as good.";
  return draw(section.querySelector(".chart"), traces, {
    xaxis: { title: axisTitle("score") },
    yaxis: { title: axisTitle("share of runs above"), tickformat: ".0%", range: [-0.02, 1.04] }, ...legendAbove(),
  });
}
