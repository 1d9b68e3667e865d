// The chosen client: whom it learned from, whom it taught, and the classes that differ.
function bars(entries, equal) {
  const top = Math.max(equal, ...entries.map((one) => one.value), 1e-9);
  return make("ul", { class: "bars" }, ...entries.map((one) => {
    const fill = make("span", { class: "fill" });
    fill.style.width = `${(100 * one.value) / top}%`;
    fill.style.background = CLIENTS.length <= MANY ? colourOf(one.client) : css("--accent");
    const mark = make("span", { class: "equal", title: `an equal share, ${equal.toFixed(3)}` });
    mark.style.left = `${(100 * equal) / top}%`;
    return make("li", {}, make("span", { class: "name", title: CLIENTS[one.client] }, CLIENTS[one.client]), make("span", { class: "track" }, fill, mark), make("b", {}, shareText(one.value)));
  }));
}

function drawPanel() {
  const rows = vectorNow();
  const name = CLIENTS[state.client];
  const panel = $("panel");
  const parts = [];
  if (!rows) {
    parts.push(make("p", { class: "none" }, $("heat-none").textContent));
  } else {
    const own = rows[state.client];
    const equal = 1 / Math.max(1, count(own) || CLIENTS.length);
    const notable = (one) => one.value >= 0.1 / CLIENTS.length;
    const measured = ranked(own, state.client);
    const learned = measured.filter(notable).slice(0, 6);
    const taught = ranked(rows.map((row) => row[state.client]), state.client).filter(notable).slice(0, 6);
    parts.push(make("h3", {}, `Who weighs most with ${name}`));
    parts.push(learned.length ? bars(learned, equal) : make("p", { class: "caption" }, measured.length ? "nobody: it keeps nearly all weight to itself" : "nothing was measured in this round"));
    parts.push(make("h3", {}, `Where ${name} weighs most`));
    parts.push(taught.length ? bars(taught, equal) : make("p", { class: "caption" }, "nobody gave it weight in this round"));
    const matrix = matrixNow();
    if (matrix && measured.length && matrix.round === roundNumber()) {
      const other = classesWithAnotherHelper(own, matrix.rows);
      parts.push(make("h3", {}, "Classes with another first weight"));
      parts.push(other.length
        ? make("ul", { class: "plain", id: "other-helpers" }, ...other.slice(0, 6).map((one) => make("li", {}, `${DATA.classes[one.label]} ← ${CLIENTS[one.helper]} (${shareText(one.share)})`)))
        : make("p", { class: "caption", id: "other-helpers" }, "none stands out"));
    }
    parts.push(make("p", { class: "note" }, `λ in round ${roundNumber()}; the thin line is an equal share. Its own model has ${Number.isFinite(own[state.client]) ? shareText(own[state.client]) : "no weight"}.`));
  }
  panel.replaceChildren(...parts);
}

function drawChips() {
  if (CLIENTS.length > 24) {
    const select = make("select", { id: "client-select", "aria-labelledby": "pick-name" }, ...CLIENTS.map((name, k) => make("option", { value: k }, name)));
    select.addEventListener("change", () => chooseClient(Number(select.value)));
    select.value = state.client;
    $("chips").replaceChildren(select);
    return;
  }
  $("chips").replaceChildren(...CLIENTS.map((name, k) => {
    const chip = make("button", { type: "button", "aria-pressed": k === state.client }, name);
    chip.addEventListener("click", () => chooseClient(k));
    return chip;
  }));
}

function chooseClient(client) {
  state.client = client;
  for (const [k, chip] of [...$("chips").querySelectorAll("button")].entries()) chip.setAttribute("aria-pressed", k === client);
  if ($("client-select")) $("client-select").value = client;
  drawPanel();
  drawMatrix();
  if (CLIENTS.length > MANY) drawAccuracy();
}
