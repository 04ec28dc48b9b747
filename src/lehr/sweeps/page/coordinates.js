// Parallel coordinates: all parameters next to the score, with ranges to choose configurations by.

/** One axis, with the values of the configurations on it. */
function dimension(parameter, values) {
  const label = short(parameter.name);
  if (!parameter.numeric) {
    const names = [...new Set(values.map((value) => value ?? "not set"))]
      .sort((a, b) => Number(a) - Number(b) || (a < b ? -1 : 1));
    return {
      label, values: values.map((value) => names.indexOf(value ?? "not set")), range: [-0.5, names.length - 0.5],
      tickvals: names.map((_, i) => i),
      ticktext: names.map((name) => cut(name, 16)), // shown as it is, without plotly's tags
    };
  }
  const given = values.filter((value) => value !== null);
  const low = Math.min(...given), high = Math.max(...given);
  // A configuration without this parameter is drawn at the bottom.
  const numbers = values.map((value) => value ?? low);
  if (low === high) {
    return { label, values: numbers, range: [low - 1, high + 1], tickvals: [low], ticktext: [number(low)] };
  }
  if (!parameter.log) return { label, values: numbers, range: [low, high], tickformat: ".3~g" };
  // These axes are linear, so what they hold is the logarithm.
  const { tickvals, ticktext } = logTicks(low, high);
  const range = [Math.log10(low), Math.log10(high)];
  return { label, values: numbers.map(Math.log10), range, tickvals: tickvals.map(Math.log10), ticktext };
}

function hasWebGL() {
  try {
    return Boolean(document.createElement("canvas").getContext("webgl"));
  } catch {
    return false;
  }
}

/** Draw all parameters next to the score; `choose` is called with the configurations inside all brushed ranges. */
async function drawCoordinates(choose) {
  const section = document.getElementById("coordinates");
  section.hidden = parameters.length === 0 || !compares;
  if (section.hidden) return;
  const element = section.querySelector(".chart"), caption = section.querySelector(".caption");
  if (!hasWebGL()) {
    element.hidden = true;
    caption.textContent = "This chart needs WebGL, which this browser does not offer.";
    return;
  }
  caption.textContent = "One line per configuration. Drag along an axis to keep a range of it, here and in the table " +
    "below; click on the axis to let go. Drag an axis by its name to move it.";
  // The best are drawn last, on top.
  const order = configurations.map((_, i) => i).sort((a, b) => configurations[b].place - configurations[a].place);
  const dimensions = parameters.map((each, p) => dimension(each, order.map((c) => configurations[c].values[p])));
  dimensions.push(dimension({ name: "score", numeric: true }, order.map((c) => scores[c])));
  element.style.minWidth = `${150 * dimensions.length}px`;
  await draw(element, [{
    type: "parcoords", dimensions,
    line: {
      color: order.map((c) => scores[c] ?? lowest), colorscale: colorscale(), cmin: lowest,
      cmax: highest > lowest ? highest : lowest + 1,
    },
    unselected: { line: { color: colour("line"), opacity: 0.25 } },
    labelfont: { size: 13, color: colour("ink") }, tickfont: { size: 11, color: colour("ink") },
    rangefont: { size: 1, color: "rgba(0,0,0,0)" },
  }], { margin: { l: 70, r: 50, t: 50, b: 24 } });
  element.removeAllListeners("plotly_restyle");
  element.on("plotly_restyle", () => {
    const brushed = element.data[0].dimensions.filter((each) => each.constraintrange);
    const inside = ({ values, constraintrange }, i) =>
      (Array.isArray(constraintrange[0]) ? constraintrange : [constraintrange])
        .some(([low, high]) => values[i] >= low && values[i] <= high);
    choose(brushed.length === 0 ? null : new Set(order.filter((_, i) => brushed.every((each) => inside(each, i)))));
  });
}
