// Draws the charts of a report as inline SVG and makes its tables sortable. Text is only ever set as text, never as markup.
"use strict";
(() => {
  const COLOURS = 8, DASHES = ["", "7 4", "2 3", "9 3 2 3", "12 5"], MOST_BANDS = 5, FONT = 12, CHARACTER = 6.6; // px: a character's width, generously
  const CIVIDIS = [[0, 34, 78], [50, 70, 109], [98, 102, 112], [140, 136, 119], [187, 173, 107], [254, 232, 56]]; // even steps of the scale
  const SHAPES = [ // markers of radius 4 around 0, 0
    "M4,0A4,4 0 1 1 -4,0A4,4 0 1 1 4,0Z", "M-3.6,-3.6H3.6V3.6H-3.6Z", "M0,-4.8L4.4,3.4H-4.4Z", "M0,-5L5,0L0,5L-5,0Z",
    "M0,4.8L4.4,-3.4H-4.4Z", "M-1.5,-4.5H1.5V-1.5H4.5V1.5H1.5V4.5H-1.5V1.5H-4.5V-1.5H-1.5Z", "M0,-5L4.8,-1.5L2.9,4H-2.9L-4.8,-1.5Z",
  ];
  const space = document.querySelector("svg")?.namespaceURI;
  const style = (series) => {
    const i = series.c ?? 0, turn = i + Math.floor(i / COLOURS);
    return { colour: `c${i % COLOURS}`, dash: DASHES[series.dash ?? turn % DASHES.length], shape: SHAPES[turn % SHAPES.length] };
  };

  // --- elements

  function fill(node, attributes, children) {
    for (const [key, value] of Object.entries(attributes)) if (value !== "" && value != null) node.setAttribute(key, value);
    node.append(...children.filter((child) => child != null));
    return node;
  }
  const svg = (name, attributes = {}, ...children) => fill(document.createElementNS(space, name), attributes, children);
  const html = (name, attributes = {}, ...children) => fill(document.createElement(name), attributes, children);
  const label = (x, y, text, anchor = "middle", attributes = {}) => svg("text", { x, y, "text-anchor": anchor, ...attributes }, text);
  const shortened = (text, width) => (text.length * CHARACTER <= width ? text : `${text.slice(0, Math.max(3, Math.floor(width / CHARACTER) - 1))}…`);

  // --- numbers

  const shown = (value, unit) => (unit === "%" ? `${value.toFixed(2)} %` : `${Number(value.toPrecision(4))}${unit ? ` ${unit}` : ""}`);
  const interval = (low, high, unit) => (low == null ? "" : `, 95 % CI [${shown(low, unit)}, ${shown(high, unit)}]`);
  const least = (values) => values.reduce((a, b) => Math.min(a, b), Infinity), most = (values) => values.reduce((a, b) => Math.max(a, b), -Infinity);
  const longest = (texts) => most(texts.map((text) => String(text).length)) * CHARACTER;
  const clamp = (value, low, high) => Math.min(Math.max(value, low), high);

  function linearTicks(low, high, count, whole) {
    const rough = (high - low) / Math.max(1, count), power = 10 ** Math.floor(Math.log10(rough));
    let step = power * [1, 2, 5, 10].find((factor) => power * factor >= rough * 0.999);
    if (whole) step = Math.max(1, Math.round(step));
    const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9)), ticks = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) ticks.push({ at: i * step, text: (i * step).toFixed(digits).replace(/^-(0(\.0*)?)$/, "$1") });
    return ticks;
  }

  function logTicks(low, high, count) {
    const ticks = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++)
      for (const factor of [1, 2, 5]) ticks.push(factor * 10 ** power);
    const inside = ticks.filter((tick) => tick >= low * 0.999 && tick <= high * 1.001);
    if (inside.length < 3) return linearTicks(low, high, count).filter((tick) => tick.at > 0);
    const tens = inside.filter((tick) => Number.isInteger(Math.round(Math.log10(tick) * 1e6) / 1e6));
    const kept = inside.length > count && tens.length > 1 ? tens : inside;
    const every = Math.ceil(kept.length / count);
    return kept.filter((_, i) => i % every === 0).map((at) => ({ at, text: String(Number(at.toPrecision(3))) }));
  }

  // The frame holds all middles; intervals that would squeeze them are cut at its edge.
  function extent(middles, ends, unit) {
    let low = least(middles), high = most(middles);
    const room = (high - low || Math.abs(high) * 0.02 || 1) * 0.75;
    low = Math.max(low - room, least([low, ...ends])), high = Math.min(high + room, most([high, ...ends]));
    const margin = (high - low || Math.abs(high) * 0.02 || 1) * 0.06;
    return unit === "%" ? [Math.max(0, low - margin), Math.min(100.5, high + margin)] : [low - margin, high + margin];
  }

  function scale(low, high, from, to, log) {
    const place = log ? Math.log10 : (value) => value, first = place(low), span = place(high) - first || 1;
    return (value) => from + ((place(value) - first) / span) * (to - from);
  }

  function heatColour(share) {
    const at = clamp(share, 0, 1) * (CIVIDIS.length - 1), i = Math.min(CIVIDIS.length - 2, Math.floor(at));
    const mixed = CIVIDIS[i].map((value, k) => Math.round(value + (CIVIDIS[i + 1][k] - value) * (at - i)));
    return { fill: `rgb(${mixed})`, ink: 0.3 * mixed[0] + 0.59 * mixed[1] + 0.11 * mixed[2] > 120 ? "#111" : "#fff" };
  }

  // --- kinds of charts: each returns { nodes, height, points: [{ x, y, group, text }] }

  function drawLines({ spec, view, series, width, bands }) {
    const points = [], nodes = [], all = series.flatMap((s) => [...s.points, ...(s.marks ?? []).map(([x, y]) => [x, y])]);
    const refs = view.refs ?? [], unit = view.unit, height = clamp(width * 0.46, 230, 340), bottom = height - 42;
    const ys = extent([...all.map((p) => p[1]), ...refs.map((r) => r.at)], all.flatMap((p) => (p[2] == null || !bands ? [] : [p[2], p[3]])), unit);
    const yTicks = linearTicks(...ys, 7), left = 28 + longest(yTicks.map((t) => t.text)), right = width - 14;
    const xs = all.map((p) => p[0]), inner = right - left, log = view.log;
    let [low, high] = [least(xs), most(xs)];
    const pad = view.categories ? 0.5 : low === high ? Math.abs(low) * 0.1 || 1 : 0;
    if (log) [low, high] = low === high ? [low / 1.5, high * 1.5] : [low / 1.02, high * 1.02];
    else [low, high] = view.categories ? [-0.5, view.categories.length - 0.5] : [low - pad, high + pad];
    const X = scale(low, high, left, right, log), Y = scale(...ys, bottom, 8), fits = Math.max(2, Math.floor(inner / 62));
    const xTicks = view.categories
      ? view.categories.map((text, at) => ({ at, text: shortened(text, inner / view.categories.length - 6) }))
      : log ? logTicks(low, high, fits) : linearTicks(low, high, Math.min(fits, 10), view.whole);
    for (const t of yTicks) nodes.push(svg("line", { class: "grid", x1: left, x2: right, y1: Y(t.at), y2: Y(t.at) }), label(left - 7, Y(t.at) + 4, t.text, "end"));
    for (const t of xTicks) nodes.push(svg("line", { class: "axis", x1: X(t.at), x2: X(t.at), y1: bottom, y2: bottom + 4 }), label(X(t.at), bottom + 17, t.text));
    nodes.push(svg("line", { class: "axis", x1: left, x2: right, y1: bottom, y2: bottom }));
    nodes.push(label((left + right) / 2, height - 6, view.x, "middle", { class: "strong" }));
    nodes.push(label(0, 0, shortened(`${view.y}${unit ? `, ${unit}` : ""}`, bottom), "middle", { class: "strong", transform: `translate(11 ${(8 + bottom) / 2}) rotate(-90)` }));
    const said = refs.map((r) => label(right - 4, Y(r.at) - 5, r.text, "end", { class: "halo" }));
    for (const r of refs) nodes.push(svg("line", { class: "ref", x1: left, x2: right, y1: Y(r.at), y2: Y(r.at) }));
    for (const [i, r] of (view.verticals ?? []).filter((v) => v.at >= low && v.at <= high).entries()) {
      const x = X(r.at), leftwards = x - left < 50 ? false : right - x < 50 || r.before;
      nodes.push(svg("line", { class: "ref", x1: x, x2: x, y1: 8, y2: bottom }));
      said.push(label(x + (leftwards ? -4 : 4), bottom - 6 - 14 * i, r.text, leftwards ? "end" : "start", { class: "halo" }));
    }
    const clip = `clip-${spec.id}`, layer = svg("g", { "clip-path": `url(#${clip})` });
    nodes.push(svg("clipPath", { id: clip }, svg("rect", { x: left, y: 2, width: inner, height: bottom - 2 })), layer);
    for (const [group, s] of series.entries()) {
      const { colour, dash, shape } = style(s), banded = bands ? s.points.filter((p) => p[2] != null) : [];
      if (banded.length > 1) layer.append(svg("path", { class: `band ${colour}`, d: `M${banded.map((p) => `${X(p[0])},${Y(p[3])}`).join("L")}L${[...banded].reverse().map((p) => `${X(p[0])},${Y(p[2])}`).join("L")}Z` }));
      if (!view.scatter) layer.append(svg("path", { class: `line ${colour}`, "stroke-dasharray": dash, d: `M${s.points.map((p) => `${X(p[0])},${Y(p[1])}`).join("L")}` }));
      const every = view.scatter ? 1 : Math.ceil(s.points.length / 24);
      for (const [i, p] of s.points.entries()) {
        if (i % every === 0 || i === s.points.length - 1) nodes.push(svg("path", { class: `mark ${colour}`, d: shape, transform: `translate(${X(p[0])} ${Y(p[1])})` }));
        const at = view.categories ? view.categories[p[0]] : shown(p[0], view.xunit);
        points.push({ x: X(p[0]), y: Y(p[1]), group, text: p[4] ?? `${s.label}\n${view.x.replace(/,.*/, "")} ${at}: ${shown(p[1], unit)}${interval(p[2], p[3], unit)}${s.n ? `, n = ${s.n}` : ""}` });
      }
      for (const [x, y, text, kind] of s.marks ?? []) {
        const ring = kind === "ring";
        if (ring) nodes.push(svg("line", { class: `whisker ${colour}`, "stroke-dasharray": "1 4", x1: X(x), x2: X(x), y1: Y(y), y2: bottom }));
        nodes.push(svg("path", { class: `${kind} ${colour}`, d: ring ? SHAPES[0] : SHAPES[3], transform: `translate(${X(x)} ${Y(y)}) scale(${ring ? 2 : 1.2})`, "vector-effect": "non-scaling-stroke" }));
        points.push({ x: X(x), y: Y(y), group, text: `${s.label}\n${text}` });
      }
    }
    return { nodes: [...nodes, ...said], height, points };
  }

  function drawDots({ view, series, width }) {
    const rows = [...new Set(series.flatMap((s) => s.points.map((p) => p.row)))], lanes = view.lanes ? series.length : 1;
    const step = 16 + 10 * lanes, top = 6, bottom = top + rows.length * step, height = bottom + 40, unit = view.unit, points = [], nodes = [];
    const all = series.flatMap((s) => s.points);
    const xs = extent(all.flatMap((p) => (p.from == null ? [p.at] : [p.at, p.from])), all.flatMap((p) => (p.low == null ? [] : [p.low, p.high])), unit);
    const left = clamp(longest(rows) + 14, 40, width * 0.38), right = width - 16, X = scale(...xs, left, right);
    for (const t of linearTicks(...xs, clamp(Math.floor((right - left) / 60), 2, 8)))
      nodes.push(svg("line", { class: "grid", x1: X(t.at), x2: X(t.at), y1: top, y2: bottom }), label(X(t.at), bottom + 16, t.text));
    nodes.push(label((left + right) / 2, height - 6, `${view.x}${unit ? `, ${unit}` : ""}`, "middle", { class: "strong" }));
    for (const [i, row] of rows.entries()) {
      nodes.push(label(left - 8, top + (i + 0.5) * step + 4, shortened(row, left - 12), "end", { class: "strong" }));
      if (i) nodes.push(svg("line", { class: "grid", x1: 0, x2: right, y1: top + i * step, y2: top + i * step, "stroke-dasharray": "1 4" }));
    }
    for (const [group, s] of series.entries()) for (const p of s.points) {
      const { colour, shape } = style(s), x = X(p.at), y = top + (rows.indexOf(p.row) + (view.lanes ? (group + 1) / (lanes + 1) : 0.5)) * step;
      if (p.low != null) {
        const a = clamp(X(p.low), left, right), b = clamp(X(p.high), left, right);
        const end = (at, value, bound, sign) => ((value - bound) * sign > 0 ? `M${at - 5 * sign},${y - 4}L${at},${y}L${at - 5 * sign},${y + 4}` : `M${at},${y - 4}V${y + 4}`);
        nodes.push(svg("path", { class: `whisker ${colour}`, d: `M${a},${y}H${b}${end(a, p.low, xs[0], -1)}${end(b, p.high, xs[1], 1)}` }));
      }
      if (p.from != null) nodes.push(svg("path", { class: `whisker ${colour}`, d: `M${X(p.from)},${y}H${x}` }), svg("path", { class: `open ${colour}`, d: shape, transform: `translate(${X(p.from)} ${y})` }));
      nodes.push(svg("path", { class: `mark ${colour}`, d: shape, transform: `translate(${x} ${y}) scale(1.15)` }));
      const value = p.from == null ? `${shown(p.at, unit)}${interval(p.low, p.high, unit)}` : `${shown(p.from, unit)} before, ${shown(p.at, unit)} after`;
      points.push({ x, y, group: rows.indexOf(p.row), text: `${p.row}${view.lanes ? `, ${s.label}` : ""}\n${value}${p.n ? `, n = ${p.n}` : ""}` });
    }
    return { nodes, height, points };
  }

  function drawHeat({ view, width }) {
    const { rows, columns, values, unit } = view, nodes = [], points = [], names = view.named ? rows : rows.map(String);
    const left = clamp(longest(names) + 32, 52, width * 0.4), right = width - 8;
    const cell = (right - left) / columns.length, wide = view.square ? Math.min(cell, 74) : Math.min(cell, 96);
    const tall = view.square ? clamp(wide * 0.6, 18, 40) : view.named ? 24 : clamp(420 / rows.length, 3, 20);
    const full = most(values.flat().map((v) => v ?? 0)) || 1, top = 30, end = left + wide * columns.length, bottom = top + tall * rows.length;
    const short = (value) => (unit === "%" ? value.toFixed(1) : String(value)), written = tall >= 15 && longest(values.flat().map((v) => short(v ?? 0))) < wide - 2;
    for (let i = 0; i < 40; i++) nodes.push(svg("rect", { x: left + i * 3, y: 4, width: 3.4, height: 9, fill: heatColour(i / 39).fill }));
    nodes.push(label(left - 6, 13, "0", "end"), label(left + 126, 13, shortened(`${shown(full, unit)}${view.what ? ` ${view.what}` : ""}`, right - left - 126), "start"));
    nodes.push(svg("rect", { class: "empty", x: left, y: top, width: end - left, height: bottom - top }));
    for (const [i, row] of rows.entries()) for (const [j, column] of columns.entries()) {
      const value = values[i][j];
      if (value == null) continue;
      const x = left + j * wide, y = top + i * tall, { fill: colour, ink } = heatColour(value / full);
      if (value || !view.sparse) nodes.push(svg("rect", { x, y, width: wide + 0.2, height: tall + 0.2, fill: colour }));
      if ((value || !view.sparse) && written) nodes.push(label(x + wide / 2, y + tall / 2 + 4, short(value), "middle", { style: `fill: ${ink}` }));
      points.push({ x: x + wide / 2, y: y + tall / 2, group: i, box: [x, y, wide, tall], text: `${[`${view.row} ${row}`, `${view.column} ${column}`].map((t) => t.trim()).join(", ")}\n${shown(value, unit)}${view.what ? ` ${view.what}` : ""}` });
    }
    const every = Math.ceil((FONT + 2) / tall), turned = longest(columns) > wide - 2 && view.named;
    for (const [i, name] of names.entries()) if (i % every === 0) nodes.push(label(left - 6, top + (i + 0.5) * tall + 4, shortened(name, left - (view.named ? 12 : 30)), "end", view.named ? { class: "strong" } : {}));
    const gap = Math.ceil((longest(columns) + 10) / wide);
    for (const [j, column] of columns.entries()) {
      const x = left + (j + 0.5) * wide;
      if (turned) nodes.push(label(0, 0, String(column), "end", { transform: `translate(${x + 4} ${bottom + 10}) rotate(-40)` }));
      else if (j % gap === 0) nodes.push(label(x, bottom + 16, String(column)));
    }
    const under = turned ? 14 + longest(columns) * 0.65 : 20;
    if (!view.named) nodes.push(label((left + end) / 2, bottom + under + 14, view.column, "middle", { class: "strong" }));
    if (!view.named) nodes.push(label(0, 0, view.row, "middle", { class: "strong", transform: `translate(11 ${(top + bottom) / 2}) rotate(-90)` }));
    return { nodes, height: bottom + under + (view.named ? 4 : 20), points };
  }

  const KINDS = { lines: drawLines, dots: drawDots, heat: drawHeat };

  // --- a chart: its choice of view, its legend, its tooltip

  function chart(figure, spec) {
    const plot = figure.querySelector(".plot"), canvas = plot.querySelector("svg"), tip = html("div", { class: "tip", role: "status" });
    const note = html("p", { class: "note" }), legend = html("div", { class: "legend" }), hidden = new Set();
    let view = spec.views[0], points = [], current = -1, drawnFor = 0, bands = (view.series ?? []).length <= MOST_BANDS;
    for (const v of spec.views) (v.series ?? []).slice(v.limit).forEach((s) => hidden.add(s.label));

    function draw() {
      const width = Math.max(260, plot.clientWidth), series = (view.series ?? []).filter((s) => !hidden.has(s.label));
      const nothing = view.series && !series.length;
      const drawn = nothing ? { nodes: [label(width / 2, 40, "Nothing chosen: click on a name below.")], height: 70, points: [] } : KINDS[spec.kind]({ spec, view, series, width, bands });
      drawnFor = plot.clientWidth, points = drawn.points, current = -1, tip.textContent = "";
      canvas.setAttribute("viewBox", `0 0 ${width} ${Math.round(drawn.height)}`);
      canvas.replaceChildren(...drawn.nodes);
      note.textContent = view.note ?? "";
    }

    function show(index) {
      canvas.querySelector(".focus")?.remove();
      current = index;
      tip.textContent = index < 0 ? "" : points[index].text;
      if (index < 0) return;
      const { x, y, box } = points[index], ratio = plot.clientWidth / canvas.viewBox.baseVal.width;
      canvas.append(box ? svg("rect", { class: "focus", x: box[0], y: box[1], width: box[2], height: box[3] }) : svg("circle", { class: "focus", cx: x, cy: y, r: 8 }));
      tip.style.left = `${clamp(x * ratio - tip.offsetWidth / 2, 0, plot.clientWidth - tip.offsetWidth)}px`;
      const above = y * ratio - tip.offsetHeight - 14;
      tip.style.top = `${above < -30 ? y * ratio + 16 : above}px`;
    }

    const nearest = (x, y, among = () => true) => points.reduce((best, p, i) => (among(p) && (best < 0 || Math.hypot(p.x - x, p.y - y) < Math.hypot(points[best].x - x, points[best].y - y)) ? i : best), -1);

    function key(event) {
      const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 1, ArrowUp: -1 }[event.key];
      if (event.key === "Escape") return show(-1);
      if (!step || !points.length) return;
      event.preventDefault();
      if (current < 0) return show(0);
      if (event.key === "ArrowRight" || event.key === "ArrowLeft") return show((current + step + points.length) % points.length);
      const { x, y, group } = points[current], groups = [...new Set(points.map((p) => p.group))].sort((a, b) => a - b);
      const next = groups[(groups.indexOf(group) + step + groups.length) % groups.length];
      show(nearest(x, y, (p) => p.group === next));
    }

    function entry(series) {
      const { colour, dash, shape } = style(series), flat = spec.kind === "dots" || view.scatter;
      const swatch = svg("svg", { viewBox: "0 0 30 12", "aria-hidden": "true" }, flat ? null : svg("path", { class: `line ${colour}`, "stroke-dasharray": dash, d: "M0,6H30" }), svg("path", { class: `mark ${colour}`, d: shape, transform: "translate(15 6)" }));
      const button = html("button", { type: "button", "aria-pressed": String(!hidden.has(series.label)) }, swatch, html("span", {}, series.n ? `${series.label} (n = ${series.n})` : series.label));
      button.addEventListener("click", () => {
        if (!hidden.delete(series.label)) hidden.add(series.label);
        button.setAttribute("aria-pressed", String(!hidden.has(series.label)));
        draw();
      });
      return button;
    }

    function fillLegend() {
      const series = view.series ?? [], rest = series.slice(view.limit).map(entry);
      legend.replaceChildren(...series.slice(0, view.limit).map(entry));
      if (!rest.length) return;
      const filter = html("input", { type: "search", placeholder: "filter by name", "aria-label": "filter by name" });
      filter.addEventListener("input", () => rest.forEach((b) => (b.hidden = !b.textContent.toLowerCase().includes(filter.value.toLowerCase()))));
      legend.append(html("details", {}, html("summary", {}, `${rest.length} more to choose from`), filter, html("div", { class: "more" }, ...rest)));
    }

    const controls = html("div", { class: "controls" });
    if (spec.views.length > 1) {
      const select = html("select", {}, ...spec.views.map((v, i) => html("option", { value: i }, v.name)));
      select.addEventListener("change", () => ((view = spec.views[select.value]), fillLegend(), draw()));
      controls.append(html("label", {}, `${spec.choice}: `, select));
    }
    if (spec.kind === "lines" && spec.views.some((v) => v.series.some((s) => s.points.some((p) => p[2] != null)))) {
      const box = html("input", { type: "checkbox", checked: bands || null });
      box.addEventListener("change", () => ((bands = box.checked), draw()));
      controls.append(html("label", {}, box, " 95 % bands"));
    }
    plot.before(controls);
    plot.append(tip);
    plot.after(legend, note);
    canvas.setAttribute("tabindex", "0");
    canvas.addEventListener("keydown", key);
    canvas.addEventListener("focus", () => canvas.matches(":focus-visible") && points.length && show(0));
    canvas.addEventListener("blur", () => show(-1));
    canvas.addEventListener("pointerleave", () => show(-1));
    for (const kind of ["pointermove", "pointerdown"]) canvas.addEventListener(kind, (event) => {
      const frame = canvas.getBoundingClientRect(), ratio = canvas.viewBox.baseVal.width / frame.width;
      const x = (event.clientX - frame.left) * ratio, y = (event.clientY - frame.top) * ratio, found = nearest(x, y), p = points[found];
      show(p && (p.box ? Math.abs(p.x - x) <= p.box[2] / 2 && Math.abs(p.y - y) <= p.box[3] / 2 : Math.hypot(p.x - x, p.y - y) < 40) ? found : -1);
    });
    new ResizeObserver(() => plot.clientWidth && plot.clientWidth !== drawnFor && draw()).observe(plot);
    fillLegend();
    draw();
  }

  // --- tables

  function sortable(table) {
    const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
    const value = (row, i) => row.cells[i].dataset.v, text = (row, i) => row.cells[i].textContent;
    heads.forEach((head, i) => {
      const button = html("button", { type: "button" }, ...head.childNodes);
      head.append(button);
      head.setAttribute("aria-sort", "none");
      button.addEventListener("click", () => {
        const sign = head.getAttribute("aria-sort") === "ascending" ? -1 : 1, rows = [...body.rows], numbers = rows.some((row) => value(row, i) != null);
        const lacks = (row) => numbers && value(row, i) == null; // stays last either way
        rows.sort((a, b) => lacks(a) - lacks(b) || sign * (numbers ? value(a, i) - value(b, i) || 0 : text(a, i).localeCompare(text(b, i), "en", { numeric: true })));
        heads.forEach((other) => other.setAttribute("aria-sort", other === head ? (sign > 0 ? "ascending" : "descending") : "none"));
        body.append(...rows);
      });
    });
  }

  document.querySelectorAll("table.sortable").forEach(sortable);
  const specs = JSON.parse(document.getElementById("report-data").textContent);
  for (const spec of specs) chart(document.getElementById(spec.id), spec);
})();
