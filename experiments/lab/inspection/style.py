"""The page's style sheet and script, inline so that the file stands alone."""

CSS = """
:root { color-scheme: light dark;
  --page: #f4f6f8; --card: #fff; --ink: #1b1f24; --soft: #57606a; --line: #d5dbe1; --grid: #e7ebef;
  --good: #116329; --good-back: #dff5e3; --bad: #a40e26; --bad-back: #ffe6e8; --warn: #7d3c00; --warn-back: #ffefdb;
  --c0: #0b5fa5; --c1: #c04a00; --c2: #08775a; --c3: #8f3a9b; --c4: #7a6000; --c5: #444c56; --c6: #b0215e; }
@media (prefers-color-scheme: dark) { :root {
  --page: #0f1216; --card: #191d23; --ink: #e9ecef; --soft: #a9b2bc; --line: #363d46; --grid: #2a3038;
  --good: #7ee2a0; --good-back: #12351f; --bad: #ff9aa6; --bad-back: #43161c; --warn: #ffbe7a; --warn-back: #402608;
  --c0: #62b0f2; --c1: #ff9a57; --c2: #48cfa6; --c3: #d79be0; --c4: #dcc04f; --c5: #c3cad2; --c6: #ff8cb8; } }
* { box-sizing: border-box; }
[hidden] { display: none !important; }
html { -webkit-text-size-adjust: 100%; scroll-behavior: smooth; }
body { margin: 0 auto; padding: 20px; max-width: 1320px; background: var(--page); color: var(--ink);
  font: 16px/1.45 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
h1 { margin: 0; font-size: 1.8rem; line-height: 1.2; overflow-wrap: anywhere; }
h2 { margin: 2rem 0 .25rem; font-size: 1.3rem; }
h3 { margin: 0; font-size: 1rem; line-height: 1.3; }
p { margin: .25rem 0; overflow-wrap: anywhere; }
a { color: var(--c0); }
.soft, .note, .eyebrow, dt { color: var(--soft); }
.note { margin: .4rem 0 0; font-size: .82rem; }
.eyebrow { display: block; font-size: .72rem; line-height: 1.3; letter-spacing: .06em; text-transform: uppercase; }
.head { display: flex; flex-wrap: wrap; gap: .3rem .8rem; align-items: center; }
.badge { padding: .1rem .55rem; border-radius: 1rem; font-size: .82rem; font-weight: 600; white-space: nowrap; }
.good { color: var(--good); background: var(--good-back); }
.bad { color: var(--bad); background: var(--bad-back); }
.warn { color: var(--warn); background: var(--warn-back); }
nav { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; margin-top: .5rem; }
.card { margin: 0; padding: 13px 14px; min-width: 0; background: var(--card); border: 1px solid var(--line);
  border-radius: 9px; }
.numbers, .charts, .rollouts { display: grid; gap: 14px; margin: 1rem 0 0; }
.numbers { grid-template-columns: repeat(auto-fit, minmax(min(100%, 140px), 1fr)); }
.numbers .wide { grid-column: span 2; }
.numbers dt { font-size: .85rem; }
.numbers dd { margin: 0; }
.numbers dd.value { font-size: 1.35rem; font-weight: 650; line-height: 1.3; font-variant-numeric: tabular-nums; }
.numbers dd.detail { font-size: .82rem; color: var(--soft); }
.numbers .warn { border-color: currentColor; }
.numbers .warn dt, .numbers .warn dd { color: inherit; }
.charts { grid-template-columns: repeat(auto-fill, minmax(min(100%, 345px), 1fr)); }
/* Caption, chart and note of neighbours start at the same heights. */
.charts .card { display: grid; grid-row: span 3; grid-template-rows: subgrid; row-gap: 0; align-content: start; }
.chart { display: block; width: 100%; height: auto; margin-top: .5rem; overflow: visible; }
.chart text { font: 12px system-ui, -apple-system, "Segoe UI", Roboto, Arial, sans-serif; fill: var(--soft);
  font-variant-numeric: tabular-nums; }
.chart .label { fill: var(--ink); }
.grid, .frame { stroke: var(--grid); fill: none; }
.line { fill: none; stroke: var(--c); stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
.faint { fill: none; stroke: var(--c); stroke-width: .8; opacity: .4; stroke-linejoin: round; stroke-linecap: round; }
.band { fill: var(--c); opacity: .18; }
.area { fill: var(--c); opacity: .82; }
.dot { fill: var(--c); }
.reference { fill: none; stroke: var(--soft); stroke-width: 1; }
.heat { fill: var(--c0); shape-rendering: crispEdges; }
.s0 { --c: var(--c0); } .s1 { --c: var(--c1); } .s2 { --c: var(--c2); } .s3 { --c: var(--c3); } .s4 { --c: var(--c4); }
.s5 { --c: var(--c5); } .s6 { --c: var(--c6); }
.line.s1 { stroke-dasharray: 7 4; } .line.s2 { stroke-dasharray: 2 4; } .line.s3 { stroke-dasharray: 9 4 2 4; }
.line.s4 { stroke-dasharray: 4 4; } .line.s5 { stroke-dasharray: 12 4; } .line.s6 { stroke-dasharray: 2 4 2 4 8 4; }
.legend { display: flex; flex-wrap: wrap; gap: .1rem .8rem; margin: .3rem 0 0; padding: 0; list-style: none;
  font-size: .82rem; }
.legend li { overflow-wrap: anywhere; }
.key { width: 22px; height: 10px; margin-right: .35rem; }
.filter { display: flex; flex-wrap: wrap; gap: 8px; margin: .8rem 0 0; }
button { padding: .5rem .9rem; min-height: 42px; border: 1px solid var(--line); border-radius: 8px; font: inherit;
  background: var(--card); color: var(--ink); cursor: pointer; }
button[aria-pressed=true] { background: var(--ink); border-color: var(--ink); color: var(--page); }
.rollouts { grid-template-columns: repeat(auto-fill, minmax(min(100%, 345px), 1fr)); align-items: start; }
.rollouts .head { justify-content: space-between; }
.rollouts dl { margin: .5rem 0 0; }
.rollouts dt { font-size: .8rem; }
.rollouts dd { margin: 0 0 .4rem; }
.facts { font-size: .82rem; color: var(--soft); overflow-wrap: anywhere; }
pre { margin: 0; padding: .35rem .5rem; max-height: 17rem; overflow: auto; background: var(--page); border-radius: 6px;
  font: .87rem/1.4 ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; white-space: pre-wrap;
  overflow-wrap: anywhere; }
.more { display: block; margin: 14px auto 0; }
summary { cursor: pointer; padding: .3rem 0; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .87rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .7rem .25rem 0; border-bottom: 1px solid var(--grid); text-align: left; vertical-align: top; }
td { overflow-wrap: anywhere; min-width: 4.5rem; }
tr.changed td, tr.changed th { font-weight: 650; }
tr:not(.changed) th { font-weight: 400; }
@media (max-width: 520px) { body { padding: 12px; } .numbers { grid-template-columns: 1fr 1fr; gap: 10px; }
  .numbers .last { grid-column: span 2; } .charts, .rollouts { gap: 10px; }
  .numbers .card { padding: 10px; } .numbers dd.value { font-size: 1.15rem; } }
@media print { .filter, .more, nav { display: none; } .card { break-inside: avoid; } }
"""  # noqa: E501

# Shows the rollouts that the pressed button asks for, a page at a time.
SCRIPT = """
(() => {
  const cards = [...document.querySelectorAll(".rollouts article")], more = document.querySelector(".more");
  const buttons = [...document.querySelectorAll(".filter button")], said = document.getElementById("shown"), page = 24;
  if (!cards.length) return;
  let want = "all", limit = page;
  const draw = () => {
    const fit = cards.filter(card => want === "all" || card.dataset.tags.split(" ").includes(want));
    cards.forEach(card => card.hidden = true);
    fit.slice(0, limit).forEach(card => card.hidden = false);
    more.hidden = fit.length <= limit;
    said.textContent = `Shown: ${Math.min(limit, fit.length)} of ${fit.length}`;
    buttons.forEach(button => button.setAttribute("aria-pressed", button.dataset.want === want));
  };
  buttons.forEach(button => button.onclick = () => { want = button.dataset.want; limit = page; draw(); });
  more.onclick = () => { limit += page; draw(); };
  document.querySelector(".filter").hidden = false;
  draw();
})();
"""  # noqa: E501
