// Draws a report's charts with Vega when they come near the screen, reads their values out, and sorts its tables. Text is only ever set as text, never as markup.
"use strict";
(async () => {
  const FEW = 8, NEAR = 40, PANEL = 300; // series drawn at first; pixels around the pointer; pixels that a panel beside others needs
  const SHAPES = { // Vega's symbols, for legends
    circle: "M4,0A4,4 0 1 1 -4,0A4,4 0 1 1 4,0Z", square: "M-4,-4H4V4H-4Z", diamond: "M0,-5L5,0L0,5L-5,0Z", cross: "M-1.5,-4.5H1.5V-1.5H4.5V1.5H1.5V4.5H-1.5V1.5H-4.5V-1.5H-1.5Z",
    "triangle-up": "M0,-4.8L4.4,3.4H-4.4Z", "triangle-down": "M0,4.8L4.4,-3.4H-4.4Z", "triangle-right": "M4.8,0L-3.4,4.4V-4.4Z", "triangle-left": "M-4.8,0L3.4,4.4V-4.4Z",
  };
  const dark = matchMedia("screen and (prefers-color-scheme: dark)");
  const clamp = (value, low, high) => Math.max(low, Math.min(value, high)), copy = (spec) => JSON.parse(JSON.stringify(spec));
  const element = (node, attributes, children) => (Object.entries(attributes).forEach((each) => node.setAttribute(...each)), node.append(...children), node);
  const html = (name, attributes = {}, ...children) => element(document.createElement(name), attributes, children);
  const svg = (name, attributes, ...children) => element(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);

  // --- specifications

  // All marks of a specification (one view, or several in `concat`), with the encoding and the data that each inherits.
  function* marks(node, encoding = {}, values = []) {
    encoding = { ...encoding, ...node.encoding }, values = node.data?.values ?? values;
    if (node.mark) yield { node, encoding, values };
    for (const child of node.layer ?? node.concat ?? []) yield* marks(child, encoding, values);
  }

  // The series of a chart: the field that colours it and its values in order. Buttons replace their legend, for the keyboard and for screen readers; they filter the data.
  function seriesOf(spec) {
    const all = [...marks(spec)], { field, scale } = all.map(({ encoding }) => encoding.color).find((color) => color?.field && color.type !== "quantitative" && color.legend !== null) ?? {}, ranges = {};
    const names = scale?.domain ?? [...new Set(all.flatMap(({ values }) => values.map((row) => row[field])))];
    if (!field) return null;
    for (const { node, encoding } of all) {
      node.transform = [{ filter: `indexof(hidden, datum[${JSON.stringify(field)}]) < 0` }, ...(node.transform ?? [])];
      for (const channel of ["color", "shape", "strokeDash"]) {
        if (encoding[channel]?.field !== field) continue;
        Object.assign(encoding[channel], { legend: null, scale: { ...encoding[channel].scale, domain: names } });
        ranges[channel] ??= encoding[channel].scale.range;
      }
    }
    return { field, names, ranges };
  }

  // Give a specification a width; return how many panels it has side by side, fewer where each would be too narrow. `trim` narrows each panel.
  function fit(spec, width, trim) {
    if (!spec.concat) return Object.assign(spec, { width, autosize: { type: "fit-x", contains: "padding" } }), 1;
    spec.columns = clamp(Math.floor((width + 60) / PANEL), 1, spec.columns ?? 3);
    for (const panel of spec.concat) {
      if (spec.columns === 1 && panel.encoding?.y?.axis?.labels === false) panel.encoding.y = spec.concat[0].encoding.y; // below each other each needs its own
      panel.width = Math.max(80, Math.floor(width / spec.columns - 50 - trim));
    }
    return spec.columns;
  }

  // The values of a drawn chart: box, text and series (or row) of each mark that has a tooltip.
  function valuesOf(view, field) {
    const points = new Map(), [left, top] = view.origin(), pad = view.padding();
    const add = ({ tooltip, bounds, datum }, x, y) => {
      const text = typeof tooltip === "object" ? Object.entries(tooltip).filter(([, value]) => !/^(undefined|null)$/.test(value)).map((entry) => entry.join(": ")).join("\n") : String(tooltip);
      const [w, h] = [bounds.x2 - bounds.x1, bounds.y2 - bounds.y1], box = [x + bounds.x1, y + bounds.y1, w, h], point = { x: box[0] + w / 2, y: box[1] + h / 2, box, text };
      points.set(`${Math.round(point.x)} ${Math.round(point.y)} ${text}`, { ...point, group: String(field in (datum ?? {}) ? datum[field] : Math.round(point.y)) });
    };
    const visit = (mark, x, y) => {
      if (/axis|legend|title/.test(mark.role)) return;
      for (const item of mark.items) {
        if (mark.marktype === "group") for (const child of item.items) visit(child, x + (item.x ?? 0), y + (item.y ?? 0));
        else if (item.tooltip != null && !/line|area|trail/.test(mark.marktype)) add(item, x, y);
      }
    };
    visit(view.scenegraph().root, left + pad.left, top + pad.top);
    return [...points.values()];
  }

  // --- a chart: drawing, legend, values by pointer and by key. Returns the function that draws it where its width or the colours have changed.

  function chart(figure) {
    const spec = copy(data.charts[figure.id.slice("figure-".length)]), series = seriesOf(spec), plot = figure.querySelector(".plot"), title = figure.querySelector("h4").textContent;
    const canvas = html("div", { class: "canvas" }), ring = html("div", { class: "ring", hidden: "" }), tip = html("div", { class: "tip", role: "status" }), legend = html("div", { class: "legend" });
    const hidden = new Set(series?.names.slice(FEW));
    let view, points = [], current = -1, drawn = "";
    element(plot, { tabindex: 0, role: "group", "aria-roledescription": "chart", "aria-label": `${title}. The arrow keys read its values.` }, [canvas, ring, tip]);
    plot.after(legend);

    async function draw() {
      const width = plot.clientWidth, look = `${width} ${dark.matches}`, config = { ...(dark.matches ? data.dark : data.config), aria: false, background: "transparent" };
      if (!width || look === drawn) return;
      drawn = look, plot.classList.remove("drawn");
      for (let trim = 0, again = 2; again--; ) {
        const sized = copy(spec), columns = fit(sized, width, trim);
        if (series) sized.params = [...(sized.params ?? []), { name: "hidden", value: [...hidden] }];
        view?.finalize();
        ({ view } = await vegaEmbed(canvas, sized, { mode: "vega-lite", config, renderer: "svg", actions: false, ast: true, defaultStyle: false, tooltip: () => {} }));
        trim = (canvas.querySelector("svg").viewBox.baseVal.width - width) / columns;
        if (sized.autosize || Math.abs(trim) < 6) break;
      }
      if (series) fillLegend();
      read();
      plot.classList.add("drawn");
    }

    const read = () => ((points = valuesOf(view, series?.field)), show(-1));

    function show(index) {
      current = index, ring.hidden = index < 0, tip.textContent = index < 0 ? "" : points[index].text;
      if (index < 0) return;
      const drawing = canvas.querySelector("svg"), ratio = drawing.clientWidth / drawing.viewBox.baseVal.width, [x, y, w, h] = points[index].box.map((v) => v * ratio), above = y - tip.offsetHeight - 10;
      Object.assign(ring.style, { left: `${x - 3}px`, top: `${y - 3}px`, width: `${w + 6}px`, height: `${h + 6}px` });
      Object.assign(tip.style, { left: `${clamp(x + w / 2 - tip.offsetWidth / 2, 0, plot.clientWidth - tip.offsetWidth)}px`, top: `${above < -30 ? y + h + 10 : above}px` });
    }

    function nearest(x, y, among) {
      const away = (p) => Math.hypot(Math.max(0, Math.abs(p.x - x) - p.box[2] / 2), Math.max(0, Math.abs(p.y - y) - p.box[3] / 2)) + 0.01 * Math.hypot(p.x - x, p.y - y);
      return points.indexOf(among.reduce((best, p) => (away(best) <= away(p) ? best : p)));
    }

    plot.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 1, ArrowUp: -1 }[event.key], groups = [...new Set(points.map((p) => p.group))], of = (group) => points.filter((p) => p.group === group);
      if (event.key === "Escape") show(-1);
      if (!step || !points.length || event.target !== plot) return; // a slider has its own keys
      event.preventDefault();
      const order = groups.flatMap((group) => of(group).sort((a, b) => a.x - b.x || a.y - b.y)), next = (all, at) => all[(all.indexOf(at) + step + all.length) % all.length];
      if (current < 0) show(points.indexOf(order[0]));
      else if (/Left|Right/.test(event.key)) show(points.indexOf(next(order, points[current])));
      else show(nearest(points[current].x, points[current].y, of(next(groups, points[current].group))));
    });
    plot.addEventListener("input", () => view.runAsync().then(read)); // a slider
    for (const kind of ["blur", "pointerleave"]) plot.addEventListener(kind, () => show(-1));
    for (const kind of ["pointermove", "pointerdown"]) plot.addEventListener(kind, (event) => {
      if (!points.length) return;
      const drawing = canvas.querySelector("svg"), frame = drawing.getBoundingClientRect(), ratio = drawing.viewBox.baseVal.width / frame.width;
      const x = (event.clientX - frame.left) * ratio, y = (event.clientY - frame.top) * ratio, index = nearest(x, y, points), [left, top, w, h] = points[index].box;
      show(x > left - NEAR && x < left + w + NEAR && y > top - NEAR && y < top + h + NEAR ? index : -1);
    });

    function entry(name, i) {
      const { color, shape, strokeDash } = series.ranges, at = (range) => range?.[i % range.length], colour = at(color ?? (dark.matches ? data.dark : data.config).range.category);
      const symbol = svg("path", { d: SHAPES[at(shape)] ?? SHAPES.square, transform: "translate(15 6)", fill: colour }), dash = svg("path", { d: "M0,6H30", "stroke-dasharray": at(strokeDash) ?? "", stroke: colour, "stroke-width": 2 });
      const button = html("button", { type: "button", "aria-pressed": !hidden.has(name) }, svg("svg", { viewBox: "0 0 30 12", "aria-hidden": true }, ...(strokeDash ? [dash] : []), ...(shape || !strokeDash ? [symbol] : [])), html("span", {}, String(name)));
      button.addEventListener("click", async () => {
        if (!hidden.delete(name)) hidden.add(name);
        button.setAttribute("aria-pressed", !hidden.has(name));
        await view.signal("hidden", [...hidden]).runAsync();
        read();
      });
      return button;
    }

    function fillLegend() {
      const entries = series.names.map(entry), rest = entries.splice(FEW), filter = html("input", { type: "search", placeholder: "filter by name", "aria-label": "filter by name" });
      filter.addEventListener("input", () => rest.forEach((button) => (button.hidden = !button.textContent.toLowerCase().includes(filter.value.toLowerCase()))));
      legend.replaceChildren(...entries, ...(rest.length ? [html("details", {}, html("summary", {}, `${rest.length} more to choose from`), filter, html("div", { class: "more" }, ...rest))] : []));
    }

    new ResizeObserver(() => drawn && draw()).observe(plot);
    return draw;
  }

  // --- tables

  function sortable(table) {
    const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0], value = (row, i) => row.cells[i].dataset.v, text = (row, i) => row.cells[i].textContent;
    for (const [i, head] of heads.entries()) {
      const button = html("button", { type: "button" }, ...head.childNodes);
      element(head, { "aria-sort": "none" }, [button]);
      button.addEventListener("click", () => {
        const sign = head.getAttribute("aria-sort") === "ascending" ? -1 : 1, rows = [...body.rows], numbers = rows.some((row) => value(row, i) != null);
        const lacks = (row) => numbers && value(row, i) == null; // stays last either way
        rows.sort((a, b) => lacks(a) - lacks(b) || sign * (numbers ? value(a, i) - value(b, i) || 0 : text(a, i).localeCompare(text(b, i), "en", { numeric: true })));
        for (const other of heads) other.setAttribute("aria-sort", other === head ? (sign > 0 ? "ascending" : "descending") : "none");
        body.append(...rows);
      });
    }
  }

  // --- contents: a menu on a narrow screen, with the part marked that is being read

  function contents(nav) {
    const button = nav.querySelector("button"), open = (is) => button.setAttribute("aria-expanded", is);
    const links = [...nav.querySelectorAll("a")], parts = links.map((link) => document.getElementById(link.hash.slice(1)));
    const mark = () => {
      const at = Math.max(0, parts.findLastIndex((part) => part.getBoundingClientRect().top < innerHeight / 3));
      links.forEach((link, i) => link[i === at ? "setAttribute" : "removeAttribute"]("aria-current", "true"));
    };
    button.addEventListener("click", () => open(button.getAttribute("aria-expanded") === "false"));
    nav.addEventListener("click", (event) => event.target.closest("a") && open(false));
    nav.addEventListener("keydown", (event) => event.key === "Escape" && (open(false), button.focus()));
    document.addEventListener("scroll", mark, { passive: true });
    mark();
  }

  document.documentElement.classList.add("scripted");
  document.querySelectorAll("table.sortable").forEach(sortable);
  contents(document.querySelector("nav"));

  // The charts are kept compressed: their numbers repeat.
  const packed = Uint8Array.from(atob(document.getElementById("report-data").textContent), (character) => character.charCodeAt(0));
  const data = await new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
  const draws = new Map([...document.querySelectorAll("figure.chart")].map((figure) => [figure, chart(figure)])), seen = new Set();
  const near = new IntersectionObserver((entries) => entries.filter((entry) => entry.isIntersecting).forEach(({ target }) => (near.unobserve(target), seen.add(target), draws.get(target)())), { rootMargin: "600px" });
  for (const figure of draws.keys()) near.observe(figure);
  dark.addEventListener("change", () => seen.forEach((figure) => draws.get(figure)()));
  addEventListener("beforeprint", () => draws.forEach((draw, figure) => (seen.add(figure), draw())));
  document.documentElement.classList.add("ready");
})();
