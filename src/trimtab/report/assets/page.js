"use strict";
// Draws what the page carries as JSON. Text from the record only ever becomes text nodes.
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const TYPES = { u1: Uint8Array, u4: Uint32Array, i4: Int32Array, f4: Float32Array, f8: Float64Array };
  const DASHES = ["", "7 3", "2 3", "9 3 2 3"];
  const ACTIVE = 1, DAMPED = 2, BY_HAND = 4;
  const VIRIDIS = [
    [68, 1, 84], [72, 36, 117], [65, 68, 135], [53, 95, 141], [42, 120, 142], [33, 145, 140], [34, 168, 132],
    [68, 191, 112], [122, 209, 81], [189, 223, 38], [253, 231, 37],
  ];
  const WHY = {
    gnmr: "gradient norm above alpha times its history", delta: "gradient norm jumped above beta",
    error: "channel error above its limit", raised: "risk raised by an alarm", failed: "gradient norm failed",
    locked: "locked since an earlier risk", amax: "largest magnitude above its limit times its history",
  };
  const root = document.documentElement;
  const redraws = new Set();

  // Small tools

  function html(tag, attributes = {}, ...children) {
    const made = document.createElement(tag);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children);
    return made;
  }
  function svg(tag, attributes = {}, ...children) {
    const made = document.createElementNS(SVG, tag);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children);
    return made;
  }
  // The shortest decimal that is this float32, as float64 values print by themselves.
  function exact(value, single) {
    if (Number.isNaN(value)) return "not a number";
    if (!Number.isFinite(value)) return value > 0 ? "infinite" : "-infinite";
    if (!single) return String(value);
    for (let digits = 1; digits < 9; digits++) {
      const text = value.toPrecision(digits);
      if (Math.fround(Number(text)) === value) return String(Number(text));
    }
    return String(Number(value.toPrecision(9)));
  }
  function short(value) {
    if (Number.isNaN(value)) return "not a number";
    if (!Number.isFinite(value)) return value > 0 ? "inf" : "-inf";
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e10)) return value.toExponential(2).replace(/\.?0+e/, "e");
    if (size >= 1e7) return `${Number((value / 1e6).toPrecision(5))}M`;
    if (size >= 1e4) return `${Number((value / 1e3).toPrecision(5))}k`;
    return String(Number(value.toPrecision(5)));
  }
  const whole = (value) => value.toLocaleString("en-US");
  const count = (number, name) => `${whole(number)} ${name}${number === 1 ? "" : "s"}`;
  const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
  const layerOf = (name) => (/(?:^|[._])(\d+)(?:\.|$)/.exec(name) || [])[1];

  async function unpack(array) {
    const text = atob(array.z);
    const packed = new Uint8Array(text.length);
    for (let i = 0; i < text.length; i++) packed[i] = text.charCodeAt(i);
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
    const planes = new Uint8Array(await new Response(stream).arrayBuffer());
    const kind = TYPES[array.type];
    const size = kind.BYTES_PER_ELEMENT, count = planes.length / size;
    if (size === 1) return planes;
    const bytes = new Uint8Array(planes.length);
    for (let k = 0; k < size; k++) for (let i = 0, from = k * count; i < count; i++) bytes[i * size + k] = planes[from + i];
    return new kind(bytes.buffer);
  }
  async function unpackAll(arrays) {
    const keys = Object.keys(arrays);
    const values = await Promise.all(keys.map((key) => unpack(arrays[key])));
    return Object.fromEntries(keys.map((key, i) => [key, values[i]]));
  }
  // First index of a sorted array whose value is at least `wanted`.
  function lowerBound(sorted, wanted) {
    let low = 0, high = sorted.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (sorted[middle] < wanted) low = middle + 1; else high = middle;
    }
    return low;
  }
  function nearest(sorted, wanted) {
    const i = lowerBound(sorted, wanted);
    return i > 0 && (i === sorted.length || wanted - sorted[i - 1] <= sorted[i] - wanted) ? i - 1 : i;
  }
  function ticks(low, high, most) {
    if (!(high > low)) return [low];
    const rough = (high - low) / Math.max(1, most);
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough);
    const found = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(i * step);
    return found;
  }

  // The steps that all charts of one run show

  class View {
    constructor(low, high) {
      Object.assign(this, { low, high, x0: low, x1: high, cursor: null, listeners: [], pointers: [], waiting: false });
    }
    // The step under the heat map's cursor; the curves show where it is, and are not drawn anew for it.
    point(step) {
      this.cursor = step;
      for (const pointer of this.pointers) pointer();
    }
    changed() {
      if (this.waiting) return;
      this.waiting = true;
      requestAnimationFrame(() => { this.waiting = false; for (const listener of this.listeners) listener(); });
    }
    show(x0, x1, least) {
      const span = clamp(x1 - x0, Math.min(least, this.high - this.low), this.high - this.low);
      this.x0 = clamp(x0, this.low, this.high - span);
      this.x1 = this.x0 + span;
      this.changed();
    }
  }
  const margins = (width) => ({ left: width < 600 ? 46 : 92, right: 10 });

  // Curves

  // Broken where a value is not finite and across `gaps`, steps that are not in the record: [last before, first after].
  function curve(xs, ys, X, Y, x0, x1, width, gaps = []) {
    const begin = Math.max(0, lowerBound(xs, x0) - 1), end = Math.min(xs.length, lowerBound(xs, x1) + 1);
    const parts = [];
    let broken = true, alone = false, before = -Infinity, g = 0;
    const put = (i) => {
      if (!Number.isFinite(ys[i]) || !Number.isFinite(Y(ys[i]))) { broken = true; return; }
      while (g < gaps.length && gaps[g][1] <= before) g++;
      if (g < gaps.length && gaps[g][1] <= xs[i]) broken = true;
      if (broken && alone) parts.push("h1"); // a point without neighbours has no line, and is to be seen
      parts.push((broken ? "M" : "L") + X(xs[i]).toFixed(1) + " " + Y(ys[i]).toFixed(1));
      alone = broken;
      broken = false;
      before = xs[i];
    };
    const path = () => parts.join("") + (alone ? "h1" : "");
    if (end - begin <= 3 * width) {
      for (let i = begin; i < end; i++) put(i);
      return path();
    }
    // More points than pixels: of each pixel's points the least and the greatest, in their order.
    for (let i = begin; i < end;) {
      const pixel = Math.floor(X(xs[i]));
      let least = -1, most = -1;
      for (; i < end && Math.floor(X(xs[i])) === pixel; i++) {
        if (!Number.isFinite(ys[i])) continue;
        if (least < 0 || ys[i] < ys[least]) least = i;
        if (most < 0 || ys[i] > ys[most]) most = i;
      }
      if (least < 0) { broken = true; continue; }
      put(Math.min(least, most));
      if (least !== most) put(Math.max(least, most));
    }
    return path();
  }
  function range(series, x0, x1, log) {
    let low = Infinity, high = -Infinity;
    for (const { x, y } of series) {
      for (let i = lowerBound(x, x0); i < x.length && x[i] <= x1; i++) {
        if (!Number.isFinite(y[i]) || (log && y[i] <= 0)) continue;
        if (y[i] < low) low = y[i];
        if (y[i] > high) high = y[i];
      }
    }
    return low <= high ? [low, high] : null;
  }
  function key(kind, text) {
    const sign = svg("svg", { width: 14, height: 10, "aria-hidden": "true" });
    if (kind === "fault") sign.append(svg("path", { d: "M2 1H12L7 9Z", class: "fault" }));
    else if (kind === "alarm") sign.append(svg("path", { d: "M7 0L12 5L7 10L2 5Z", class: "alarm" }));
    else if (kind === "notice") sign.append(svg("path", { d: "M7 0L12 5L7 10L2 5Z", class: "notice" }));
    else if (kind === "switch") sign.append(svg("path", { d: "M4 1V9M8 1V9M11 1V9", class: "switch" }));
    else if (kind === "limit") sign.append(svg("path", { d: "M0 5H14", class: "limit" }));
    else if (kind === "lost") sign.append(svg("path", { d: "M3 1L11 9M3 9L11 1", class: "lost" }));
    else if (kind === "gap") sign.append(svg("rect", { x: 1, y: 0, width: 12, height: 10, class: "gap-span" }));
    return html("span", {}, sign, text);
  }

  // spec: title, height, view, series [{name, x, y, color, dash}], log, zero, limits [{y, name}], gaps, faults, alarms, switches
  function chart(box, spec) {
    const title = html("b", {}, spec.title);
    const caption = html("figcaption", {}, title);
    for (const [kind, text] of spec.keys || []) caption.append(key(kind, text));
    const drawing = svg("svg", { role: "img", height: spec.height });
    const tip = html("div", { class: "tip", hidden: "" });
    const figure = html("figure", {}, caption, drawing, tip);
    box.append(figure);
    const line = svg("path", { class: "cursor" });
    let X, x0, x1, area;
    function point() {
      const step = spec.view.cursor;
      line.setAttribute("d", step !== null && step >= x0 && step <= x1 ? `M${X(step)} ${area.top}V${area.bottom}` : "");
    }
    function draw() {
      const width = Math.max(240, figure.clientWidth);
      const { left, right } = margins(width);
      const top = 14, bottom = spec.height - 20;
      area = { left, right: width - right, top, bottom };
      x0 = spec.view.x0; x1 = spec.view.x1;
      X = (step) => left + ((step - x0) / (x1 - x0)) * (width - right - left);
      const seen = range(spec.series, x0, x1, spec.log);
      let [low, high] = seen || [0, 1];
      for (const limit of seen ? spec.limits || [] : []) { low = Math.min(low, limit.y); high = Math.max(high, limit.y); }
      if (spec.zero) low = Math.min(0, low);
      if (low === high) { high += Math.abs(high) * 0.05 || 1; low -= spec.zero ? 0 : Math.abs(low) * 0.05 || 1; }
      const log = spec.log && seen && low > 0;
      title.textContent = spec.title + (log ? ", logarithmic" : "");
      const scale = log ? Math.log10 : (v) => v;
      const s0 = scale(low), s1 = scale(high), pad = (s1 - s0) * 0.04;
      const Y = (v) => bottom - ((scale(v) - s0 + (spec.zero ? 0 : pad)) / (s1 - s0 + 2 * pad)) * (bottom - top);
      const parts = [];
      parts.push(svg("path", { class: "axis", d: `M${left} ${top}V${bottom}H${width - right}`, fill: "none" }));
      const marks = !seen ? [] : log ? logTicks(low, high) : ticks(low, high, 4);
      if (!seen) parts.push(svg("text", { x: (left + width - right) / 2, y: (top + bottom) / 2, "text-anchor": "middle" }, "no finite value in these steps"));
      for (const value of marks) {
        const y = Y(value);
        if (y < top - 2 || y > bottom + 2) continue;
        parts.push(svg("path", { class: "axis", d: `M${left - 4} ${y}H${left}` }));
        parts.push(svg("text", { x: left - 7, y: y + 4, "text-anchor": "end" }, short(value)));
      }
      for (const step of ticks(Math.max(x0, 0), x1, width / 110)) {
        if (step !== Math.round(step) || step < x0) continue;
        parts.push(svg("text", { x: Math.min(X(step), width - 20), y: bottom + 15, "text-anchor": "middle" }, whole(step)));
      }
      for (const [before, after] of spec.gaps || []) {
        if (after < x0 || before > x1) continue;
        const a = Math.max(left, X(before + 0.5)), b = Math.min(width - right, X(after - 0.5));
        parts.push(svg("rect", { class: "gap-span", x: a, y: top, width: Math.max(1, b - a), height: bottom - top }));
      }
      for (const [begin, end] of spec.faults || []) {
        if (end < x0 || begin > x1) continue;
        const a = Math.max(left, X(begin - 0.5)), b = Math.min(width - right, X(end - 0.5));
        parts.push(svg("rect", { class: "fault-span", x: a, y: top, width: Math.max(1, b - a), height: bottom - top }));
        if (begin >= x0) parts.push(svg("path", { class: "fault", d: `M${a - 4} ${top - 9}h8l-4 8z` }));
      }
      for (const alarm of spec.alarms || []) {
        if (alarm.step < x0 || alarm.step > x1) continue;
        const x = X(alarm.step);
        parts.push(svg("path", { class: "alarm-line", d: `M${x} ${top}V${bottom}` }));
        parts.push(svg("path", { class: "alarm", d: `M${x} ${top - 12}l5 6l-5 6l-5 -6z` },
          svg("title", {}, `Step ${alarm.step}: ${alarm.sentence}`)));
      }
      if (spec.switches) {
        const { step, num_entered } = spec.switches;
        let path = "", before = -1;
        for (let i = lowerBound(step, x0); i < step.length && step[i] <= x1; i++) {
          const x = Math.round(X(step[i]));
          if (num_entered[i] > 0 && x !== before) { path += `M${x + 0.5} ${bottom - 7}v7`; before = x; }
        }
        parts.push(svg("path", { class: "switch", d: path }));
      }
      for (const limit of spec.limits || []) {
        const y = Y(limit.y);
        parts.push(svg("path", { class: "limit", d: `M${left} ${y}H${width - right}` }));
      }
      let lost = "";
      for (const one of spec.series) {
        const { x, y } = one;
        parts.push(svg("path", { class: "curve", style: `stroke:var(--c${one.color || 0})`,
          "stroke-dasharray": one.dash || "", d: curve(x, y, X, Y, x0, x1, width, one.gaps || spec.gaps) }));
        if (!spec.marksLost) continue;
        let before = -9;
        for (let i = lowerBound(x, x0); i < x.length && x[i] <= x1; i++) {
          const at = X(x[i]);
          if (Number.isFinite(y[i]) || at - before < 3) continue;
          lost += `M${(at - 3).toFixed(1)} ${top + 2}l6 6m0 -6l-6 6`;
          before = at;
        }
      }
      if (lost) parts.push(svg("path", { class: "lost", d: lost }));
      parts.push(line);
      point();
      drawing.setAttribute("viewBox", `0 0 ${width} ${spec.height}`);
      drawing.setAttribute("aria-label", describe(spec, seen));
      drawing.replaceChildren(...parts);
    }
    figure.addEventListener("pointermove", (event) => {
      const place = figure.getBoundingClientRect();
      const at = event.clientX - place.left;
      if (!area || at < area.left - 3 || at > area.right + 3) { tip.hidden = true; return; }
      const step = x0 + ((at - area.left) / (area.right - area.left)) * (x1 - x0);
      const rows = [];
      let shown = null;
      for (const one of spec.series) {
        if (!one.x.length) continue;
        const i = nearest(one.x, step);
        shown = shown === null ? one.x[i] : shown;
        const text = one.text ? one.text(i) : exact(one.y[i], false);
        rows.push(html("span", {}, html("i", {}, one.name), text + (one.x[i] === shown ? "" : `, at step ${whole(one.x[i])}`)));
      }
      if (shown === null) return;
      tip.replaceChildren(html("b", {}, `step ${whole(shown)}`), ...rows.slice(0, 12));
      put(tip, figure, at, drawing.offsetTop + 18);
    });
    figure.addEventListener("pointerleave", () => { tip.hidden = true; });
    spec.view.listeners.push(draw);
    spec.view.pointers.push(point);
    redraws.add(draw);
    new ResizeObserver(() => draw()).observe(figure);
    draw();
    return draw;
  }
  function logTicks(low, high) {
    // Powers of ten; with fewer than three of them also twice and five times these.
    for (const factors of [[1], [1, 2, 5]]) {
      const found = [];
      for (let p = Math.floor(Math.log10(low)); p <= Math.ceil(Math.log10(high)); p++) found.push(...factors.map((f) => f * 10 ** p));
      const inside = found.filter((v) => v >= low && v <= high);
      if (inside.length >= 3) return inside;
    }
    return ticks(low, high, 4);
  }
  function describe(spec, seen) {
    const between = seen ? `, from ${short(seen[0])} to ${short(seen[1])}` : ", nothing recorded";
    return `${spec.title}, steps ${Math.ceil(spec.view.x0)} to ${Math.floor(spec.view.x1)}${between}`;
  }
  function put(tip, box, x, y) {
    tip.hidden = false;
    const width = tip.offsetWidth;
    tip.style.left = `${x + 14 + width > box.clientWidth ? Math.max(0, x - 14 - width) : x + 14}px`;
    tip.style.top = `${y}px`;
  }

  // The heat map

  class HeatMap {
    constructor(box, run, cells, view) {
      Object.assign(this, { run, cells, view, mode: "risk", y0: 0, y1: run.units.length, at: null });
      this.bins = cells.num_steps.length;
      this.count = run.units.length;
      this.level = { risk: this.levels("risk"), active: this.levels("active") };
      this.build(box);
      view.listeners.push(() => this.draw());
      redraws.add(() => this.draw());
      new ResizeObserver(() => this.draw()).observe(this.box);
      this.draw();
    }
    // A risk of 0 of a step in which the policy only learns is no judgement.
    isLearning(i) {
      const { step, risk, first } = this.cells;
      return step[i] >= 0 && first + step[i] <= this.run.learning_steps && !(risk[i] > 0);
    }
    // One byte a cell, unit by unit: 0 none, 1 not judged yet, else 2 to 255. r / (1 + r) puts a risk of 1 in the middle.
    levels(mode) {
      const { step, risk, num_active, num_steps } = this.cells;
      const found = new Uint8Array(this.bins * this.count);
      for (let b = 0; b < this.bins; b++) {
        for (let u = 0; u < this.count; u++) {
          const i = b * this.count + u;
          if (step[i] < 0) continue;
          if (mode === "risk" && this.isLearning(i)) { found[u * this.bins + b] = 1; continue; }
          const r = risk[i];
          const share = mode === "active" ? num_active[i] / Math.max(1, num_steps[b]) : r === Infinity ? 1 : r > 0 ? r / (1 + r) : 0;
          found[u * this.bins + b] = 2 + Math.round(253 * share);
        }
      }
      return found;
    }
    build(box) {
      const named = (value, text, on) => {
        const input = html("input", { type: "radio", name: `mode-${this.run.index}`, value });
        input.checked = on;
        input.addEventListener("change", () => { this.mode = value; this.legend(); this.draw(); });
        return html("label", { class: "choice" }, input, text);
      };
      const button = (text, label, act) => {
        const made = html("button", { type: "button", "aria-label": label, title: label }, text);
        made.addEventListener("click", act);
        return made;
      };
      const hint = "hint-" + this.run.index;
      box.append(
        html("h3", {}, "Risk and recovery path of every unit"),
        html("div", { class: "tools" },
          html("fieldset", {}, html("legend", { class: "unseen" }, "What is shown"), named("risk", "risk", true), named("active", "recovery path", false)),
          button("+", "Zoom in", () => this.zoom(0.5)), button("−", "Zoom out", () => this.zoom(2)),
          button("Reset", "Show everything", () => this.reset()),
          html("span", { class: "hint", id: hint }, "Drag to move, double-click or Ctrl and wheel to zoom. With the keyboard: arrows move, Shift is faster, + − 0 zoom, Escape closes."),
        ),
      );
      this.canvas = html("canvas", {});
      this.over = html("canvas", { class: "over" });
      this.tip = html("div", { class: "tip", hidden: "" });
      this.box = html("div", { class: "heat", tabindex: "0", role: "application", "aria-label": "Heat map, units by steps", "aria-describedby": hint }, this.canvas, this.over, this.tip);
      this.status = html("div", { class: "unseen", role: "status", "aria-live": "polite" });
      this.key = html("div", { class: "legend" });
      box.append(this.box, this.status, this.key);
      this.legend();
      this.listen();
    }
    legend() {
      const strip = html("canvas", { width: 160, height: 12, "aria-hidden": "true" });
      const pen = strip.getContext("2d");
      for (let x = 0; x < 160; x++) { pen.fillStyle = `rgb(${color(x / 159).join()})`; pen.fillRect(x, 0, 1, 12); }
      const width = this.cells.width;
      const bins = width > 1 ? ` A column is ${whole(width)} steps and shows the riskiest of them.` : "";
      const texts = this.mode === "risk"
        ? ["risk 0 ", strip, " failed; in the middle 1: above it a unit is a candidate.", bins]
        : ["never ", strip, " in every step: on the recovery path, as decided for the step after.", bins];
      this.key.replaceChildren(html("span", {}, ...texts), html("span", {}, html("span", { class: "none" }), " not recorded"),
        ...(this.mode === "risk" && this.level.risk.includes(1)
          ? [html("span", {}, html("span", { class: "none learning" }), ` not judged: the policy only learns up to step ${whole(this.run.learning_steps)}`)] : []),
        html("span", {}, "at the side: layers"), html("span", {}, "when large enough: ● on the recovery path, × failed"));
    }
    layout() {
      const width = Math.max(240, this.box.clientWidth);
      const { left, right } = margins(width);
      const height = clamp(this.count * 16, 96, 560);
      return { width, left, top: 4, plotWidth: width - left - right, plotHeight: height, height: height + 26 };
    }
    draw() {
      const { width, left, top, plotWidth, plotHeight, height } = this.layout();
      const ratio = Math.min(2, window.devicePixelRatio || 1);
      const pixels = [Math.round(width * ratio), Math.round(height * ratio)];
      for (const canvas of [this.canvas, this.over]) {
        canvas.width = pixels[0]; canvas.height = pixels[1];
        canvas.style.height = `${height}px`;
      }
      const style = getComputedStyle(root);
      const pen = this.canvas.getContext("2d");
      this.paint(pen, Math.round(left * ratio), Math.round(top * ratio), Math.round(plotWidth * ratio), Math.round(plotHeight * ratio), style);
      pen.setTransform(ratio, 0, 0, ratio, 0, 0);
      pen.font = '11px system-ui, "DejaVu Sans", sans-serif';
      pen.fillStyle = style.getPropertyValue("--faint");
      this.labels(pen, left, top, plotWidth, plotHeight);
      this.signs(pen, left, top, plotWidth, plotHeight);
      this.drawCursor();
    }
    paint(pen, left, top, width, height, style) {
      const { first, width: steps } = this.cells;
      const level = this.level[this.mode];
      const image = pen.createImageData(width, height);
      const words = new Uint32Array(image.data.buffer);
      const palette = new Uint32Array(256);
      palette[0] = packed(rgb(style.getPropertyValue("--nodata")));
      palette[1] = packed(rgb(style.getPropertyValue("--learning")));
      for (let i = 2; i < 256; i++) palette[i] = packed(color((i - 2) / 253));
      const bin = (x) => (this.view.x0 + 0.5 + (x / width) * (this.view.x1 - this.view.x0) - first) / steps;
      const begin = new Int32Array(width), end = new Int32Array(width);
      for (let x = 0; x < width; x++) {
        begin[x] = clamp(Math.floor(bin(x)), 0, this.bins - 1);
        end[x] = clamp(Math.ceil(bin(x + 1) - 1e-6), begin[x] + 1, this.bins);
      }
      const row = new Uint8Array(this.bins);
      let u0 = -1, u1 = -1;
      for (let y = 0; y < height; y++) {
        const unit = (v) => this.y0 + (v / height) * (this.y1 - this.y0);
        const a = clamp(Math.floor(unit(y)), 0, this.count - 1);
        const b = clamp(Math.ceil(unit(y + 1) - 1e-6), a + 1, this.count);
        if (a === u0 && b === u1) { words.copyWithin(y * width, (y - 1) * width, y * width); continue; }
        u0 = a; u1 = b;
        row.set(level.subarray(a * this.bins, (a + 1) * this.bins));
        for (let u = a + 1; u < b; u++) {
          for (let i = 0, from = u * this.bins; i < this.bins; i++) if (level[from + i] > row[i]) row[i] = level[from + i];
        }
        for (let x = 0, to = y * width; x < width; x++) {
          let most = 0;
          for (let i = begin[x]; i < end[x]; i++) if (row[i] > most) most = row[i];
          words[to + x] = palette[most];
        }
      }
      pen.putImageData(image, left, top);
    }
    labels(pen, left, top, width, height) {
      const { units } = this.run;
      const tall = height / (this.y1 - this.y0);
      pen.textAlign = "right"; pen.textBaseline = "middle";
      let before = -99, layer = null;
      for (let u = Math.floor(this.y0); u < Math.ceil(this.y1); u++) {
        const y = top + (u + 0.5 - this.y0) * tall;
        const now = layerOf(units[u]);
        let text = null;
        if (tall >= 12 && left > 60) text = `${now === undefined ? "" : now + " "}${units[u].split(".").pop()}`;
        else if (now !== layer) text = now === undefined ? String(u) : now;
        layer = now;
        if (text === null || y - before < 12 || y < top || y > top + height) continue;
        while (text.length > 3 && pen.measureText(text).width > left - 8) text = text.slice(0, -2) + "…";
        pen.fillText(text, left - 5, y);
        before = y;
      }
      pen.textAlign = "center"; pen.textBaseline = "top";
      for (const step of ticks(Math.max(0, this.view.x0), this.view.x1, width / 110)) {
        if (step !== Math.round(step) || step < this.view.x0) continue;
        pen.fillText(whole(step), Math.min(left + ((step - this.view.x0) / (this.view.x1 - this.view.x0)) * width, left + width - 10), top + height + 6);
      }
    }
    // Shapes beside the colours, where there is room for them.
    signs(pen, left, top, width, height) {
      const { first, width: steps, flags, risk, step } = this.cells;
      const tall = height / (this.y1 - this.y0), wide = (width / (this.view.x1 - this.view.x0)) * steps;
      if (tall < 7 || wide < 6) return;
      pen.save();
      pen.beginPath(); pen.rect(left, top, width, height); pen.clip();
      for (let u = Math.floor(this.y0); u < Math.ceil(this.y1); u++) {
        for (let b = 0; b < this.bins; b++) {
          const i = b * this.count + u;
          const x = left + ((first + (b + 0.5) * steps - 0.5 - this.view.x0) / (this.view.x1 - this.view.x0)) * width;
          if (step[i] < 0 || x < left - wide || x > left + width + wide) continue;
          const y = top + (u + 0.5 - this.y0) * tall;
          const dark = this.level[this.mode][u * this.bins + b] > 140;
          pen.strokeStyle = pen.fillStyle = dark ? "#111" : "#fff";
          if (risk[i] === Infinity) {
            pen.lineWidth = 1.5;
            pen.beginPath(); pen.moveTo(x - 3, y - 3); pen.lineTo(x + 3, y + 3); pen.moveTo(x - 3, y + 3); pen.lineTo(x + 3, y - 3); pen.stroke();
          } else if (flags[i] & ACTIVE) {
            pen.beginPath(); pen.arc(x, y, 1.9, 0, 7); pen.fill();
          }
        }
      }
      pen.restore();
    }
    drawCursor() {
      const pen = this.over.getContext("2d");
      const ratio = this.over.width / Math.max(240, this.box.clientWidth);
      pen.setTransform(ratio, 0, 0, ratio, 0, 0);
      pen.clearRect(0, 0, 9999, 9999);
      if (!this.at) return;
      const { left, top, plotWidth, plotHeight } = this.layout();
      const { first, width } = this.cells;
      const X = (step) => left + ((step - this.view.x0) / (this.view.x1 - this.view.x0)) * plotWidth;
      const Y = (u) => top + ((u - this.y0) / (this.y1 - this.y0)) * plotHeight;
      const [u, b] = this.at;
      const x = X(first + b * width - 0.5), y = Y(u);
      const w = Math.max(5, X(first + (b + 1) * width - 0.5) - x), h = Math.max(5, Y(u + 1) - y);
      pen.lineWidth = 4; pen.strokeStyle = "#fff"; pen.strokeRect(x, y, w, h);
      pen.lineWidth = 2; pen.strokeStyle = "#d1004b"; pen.strokeRect(x, y, w, h);
      return [x + w / 2, y + h];
    }
    // What a pixel shows is the riskiest cell under it, and so is what the tooltip tells.
    cellAt(x, y) {
      const { left, top, plotWidth, plotHeight } = this.layout();
      if (x < left || x >= left + plotWidth || y < top || y >= top + plotHeight) return null;
      const { first, width } = this.cells;
      const bin = (v) => (this.view.x0 + 0.5 + ((v - left) / plotWidth) * (this.view.x1 - this.view.x0) - first) / width;
      const unit = (v) => this.y0 + ((v - top) / plotHeight) * (this.y1 - this.y0);
      const b0 = clamp(Math.floor(bin(x)), 0, this.bins - 1), b1 = clamp(Math.ceil(bin(x + 1) - 1e-6), b0 + 1, this.bins);
      const u0 = clamp(Math.floor(unit(y)), 0, this.count - 1), u1 = clamp(Math.ceil(unit(y + 1) - 1e-6), u0 + 1, this.count);
      const level = this.level[this.mode];
      const wide = (b1 - b0) > 1 && (bin(x + 1) - bin(x)) <= 1 ? b0 + 1 : b1;
      const tall = (u1 - u0) > 1 && (unit(y + 1) - unit(y)) <= 1 ? u0 + 1 : u1;
      let found = [u0, b0];
      for (let u = u0; u < tall; u++) for (let b = b0; b < wide; b++) if (level[u * this.bins + b] > level[found[0] * this.bins + found[1]]) found = [u, b];
      return found;
    }
    facts([u, b]) {
      const c = this.cells, i = b * this.count + u;
      const from = c.first + b * c.width, to = Math.min(from + c.width - 1, this.view.high - 0.5);
      const title = this.run.units[u];
      if (c.step[i] < 0) return [title, [["step", c.width > 1 ? `${whole(from)} to ${whole(to)}` : whole(from)], ["", "not recorded"]]];
      const rows = [["step", whole(c.first + c.step[i]) + (c.width > 1 ? `, the riskiest of ${whole(from)} to ${whole(to)}` : "")]];
      const norm = c.norm[i];
      rows.push(["norm", norm === 0 ? "0, not observed" : Number.isNaN(norm) ? "not a number, or not recorded" : exact(norm, false)]);
      const score = (name, values, single) => { if (values && !Number.isNaN(values[i])) rows.push([name, exact(values[i], single)]); };
      score("GNMR", c.gnmr, true); score("Delta", c.delta, true);
      if (this.isLearning(i)) rows.push(["risk", "not judged: the policy only learns"]);
      else score("risk", c.risk, true);
      score("channel error", c.error, false);
      const active = c.flags[i] & ACTIVE;
      rows.push(["active", active ? "yes: decided onto the recovery path for the next step" : "no"]);
      rows.push(["lock", c.lock[i] ? `${whole(c.lock[i])} more steps` : "none"]);
      const reason = this.run.reasons[c.reason[i]];
      if (c.reason[i]) rows.push(["reason", WHY[reason] || reason]);
      if (c.flags[i] & DAMPED) rows.push(["damped", "its gradient was scaled down"]);
      if (c.flags[i] & BY_HAND) rows.push(["routed", "by hand: on the recovery path in this step"]);
      if (c.width > 1) rows.push(["active for", `${whole(c.num_active[i])} of ${whole(c.num_steps[b])} steps`]);
      return [title, rows];
    }
    show(cell, x, y) {
      this.at = cell;
      const [title, rows] = this.facts(cell);
      this.tip.replaceChildren(html("b", {}, title), ...rows.map(([name, value]) => html("span", { "data-fact": name }, html("i", {}, name), value)));
      put(this.tip, this.box, x, 0);
      const below = y + 14 + this.tip.offsetHeight > this.box.clientHeight && y - 14 - this.tip.offsetHeight >= -60;
      this.tip.style.top = `${below ? y - 14 - this.tip.offsetHeight : y + 14}px`;
      this.drawCursor();
      const step = this.cells.step[cell[1] * this.count + cell[0]];
      this.view.point(step < 0 ? null : this.cells.first + step);
    }
    hide() {
      this.tip.hidden = true; this.at = null;
      this.drawCursor();
      this.view.point(null);
    }
    zoom(factor, x = null, y = null) {
      const { left, top, plotWidth, plotHeight } = this.layout();
      let fx = 0.5, fy = 0.5;
      if (x !== null) { fx = clamp((x - left) / plotWidth, 0, 1); fy = clamp((y - top) / plotHeight, 0, 1); }
      else if (this.at) {
        fx = clamp((this.cells.first + (this.at[1] + 0.5) * this.cells.width - this.view.x0) / (this.view.x1 - this.view.x0), 0, 1);
        fy = clamp((this.at[0] + 0.5 - this.y0) / (this.y1 - this.y0), 0, 1);
      }
      const px = this.view.x0 + fx * (this.view.x1 - this.view.x0), py = this.y0 + fy * (this.y1 - this.y0);
      this.rows(py - fy * (this.y1 - this.y0) * factor, py + (1 - fy) * (this.y1 - this.y0) * factor);
      this.view.show(px - fx * (this.view.x1 - this.view.x0) * factor, px + (1 - fx) * (this.view.x1 - this.view.x0) * factor, 6 * this.cells.width);
    }
    rows(y0, y1) {
      const span = clamp(y1 - y0, Math.min(6, this.count), this.count);
      this.y0 = clamp(y0, 0, this.count - span);
      this.y1 = this.y0 + span;
    }
    reset() { this.rows(0, this.count); this.view.show(this.view.low, this.view.high, 1); }
    pan(dx, dy) {
      const { plotWidth, plotHeight } = this.layout();
      const x = (dx / plotWidth) * (this.view.x1 - this.view.x0), y = (dy / plotHeight) * (this.y1 - this.y0);
      this.rows(this.y0 - y, this.y1 - y);
      this.view.show(this.view.x0 - x, this.view.x1 - x, 6 * this.cells.width);
    }
    listen() {
      const fingers = new Map();
      let dragged = false;
      const place = (event) => {
        const area = this.box.getBoundingClientRect();
        return [event.clientX - area.left, event.clientY - area.top];
      };
      const point = (event) => {
        const [x, y] = place(event), cell = this.cellAt(x, y);
        if (cell) this.show(cell, x, y); else this.hide();
      };
      this.box.addEventListener("pointerdown", (event) => {
        fingers.set(event.pointerId, place(event));
        dragged = false;
        this.box.setPointerCapture(event.pointerId);
      });
      this.box.addEventListener("pointermove", (event) => {
        const now = place(event), before = fingers.get(event.pointerId);
        if (!before) { point(event); return; }
        if (fingers.size === 2) {
          const other = [...fingers].find(([id]) => id !== event.pointerId)[1];
          const apart = (p) => Math.hypot(p[0] - other[0], p[1] - other[1]);
          fingers.set(event.pointerId, now);
          this.zoom(clamp(apart(before) / Math.max(1, apart(now)), 0.5, 2), (now[0] + other[0]) / 2, (now[1] + other[1]) / 2);
          dragged = true;
          return;
        }
        if (!dragged && Math.hypot(now[0] - before[0], now[1] - before[1]) < 4) return;
        dragged = true;
        this.hide();
        this.pan(now[0] - before[0], now[1] - before[1]);
        fingers.set(event.pointerId, now);
      });
      for (const end of ["pointerup", "pointercancel"]) {
        this.box.addEventListener(end, (event) => {
          if (fingers.delete(event.pointerId) && end === "pointerup" && !dragged) point(event);
        });
      }
      this.box.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse" && document.activeElement !== this.box) this.hide(); });
      this.box.addEventListener("dblclick", (event) => this.zoom(event.shiftKey ? 2 : 0.5, ...place(event)));
      this.box.addEventListener("wheel", (event) => {
        if (!event.ctrlKey && !event.metaKey) return;
        event.preventDefault();
        this.zoom(event.deltaY > 0 ? 1.25 : 0.8, ...place(event));
      }, { passive: false });
      this.box.addEventListener("blur", () => this.hide());
      this.box.addEventListener("keydown", (event) => this.press(event));
    }
    press(event) {
      const by = event.shiftKey ? 10 : 1;
      const moves = { ArrowLeft: [0, -by], ArrowRight: [0, by], ArrowUp: [-by, 0], ArrowDown: [by, 0], PageUp: [-10, 0], PageDown: [10, 0], Home: [0, -1e9], End: [0, 1e9] };
      if (event.key === "Escape") { this.hide(); return; }
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      if (event.key === "+" || event.key === "=") this.zoom(0.5);
      else if (event.key === "-") this.zoom(2);
      else if (event.key === "0") this.reset();
      else if (moves[event.key]) this.move(...moves[event.key]);
      else return;
      event.preventDefault();
    }
    move(du, db) {
      const middle = (low, high) => Math.floor((low + high) / 2);
      let [u, b] = this.at || [middle(this.y0, this.y1), clamp(middle((this.view.x0 - this.cells.first) / this.cells.width, (this.view.x1 - this.cells.first) / this.cells.width), 0, this.bins - 1)];
      if (this.at) { u = clamp(u + du, 0, this.count - 1); b = clamp(b + db, 0, this.bins - 1); }
      const span = this.y1 - this.y0;
      if (u < this.y0) this.rows(u, u + span); else if (u + 1 > this.y1) this.rows(u + 1 - span, u + 1);
      const begin = this.cells.first + b * this.cells.width - 0.5, end = begin + this.cells.width, wide = this.view.x1 - this.view.x0;
      if (begin < this.view.x0) this.view.show(begin, begin + wide, 1); else if (end > this.view.x1) this.view.show(end - wide, end, 1);
      this.at = [u, b];
      const [x, y] = this.drawCursor();
      this.show([u, b], x, y);
      const [title, rows] = this.facts([u, b]);
      this.status.textContent = `${title}. ` + rows.map((row) => row.join(" ")).join(". ");
    }
  }
  function color(share) {
    const at = clamp(share, 0, 1) * (VIRIDIS.length - 1), i = Math.min(Math.floor(at), VIRIDIS.length - 2);
    return VIRIDIS[i].map((v, k) => Math.round(v + (VIRIDIS[i + 1][k] - v) * (at - i)));
  }
  const packed = ([r, g, b]) => (255 << 24) | (b << 16) | (g << 8) | r;
  const rgb = (text) => [1, 3, 5].map((i) => parseInt(text.trim().slice(i, i + 2), 16));

  // Alarms and notices on a time line

  function timeline(box, run, view) {
    const nameOf = (episode) => `${episode.monitor}/${episode.metric}`;
    const names = [...new Set([...run.alarms, ...run.notices].map(nameOf))];
    const height = 22 + names.length * 34;
    const drawing = svg("svg", { role: "img", height, "aria-label": `${run.alarms.length} alarms and ${run.notices.length} notices of ${names.length} metrics; the tables below list them` });
    const caption = html("figcaption", {}, html("b", {}, run.alarms.length ? "Alarms" : "Notices"), ...(run.alarms.length ? [key("alarm", "raised")] : []), ...(run.notices.length ? [key("notice", "notice, which is no alarm")] : []), html("span", {}, "bar: from the first place to the end of the episode"));
    const figure = html("figure", {}, caption, drawing);
    box.append(figure);
    function draw() {
      const width = Math.max(240, figure.clientWidth), { left, right } = margins(width);
      const X = (step) => left + ((clamp(step, view.x0, view.x1) - view.x0) / (view.x1 - view.x0)) * (width - left - right);
      const parts = [];
      names.forEach((name, i) => {
        const y = i * 34;
        parts.push(svg("text", { x: left, y: y + 12 }, name));
        parts.push(svg("path", { class: "axis", d: `M${left} ${y + 32}H${width - right}` }));
      });
      for (const alarm of [...run.notices, ...run.alarms]) {
        const kind = run.notices.includes(alarm) ? "notice" : "alarm";
        const y = names.indexOf(nameOf(alarm)) * 34 + 16, end = alarm.end_step === null ? view.high : alarm.end_step;
        if (end < view.x0 || alarm.first_step > view.x1) continue;
        const text = svg("title", {}, `Step ${alarm.step}: ${alarm.sentence}`);
        parts.push(svg("rect", { class: `${kind}-span`, x: X(alarm.first_step), y, width: Math.max(2, X(end) - X(alarm.first_step)), height: 13 }, text));
        if (alarm.step >= view.x0 && alarm.step <= view.x1) parts.push(svg("path", { class: kind, d: `M${X(alarm.step)} ${y}l6 6.5l-6 6.5l-6 -6.5z` }, text.cloneNode(true)));
      }
      for (const step of ticks(Math.max(0, view.x0), view.x1, width / 110)) {
        if (step === Math.round(step) && step >= view.x0) parts.push(svg("text", { x: Math.min(X(step), width - 20), y: height - 6, "text-anchor": "middle" }, whole(step)));
      }
      drawing.setAttribute("viewBox", `0 0 ${width} ${height}`);
      drawing.replaceChildren(...parts);
    }
    view.listeners.push(draw);
    new ResizeObserver(draw).observe(figure);
    draw();
  }

  // Readings of the monitors: a panel a layer

  const SHOWN = /^(d2_entropy|dwq_layer_entropy|dwk_layer_entropy|coherence|entropy_mean)$/;
  function readings(box, run) {
    if (!run.readings.length) return;
    box.append(html("h3", {}, "Readings of the monitors"));
    const isRung = (metric) => run.alarms.some((alarm) => alarm.monitor === metric.monitor && alarm.metric === metric.metric);
    const isFirst = (metric) => isRung(metric) || SHOWN.test(metric.metric);
    const first = run.readings.filter(isFirst), others = run.readings.filter((metric) => !isFirst(metric));
    const rest = html("details", {}, html("summary", {}, `Other metrics (${others.length})`));
    for (const metric of [...first, ...others]) {
      const name = `${metric.monitor}/${metric.metric}`;
      const rung = isRung(metric);
      const panels = html("div", { class: "panels" });
      const fold = html("details", {}, html("summary", {}, name + (rung ? " (alarm)" : "")), panels);
      (isFirst(metric) ? box : rest).append(fold);
      let drawn = false;
      fold.addEventListener("toggle", async () => {
        if (!fold.open || drawn) return;
        drawn = true;
        const arrays = { step: metric.step, mean: metric.mean };
        if (metric.band) [arrays.low, arrays.high] = metric.band;
        panel(panels, run, metric, await unpackAll(arrays));
      });
      fold.open = isFirst(metric);
    }
    if (others.length) box.append(rest);
  }
  // Where steps are missing and readings with them: readings further apart than usual, with a gap of the record between.
  function missedReadings(step, gaps) {
    const apart = Array.from(step.subarray(1), (s, i) => s - step[i]);
    const usual = apart.slice().sort((a, b) => a - b)[apart.length >> 1];
    const missed = [];
    apart.forEach((distance, i) => {
      if (distance > 1.5 * usual && gaps.some(([a, b]) => a < step[i + 1] && b > step[i])) missed.push([step[i], step[i + 1]]);
    });
    return missed;
  }
  function panel(box, run, metric, { step, mean, low, high }) {
    const groups = metric.groups.length, width = 220, height = 92, left = 48, right = 4, top = 5, bottom = 76;
    let y0 = Infinity, y1 = -Infinity;
    for (const values of [low || mean, high || mean]) for (const v of values) if (Number.isFinite(v)) { y0 = Math.min(y0, v); y1 = Math.max(y1, v); }
    if (!(y0 <= y1)) { box.append(html("p", {}, "Every value is missing or not finite.")); return; }
    const gaps = missedReadings(step, run.gaps), after = new Set(gaps.map((gap) => gap[1]));
    const lowest = y0, highest = y1;
    if (y0 === y1) { y0 -= Math.abs(y0) * 0.05 || 1; y1 += Math.abs(y1) * 0.05 || 1; }
    const last = Math.max(step[step.length - 1], step[0] + 1);
    const X = (s) => left + ((s - step[0]) / (last - step[0])) * (width - left - right);
    const Y = (v) => bottom - ((v - y0) / (y1 - y0)) * (bottom - top);
    metric.groups.forEach((group, g) => {
      const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${metric.metric} of ${group}` });
      drawing.append(svg("path", { class: "axis", fill: "none", d: `M${left} ${top}V${bottom}H${width - right}` }));
      drawing.append(svg("text", { x: left - 4, y: top + 8, "text-anchor": "end" }, short(Number(highest.toPrecision(2)))));
      drawing.append(svg("text", { x: left - 4, y: bottom, "text-anchor": "end" }, short(Number(lowest.toPrecision(2)))));
      drawing.append(svg("text", { x: left, y: height - 3 }, whole(step[0])), svg("text", { x: width - right, y: height - 3, "text-anchor": "end" }, whole(step[step.length - 1])));
      const column = (values) => Float64Array.from(step, (_, t) => values[t * groups + g]);
      if (low) {
        const l = column(low), h = column(high);
        let bands = "", there = "", back = "";
        const close = () => { if (there) bands += there + back + "Z"; there = back = ""; };
        for (let t = 0; t < step.length; t++) {
          if (after.has(step[t])) close();
          if (!Number.isFinite(l[t]) || !Number.isFinite(h[t])) continue;
          there += `${there ? "L" : "M"}${X(step[t]).toFixed(1)} ${Y(h[t]).toFixed(1)}`;
          back = `L${X(step[t]).toFixed(1)} ${Y(l[t]).toFixed(1)}` + back;
        }
        close();
        if (bands) drawing.append(svg("path", { class: "band", style: "fill:var(--c0)", d: bands }));
      }
      drawing.append(svg("path", { class: "curve", style: "stroke:var(--c0)", d: curve(step, column(mean), X, Y, step[0], last, width, gaps) }));
      for (const alarm of run.alarms) {
        if (alarm.monitor !== metric.monitor || alarm.metric !== metric.metric) continue;
        if (!alarm.places.some((place) => place === group || place.startsWith(group + "/") || (!place && group === "the model"))) continue;
        const x = X(clamp(alarm.step, step[0], last));
        drawing.append(svg("path", { class: "alarm-line", d: `M${x} ${top}V${bottom}` }), svg("path", { class: "alarm", d: `M${x} ${top - 5}l4 5l-4 5l-4 -5z` }));
      }
      box.append(html("div", {}, html("h4", {}, group.replace("_", " ")), drawing));
    });
    if (low) box.parentNode.append(html("p", { class: "hint" }, "Line: mean of the places of a layer. Band: least to greatest. All panels have one scale."));
  }

  // A run

  const LOSS_NOT_GIVEN = "It was not given, so there is no curve. It is found by itself where the model returns an output with a loss; elsewhere call guard.observe(loss=loss) before guard.step().";
  // The steps whose loss was given, which may be every tenth.
  function givenLoss(p) {
    const given = (_, i) => p.loss_given[i];
    return { x: p.step.filter(given), y: p.loss.filter(given) };
  }
  async function drawRun(box, run) {
    const p = await run.getPoints();
    const first = p.step[0] - 0.5, last = p.step[p.step.length - 1] + 0.5;
    const view = new View(run.cells ? Math.min(first, run.cells.first - 0.5) : first, Math.max(last, first + 1));
    const marks = { view, gaps: run.gaps, faults: run.faults, alarms: run.alarms };
    const keys = [];
    if (run.faults.length) keys.push(["fault", "fault made on purpose"]);
    if (run.alarms.length) keys.push(["alarm", "alarm"]);
    if (run.gaps.length) keys.push(["gap", "not recorded"]);
    const switches = p.num_entered.some((n) => n > 0);
    const series = (name, y, color) => [{ name, x: p.step, y, color }];
    const lost = (y) => (y.some((v) => !Number.isFinite(v)) ? [["lost", "not finite"]] : []);
    const switchKey = switches ? [["switch", "units switched to the recovery path"]] : [];
    if (run.loss_given) {
      const loss = givenLoss(p);
      chart(box, { ...marks, title: "Loss", height: 210, series: [{ name: "loss", color: 0, ...loss }], switches: switches ? p : null, marksLost: true,
        keys: [...keys, ...switchKey, ...lost(loss.y)] });
    } else {
      box.append(html("p", {}, html("b", {}, "Loss. "), LOSS_NOT_GIVEN));
    }
    chart(box, { ...marks, title: "Gradient norm before clipping", height: 150, log: true, series: series("norm", p.grad_norm, 1), switches: switches ? p : null, marksLost: true,
      keys: [...keys, ...(run.loss_given ? [] : switchKey), ...lost(p.grad_norm)] });
    if (run.budget !== null || p.num_active.some((n) => n > 0)) {
      const share = (i) => `${exact(p.num_active[i], false)}` + (run.budget ? ` of ${whole(run.budget)}: ${((100 * p.num_active[i]) / run.budget).toFixed(0)}% of the budget` : "");
      chart(box, { ...marks, title: "Units on the recovery path in the next step" + (run.num_forced_steps ? ", where it is not routed by hand" : ""), height: 120, zero: true,
        series: [{ name: "units", x: p.step, y: p.num_active, color: 2, text: share }], limits: run.budget === null ? [] : [{ y: run.budget, name: "budget" }],
        keys: run.budget === null ? [] : [["limit", `budget, ${count(run.budget, "unit")}`]] });
    }
    if (run.saved_bytes && run.saved_bytes[2] > run.saved_bytes[0]) {
      const [low, , high] = run.saved_bytes;
      chart(box, { ...marks, faults: [], alarms: [], title: "Bytes kept for backward, per token", height: 110,
        series: series("bytes", p.saved_bytes, 3), limits: [{ y: low }, { y: high }],
        keys: [["limit", `static paths: ${whole(Math.round(low))} low-cost, ${whole(Math.round(high))} recovery`]] });
    }
    if (run.cells) {
      const { first: begin, width, error, ...arrays } = run.cells;
      const cells = { first: begin, width, error: error ? await unpack(error) : null, ...(await unpackAll(arrays)) };
      run.map = new HeatMap(box, run, cells, view);
    }
    if (run.alarms.length || run.notices.length) timeline(box, run, view);
    readings(box, run);
    box.style.minHeight = "0"; // what was kept free for the charts
  }

  function smooth(values, width) {
    const found = new Float64Array(values.length);
    let sum = 0, count = 0;
    for (let i = 0; i < values.length; i++) {
      if (Number.isFinite(values[i])) { sum += values[i]; count++; }
      const gone = values[i - width];
      if (i >= width && Number.isFinite(gone)) { sum -= gone; count--; }
      found[i] = count ? sum / count : NaN;
    }
    return found;
  }
  async function overlay(box, runs) {
    const all = (await Promise.all(runs.map((run) => run.getPoints()))).map((p, i) => ({ ...givenLoss(p), i })).filter(({ x }) => x.length);
    if (!all.length) { box.append(html("p", {}, "No run was given its loss, so there is nothing to compare.")); return; }
    const view = new View(Math.min(...all.map(({ x }) => x[0])) - 0.5, Math.max(...all.map(({ x }) => x[x.length - 1])) + 0.5);
    const tick = html("input", { type: "checkbox" });
    tick.checked = true;
    const spec = { title: "Loss of all runs", height: 280, view, series: [] };
    const build = () => {
      spec.series = all.map(({ x, y, i }) => ({ name: runs[i].name, x, color: i % 8, dash: DASHES[i % DASHES.length], gaps: runs[i].gaps,
        y: tick.checked ? smooth(y, Math.max(1, Math.round(y.length / 50))) : y, text: (k) => exact(y[k], false) }));
    };
    build();
    box.append(html("div", { class: "tools" }, html("label", { class: "choice" }, tick, "smooth (mean of the last 2% of the steps)")));
    const draw = chart(box, spec);
    tick.addEventListener("change", () => { build(); draw(); });
    for (const place of document.querySelectorAll(".swatch")) {
      const i = Number(place.dataset.series);
      place.append(svg("svg", { width: 30, height: 10, "aria-hidden": "true" }, svg("path", { d: "M0 5H30", style: `stroke:var(--c${i % 8});stroke-width:3`, "stroke-dasharray": DASHES[i % DASHES.length] })));
    }
  }

  // The whole page

  function themes() {
    const button = document.getElementById("theme");
    const order = ["auto", "light", "dark"];
    let now = 0;
    button.addEventListener("click", () => {
      now = (now + 1) % order.length;
      if (now) root.dataset.theme = order[now]; else delete root.dataset.theme;
      button.textContent = `Colours: ${order[now]}`;
      button.setAttribute("aria-label", `Colours: ${now ? order[now] : "as the system"}`);
      for (const redraw of redraws) redraw();
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { for (const redraw of redraws) redraw(); });
  }
  async function begin() {
    themes();
    if (typeof DecompressionStream === "undefined") {
      for (const box of document.querySelectorAll(".charts")) box.textContent = "The charts need a browser of 2023 or later.";
      return;
    }
    const boxes = [...document.querySelectorAll(".run")];
    const runs = boxes.map((_, i) => {
      const run = { index: i, ...JSON.parse(document.getElementById(`run-${i}-data`).textContent) };
      let points = null;
      run.getPoints = () => (points = points || unpackAll(run.points));
      return run;
    });
    window.trimtabReport = { runs };
    const drawn = new Map();
    const draw = (box) => {
      const i = Number(box.dataset.run);
      if (!drawn.has(i)) drawn.set(i, drawRun(box, runs[i]));
      return drawn.get(i);
    };
    const over = document.getElementById("overlay");
    if (over) await overlay(over, runs);
    const charts = [...document.querySelectorAll(".charts")];
    // With many runs, those further down the page wait until they are come to.
    const watcher = new IntersectionObserver((entries) => { for (const entry of entries) if (entry.isIntersecting) draw(entry.target); }, { rootMargin: "600px" });
    for (const box of charts) watcher.observe(box);
    addEventListener("beforeprint", () => { for (const box of charts) draw(box); });
    window.trimtabReport.drawAll = () => Promise.all(charts.map(draw));
    if (charts.length) await draw(charts[0]);
    root.dataset.ready = "yes";
    window.trimtabReport.readyMs = performance.now();
  }
  begin();
})();
