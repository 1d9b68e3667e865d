// The two heat maps: λ of all clients, and Λ of the chosen one.
const noInfluence = () => `${currentRun().label} measures no influence of clients on each other.`;

/** Sections about influence that the chosen run did not measure give way to one sentence. */
function showMeasured() {
  const { vector, matrix } = currentRun().measured;
  const shown = { heat: vector, graph: vector, client: vector || matrix || CLIENTS.length > MANY };
  for (const [id, is] of Object.entries(shown)) {
    $(id).hidden = !is;
    document.querySelector(`.toc a[href="#${id}"]`).hidden = !is;
  }
  $("influence-none").hidden = Boolean(vector);
  $("influence-none").textContent = noInfluence();
}

const width = (id) => $(id).clientWidth || 600;

function drawVector() {
  const rows = vectorNow();
  const run = currentRun();
  $("heat-none").hidden = Boolean(rows);
  $("heat-own").hidden = !rows;
  $("heat-chart").hidden = !rows;
  if (!rows) {
    $("heat-none").textContent = run.measured.vector
      ? `The influence vectors of ${CLIENTS.length} clients are too large for a page; influence.npz in the run folder has them.`
      : noInfluence();
    $("heat-caption").textContent = "";
    return;
  }
  const size = CLIENTS.length;
  const few = size <= MANY;
  const z = rows.map((row, m) => Array.from(row, (value, i) => (Number.isFinite(value) && !(state.withoutOwn && i === m) ? value : null)));
  const names = axisNames(CLIENTS);
  const side = width("heat-chart");
  const [zmin, zmax] = spanOf(vectorsOfAllRounds(), 1 / size);
  const cells = { z, x: names, y: names, zmin, zmax, colorscale: stops(palette().scale) };
  draw("heat-chart", [
    { type: "heatmap", ...cells, xgap: few ? 2 : 0, ygap: few ? 2 : 0, colorbar: colorbar("λ"), hoverongaps: false, hovertemplate: "%{y} gives %{x} λ = %{z:.3f}<extra></extra>" },
    ...(few && side / size > 44 ? [numbersOf(cells, (value) => value.toFixed(2), size < 8 ? 13 : 11)] : []),
  ], {
    height: Math.min(640, few ? 110 + size * Math.min(62, side / (size + 1.5)) : Math.max(340, side * 0.86)), margin: { t: 34, l: 20, b: 8 },
    xaxis: cellAxis(size, { side: "top", title: { text: "gives", standoff: 12, font: { size: 12 } }, showticklabels: size <= 40, tickangle: size <= 6 && side > 520 ? 0 : -40 }),
    yaxis: rowAxis(size, { title: { text: "receives", standoff: 14, font: { size: 12 } }, showticklabels: size <= 40 }),
  });
  const kept = run.influenceRounds.vector.length;
  $("heat-caption").textContent =
    `An equal share would be ${(1 / size).toFixed(size > 50 ? 3 : 2)}. Shown is round ${roundNumber()}, ${shownView("vector")}; colours mean the same in all rounds.` +
    (kept < run.influenceRounds.vector.at(-1) ? ` The page holds ${kept} of the rounds.` : "") +
    (rows.some((row) => count(row) < size) ? " Empty cells: nothing was measured." : "");
}

/** The label of the view that is really shown. */
function shownView(kind) {
  const run = currentRun();
  return run.views[state.view][kind] ? run.views[state.view].label : `${run.views[0].label} (single seeds do not fit into the page)`;
}

/** λ of every round, without what clients give to themselves if that is hidden. */
function vectorsOfAllRounds() {
  const { shape, values } = unpack(packedInfluence("vector"));
  const cells = shape[1] * shape[1];
  return [state.withoutOwn ? values.filter((_, k) => Math.floor((k % cells) / shape[1]) !== k % shape[1]) : values];
}

/** Classes of the chosen client whose first helper is not the first of λ: {label, helper, share}, the clearest first. */
function classesWithAnotherHelper(vector, matrix) {
  const usual = ranked(vector, state.client)[0];
  if (!usual) return [];
  return DATA.classes.map((_, label) => {
    const column = matrix.map((row) => row[label]);
    const first = ranked(column, state.client)[0];
    return { label, helper: first?.client, share: first?.value, usual: column[usual.client], equal: 1 / Math.max(1, count(column)) };
  }).filter((one) => one.helper !== undefined && one.helper !== usual.client && one.share >= 1.25 * one.equal && !(one.share < 1.2 * one.usual))
    .sort((a, b) => (b.share - b.usual) - (a.share - a.usual));
}

/** Whether nothing is more than a tenth away from an equal share. */
const isFlat = (rows, equal) => rows.every((row) => row.every((value) => !(Math.abs(value / equal - 1) > 0.1)));

function drawMatrix() {
  const found = matrixNow();
  const run = currentRun();
  const name = CLIENTS[state.client];
  $("matrix-title").textContent = `Influence matrix Λ of ${name}`;
  $("matrix-chart").hidden = !found;
  $("matrix-none").hidden = Boolean(found);
  if (!found) {
    $("matrix-none").textContent = run.measured.matrix
      ? "The influence matrices are too large for a page; influence.npz in the run folder has them."
      : `${run.label} measures no influence of classes.`;
    $("matrix-caption").textContent = "";
    return;
  }
  const { rows, round, all } = found;
  const size = rows.length;
  const few = size <= MANY;
  const equal = 1 / Math.max(1, count(rows.map((row) => row.find(Number.isFinite) ?? NaN)));
  const names = axisNames(CLIENTS);
  const classes = axisNames(DATA.classes);
  const vector = vectorNow();
  const other = vector ? classesWithAnotherHelper(vector[state.client], rows) : [];
  const [zmin, zmax] = spanOf(all, equal);
  const cell = (width("matrix-chart") - 150) / classes.length;
  const z = rows.map((row) => Array.from(row, (value) => (Number.isFinite(value) ? value : null)));
  const cells = { z, x: classes, y: names, zmin, zmax, colorscale: diverging(zmin, equal, zmax) };
  draw("matrix-chart", [
    { type: "heatmap", ...cells, xgap: few ? 2 : 0, ygap: few ? 2 : 0, colorbar: colorbar("Λ"), hoverongaps: false, hovertemplate: "%{y} weighs at %{x}: Λ = %{z:.3f}<extra></extra>" },
    ...(few && cell > 34 ? [numbersOf(cells, (value) => value.toFixed(2), 11)] : []),
    {
      x: other.map((one) => classes[one.label]), y: other.map((one) => names[one.helper]), mode: "markers", hoverinfo: "skip",
      marker: { symbol: "square-open", size: few ? Math.min(30, Math.max(14, cell * 0.7)) : 8, color: css("--ink"), line: { width: 1.6 } },
    },
  ], {
    height: few ? 130 + 36 * size : 520, margin: { t: 10, l: 20 },
    xaxis: cellAxis(classes.length, { title: { text: "class", font: { size: 12 } }, showticklabels: classes.length <= 60 }),
    yaxis: rowAxis(size, { title: { text: "gives", standoff: 14, font: { size: 12 } }, showticklabels: size <= 40 }),
  });
  const measured = rows.some((row) => row.some(Number.isFinite));
  $("matrix-caption").textContent = !measured
    ? `${name} measured nothing in round ${round}.`
    : `How ${name} weighs everyone's classifier, class by class, in round ${round}${round !== roundNumber() ? " (the nearest that the page holds)" : ""}, ${shownView("matrix")}. ` +
      (isFlat(rows, equal) ? "It is close to equal for every class. " : "") + "Blue is more than an equal share, brown is less" + (other.length ? "; a frame marks a class whose first client is not the first of λ." : ".");
}
