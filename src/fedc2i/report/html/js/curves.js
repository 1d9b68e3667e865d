// Accuracy over rounds: of each client, of domains where there are many, and the averages of several runs.
const POINTS = ["received", "trained"];

function scores(point) {
  const { shape, values } = unpack(currentRun().views[state.view].scores[point]);
  const [rounds, clients] = shape;
  return Array.from({ length: clients }, (_, k) => Array.from({ length: rounds }, (_, t) => values[t * clients + k]));
}

const acrossClients = (lines, combine) => currentRun().rounds.map((_, t) => {
  const there = lines.map((line) => line[t]).filter(Number.isFinite);
  return there.length ? combine(there) : null;
});

/** Lines to draw: {name, values, colour, width}; of many clients those of their domains. */
function clientLines(lines) {
  const { names, of } = DATA.domains;
  if (CLIENTS.length <= MANY) return lines.map((values, k) => ({ name: CLIENTS[k], values, colour: colourOf(k) }));
  if (names.length > MANY || names.length === CLIENTS.length) return [];
  return names.map((name, d) => ({
    name, values: acrossClients(lines.filter((_, k) => of[k] === d), average), colour: colourOf(d),
  }));
}

function drawAccuracy() {
  const run = currentRun();
  const many = CLIENTS.length > MANY;
  const all = POINTS.flatMap((point) => scores(point).flat().filter(Number.isFinite));
  const range = reachOf(all);
  for (const point of POINTS) {
    const lines = scores(point);
    const traces = [];
    const mode = run.rounds.length < 3 ? "lines+markers" : "lines";
    if (many) {
      const band = { x: run.rounds, mode: "lines", line: { width: 0 }, hoverinfo: "skip" };
      traces.push({ ...band, y: acrossClients(lines, (own) => Math.min(...own)) });
      traces.push({ ...band, y: acrossClients(lines, (own) => Math.max(...own)), fill: "tonexty", fillcolor: css("--fill") });
    }
    const own = clientLines(lines);
    if (many) own.push({ name: CLIENTS[state.client], values: lines[state.client], colour: css("--accent"), dash: "dot" });
    own.push({ name: "average", values: acrossClients(lines, average), colour: css("--ink"), width: 3.2 });
    for (const one of own) {
      traces.push({
        x: run.rounds, y: one.values, mode, name: plain(one.name), connectgaps: true,
        line: { color: one.colour, width: one.width ?? 1.8, dash: one.dash ?? "solid" },
        hovertemplate: `%{fullData.name}: %{y:${METRIC.unit ? ".1f" : ".3f"}}${METRIC.unit}<extra></extra>`,
      });
    }
    draw(`accuracy-${point}`, traces, {
      title: { text: `<b>${DATA.points[point]}</b>`, x: 0, xref: "paper", xanchor: "left", font: { size: 14, color: css("--ink") } },
      height: 340, hovermode: "x unified",
      xaxis: { title: { text: "round", font: { size: 12 } }, dtick: run.rounds.length < 10 ? 1 : undefined, hoverformat: "d" },
      yaxis: { range, ticksuffix: METRIC.unit },
      shapes: influenceIsThere() ? [{ type: "line", x0: roundNumber(), x1: roundNumber(), yref: "paper", y0: 0, y1: 1, line: { color: css("--soft"), width: 1, dash: "dot" } }] : [],
    });
    if (point === "trained") legend(own.filter(({ values }) => values.some(Number.isFinite)));
  }
  $("accuracy-caption").textContent =
    `${run.label}, ${run.views[state.view].label}. Left: before local training, what a round's exchange makes of the trained models. Right: after local training, these trained models. ` +
    (many ? "The grey band reaches from the worst client to the best." : "The heavy line is the average over clients.") +
    (run.rounds.length < run.scored ? ` The page holds ${run.rounds.length} of ${run.scored} scored rounds.` : "");
}

/** The axis for these scores; a call with each as an argument would not bear hundreds of thousands. */
function reachOf(values) {
  if (!values.length) return [0, METRIC.unit ? 100 : 1];
  const [low, high] = [values.reduce((a, b) => Math.min(a, b)), values.reduce((a, b) => Math.max(a, b))];
  const [edge, most] = METRIC.unit ? [0.06 * (high - low) + 0.5, 101] : [0.06 * (high - low) + 0.005, Infinity];
  return [Math.max(0, low - edge), Math.min(most, high + edge)];
}
const influenceIsThere = () => Boolean(packedInfluence("vector") || packedInfluence("matrix"));

function legend(lines) {
  $("accuracy-legend").replaceChildren(...lines.map((one) => {
    const entry = make("span", {}, one.name);
    entry.style.setProperty("--swatch", one.colour);
    return entry;
  }));
}

function drawComparison() {
  if (DATA.runs.length < 2) return;
  const reach = ({ mean, sd }) => mean.flatMap((value, t) => [value - sd[t], value + sd[t]].filter(() => value !== null));
  const all = DATA.runs.flatMap((run) => POINTS.flatMap((point) => reach(run.average[point])));
  const range = reachOf(all);
  for (const point of POINTS) {
    const traces = DATA.runs.flatMap((run, k) => {
      const { mean, sd } = run.average[point];
      const line = { x: run.rounds, y: mean, mode: run.rounds.length < 3 ? "lines+markers" : "lines", name: plain(run.label), line: { color: colourOf(k), width: 2.4 }, hovertemplate: `%{fullData.name}: %{y:${METRIC.unit ? ".2f" : ".3f"}}${METRIC.unit}<extra></extra>` };
      if (sd.some((value) => value === null)) return [line];
      const band = { x: run.rounds, mode: "lines", line: { width: 0 }, hoverinfo: "skip", showlegend: false };
      return [
        { ...band, y: mean.map((value, t) => value - sd[t]) },
        { ...band, y: mean.map((value, t) => value + sd[t]), fill: "tonexty", fillcolor: `${colourOf(k)}22` },
        line,
      ];
    });
    draw(`compare-${point}`, traces, {
      title: { text: `<b>${DATA.points[point]}</b>`, x: 0, xref: "paper", xanchor: "left", font: { size: 14, color: css("--ink") } },
      height: 360, hovermode: "x unified", showlegend: true,
      legend: { orientation: "h", y: -0.14, font: { size: 12 }, traceorder: "normal" },
      xaxis: { hoverformat: "d" }, yaxis: { range, ticksuffix: METRIC.unit },
    });
  }
  drawDifference();
}

/** Every run minus the chosen one after the last round, client by client. */
function drawDifference() {
  const last = (run) => {
    const { shape, values } = unpack(run.views[0].scores[state.againstPoint]);
    return values.slice((shape[0] - 1) * shape[1]);
  };
  const reference = last(DATA.runs[state.against]);
  const z = DATA.runs.map((run) => Array.from(last(run), (value, k) => value - reference[k]));
  const reach = z.flat().filter(Number.isFinite).reduce((top, value) => Math.max(top, Math.abs(value)), METRIC.unit ? 1 : 0.01);
  const places = METRIC.unit ? 1 : 3;
  const few = CLIENTS.length <= MANY;
  const [x, y] = [axisNames(CLIENTS), axisNames(DATA.runs.map((run) => run.label))];
  const scale = diverging(-1, 0, 1);
  const colorscale = METRIC.sign < 0 ? scale.map(([at, colour]) => [1 - at, colour]).reverse() : scale;
  const cells = { z, x, y, zmin: -reach, zmax: reach, colorscale };
  draw("difference", [
    { type: "heatmap", ...cells, xgap: few ? 2 : 0, ygap: 2, colorbar: colorbar(METRIC.unit ? "points" : METRIC.name), hoverongaps: false, hovertemplate: `%{y}, %{x}: %{z:+.${places}f}${METRIC.points}<extra></extra>` },
    ...(few ? [numbersOf(cells, (value) => signed(value, places), 13)] : []),
  ], {
    height: 90 + 40 * DATA.runs.length, margin: { t: 10, b: 8 },
    xaxis: cellAxis(x.length, { showticklabels: CLIENTS.length <= 40 }),
    yaxis: rowAxis(y.length),
  });
}

/** With its sign; no change has none. */
function signed(value, places) {
  const text = Math.abs(value).toFixed(places);
  return Number(text) === 0 ? text : `${value < 0 ? "−" : "+"}${text}`;
}
