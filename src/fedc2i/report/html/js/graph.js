// Who weighs most with whom: an arrow from the giver to the receiver, as thick as its influence.
const CLEARLY = 1.1; // times an equal share

/** λ between nodes: share[b][a] is what a member of b gives to the members of a in all, except itself; and the equal share. */
function nodeShares(rows) {
  const { labels, of } = currentRun().nodes;
  const sizes = labels.map((_, a) => of.filter((node) => node === a).length);
  const share = labels.map(() => labels.map(() => 0));
  const equal = labels.map(() => labels.map(() => 0));
  const counted = labels.map(() => 0);
  const own = labels.map(() => 0);
  rows.forEach((row, m) => {
    const there = count(row);
    if (!there) return;
    const b = of[m];
    counted[b] += 1;
    row.forEach((value, i) => {
      if (!Number.isFinite(value)) return;
      if (i === m) { own[b] += value; return; }
      share[b][of[i]] += value;
      equal[b][of[i]] += 1 / there;
    });
  });
  const mean = (table) => table.map((line, b) => line.map((value) => (counted[b] ? value / counted[b] : NaN)));
  return { labels, sizes, share: mean(share), equal: mean(equal), own: own.map((value, b) => (counted[b] ? value / counted[b] : NaN)) };
}

const memo = new Map();
/** The thickest edge of all rounds, so that thickness means the same in all of them. */
function thickest() {
  const packed = packedInfluence("vector");
  const key = `${state.run} ${state.view}`;
  if (!memo.has(key)) {
    let top = 2 / currentRun().nodes.labels.length;
    for (let t = 0; t < slots().length; t++) {
      nodeShares(rowsAt(packed, t)).share.forEach((line, b) => line.forEach((value, a) => { if (a !== b && value > top) top = value; }));
    }
    memo.set(key, top);
  }
  return memo.get(key);
}

function drawGraph() {
  const rows = vectorNow();
  $("graph-none").hidden = Boolean(rows);
  $("graph-chart").hidden = $("graph-note").hidden = !rows;
  const run = currentRun();
  if (!rows) {
    $("graph-none").textContent = `${$("heat-none").textContent}`;
    $("graph-caption").textContent = "";
    return;
  }
  const { labels, sizes, share, equal, own } = nodeShares(rows);
  const kind = run.nodes.kind;
  const wide = Math.min(704, Math.max(300, $("graph-chart").clientWidth || 640));
  const high = Math.max(340, Math.min(540, wide * 0.86));
  const ring = { x: wide / 2 - 58, y: high / 2 - 52 };
  const top = thickest();
  const nodes = labels.map((label, a) => {
    const angle = -Math.PI / 2 + (2 * Math.PI * a) / labels.length;
    const radius = kind === "client" ? 9 + 15 * Math.sqrt(Math.max(0, own[a] || 0)) : 11 + 13 * Math.sqrt(sizes[a] / Math.max(...sizes));
    const alone = labels.length === 1;
    return { a, label, radius, x: wide / 2 + (alone ? 0 : ring.x * Math.cos(angle)), y: high / 2 + (alone ? 0 : ring.y * Math.sin(angle)), upper: Math.sin(angle) < -0.1 };
  });
  const svg = make("svg", { viewBox: `0 0 ${wide} ${high}`, role: "group", "aria-label": `Who weighs most with whom in round ${roundNumber()}` });
  const edges = [];
  share.forEach((line, b) => line.forEach((value, a) => {
    if (a !== b && value > 0.03 * top) edges.push({ a, b, value, strong: value > CLEARLY * equal[b][a] });
  }));
  edges.sort((one, two) => one.value - two.value);
  for (const edge of edges) svg.append(arrow(nodes[edge.a], nodes[edge.b], edge, top));
  for (const node of nodes) svg.append(disc(node, { kind, size: sizes[node.a], own: own[node.a], kept: own[node.a] + share[node.a][node.a] }, (on) => highlight(svg, on ? node.a : null)));
  $("graph-chart").replaceChildren(svg);
  const what = { client: "clients", domain: "domains; an arrow adds up what a client of one domain gives to the clients of another", cluster: "groups of clients that listen to each other, found in the last round" }[kind];
  $("graph-caption").textContent =
    `Nodes are ${what}. An arrow goes from the giver to the receiver, in the giver's colour, as thick as its λ in round ${roundNumber()} (${shownView("vector")}); pale arrows are less than a tenth above an equal share. ` +
    (kind === "client" ? "A larger disc keeps more to itself. " : "A larger disc has more clients; inside: what they give to each other and themselves. ") + "Point at a node, or move to it with the tab key, to see its arrows alone.";
  $("graph-note").textContent = summaryOf(edges, labels);
}

function arrow(from, to, edge, top) {
  const width = 0.8 + 11 * (edge.value / top);
  const head = 5 + 1.25 * width;
  const [dx, dy] = [to.x - from.x, to.y - from.y];
  const long = Math.hypot(dx, dy);
  const bend = { x: (from.x + to.x) / 2 - (dy / long) * long * 0.14, y: (from.y + to.y) / 2 + (dx / long) * long * 0.14 };
  const toward = (p, q, step) => { const d = Math.hypot(q.x - p.x, q.y - p.y); return { x: p.x + ((q.x - p.x) / d) * step, y: p.y + ((q.y - p.y) / d) * step }; };
  const start = toward(from, bend, from.radius + 2);
  const tip = toward(to, bend, to.radius + 3);
  const neck = toward(to, bend, to.radius + 3 + head);
  const unit = { x: (tip.x - neck.x) / head, y: (tip.y - neck.y) / head };
  const wing = 0.5 * width + 3;
  const group = make("g", { class: "edge", "data-from": edge.a, "data-to": edge.b, "data-share": edge.value.toFixed(4), opacity: edge.strong ? 0.88 : 0.22 });
  const colour = colourOf(edge.a);
  group.append(
    make("path", { d: `M${start.x} ${start.y}Q${bend.x} ${bend.y} ${neck.x} ${neck.y}`, stroke: colour, "stroke-width": width, fill: "none" }),
    make("path", { d: `M${tip.x} ${tip.y}L${neck.x - unit.y * wing} ${neck.y + unit.x * wing}L${neck.x + unit.y * wing} ${neck.y - unit.x * wing}Z`, fill: colour }),
    make("title", {}, `${from.label} weighs with ${to.label}: ${edge.value.toFixed(3)}`),
  );
  if (edge.strong && Number.isFinite(edge.value)) {
    const at = { x: (start.x + 2 * bend.x + neck.x) / 4, y: (start.y + 2 * bend.y + neck.y) / 4 };
    group.append(make("text", { class: "share", x: at.x, y: at.y + 4, "text-anchor": "middle", "font-size": 12 }, edge.value.toFixed(2)));
  }
  return group;
}

function disc(node, { kind, size, own, kept }, focus) {
  const inside = Number.isFinite(kept) ? `, ${Math.round(100 * kept)} % inside` : "";
  const group = make("g", { class: "node", tabindex: 0, role: kind === "client" ? "button" : "img", "aria-label": kind === "client" ? `${node.label}, choose this client` : `${node.label}, ${size} clients${inside}` });
  const y = node.upper ? node.y - node.radius - (kind === "client" ? 9 : 22) : node.y + node.radius + 18;
  group.append(
    make("circle", { cx: node.x, cy: node.y, r: node.radius, fill: colourOf(node.a), stroke: css("--card"), "stroke-width": 2 }),
    make("text", { x: node.x, y, "text-anchor": "middle", "font-size": 13 }, shortened(node.label, 16)),
    make("title", {}, `${node.label}${Number.isFinite(own) && kind === "client" ? `, λ on itself ${own.toFixed(2)}` : ""}`),
  );
  if (kind !== "client") group.append(make("text", { class: "sub", x: node.x, y: y + 15, "text-anchor": "middle", "font-size": 12 }, `${size} clients${inside}`));
  for (const [event, on] of [["mouseenter", true], ["focus", true], ["mouseleave", false], ["blur", false]]) group.addEventListener(event, () => focus(on));
  const choose = () => { if (kind === "client") chooseClient(node.a); };
  group.addEventListener("click", choose);
  group.addEventListener("keydown", (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); choose(); } });
  return group;
}

function highlight(svg, node) {
  for (const edge of svg.querySelectorAll(".edge")) {
    edge.classList.toggle("faded", node !== null && Number(edge.dataset.from) !== node && Number(edge.dataset.to) !== node);
  }
}

function summaryOf(edges, labels) {
  const strongest = edges.slice(-3).reverse();
  if (!strongest.length) return "Nobody gives weight to anyone else in this round.";
  return `Strongest now: ${strongest.map((edge) => `${labels[edge.a]} → ${labels[edge.b]} (${shareText(edge.value)})`).join(", ")}.`;
}
