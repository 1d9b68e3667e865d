// Colours: light and dark. Influence is drawn in steps of equal OKLab lightness; blue is more, brown is less than equal.
const PALETTES = {
  light: {
    clients: ["#3674c8", "#cf6f29", "#008d56", "#cc6395", "#805ebd", "#ac8800", "#008a9c", "#d66363", "#538518", "#b76abc", "#0080ba", "#c17b00", "#008e7b", "#d3627b", "#5f69c8", "#8f9400"],
    scale: ["#f1f8fa", "#bde3f3", "#90cbec", "#6bb1e3", "#5294d6", "#4577c4", "#3f5aae", "#3a3e93", "#322474"],
    less: ["#8f4400", "#af6f40", "#c99b7c", "#e2c8b7", "#faf6f4"],
    more: ["#f4f7fa", "#bbd1e4", "#83abce", "#4986b7", "#00619f"],
  },
  dark: {
    clients: ["#6aa0eb", "#f6a069", "#4ab683", "#f495c0", "#a88ce2", "#d4b54f", "#00b4c3", "#fd9693", "#81af59", "#e09be3", "#37abde", "#e9a955", "#03b7a4", "#fb94a8", "#8a97eb", "#b9bf5b"],
    scale: ["#232630", "#283b5b", "#255481", "#146fa1", "#008cbb", "#03aace", "#41c6db", "#78e0e6", "#b1f8f2"],
    less: ["#f7a55f", "#c18452", "#8d6544", "#5c4736", "#2f2a26"],
    more: ["#272c30", "#384f60", "#477493", "#559ccb", "#63c5ff"],
  },
};
const root = document.documentElement;
const palette = () => PALETTES[root.dataset.theme];
const colourOf = (k) => palette().clients[k % palette().clients.length];
const css = (name) => getComputedStyle(root).getPropertyValue(name).trim();
const stops = (colours) => colours.map((colour, k) => [k / (colours.length - 1), colour]);

/** Colours that meet where a value is `middle`, for values from `low` to `high`. */
function diverging(low, middle, high) {
  const at = high > low ? Math.min(0.999, Math.max(0.001, (middle - low) / (high - low))) : 0.5;
  const { less, more } = palette();
  return [
    ...less.map((colour, k) => [(at * k) / (less.length - 1), colour]).slice(0, -1),
    [at, more[0]],
    ...more.map((colour, k) => [at + ((1 - at) * k) / (more.length - 1), colour]).slice(1),
  ];
}

/** Red, green and blue of a scale of [place, colour] at a share of its way, mixed as plotly does. */
function mixed(scale, share) {
  const k = Math.max(1, scale.findIndex(([at]) => at >= share));
  const [[low, from], [high, to]] = [scale[k - 1], scale[k]];
  const way = high > low ? Math.min(1, Math.max(0, (share - low) / (high - low))) : 1;
  return [1, 3, 5].map((at) => (1 - way) * parseInt(from.slice(at, at + 2), 16) + way * parseInt(to.slice(at, at + 2), 16));
}

/** Black or white, whichever has more contrast (WCAG) to a colour. */
function readableOn(colour) {
  const [red, green, blue] = colour.map((part) => (part <= 10.3 ? part / 3294.6 : ((part / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue > Math.sqrt(1.05 * 0.05) - 0.05 ? "#000000" : "#ffffff";
}

/** The numbers in the cells of a heat map as a separate trace: plotly's are grey on pale and on deep colours alike. */
function numbersOf({ z, x, y, zmin, zmax, colorscale }, text, size) {
  const cells = z.flatMap((row, m) => row.map((value, i) => ({ value, x: x[i], y: y[m] }))).filter((one) => one.value !== null && Number.isFinite(one.value));
  return {
    mode: "text", hoverinfo: "skip", x: cells.map((one) => one.x), y: cells.map((one) => one.y), text: cells.map((one) => text(one.value)),
    textfont: { size, color: cells.map((one) => readableOn(mixed(colorscale, (one.value - zmin) / (zmax - zmin)))) },
  };
}

/** Axes of a heat map: whole cells, the first row on top. */
const cellAxis = (size, own = {}) => ({ type: "category", range: [-0.5, size - 0.5], showgrid: false, ...own });
const rowAxis = (size, own = {}) => cellAxis(size, { range: [size - 0.5, -0.5], ...own });

/** What all charts have in common. */
function layout(own = {}) {
  const axis = { gridcolor: css("--line"), zeroline: false, linecolor: css("--line"), tickfont: { size: 12 }, automargin: true, fixedrange: true, ticks: "" };
  return {
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: css("--font"), size: 13, color: css("--soft") },
    hoverlabel: { bgcolor: css("--card"), bordercolor: css("--line"), font: { family: css("--font"), color: css("--ink"), size: 13 } },
    showlegend: false,
    ...own,
    margin: { l: 46, r: 12, t: 30, b: 42, ...own.margin },
    xaxis: { ...axis, ...own.xaxis },
    yaxis: { ...axis, ...own.yaxis },
  };
}

const charts = new Set();
function draw(id, traces, own) {
  charts.add(id);
  return Plotly.react(id, traces, layout(own), { displayModeBar: false, responsive: true });
}
const colorbar = (title) => ({ title: { text: title, side: "top", font: { size: 12 } }, thickness: 10, outlinewidth: 0, len: 0.9, tickfont: { size: 11 } });

function setTheme(name) {
  root.dataset.theme = name;
  $("theme-name").textContent = name === "dark" ? "Dark" : "Light";
}
