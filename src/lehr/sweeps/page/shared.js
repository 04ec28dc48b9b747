// What all charts share: the data, colours, numbers and texts, axes, and the curves of all configurations.

const data = JSON.parse(document.getElementById("data").textContent);
const { configurations, parameters, drawn, top: best } = data;
const scores = configurations.map((each) => each.selected[0]);
const known = scores.filter((score) => score !== null).sort((a, b) => a - b);
const hasScores = known.length > 0;
const winner = hasScores ? best[0] : null;
const compares = hasScores && configurations.length > 1;
// The lowest twentieth shares one colour: one hopeless configuration must not take all contrast from the others.
const lowest = hasScores ? known[Math.floor(known.length / 20)] : 0;
const highest = hasScores ? known[known.length - 1] : 1;
const SHADES = 12;

/** A colour of the style sheet, in the theme that is on. */
function colour(name) {
  const probe = document.body.appendChild(document.createElement("i"));
  probe.style.color = `var(--${name})`;
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

/** The same colour, less of it. */
function faded(rgb, opacity) {
  return rgb.replace(/^rgba?\(([^,]+,[^,]+,[^,)]+).*$/, `rgba($1, ${opacity})`);
}

/** The colours of scores, lowest first, as plotly's colorscale. */
function colorscale() {
  return [0, 1, 2, 3, 4].map((step) => [step / 4, colour(`scale-${step}`)]);
}

/** The colour at a share, 0 to 1, of the scale. */
function shade(share) {
  const stops = colorscale().map(([, rgb]) => rgb.match(/[\d.]+/g).map(Number));
  const place = share * 4;
  const low = Math.min(Math.floor(place), 3);
  const mixed = stops[low].map((value, i) => Math.round(value + (stops[low + 1][i] - value) * (place - low)));
  return `rgb(${mixed.slice(0, 3).join(",")})`;
}

/** Where a score stands between the lowest and the highest: 0 to 1. */
function shareOf(score) {
  return highest > lowest ? Math.min(Math.max((score - lowest) / (highest - lowest), 0), 1) : 1;
}

/** A number with four digits. */
function number(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size >= 1000 && size < 1e9) return Math.round(value).toLocaleString("en").replace("-", "−");
  return String(Number(value.toPrecision(4))).replace("-", "−");
}

/** The name of a parameter, short enough for a heading. */
function short(name, most = 28) {
  return literal(cut(name, most));
}

/** Text of at most so many characters. */
function cut(text, most) {
  return text.length > most ? `${text.slice(0, most - 1)}…` : text;
}

/** Text that plotly shows as it is: it reads some tags and formulas otherwise. */
function literal(text) {
  return String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;").replace(/\$/g, "&#36;");
}

/** The layout of a chart: the common look, and what is its own. */
function layout(changes) {
  const axis = {
    gridcolor: colour("line"), linecolor: colour("line"), zerolinecolor: colour("line"), tickcolor: colour("line"),
    automargin: true,
  };
  const { xaxis, yaxis, ...others } = changes;
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: getComputedStyle(document.body).fontFamily, size: 12.5, color: colour("soft") },
    margin: { l: 10, r: 24, t: 12, b: 10 }, hovermode: "closest", showlegend: false,
    modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("line"), activecolor: colour("soft") },
    hoverlabel: { bgcolor: colour("raised"), bordercolor: colour("line"), font: { color: colour("ink") } },
    xaxis: { ...axis, showgrid: false, zeroline: false, ...xaxis }, yaxis: { ...axis, ...yaxis }, ...others,
  };
}

/** A title with its distance to the axis. */
function axisTitle(text) {
  return { text: literal(text), font: { size: 13 }, standoff: 10 };
}

/** Draw a chart, or draw it again. */
function draw(element, traces, changes) {
  return Plotly.react(element, traces, layout(changes), {
    responsive: true, displaylogo: false, displayModeBar: "hover",
    modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]],
  });
}

/** The legend of a chart, above it. */
function legendAbove() {
  return {
    showlegend: true,
    legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { color: colour("ink") } },
  };
}

/** The band between two curves. */
function band(x, low, high, rgb, opacity) {
  return {
    x: x.concat([...x].reverse()), y: low.concat([...high].reverse()), type: "scatter", mode: "lines", fill: "toself",
    fillcolor: faded(rgb, opacity), line: { width: 0 }, hoverinfo: "skip", showlegend: false,
  };
}

/** Curves of all drawn configurations in a few shades by score: one trace per shade, the best on top. */
function lines(steps, curves, hover) {
  const opacity = Math.min(0.9, Math.max(0.15, 40 / drawn.length));
  const shades = Array.from({ length: SHADES }, () => ({ x: [], y: [], customdata: [] }));
  drawn.forEach((configuration, i) => {
    const score = scores[configuration];
    const into = shades[score === null ? 0 : Math.round(shareOf(score) * (SHADES - 1))];
    for (let row = 0; row < steps.length; row++) {
      into.x.push(steps[row]);
      into.y.push(curves[i][row]);
      into.customdata.push(configuration);
    }
    into.x.push(null);
    into.y.push(null);
    into.customdata.push(configuration);
  });
  return shades.flatMap((each, step) => each.x.length === 0 ? [] : [{
    ...each, type: "scatter", mode: "lines", opacity, showlegend: false,
    line: { color: shade(step / (SHADES - 1)), width: 1.2 },
    ...(hover ? { hovertemplate: hover } : { hoverinfo: "skip" }),
  }]);
}

/** Ticks of a logarithmic axis: powers of ten, on a short one their multiples too, on a very short one equal steps. */
function logTicks(low, high) {
  const decades = Math.log10(high / low);
  const steps = decades > 2.5 ? [1] : decades > 1.5 ? [1, 3] : decades > 1 ? [1, 2, 5] : [1, 2, 3, 5];
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
    for (const step of steps) {
      const tick = step * 10 ** power;
      if (tick >= low * 0.999 && tick <= high * 1.001) ticks.push(tick);
    }
  }
  if (decades < 0.5) {
    const size = (high - low) / 6 || high, unit = 10 ** Math.floor(Math.log10(size));
    const step = [1, 2, 5, 10].find((multiple) => multiple * unit >= size * 0.999) * unit;
    ticks.length = 0;
    for (let i = Math.ceil(low / step - 0.001); i * step <= high * 1.001; i++) ticks.push(i * step);
  }
  if (!ticks.length) ticks.push(low);
  const power = (tick) => Number(tick.toPrecision(3)).toExponential().replace("e+", "e");
  const text = (tick) => tick < 0.001 || tick >= 1e5 ? power(tick) : number(tick);
  return { tickvals: ticks, ticktext: ticks.map(text) };
}
