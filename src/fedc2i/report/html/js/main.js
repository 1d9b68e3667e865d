// Controls, and drawing everything once.
const TICK = 900; // milliseconds a round while playing
let playing = null;

function drawRound() {
  const rounds = slots();
  $("round").max = rounds.length - 1;
  $("round").value = state.at;
  $("round").setAttribute("aria-valuetext", `round ${roundNumber()}`);
  $("round-name").textContent = `round ${roundNumber()} of ${currentRun().rounds.at(-1) ?? rounds.at(-1)}`;
  $("time").hidden = !influenceIsThere() || rounds.length < 2;
  showMeasured();
  drawVector();
  drawGraph();
  drawPanel();
  drawMatrix();
}

function drawAll() {
  drawComparison();
  drawAccuracy();
  drawRound();
}

function moveTo(at) {
  state.at = Math.max(0, Math.min(slots().length - 1, at));
  drawAccuracy();
  drawRound();
}

function play(on) {
  clearInterval(playing);
  playing = on ? setInterval(() => (state.at >= slots().length - 1 ? play(false) : moveTo(state.at + 1)), TICK) : null;
  $("play").setAttribute("aria-label", on ? "Stop playing" : "Play the rounds");
  $("play").firstElementChild.textContent = on ? "❚❚" : "▶";
  if (on && state.at >= slots().length - 1) moveTo(0);
}

function options(select, names) {
  select.replaceChildren(...names.map((name, k) => make("option", { value: k }, name)));
}

function chooseRun(run) {
  const before = slots().length ? roundNumber() : 0;
  state.run = run;
  state.view = 0;
  const views = currentRun().views;
  options($("view"), views.map((view) => view.label));
  $("view-label").hidden = views.length < 2;
  const later = slots().findIndex((round) => round >= before);
  state.at = later < 0 ? slots().length - 1 : later;
}

/** The client with the strongest helper: a good one to begin with. */
function mostHelped() {
  const tops = (vectorNow() ?? []).map((row, m) => ranked(row, m)[0]?.value ?? 0);
  return Math.max(0, tops.indexOf(Math.max(...tops)));
}

function begin() {
  setTheme(root.dataset.theme);
  options($("run"), DATA.runs.map((run) => run.label));
  chooseRun(DATA.first);
  $("run").value = state.run;
  state.at = slots().length - 1;
  state.client = mostHelped();
  drawChips();
  if ($("against")) {
    options($("against"), DATA.runs.map((run) => run.label));
    $("against").addEventListener("change", () => { state.against = Number($("against").value); drawDifference(); });
    $("against-point").addEventListener("change", () => { state.againstPoint = $("against-point").value; drawDifference(); });
  }
  $("run").addEventListener("change", () => { play(false); chooseRun(Number($("run").value)); drawAccuracy(); drawRound(); });
  $("view").addEventListener("change", () => { state.view = Number($("view").value); drawAccuracy(); drawRound(); });
  $("round").addEventListener("input", () => { play(false); moveTo(Number($("round").value)); });
  $("play").addEventListener("click", () => play(playing === null));
  $("without-own").addEventListener("change", () => { state.withoutOwn = $("without-own").checked; drawVector(); });
  $("theme").addEventListener("click", () => { setTheme(root.dataset.theme === "dark" ? "light" : "dark"); drawAll(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", (event) => { setTheme(event.matches ? "dark" : "light"); drawAll(); });
  for (const button of document.querySelectorAll(".copy")) button.addEventListener("click", () => copy(button));
  followContents();
  drawAll();
  markWide();
  for (const fold of document.querySelectorAll("details")) fold.addEventListener("toggle", markWide);
  let narrow = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== narrow) { narrow = innerWidth; requestAnimationFrame(() => { drawRound(); markWide(); }); } });
  let before = null;
  addEventListener("beforeprint", () => { before = root.dataset.theme; setTheme("light"); forPrint(true); });
  addEventListener("afterprint", () => { setTheme(before); forPrint(false); });
  root.dataset.ready = Math.round(performance.now());
}

/** Tables that are wider than the page say that they scroll. */
function markWide() {
  for (const table of document.querySelectorAll(".scroll")) table.classList.toggle("wide", table.scrollWidth > table.clientWidth + 4);
}

/** Paper is narrower than most windows, and has no folds. */
function forPrint(on) {
  for (const fold of document.querySelectorAll("details")) {
    if (on) fold.dataset.before = fold.open;
    fold.open = on || fold.dataset.before === "true";
  }
  drawAll();
  for (const id of charts) if (!$(id).hidden) Plotly.relayout(id, on ? { width: Math.min($(id).clientWidth, 640) } : { width: null, autosize: true });
}

async function copy(button) {
  const code = button.previousElementSibling;
  getSelection().selectAllChildren(code);
  try {
    await navigator.clipboard.writeText(code.textContent);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Press Ctrl+C";
  }
  setTimeout(() => { button.textContent = "Copy"; }, 2000);
}

function followContents() {
  const links = new Map([...document.querySelectorAll(".toc a")].map((link) => [link.hash.slice(1), link]));
  const visible = new Set();
  const seen = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) visible[isIntersecting ? "add" : "delete"](target.id);
    const first = [...links.keys()].find((id) => visible.has(id));
    for (const [id, link] of first ? links : []) {
      if (id === first) link.setAttribute("aria-current", "true");
      else link.removeAttribute("aria-current");
    }
  }, { rootMargin: "-20% 0px -70% 0px" });
  for (const section of document.querySelectorAll("main section")) seen.observe(section);
}

begin();
