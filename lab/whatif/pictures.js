"use strict";

/**
 * The four pictures of the page, drawn as SVG from plain numbers.
 *
 * Each picture is drawn anew at every call and again when its element gets another width. Colours
 * are presentation attributes: a page sets --ink, --paper, --muted and --faint for its scheme.
 * Helpers come first, then what reacts to the pointer and to keys, then the pictures.
 *
 * @typedef {{name: string, color: string, marker: string}} Strategy
 *     of data.strategies; the marker is one of matplotlib's letters
 *
 * @typedef {{name: string, begin: number, end: number}} Pass seconds from the step's start
 * @typedef {{kind: string, nbytes: number, count: number, begin: number, end: number,
 *     ready: number, where: string, exposed: number[][]}} Message
 *     seconds; where: "between nodes" or "inside a node"; nbytes: of each of its `count` messages
 * @typedef {{total_seconds: number, passes: Pass[], messages: Message[],
 *     exposed: number[][]}} Timeline as Engine.timeline returns it
 *
 * @typedef {{nodes: number, step_seconds: number, efficiency: number, low_seconds: ?number,
 *     high_seconds: ?number, low_efficiency: ?number, high_efficiency: ?number}} Point
 *     an entry of Engine.curve, or a row of Engine.row; without low_… and high_… it has no band
 * @typedef {{strategy: string, nodes: number, seconds: number, efficiency: ?number,
 *     note: ?string}} Measured
 * @typedef {{nodes: number, focus: ?string, curves: {strategy: string, points: Point[],
 *     reader: ?Point}[], measured: ?Measured[]}} Scaling
 *     nodes: of the reader's point; focus: the strategy whose line is thick
 *
 * @typedef {{strategy: string, bytes_sent_root: number, bytes_sent_others: number}} Sent
 *     a row of Engine.row with its strategy
 */
const Pictures = (() => {
  const NAMESPACE = "http://www.w3.org/2000/svg";
  const INK = "var(--ink, currentColor)";
  const PAPER = "var(--paper, Canvas)";
  const MUTED = "var(--muted, var(--ink, currentColor))";
  const FAINT = "var(--faint, var(--line, #d5dbe1))";
  // As in lab/plot_style.py.
  const SECTIONS = {
    forward: "#4f97da", backward: "#1b66b3", update: "#27986a", wait: "#cf7f12", wire: "#b83a0b",
  };
  // What can be read on them, in both schemes.
  const PASS_TEXTS = { forward: "#10141a", backward: "#ffffff", update: "#10141a" };
  const DASHES = [null, "6 2.5", "2 2", "8 2.5 2 2.5", "4 1.5", "11 3"];
  const TEXT = 12; // pixels
  const SMALL = 11;
  const WIDE = 640; // pixels: from here on there is room for names beside a picture
  const LEAST_WIDTH = 300;
  const LEAST_HEIGHT = 110; // room for what the pointer tells
  const FEW = 6; // curves: up to so many, each point of the reader has its ring
  const REACH = 26; // pixels: how far from a point the pointer still tells its number

  // -- elements, scales and ticks ---------------------------------------------------------------

  /** Return a new SVG element; attributes that are null or undefined are left out. */
  function element(name, attributes = {}, text = null) {
    const made = document.createElementNS(NAMESPACE, name);
    for (const [key, value] of Object.entries(attributes)) {
      if (value !== null && value !== undefined) made.setAttribute(key, value);
    }
    if (text !== null) made.textContent = text;
    return made;
  }

  /** Return a function from numbers in [low, high] to pixels in [begin, end]. */
  function linear(low, high, begin, end) {
    const factor = (end - begin) / (high - low || 1);
    return (value) => begin + (value - low) * factor;
  }

  /** Return the same on a logarithmic scale; all numbers are positive. */
  function logarithmic(low, high, begin, end) {
    const scale = linear(Math.log(low), Math.log(high), begin, end);
    return (value) => scale(Math.log(value));
  }

  /** Return multiples of 1, 2 or 5 times a power of ten from low to high, at most `most`. */
  function linearTicks(low, high, most) {
    const rough = (high - low) / Math.max(1, most - 1);
    if (!(rough > 0)) return [low];
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].find((digit) => digit * power >= rough * 0.999) * power;
    const ticks = [];
    for (let index = Math.ceil(low / step - 1e-9); index * step <= high * (1 + 1e-9); index += 1) {
      ticks.push(Number((index * step).toPrecision(12)));
    }
    return ticks;
  }

  /** Return round numbers for a logarithmic axis, as many of them as fit into `most`. */
  function logTicks(low, high, most) {
    const first = Math.floor(Math.log10(low));
    const last = Math.ceil(Math.log10(high));
    const inside = (value) => value >= low * (1 - 1e-9) && value <= high * (1 + 1e-9);
    const exponents = Array.from({ length: last - first + 1 }, (_, index) => first + index);
    const fine = exponents.flatMap((exponent) => [1, 2, 5].map((digit) => digit * 10 ** exponent));
    const shown = fine.filter(inside);
    if (shown.length < 3) return linearTicks(low, high, Math.min(5, most)).filter(inside);
    if (shown.length <= most) return shown;
    const decades = exponents.map((exponent) => 10 ** exponent).filter(inside);
    const every = Math.ceil(decades.length / most);
    return decades.filter((_, index) => index % every === 0);
  }

  /** Return powers of two from low to high, at most `most`; the first one is shown. */
  function nodeTicks(low, high, most) {
    const powers = [];
    for (let nodes = 2 ** Math.ceil(Math.log2(low)); nodes <= high; nodes *= 2) powers.push(nodes);
    const every = Math.ceil(powers.length / most);
    return powers.filter((_, index) => index % every === 0);
  }

  /** Move sorted positions apart to a distance of `gap` within [low, high], as little as needed. */
  function spread(positions, gap, low, high) {
    const blocks = []; // of labels that touch: where the first would stand, and how many
    positions.forEach((position, index) => {
      let block = { start: position - index * gap, size: 1 };
      while (blocks.length && blocks.at(-1).start > block.start) {
        const before = blocks.pop();
        const size = before.size + block.size;
        const start = (before.start * before.size + block.start * block.size) / size;
        block = { start, size };
      }
      blocks.push(block);
    });
    const latest = Math.max(low, high - (positions.length - 1) * gap);
    const starts = blocks.flatMap((block) => Array(block.size).fill(block.start));
    return starts.map((start, index) => Math.min(Math.max(start, low), latest) + index * gap);
  }

  // -- texts ------------------------------------------------------------------------------------

  const widths = new Map();
  let ruler = null;

  /** Return the pixels of a text in the page's font, without asking the page for its layout. */
  function textWidth(text, size = TEXT, weight = "normal") {
    const key = `${weight} ${size} ${text}`;
    if (widths.size > 5000) widths.clear();
    if (!widths.has(key)) {
      if (!ruler) {
        ruler = document.createElement("canvas").getContext("2d");
        ruler.family = getComputedStyle(document.body).fontFamily;
      }
      ruler.font = `${weight} ${size}px ${ruler.family}`;
      widths.set(key, ruler.measureText(text).width);
    }
    return widths.get(key);
  }

  /** Return the words of a text in lines of at most so many pixels. */
  function wrap(text, most, size) {
    const lines = [];
    for (const word of text.split(" ")) {
      const longer = lines.length ? `${lines.at(-1)} ${word}` : word;
      if (lines.length && textWidth(longer, size) <= most) lines[lines.length - 1] = longer;
      else lines.push(word);
    }
    return lines;
  }

  const number = (value) => Number(value.toPrecision(6)).toLocaleString("en-US");
  const percent = (share) => `${Words.three(100 * share)} %`;

  /** Return the unit in which an axis of times up to `seconds` is read. */
  function timeUnit(seconds) {
    const units = [["h", 3600, 7200], ["min", 60, 120], ["s", 1, 1], ["ms", 1e-3, 1e-3]];
    const found = units.find(([, , least]) => seconds >= least);
    if (!found) return { name: "µs", size: 1e-6 };
    return { name: found[0], size: found[1] };
  }

  /** Return the text of a tick on a logarithmic axis of times. */
  function timeText(seconds) {
    const units = [["s", 1], ["ms", 1e-3], ["µs", 1e-6]];
    const [name, size] = units.find(([, least]) => seconds >= least * (1 - 1e-9)) || ["ns", 1e-9];
    return `${number(seconds / size)} ${name}`;
  }

  // -- a picture: its element, what it draws into, and what tells its numbers --------------------

  const drawn = new WeakMap(); // of each <svg>: what is drawn in it, and its width
  let watcher = null;
  let pictures = 0;

  /** Draw a picture now, and again whenever its element's width changes. */
  function show(svg, paint, data, model) {
    let state = drawn.get(svg);
    if (!state) {
      pictures += 1;
      svg.classList.add("picture"); // its width is then that of the page's column
      state = { id: `picture-${pictures}`, width: svg.getBoundingClientRect().width };
      drawn.set(svg, state);
      listen(svg);
      watchWidth(svg);
    }
    Object.assign(state, { paint, data, model });
    redraw(svg);
  }

  function watchWidth(svg) {
    watcher ||= new ResizeObserver((entries) => {
      for (const { target } of entries) {
        const state = drawn.get(target);
        const { width } = target.getBoundingClientRect();
        if (!width || Math.abs(width - state.width) < 0.5) continue;
        state.width = width;
        // Not now: a new height while sizes are observed is an error on the console.
        requestAnimationFrame(() => redraw(target));
      }
    });
    watcher.observe(svg);
  }

  /** Draw what was shown last. The item that has the focus keeps it. */
  function redraw(svg) {
    const state = drawn.get(svg);
    const focused = focusedStop(svg);
    const width = Math.max(LEAST_WIDTH, Math.round(state.width || WIDE));
    const canvas = { id: state.id, width, parts: [], stops: [], definitions: element("defs") };
    const { height, title, description } = state.paint(canvas, state.data, state.model);
    canvas.height = Math.ceil(Math.max(LEAST_HEIGHT, height));
    Object.assign(state, { canvas, item: null });

    svg.setAttribute("viewBox", `0 0 ${width} ${canvas.height}`);
    svg.setAttribute("role", "group");
    if (!svg.hasAttribute("aria-labelledby")) {
      svg.setAttribute("aria-labelledby", `${state.id}-title`);
    }
    svg.setAttribute("aria-describedby", `${state.id}-description`);
    const drawing = element("g", { "aria-hidden": "true", "font-size": TEXT, fill: INK });
    drawing.append(...canvas.parts);
    svg.replaceChildren(
      element("title", { id: `${state.id}-title` }, title),
      element("desc", { id: `${state.id}-description` }, description),
      canvas.definitions, drawing, ...canvas.stops.map((stop) => stopElement(svg, stop)),
      element("g", { class: "tip", "aria-hidden": "true", "pointer-events": "none" }),
    );
    svg.querySelectorAll(".stop")[focused]?.focus({ preventScroll: true });
  }

  function add(canvas, name, attributes, text = null) {
    const made = element(name, attributes, text);
    canvas.parts.push(made);
    return made;
  }

  function addText(canvas, text, x, y, attributes = {}) {
    return add(canvas, "text", { x: round(x), y: round(y), ...attributes }, text);
  }

  const round = (pixels) => Math.round(pixels * 100) / 100;

  /** Add diagonal stripes as a filling and return the value of `fill` that names it. */
  function stripes(canvas, name, color) {
    const id = `${canvas.id}-${name}`;
    const pattern = element("pattern", {
      id, width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)",
    });
    pattern.append(
      element("rect", { width: 6, height: 6, fill: color }),
      element("rect", { width: 2, height: 6, fill: PAPER }),
    );
    canvas.definitions.append(pattern);
    return `url(#${id})`;
  }

  /**
   * Let pointer and keys reach items that tell a number.
   *
   * One stop of the Tab key holds several items; arrow keys go from one to the next.
   * items: {x, y, width, height, lines}, pixels; lines() are a heading and what follows. start: the
   * item that comes first.
   */
  function addStop(canvas, label, items, start = 0) {
    if (items.length) canvas.stops.push({ label, items, current: start });
  }

  function stopElement(svg, stop) {
    const left = Math.min(...stop.items.map((item) => item.x));
    const top = Math.min(...stop.items.map((item) => item.y));
    const right = Math.max(...stop.items.map((item) => item.x + item.width));
    const bottom = Math.max(...stop.items.map((item) => item.y + item.height));
    const group = element("g", { class: "stop", tabindex: 0, "pointer-events": "none" });
    group.append(element("rect", {
      x: round(left), y: round(top), width: round(right - left), height: round(bottom - top),
      fill: "none",
    }));
    describeStop(group, stop);
    // Not on the <svg>: with such a listener it would be a stop, too.
    group.addEventListener("focus", () => tell(svg, stop.items[stop.current]));
    group.addEventListener("blur", () => tell(svg, null));
    group.addEventListener("keydown", (event) => onKey(svg, group, stop, event));
    return group;
  }

  /** Write a stop's current item into its attributes, which screen readers read. */
  function describeStop(group, stop) {
    const text = stop.items[stop.current].lines().join(", ");
    if (stop.items.length === 1) {
      group.setAttribute("role", "img");
      group.setAttribute("aria-label", text);
      return;
    }
    // Screen readers pass arrow keys on to a slider, and read its text at each change.
    group.setAttribute("role", "slider");
    group.setAttribute("aria-label", `${stop.label} (arrow keys)`);
    group.setAttribute("aria-valuemin", 1);
    group.setAttribute("aria-valuemax", stop.items.length);
    group.setAttribute("aria-valuenow", stop.current + 1);
    group.setAttribute("aria-valuetext", text);
  }

  // -- pointer and keys -------------------------------------------------------------------------

  function listen(svg) {
    svg.addEventListener("pointermove", (event) => tell(svg, itemAt(svg, event)));
    svg.addEventListener("pointerdown", (event) => tell(svg, itemAt(svg, event)));
    svg.addEventListener("pointerleave", () => tell(svg, focusedItem(svg)));
  }

  /** Return the number of the stop that has the focus, or -1. */
  function focusedStop(svg) {
    return [...svg.querySelectorAll(".stop")].indexOf(document.activeElement);
  }

  /** Return the item that the focus is on, or null. */
  function focusedItem(svg) {
    const stop = drawn.get(svg).canvas.stops[focusedStop(svg)];
    return stop ? stop.items[stop.current] : null;
  }

  function onKey(svg, group, stop, event) {
    if (event.key === "Escape") tell(svg, null);
    const last = stop.items.length - 1;
    const targets = {
      ArrowRight: stop.current + 1, ArrowUp: stop.current + 1, ArrowLeft: stop.current - 1,
      ArrowDown: stop.current - 1, PageUp: stop.current + 10, PageDown: stop.current - 10,
      Home: 0, End: last,
    };
    if (!(event.key in targets) || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    stop.current = within(targets[event.key], 0, last);
    describeStop(group, stop);
    tell(svg, stop.items[stop.current]);
  }

  /** Return the item under the pointer, or the nearest one within reach, or null. */
  function itemAt(svg, event) {
    const { canvas } = drawn.get(svg);
    const box = svg.getBoundingClientRect();
    const factor = canvas.width / box.width;
    const x = (event.clientX - box.left) * factor;
    const y = (event.clientY - box.top) * factor;
    let nearest = null;
    let least = REACH;
    for (const item of canvas.stops.flatMap((stop) => stop.items)) {
      const across = Math.max(item.x - x, 0, x - item.x - item.width);
      const down = Math.max(item.y - y, 0, y - item.y - item.height);
      const distance = Math.hypot(across, down);
      if (distance >= least) continue;
      least = distance;
      nearest = item;
    }
    return nearest;
  }

  /** Show an item's lines beside it, inside the picture; null hides them. */
  function tell(svg, item) {
    const state = drawn.get(svg);
    if (state.item === (item || null)) return;
    state.item = item || null;
    const tip = svg.querySelector(".tip");
    tip.replaceChildren();
    if (!item) return;
    const { canvas } = state;
    const most = Math.min(320, canvas.width - 24);
    const lines = item.lines().flatMap((line, index) =>
      wrap(line, most, TEXT).map((text) => ({ text, weight: index ? "normal" : "bold" })));
    const width = Math.max(...lines.map(({ text, weight }) => textWidth(text, TEXT, weight))) + 16;
    const height = lines.length * 16 + 9;
    const x = within(item.x + item.width / 2 - width / 2, 2, canvas.width - width - 2);
    const above = item.y - height - 9;
    const below = item.y + item.height + 9;
    const y = within(above >= 2 ? above : below, 2, canvas.height - height - 2);
    tip.append(element("rect", {
      x: round(item.x - 3), y: round(item.y - 3), width: round(item.width + 6),
      height: round(item.height + 6), rx: 3, fill: "none", stroke: INK, "stroke-width": 1.75,
    }));
    tip.append(element("rect", {
      x: round(x), y: round(y), width: round(width), height, rx: 4, fill: INK,
    }));
    lines.forEach(({ text, weight }, index) => {
      tip.append(element("text", {
        x: round(x + 8), y: round(y + 16 + index * 16), fill: PAPER, "font-size": TEXT,
        "font-weight": weight,
      }, text));
    });
  }

  const within = (value, low, high) => Math.max(low, Math.min(value, high));

  // -- legends ----------------------------------------------------------------------------------

  /**
   * Add entries {text, width, draw(x, y)} in as many rows as they need; return the height.
   *
   * draw puts the entry's sign of `width` pixels at x, around the middle y.
   */
  function addKey(canvas, entries, left, top, { columns = false } = {}) {
    const sizes = entries.map((entry) => entry.width + 6 + textWidth(entry.text, SMALL) + 16);
    const widest = Math.max(0, ...sizes);
    const right = canvas.width - 4;
    let x = left;
    let y = top + 9;
    entries.forEach((entry, index) => {
      const size = columns ? widest : sizes[index];
      if (x > left && x + size - 16 > right) {
        x = left;
        y += 18;
      }
      entry.draw(x, y);
      addText(canvas, entry.text, x + entry.width + 6, y + 4, { "font-size": SMALL });
      x += size;
    });
    return entries.length ? y + 9 - top : 0;
  }

  /** Return a legend's entry of a filled box. */
  function boxEntry(canvas, text, attributes) {
    const place = { width: 16, height: 10 };
    const draw = (x, y) => add(canvas, "rect", { x, y: y - 5, ...place, ...attributes });
    return { text, width: 16, draw };
  }

  // -- one step as a timeline -------------------------------------------------------------------

  const ROW = 30; // pixels: height of a row's bars
  const READY = 9; // of the marks above a link's bars
  const BYTES = 18; // of the texts below them

  /**
   * Draw one step: what computes, and each message on its link.
   *
   * @param {SVGElement} svg
   * @param {object} data of the page; not used
   * @param {{strategy: string, nodes: ?number, timeline: Timeline}} model
   */
  function timeline(svg, data, model) {
    show(svg, paintTimeline, data, model);
  }

  function paintTimeline(canvas, data, model) {
    const { strategy, timeline: step } = model;
    const places = ["between nodes", "inside a node"].filter(
      (place) => step.messages.some((message) => message.where === place));
    const isWide = canvas.width >= WIDE;
    const labels = ["computing", ...places].map((label) => textWidth(label));
    const left = isWide ? Math.max(...labels) + 14 : 6;
    const right = canvas.width - 8;
    const x = linear(0, step.total_seconds, left, right);
    const fills = {
      wait: stripes(canvas, "wait", SECTIONS.wait),
      exposed: stripes(canvas, "exposed", SECTIONS.wire),
    };
    const area = { canvas, x, left, right, isWide, fills, step };

    let y = paintTimelineHead(area, model);
    const boundaries = add(canvas, "path", { stroke: FAINT, fill: "none" });
    const first = y;
    const top = rowTop(area, "computing", y);
    const unlabelled = paintPasses(area, top);
    y = top + ROW + 4;
    for (const place of places) {
      const bars = rowTop(area, place, y, READY) + READY;
      paintLink(area, place, bars);
      y = bars + ROW + BYTES;
    }
    if (!places.length) {
      addText(canvas, "no messages", left, y + 12, { fill: MUTED });
      y += 20;
    }
    boundaries.setAttribute("d", step.passes.map(
      (pass) => `M${round(x(pass.end))} ${first}V${round(y)}`).join(""));
    y = paintTimeAxis(area, y);
    y += addKey(canvas, timelineKey(area, unlabelled), isWide ? left : 6, y + 4) + 6;
    return { height: y, title: `One step of ${strategy}`, description: timelineText(model) };
  }

  /** Return where a row's bars begin; its name stands to the left, or above in a narrow picture. */
  function rowTop({ canvas, left, isWide }, label, y, above = 0) {
    if (!isWide) {
      addText(canvas, label, left, y + 11);
      return y + 16;
    }
    const middle = y + above + ROW / 2;
    addText(canvas, label, left - 10, middle + 4, { "text-anchor": "end" });
    return y;
  }

  /** Return the length of intervals together. */
  function summed(intervals) {
    return intervals.reduce((sum, [begin, end]) => sum + end - begin, 0);
  }

  /** Write the strategy and what the step takes over the rows; return where these begin. */
  function paintTimelineHead({ canvas, left, right, step }, { strategy, nodes }) {
    const about = nodes ? `${strategy} on ${Words.counted(nodes, "node")}` : strategy;
    let total = `${Words.duration(step.total_seconds)} a step`;
    const exposed = summed(step.exposed);
    if (exposed > 0) total += `, ${Words.duration(exposed)} exposed`;
    addText(canvas, about, left, 14, { "font-weight": "bold" });
    const isRoom = textWidth(about, TEXT, "bold") + textWidth(total) + 20 <= right - left;
    const y = isRoom ? 14 : 31;
    if (isRoom) addText(canvas, total, right, y, { "text-anchor": "end" });
    else addText(canvas, total, left, y);
    return y + 10;
  }

  /** Return the parts of a pass in which it computes. */
  function computingParts(pass, exposed) {
    const parts = [];
    let begin = pass.begin;
    for (const [from, to] of exposed) {
      if (to <= begin || from >= pass.end) continue;
      if (from > begin) parts.push([begin, from]);
      begin = to;
    }
    if (begin < pass.end) parts.push([begin, pass.end]);
    return parts;
  }

  /** Draw the passes and where they wait; return the names that do not fit. */
  function paintPasses(area, y) {
    const { canvas, x, fills, step } = area;
    const unlabelled = new Set();
    const items = [];
    const addBox = (kind, fill, begin, end, heading) => {
      const place = { x: x(begin), y, width: x(end) - x(begin), height: ROW };
      const lines = () => {
        const share = percent((end - begin) / step.total_seconds);
        return [heading, `${Words.duration(end - begin)}, ${share} of the step`];
      };
      items.push({ ...place, begin, lines });
      add(canvas, "rect", {
        class: kind, x: round(place.x), y, width: round(place.width), height: ROW, fill,
      });
      return { ...place, seconds: end - begin };
    };
    for (const pass of step.passes) {
      const boxes = computingParts(pass, step.exposed).map(([begin, end]) =>
        addBox(`pass ${pass.name}`, SECTIONS[pass.name], begin, end, pass.name));
      boxes.sort((box, other) => other.width - box.width);
      const isLabelled = boxes.length && labelBar(canvas, boxes[0], pass.name);
      if (!isLabelled) unlabelled.add(pass.name);
    }
    for (const [begin, end] of step.exposed) {
      const box = addBox("waits", fills.wait, begin, end, "computing waits for messages");
      const isLabelled = labelBar(canvas, box, "waits", { plate: true });
      if (!isLabelled) unlabelled.add("waits");
    }
    items.sort((item, other) => item.begin - other.begin);
    addStop(canvas, `computing, ${Words.counted(items.length, "part")}`, items);
    return unlabelled;
  }

  /**
   * Write a name, and its seconds if there is room, into a bar; return whether one fits.
   *
   * plate: put the text on paper, since it could not be read on stripes.
   */
  function labelBar(canvas, box, name, { plate = false } = {}) {
    const texts = [`${name} ${Words.duration(box.seconds)}`, name];
    const text = texts.find((candidate) => textWidth(candidate) + 14 <= box.width);
    if (!text) return false;
    const middle = box.x + box.width / 2;
    if (plate) {
      const width = textWidth(text) + 10;
      add(canvas, "rect", {
        x: round(middle - width / 2), y: box.y + 6, width: round(width), height: ROW - 12, rx: 3,
        fill: PAPER,
      });
    }
    addText(canvas, text, middle, box.y + ROW / 2 + 4, {
      "text-anchor": "middle", fill: plate ? INK : PASS_TEXTS[name],
    });
    return true;
  }

  /** Draw the messages of a link, what of them is exposed, and when each became ready. */
  function paintLink({ canvas, x, left, right, fills, step }, place, y) {
    const messages = step.messages.filter((message) => message.where === place);
    add(canvas, "rect", {
      x: left, y, width: right - left, height: ROW, fill: INK, "fill-opacity": 0.05,
    });
    const boxes = messages.map((message) => ({
      x: x(message.begin), y, width: x(message.end) - x(message.begin), height: ROW, message,
    }));
    for (const box of boxes) {
      add(canvas, "rect", {
        class: "message", x: round(box.x), y, width: round(box.width), height: ROW,
        fill: SECTIONS.wire, "fill-opacity": 0.6,
      });
    }
    for (const [begin, end] of joined(messages.flatMap((message) => message.exposed))) {
      add(canvas, "rect", {
        class: "exposed", x: round(x(begin)), y, width: round(x(end) - x(begin)), height: ROW,
        fill: fills.exposed,
      });
    }
    paintSeparators(canvas, boxes);
    const mean = boxes.reduce((sum, box) => sum + box.width, 0) / boxes.length;
    add(canvas, "path", {
      class: "ready",
      d: messages.map((message) => `M${round(x(message.ready))} ${y - READY + 2}v6`).join(""),
      stroke: INK, "stroke-width": within(mean / 8, 0.25, 1.25),
    });
    labelMessages(canvas, boxes);
    const items = boxes.map((box, index) => ({
      ...box, lines: () => messageLines(box.message, index, messages.length, step),
    }));
    addStop(canvas, `${place}, ${Words.counted(items.length, "message")}`, items);
  }

  /** Draw lines between one message and the next, thinner than the messages. */
  function paintSeparators(canvas, boxes) {
    const thinner = boxes.slice(1).map((box, index) => Math.min(box.width, boxes[index].width));
    const between = (least, most) => boxes.slice(1)
      .filter((_, index) => thinner[index] >= least && thinner[index] < most)
      .map((box) => `M${round(box.x)} ${box.y}v${ROW}`).join("");
    add(canvas, "path", { d: between(6, Infinity), stroke: PAPER, "stroke-width": 1.25 });
    add(canvas, "path", { d: between(1.5, 6), stroke: PAPER, "stroke-width": 0.3 });
  }

  /** Return intervals without overlaps, in order. */
  function joined(intervals) {
    const result = [];
    for (const [begin, end] of [...intervals].sort((one, other) => one[0] - other[0])) {
      const last = result.at(-1);
      if (last && begin <= last[1]) last[1] = Math.max(last[1], end);
      else result.push([begin, end]);
    }
    return result;
  }

  /** Return what a message's bar says: "25 MB", or "12 × 25 MB". */
  function messageBytes({ count, nbytes }) {
    const bytes = Words.bytes(nbytes);
    return count > 1 ? `${Words.grouped(count)} × ${bytes}` : bytes;
  }

  /** Write the bytes of messages below their bars, where they reach below no other bar. */
  function labelMessages(canvas, boxes) {
    let free = 0; // from where on there is no text
    boxes.forEach(({ x, y, width, message }, index) => {
      const before = index ? boxes[index - 1] : { x: 0, width: 0 };
      const begin = Math.max(free, before.x + before.width);
      const end = index + 1 < boxes.length ? boxes[index + 1].x : canvas.width;
      if (end - begin < 24) return; // too narrow for any text
      const text = messageBytes(message);
      const half = textWidth(text, SMALL) / 2 + 3;
      const middle = x + width / 2;
      if (middle - half < begin || middle + half > end) return;
      free = middle + half;
      addText(canvas, text, middle, y + ROW + 12, {
        class: "megabytes", "text-anchor": "middle", "font-size": SMALL,
      });
    });
  }

  function messageLines(message, index, count, step) {
    const unit = timeUnit(step.total_seconds);
    const moment = (value) => `${Number((value / unit.size).toPrecision(5))} ${unit.name}`;
    const { kind, begin, end, ready, exposed } = message;
    return [
      `message ${index + 1} of ${count}: ${kind}`,
      `${messageBytes(message)} ${message.where}`,
      `takes ${Words.duration(end - begin)}, ${Words.duration(summed(exposed))} of it exposed`,
      `from ${moment(begin)} to ${moment(end)}, ready at ${moment(ready)}`,
    ];
  }

  /** Draw the axis of times below the rows; return where it ends. */
  function paintTimeAxis({ canvas, x, left, right, step }, y) {
    const unit = timeUnit(step.total_seconds);
    const most = Math.max(2, Math.floor((right - left) / 54));
    add(canvas, "path", { d: `M${round(left)} ${y}H${right}`, stroke: INK, "stroke-width": 0.8 });
    for (const value of linearTicks(0, step.total_seconds / unit.size, most)) {
      const at = x(value * unit.size);
      add(canvas, "path", {
        class: "tick", d: `M${round(at)} ${y}v4`, stroke: INK, "stroke-width": 0.8,
      });
      const text = number(value);
      const half = textWidth(text, SMALL) / 2;
      addText(canvas, text, within(at, half + 1, canvas.width - half - 1), y + 16, {
        class: "ticks", "text-anchor": "middle", "font-size": SMALL,
      });
    }
    addText(canvas, unit.name, (left + right) / 2, y + 31, {
      "text-anchor": "middle", "font-size": SMALL,
    });
    return y + 36;
  }

  function timelineKey({ canvas, fills, step }, unlabelled) {
    const entries = step.passes.filter((pass) => unlabelled.has(pass.name)).map((pass) =>
      boxEntry(canvas, pass.name, { fill: SECTIONS[pass.name] }));
    if (unlabelled.has("waits")) {
      entries.push(boxEntry(canvas, "computing waits", { fill: fills.wait }));
    }
    if (!step.messages.length) return entries;
    const isHidden = step.messages.some((message) => {
      const seconds = message.end - message.begin;
      return seconds - summed(message.exposed) > 1e-6 * seconds;
    });
    if (isHidden) {
      entries.push(boxEntry(canvas, "message, hidden behind computing", {
        fill: SECTIONS.wire, "fill-opacity": 0.6,
      }));
    }
    if (step.messages.some((message) => message.exposed.length)) {
      entries.push(boxEntry(canvas, "message, exposed", { fill: fills.exposed }));
    }
    const tick = (x, y) => add(canvas, "path", {
      d: `M${x + 2} ${y - 3}v6`, stroke: INK, "stroke-width": 1.25,
    });
    entries.push({ text: "a message is ready", width: 4, draw: tick });
    return entries;
  }

  /** Return the picture in words. */
  function timelineText({ strategy, nodes, timeline: step }) {
    const passes = step.passes.map(
      (pass) => `${pass.name} ends at ${Words.duration(pass.end)}`).join(", ");
    const where = nodes ? `on ${Words.counted(nodes, "node")} ` : "";
    return `A step of ${strategy} ${where}takes ${Words.duration(step.total_seconds)}: ${passes}. `
      + `${Words.counted(step.messages.length, "message")}; `
      + `${Words.duration(summed(step.exposed))} of communication are exposed.`;
  }

  // -- strategies: colours, markers, dashes -----------------------------------------------------

  /** Return how a strategy is drawn; its dash goes with its place among all of the page's. */
  function styleOf(data, name) {
    const index = data.strategies.findIndex((strategy) => strategy.name === name);
    if (index < 0) return { index: 0, color: INK, marker: "o", dash: null };
    const { color, marker } = data.strategies[index];
    return { index, color, marker, dash: DASHES[index % DASHES.length] };
  }

  /** Return the corners of a regular polygon; a second radius makes a star. */
  function polygon(corners, x, y, radius, { turn = 0, inner = null } = {}) {
    const points = inner === null ? corners : 2 * corners;
    const at = (index) => {
      const length = inner !== null && index % 2 ? inner : radius;
      const angle = 2 * Math.PI * (index / points + turn) - Math.PI / 2;
      return `${round(x + length * Math.cos(angle))} ${round(y + length * Math.sin(angle))}`;
    };
    return `M${Array.from({ length: points }, (_, index) => at(index)).join("L")}Z`;
  }

  /** Return spokes from the middle, for markers without an area. */
  function spokes(count, x, y, radius, turn) {
    return Array.from({ length: count }, (_, index) => {
      const angle = 2 * Math.PI * (index / count + turn) - Math.PI / 2;
      const end = `${round(x + radius * Math.cos(angle))} ${round(y + radius * Math.sin(angle))}`;
      return `M${x} ${y}L${end}`;
    }).join("");
  }

  /** Return the outline of one of matplotlib's markers around a point; a circle if unknown. */
  function markerPath(marker, x, y, r) {
    const shapes = {
      s: () => polygon(4, x, y, 1.25 * r, { turn: 1 / 8 }),
      D: () => polygon(4, x, y, 1.25 * r),
      d: () => polygon(2, x, y, 1.4 * r, { inner: 0.8 * r }),
      "^": () => polygon(3, x, y, 1.3 * r),
      v: () => polygon(3, x, y, 1.3 * r, { turn: 1 / 2 }),
      "<": () => polygon(3, x, y, 1.3 * r, { turn: 3 / 4 }),
      ">": () => polygon(3, x, y, 1.3 * r, { turn: 1 / 4 }),
      p: () => polygon(5, x, y, 1.15 * r),
      h: () => polygon(6, x, y, 1.15 * r),
      H: () => polygon(6, x, y, 1.15 * r, { turn: 1 / 12 }),
      8: () => polygon(8, x, y, 1.1 * r, { turn: 1 / 16 }),
      "*": () => polygon(5, x, y, 1.5 * r, { inner: 0.65 * r }),
      P: () => polygon(4, x, y, 1.35 * r, { inner: 0.55 * r }),
      X: () => polygon(4, x, y, 1.4 * r, { inner: 0.6 * r, turn: 1 / 8 }),
      "+": () => spokes(4, x, y, 1.3 * r, 0),
      x: () => spokes(4, x, y, 1.3 * r, 1 / 8),
      1: () => spokes(3, x, y, 1.3 * r, 1 / 2),
      2: () => spokes(3, x, y, 1.3 * r, 0),
      3: () => spokes(3, x, y, 1.3 * r, 3 / 4),
      4: () => spokes(3, x, y, 1.3 * r, 1 / 4),
    };
    const circle = () =>
      `M${round(x - r)} ${y}a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0Z`;
    return (shapes[marker] || circle)();
  }

  function addMarker(canvas, kind, { color, marker }, x, y, radius, attributes = {}) {
    return add(canvas, "path", {
      class: kind, d: markerPath(marker, round(x), round(y), radius), fill: color, stroke: color,
      "stroke-width": 1.2, "stroke-linejoin": "round", ...attributes,
    });
  }

  /** Fill a small <svg> of 16 x 16 with a strategy's marker, for a list of strategies. */
  function mark(svg, data, name) {
    const style = styleOf(data, name);
    svg.replaceChildren(element("path", {
      d: markerPath(style.marker, 8, 8, 4.5), fill: style.color, stroke: style.color,
      "stroke-width": 1.2, "stroke-linejoin": "round",
    }));
  }

  // -- curves against the number of nodes -------------------------------------------------------

  const STEPS = {
    kind: "steps",
    title: "Time of a step against the number of nodes",
    axis: "time of a step",
    value: (point) => point.step_seconds,
    low: (point) => point.low_seconds,
    high: (point) => point.high_seconds,
    measured: (point) => point.seconds,
    text: (seconds) => `${Words.duration(seconds)} a step`,
    short: (seconds) => Words.duration(seconds),
    range: (low, high) => Words.range(low, high),
    tick: timeText,
  };
  const EFFICIENCY = {
    kind: "efficiency",
    title: "Efficiency against the number of nodes",
    axis: "samples a second of a node, relative to one node",
    value: (point) => point.efficiency,
    low: (point) => point.low_efficiency,
    high: (point) => point.high_efficiency,
    measured: (point) => point.efficiency,
    text: (share) => `${Words.efficiency(share)} of one node's speed`,
    short: (share) => Words.efficiency(share),
    range: (low, high) => `${Words.efficiency(low)} to ${Words.efficiency(high)}`,
    tick: (share) => `${number(100 * share)} %`,
  };

  /**
   * Draw the time of a step against the number of nodes; both axes are logarithmic.
   *
   * @param {SVGElement} svg
   * @param {{strategies: Strategy[]}} data
   * @param {Scaling} model
   */
  function steps(svg, data, model) {
    show(svg, (canvas, ...rest) => paintCurves(canvas, STEPS, ...rest), data, model);
  }

  /** Draw samples a second of each node, relative to one node; parameters as of `steps`. */
  function efficiency(svg, data, model) {
    show(svg, (canvas, ...rest) => paintCurves(canvas, EFFICIENCY, ...rest), data, model);
  }

  function paintCurves(canvas, quantity, data, model) {
    const curves = model.curves.map((curve) => ({
      ...curve, style: styleOf(data, curve.strategy),
      points: curve.points.filter((point) => quantity.value(point) > 0),
    })).filter((curve) => curve.points.length);
    const measured = (model.measured || []).filter((point) => quantity.measured(point) > 0);
    const area = chartArea(canvas, quantity, model, curves, measured);
    paintAxes(area);
    paintReaderLine(area, model.nodes);
    curves.forEach((curve) => paintBand(area, curve));
    curves.forEach((curve) => paintCurve(area, curve, curve.strategy === model.focus));
    measured.forEach((point) => addMarker(
      canvas, "measured", styleOf(data, point.strategy), area.x(point.nodes),
      area.y(quantity.measured(point)), 5, { fill: PAPER, "stroke-width": 2 }));
    curves.forEach((curve) =>
      paintReader(area, curve, curve.strategy === model.focus || curves.length <= FEW));
    if (area.isLabelled) labelEnds(area, curves, model.focus);
    addCurveStops(area, curves, measured);
    const height = paintCurvesKey(area, curves, measured, model);
    const description = curvesText(area, model, curves, measured);
    return { height, title: quantity.title, description };
  }

  /** Return the plot's edges in pixels, its scales and its ticks. */
  function chartArea(canvas, quantity, model, curves, measured) {
    const isLabelled = canvas.width >= WIDE && curves.length <= 20;
    const names = curves.map((curve) => textWidth(curve.strategy, TEXT, "bold"));
    const top = 38;
    const bottom = top + (canvas.width >= WIDE ? 290 : 230);
    const values = curves.flatMap((curve) =>
      [...curve.points, ...(curve.reader ? [curve.reader] : [])].flatMap((point) =>
        [quantity.value(point), quantity.low(point), quantity.high(point)]));
    values.push(...measured.map(quantity.measured));
    const known = values.filter((value) => value > 0);
    const scale = (quantity === STEPS ? timeScale : shareScale)(known, top, bottom);
    const texts = scale.ticks.map((tick) => tick.text);
    const left = Math.max(30, ...texts.map((text) => textWidth(text, SMALL))) + 12;
    const right = canvas.width - (isLabelled ? Math.max(40, ...names) + 34 : 14);
    const nodes = curves.flatMap((curve) => curve.points.map((point) => point.nodes));
    nodes.push(...measured.map((point) => point.nodes));
    if (model.nodes) nodes.push(model.nodes);
    const most = Math.max(2, ...nodes);
    const least = Math.min(...nodes, most / 2);
    const x = logarithmic(least, most, left + 9, right - 3);
    const nodeLabels = nodeTicks(least, most, Math.floor((right - left) / 44));
    return { canvas, quantity, isLabelled, top, bottom, left, right, x, nodeLabels, ...scale };
  }

  /** Return a logarithmic scale of seconds and its ticks. From a minute on, it counts minutes. */
  function timeScale(seconds, top, bottom) {
    let low = Math.min(...seconds, Infinity);
    let high = Math.max(...seconds, 0);
    if (!seconds.length) [low, high] = [0.1, 1];
    const widening = Math.max(1.08, Math.sqrt(1.5 / (high / low)));
    low /= widening;
    high *= widening;
    let unit = null;
    if (low >= 3600) unit = { name: "h", size: 3600 };
    else if (low >= 60) unit = { name: "min", size: 60 };
    const size = unit ? unit.size : 1;
    const values = logTicks(low / size, high / size, Math.floor((bottom - top) / 30));
    const ticks = values.map((value) => ({
      value: value * size, text: unit ? `${number(value)} ${unit.name}` : timeText(value),
    }));
    return { y: logarithmic(low, high, bottom, top), ticks };
  }

  /** Return a linear scale of shares from 0 to at least 1, and its ticks. */
  function shareScale(shares, top, bottom) {
    const high = Math.max(1, ...shares);
    const values = linearTicks(0, high, 8);
    const ticks = values.map((value) => ({ value, text: EFFICIENCY.tick(value) }));
    return { y: linear(0, high, bottom, top), ticks };
  }

  function paintAxes({ canvas, quantity, top, bottom, left, right, x, y, nodeLabels, ticks }) {
    addText(canvas, quantity.axis, 4, 13, { "font-size": SMALL, fill: MUTED });
    for (const { value, text } of ticks) {
      const at = round(y(value));
      add(canvas, "path", {
        class: "gridline", d: `M${round(left)} ${at}H${round(right)}`, stroke: FAINT,
      });
      addText(canvas, text, left - 7, at + 4, {
        class: "heights", "text-anchor": "end", "font-size": SMALL,
      });
    }
    if (quantity === EFFICIENCY) {
      add(canvas, "path", {
        d: `M${round(left)} ${round(y(1))}H${round(right)}`, stroke: INK, "stroke-width": 0.8,
        "stroke-dasharray": "4 3",
      });
    }
    add(canvas, "path", {
      d: `M${round(left)} ${bottom}H${round(right)}`, stroke: INK, "stroke-width": 0.8,
    });
    for (const nodes of nodeLabels) {
      const at = x(nodes);
      add(canvas, "path", {
        class: "tick", d: `M${round(at)} ${bottom}v4`, stroke: INK, "stroke-width": 0.8,
      });
      const text = Words.grouped(nodes);
      const half = textWidth(text, SMALL) / 2;
      addText(canvas, text, Math.min(at, canvas.width - half - 1), bottom + 19, {
        class: "ticks", "text-anchor": "middle", "font-size": SMALL,
      });
    }
    addText(canvas, "nodes", (left + right) / 2, bottom + 35, {
      "text-anchor": "middle", "font-size": SMALL,
    });
  }

  /** Mark the reader's number of nodes across the plot. */
  function paintReaderLine({ canvas, top, bottom, left, right, x }, nodes) {
    if (!nodes) return;
    const at = round(x(nodes));
    add(canvas, "path", {
      d: `M${at} ${top - 4}V${bottom}`, stroke: INK, "stroke-width": 0.8, "stroke-dasharray": "1 3",
    });
    const text = Words.counted(nodes, "node");
    const half = textWidth(text, TEXT, "bold") / 2;
    addText(canvas, text, within(at, left + half, right - half), top - 8, {
      "text-anchor": "middle", "font-weight": "bold",
    });
  }

  function paintBand({ canvas, quantity, x, y }, { points, style }) {
    const sure = points.filter((point) => quantity.low(point) > 0 && quantity.high(point) > 0);
    if (sure.length < 2) return;
    const at = (value) => (point) => `${round(x(point.nodes))} ${round(y(value(point)))}`;
    const there = sure.map(at(quantity.high));
    const back = sure.map(at(quantity.low)).reverse();
    add(canvas, "path", {
      class: "band", d: `M${[...there, ...back].join("L")}Z`, fill: style.color,
      "fill-opacity": 0.16,
    });
  }

  /** Draw a line, with a marker at every fourth point, not where other lines have theirs. */
  function paintCurve({ canvas, quantity, x, y }, { points, style }, isFocus) {
    const places = points.map((point) => [round(x(point.nodes)), round(y(quantity.value(point)))]);
    add(canvas, "path", {
      class: "curve", d: `M${places.map((place) => place.join(" ")).join("L")}`, fill: "none",
      stroke: style.color, "stroke-width": isFocus ? 3 : 1.6, "stroke-dasharray": style.dash,
      "stroke-linejoin": "round",
    });
    places.forEach(([left, top], index) => {
      if ((index + style.index) % 4 === 0) addMarker(canvas, "marker", style, left, top, 3);
    });
  }

  /** Draw the reader's point, with a ring unless many points crowd there. */
  function paintReader({ canvas, quantity, x, y }, { reader, style }, isRinged) {
    if (!reader || !(quantity.value(reader) > 0)) return;
    const left = x(reader.nodes);
    const top = y(quantity.value(reader));
    addMarker(canvas, "reader", style, left, top, 4);
    if (!isRinged) return;
    add(canvas, "circle", {
      class: "ring", cx: round(left), cy: round(top), r: 7.5, fill: "none", stroke: INK,
      "stroke-width": 1.25,
    });
  }

  /** Write the names beside the ends of the curves, with a line to each. */
  function labelEnds({ canvas, quantity, top, bottom, right, x, y }, curves, focus) {
    const ends = curves.map(({ strategy, points, style }) => {
      const last = points.at(-1);
      return { strategy, style, x: x(last.nodes), y: y(quantity.value(last)) };
    }).sort((end, other) => end.y - other.y);
    const gap = Math.min(16, (bottom - top) / Math.max(1, ends.length - 1));
    const heights = spread(ends.map((end) => end.y), gap, top, bottom);
    ends.forEach((end, index) => {
      const height = round(heights[index]);
      add(canvas, "path", {
        d: `M${round(end.x + 3)} ${round(end.y)}L${round(right + 13)} ${height}h4`,
        fill: "none", stroke: end.style.color, "stroke-width": 0.8,
      });
      addMarker(canvas, "marker", end.style, right + 22, height, 3.5);
      addText(canvas, end.strategy, right + 31, height + 4, {
        class: "end", "font-weight": end.strategy === focus ? "bold" : null,
      });
    });
  }

  function addCurveStops({ canvas, quantity, x, y }, curves, measured) {
    const place = (nodes, value, size) => ({
      x: x(nodes) - size, y: y(value) - size, width: 2 * size, height: 2 * size,
    });
    for (const { strategy, points, reader } of curves) {
      const all = [...points.filter((point) => point.nodes !== reader?.nodes)];
      if (reader) all.push(reader);
      all.sort((point, other) => point.nodes - other.nodes);
      const items = all.map((point) => ({
        ...place(point.nodes, quantity.value(point), point === reader ? 6 : 2),
        lines: () => pointLines(quantity, strategy, point),
      }));
      addStop(canvas, `${strategy}, ${Words.counted(items.length, "point")}`, items,
        Math.max(0, all.indexOf(reader)));
    }
    addStop(canvas, "measured", measured.map((point) => ({
      ...place(point.nodes, quantity.measured(point), 6),
      lines: () => measuredLines(quantity, point),
    })));
  }

  function measuredLines(quantity, point) {
    const heading = `${point.strategy} on ${Words.counted(point.nodes, "node")}, measured`;
    const note = point.note ? [point.note] : [];
    return [heading, quantity.text(quantity.measured(point)), ...note];
  }

  function pointLines(quantity, strategy, point) {
    const lines = [
      `${strategy} on ${Words.counted(point.nodes, "node")}`, quantity.text(quantity.value(point)),
    ];
    const low = quantity.low(point);
    const high = quantity.high(point);
    if (low > 0 && high > low) {
      lines.push(`80 % band: ${quantity.range(low, high)}`);
    }
    return lines;
  }

  /** Draw what signs mean, and the strategies if their names do not stand beside the curves. */
  function paintCurvesKey({ canvas, quantity, isLabelled, bottom, left }, curves, measured, model) {
    const start = isLabelled ? left : 6;
    let y = bottom + 42;
    if (!isLabelled) {
      const names = curves.map(({ strategy, style }) => ({
        text: strategy, width: 30, draw: (x, middle) => {
          add(canvas, "path", {
            d: `M${x} ${middle}h30`, stroke: style.color, "stroke-width": 1.6,
            "stroke-dasharray": style.dash,
          });
          addMarker(canvas, "marker", style, x + 15, middle, 3.5);
        },
      }));
      y += addKey(canvas, names, start, y, { columns: true }) + 4;
    }
    const signs = [];
    if (model.nodes) {
      signs.push({ text: "your number of nodes", width: 16, draw: (x, middle) => {
        add(canvas, "circle", {
          cx: x + 8, cy: middle, r: 7, fill: "none", stroke: INK, "stroke-width": 1.25,
        });
      } });
    }
    const hasBand = curves.some((curve) => curve.points.some((point) => quantity.high(point) > 0));
    if (hasBand) {
      signs.push(boxEntry(canvas, "80 % band", { fill: INK, "fill-opacity": 0.16 }));
    }
    if (measured.length) {
      signs.push({ text: "measured", width: 12, draw: (x, middle) => addMarker(
        canvas, "sign", { color: INK, marker: "o" }, x + 6, middle, 5,
        { fill: PAPER, "stroke-width": 2 }) });
    }
    if (quantity === EFFICIENCY) {
      signs.push({ text: "ideal", width: 24, draw: (x, middle) => add(canvas, "path", {
        d: `M${x} ${middle}h24`, stroke: INK, "stroke-width": 0.8, "stroke-dasharray": "4 3",
      }) });
    }
    return y + addKey(canvas, signs, start, y) + 6;
  }

  /** Return the picture in words: the reader's points. */
  function curvesText({ quantity }, { nodes }, curves, measured) {
    const readers = curves.filter((curve) => curve.reader).map(
      ({ strategy, reader }) => `${strategy} ${quantity.short(quantity.value(reader))}`);
    const own = readers.length ? `On ${Words.counted(nodes, "node")}: ${readers.join(", ")}. ` : "";
    const shown = Words.counted(curves.length, "curve");
    return `${own}${shown}, ${Words.counted(measured.length, "measured point")}.`;
  }

  // -- bytes ------------------------------------------------------------------------------------

  const BAR = 14; // pixels: height of a bar of bytes

  /**
   * Draw what rank 0 and each other rank send in a step.
   *
   * @param {SVGElement} svg
   * @param {{strategies: Strategy[]}} data
   * @param {{rows: Sent[]}} model
   */
  function bytes(svg, data, model) {
    show(svg, paintBytes, data, model);
  }

  function paintBytes(canvas, data, { rows }) {
    const isWide = canvas.width >= WIDE;
    const names = rows.map((row) => textWidth(row.strategy));
    const left = isWide ? Math.max(40, ...names) + 14 : 6;
    const bars = rows.map(bytesBars);
    const texts = bars.flat().map((bar) => textWidth(bar.text, SMALL));
    const right = canvas.width - Math.max(30, ...texts) - 12;
    const most = Math.max(1, ...bars.flat().map((bar) => bar.bytes));
    const x = linear(0, most, left, right);
    const baselines = add(canvas, "path", { stroke: INK, "stroke-width": 0.8 });
    const lines = [];
    const items = [];
    let y = 6;
    rows.forEach((row, index) => {
      const height = bars[index].length * BAR;
      const top = isWide ? y : y + 17;
      const middle = top + height / 2 + 4;
      const { color } = styleOf(data, row.strategy);
      if (isWide) addText(canvas, row.strategy, left - 10, middle, { "text-anchor": "end" });
      else addText(canvas, row.strategy, left, y + 12);
      bars[index].forEach((bar, place) => {
        const box = { x: left, y: top + place * BAR, width: x(bar.bytes) - left, height: BAR };
        paintBytesBar(canvas, bar, box, color);
        items.push({ ...box, lines: () => [row.strategy, bar.about] });
      });
      lines.push(`M${round(left)} ${top - 2}v${height + 4}`);
      y = top + height + 9;
    });
    baselines.setAttribute("d", lines.join(""));
    addStop(canvas, "bytes sent", items);
    if (bars.some((bar) => bar.length === 1)) {
      addText(canvas, "One bar: every rank sends as much.", left, y + 10, {
        "font-size": SMALL, fill: MUTED,
      });
    }
    const description = rows.map((row, index) =>
      `${row.strategy}: ${bars[index].map((bar) => bar.about).join(", ")}`).join("; ");
    return { height: y + 18, title: "Bytes sent in a step", description: `${description}.` };
  }

  /** Return the bars of a strategy: one if every rank sends as much as rank 0. */
  function bytesBars({ bytes_sent_root: root, bytes_sent_others: others }) {
    const isSame = Words.bytes(root) === Words.bytes(others);
    const amount = Words.bytes(root);
    if (isSame) return [{ bytes: root, text: amount, about: `every rank sends ${amount}` }];
    const other = Words.bytes(others);
    const about = `each other rank sends ${other}`;
    return [
      { bytes: root, text: `rank 0: ${amount}`, about: `rank 0 sends ${amount}` },
      { bytes: others, text: `others: ${other}`, about, isPale: true },
    ];
  }

  function paintBytesBar(canvas, bar, box, color) {
    add(canvas, "rect", {
      class: "bytes", x: round(box.x), y: box.y + 1, width: round(box.width), height: BAR - 2,
      fill: color, "fill-opacity": bar.isPale ? 0.45 : 1,
    });
    addText(canvas, bar.text, box.x + box.width + 6, box.y + BAR / 2 + 4, { "font-size": SMALL });
  }

  // -- a picture as a file ----------------------------------------------------------------------

  /** Return a picture as the text of an SVG file, with the colours and the font it has now. */
  function standalone(svg) {
    const { canvas } = drawn.get(svg);
    const copy = svg.cloneNode(true);
    const originals = [...svg.querySelectorAll("*")];
    const copies = [...copy.querySelectorAll("*")];
    originals.forEach((original, index) => {
      for (const { name, value } of original.attributes) {
        if (!value.includes("var(")) continue;
        copies[index].setAttribute(name, getComputedStyle(original)[name]);
      }
    });
    copy.querySelectorAll(".stop, .tip").forEach((part) => part.remove());
    const paper = element("rect", { width: "100%", height: "100%", fill: paperColor(svg) });
    copy.querySelector("defs").after(paper);
    copy.removeAttribute("class");
    copy.setAttribute("role", "img");
    copy.setAttribute("width", canvas.width);
    copy.setAttribute("height", canvas.height);
    copy.setAttribute("font-family", getComputedStyle(svg).fontFamily);
    return new XMLSerializer().serializeToString(copy);
  }

  /** Return the page's paper as a colour without variables. */
  function paperColor(svg) {
    const probe = element("rect", { fill: PAPER });
    svg.append(probe);
    const { fill } = getComputedStyle(probe);
    probe.remove();
    return fill;
  }

  /** Download a picture as `name`.svg, which looks the same outside the page. */
  function save(svg, name) {
    const file = new Blob([standalone(svg)], { type: "image/svg+xml" });
    const link = document.createElement("a");
    link.href = URL.createObjectURL(file);
    link.download = `${name}.svg`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
  }

  return { timeline, steps, efficiency, bytes, mark, save, standalone };
})();

if (typeof module !== "undefined") module.exports = Pictures;
