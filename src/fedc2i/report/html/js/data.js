// The data of the page, and what every part below shares.
const DATA = JSON.parse(document.getElementById("data").textContent);
const CLIENTS = DATA.clients;
const METRIC = DATA.metric;
const MANY = 12; // clients that still have a line, a chip or a number in a cell of their own
const NAN = 65535;
const state = { run: 0, view: 0, at: 0, client: 0, withoutOwn: false, against: 0, againstPoint: "trained" };

const $ = (id) => document.getElementById(id);
const currentRun = () => DATA.runs[state.run];

/** An element with text or children; text is never read as HTML. */
function make(tag, attributes = {}, ...children) {
  const svg = ["svg", "g", "path", "circle", "text", "title", "tspan"].includes(tag);
  const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** Packed numbers as {shape, values}; unpacked once. */
const unpacked = new Map();
function unpack(packed) {
  if (!unpacked.has(packed)) {
    const text = atob(packed.data);
    const values = new Float32Array(text.length / 2);
    for (let k = 0; k < values.length; k++) {
      const whole = text.charCodeAt(2 * k) + 256 * text.charCodeAt(2 * k + 1);
      values[k] = whole === NAN ? NaN : packed.low + packed.step * whole;
    }
    unpacked.set(packed, { shape: packed.shape, values });
  }
  return unpacked.get(packed);
}

/** Entry t of the first axis as rows: (M, M) for λ. */
function rowsAt(packed, t) {
  const { shape, values } = unpack(packed);
  const [rows, columns] = shape.slice(1);
  const start = t * rows * columns;
  return Array.from({ length: rows }, (_, m) => values.subarray(start + m * columns, start + (m + 1) * columns));
}

/** The numbers of the slider: rounds in which influence was measured, or else those that were scored. */
function slots() {
  const { vector, matrix } = currentRun().influenceRounds;
  return vector.length ? vector : matrix.length ? matrix : currentRun().rounds;
}
const roundNumber = () => slots()[state.at] ?? slots().at(-1);

/** A kind of influence in the chosen view, or in the mean over seeds where single seeds do not fit into the page. */
const packedInfluence = (kind) => currentRun().views[state.view][kind] ?? currentRun().views[0][kind];

/** λ of the chosen round as rows, or null. */
function vectorNow() {
  const packed = packedInfluence("vector");
  return packed ? rowsAt(packed, state.at) : null;
}

/** Λ of the chosen client: {round, rows (M, C), all: its values of all rounds}, or null. */
function matrixNow() {
  const packed = packedInfluence("matrix");
  if (!packed) return null;
  const rounds = currentRun().influenceRounds.matrix;
  let t = 0;
  rounds.forEach((round, k) => { if (round <= roundNumber()) t = k; });
  const { shape, values } = unpack(packed);
  const [, helped, helpers, classes] = shape;
  const start = (k) => ((k * helped + state.client) * helpers) * classes;
  const rows = Array.from({ length: helpers }, (_, i) => values.subarray(start(t) + i * classes, start(t) + (i + 1) * classes));
  const all = rounds.map((_, k) => values.subarray(start(k), start(k) + helpers * classes));
  return { round: rounds[t], rows, all };
}

/** From the lowest to the highest weight, and at least half an equal share to both sides: less would make much of little. */
function spanOf(parts, equal) {
  let [low, high] = [0.5 * equal, 1.5 * equal];
  for (const values of parts) {
    for (const value of values) {
      if (value < low) low = value;
      if (value > high) high = value;
    }
  }
  return [low, high];
}

const count = (values) => values.reduce((sum, value) => sum + Number.isFinite(value), 0);
const average = (values) => {
  const there = values.filter(Number.isFinite);
  return there.length ? there.reduce((sum, value) => sum + value, 0) / there.length : NaN;
};

/** Others than `without` by falling value; ties go to the lower index. */
function ranked(values, without) {
  return Array.from(values, (value, client) => ({ client, value }))
    .filter((one) => one.client !== without && Number.isFinite(one.value))
    .sort((a, b) => b.value - a.value);
}

/** A share of one with as many digits as the number of clients calls for. */
const shareText = (value) => value.toFixed(CLIENTS.length > 50 ? 3 : 2);

/** Names for plotly, which reads some tags and entities in labels. */
const plain = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
const shortened = (text, most = 18) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);
const axisNames = (names) => {
  const short = names.map((name) => shortened(name));
  return new Set(short).size === names.length ? short.map(plain) : names.map(plain);
};
