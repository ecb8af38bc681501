"use strict";

/**
 * The three pictures of the page, drawn as SVG from plain numbers.
 *
 * A picture is drawn anew at every call, and again when its element gets another width. Colours
 * are attributes with the page's variables --ink, --paper, --muted and --faint, so that a saved
 * file can have their values.
 *
 * @typedef {{nodes: number, step_seconds: number, efficiency: number, low_seconds: ?number,
 *     high_seconds: ?number, low_efficiency: ?number, high_efficiency: ?number}} Point
 *     an entry of Engine.curve; without low_… and high_… it has no band
 * @typedef {{strategy: string, nodes: number, seconds: number, efficiency: ?number,
 *     note: string}} Measured
 * @typedef {{nodes: number, focus: string, curves: {strategy: string, points: Point[]}[],
 *     measured: Measured[], targets: {steps: ?number, efficiency: ?number},
 *     kept: ?{strategy: string, nodes: number, points: Point[]}}} Scaling
 *     nodes: the reader's, at which each curve has a point; focus: the strategy whose line is thick
 */
const Pictures = (() => {
  const NAMESPACE = "http://www.w3.org/2000/svg";
  const INK = "var(--ink)";
  const PAPER = "var(--paper)";
  const MUTED = "var(--muted)";
  const FAINT = "var(--faint)";
  // As in lab/plot_style.py.
  const SECTIONS = {
    forward: "#4f97da", backward: "#1b66b3", update: "#27986a", wait: "#cf7f12", wire: "#b83a0b",
  };
  const DASHES = ["none", "6 2.5", "2 2", "8 2.5 2 2.5", "4 1.5", "11 3"];
  // All lengths are pixels.
  const TEXT = 12;
  const LINE = 18; // from one line of text to the next
  const LEFT = 12; // half a tick's text may stand to the left of an axis, or to its right
  const RIGHT = 24;
  const LEAST_WIDTH = 300;
  const LEAST_HEIGHT = 110; // room for what the pointer tells
  const REACH = 26; // how far from a point the pointer still tells its number

  // -- elements and texts -----------------------------------------------------------------------

  function setAttributes(made, attributes) {
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  }

  /** Return a new SVG element. */
  function element(name, attributes = {}, text = "") {
    const made = document.createElementNS(NAMESPACE, name);
    setAttributes(made, attributes);
    made.textContent = text;
    return made;
  }

  function addPath(drawing, kind, path, attributes) {
    drawing.parts.append(element("path", { class: kind, d: path, ...attributes }));
  }

  function addText(drawing, text, x, y, attributes = {}) {
    drawing.parts.append(element("text", { x: round(x), y: round(y), ...attributes }, text));
  }

  /** Draw boxes of {x, y, width, height} as one path, however many they are. */
  function addBoxes(drawing, kind, boxes, attributes) {
    const outlines = boxes.map(({ x, y, width, height }) =>
      `M${round(x)} ${round(y)}h${round(width)}v${round(height)}H${round(x)}Z`);
    addPath(drawing, kind, outlines.join(""), attributes);
  }

  const round = (pixels) => Math.round(pixels * 100) / 100;
  const within = (value, low, high) => Math.max(low, Math.min(value, high));

  let ruler = null;

  /** Return the width of a text without asking the page for its layout, which takes long. */
  function textWidth(text) {
    if (ruler === null) {
      ruler = document.createElement("canvas").getContext("2d");
      ruler.font = `${TEXT}px ${getComputedStyle(document.body).fontFamily}`;
    }
    return ruler.measureText(text).width;
  }

  const widest = (texts) => Math.max(0, ...texts.map(textWidth));
  const percent = (share) => `${Words.three(100 * share)} %`;

  /** Return the text of a tick; hours would make odd numbers of round seconds. */
  const timeTick = (seconds) =>
    (seconds < 3600 ? Words.duration(seconds) : `${Words.three(seconds)} s`);

  // -- scales and ticks -------------------------------------------------------------------------

  /** Return a function from numbers in [low, high] to pixels in [begin, end]. */
  function linear(low, high, begin, end) {
    const factor = (end - begin) / (high - low);
    return (value) => begin + (value - low) * factor;
  }

  /** Return the same on a logarithmic scale; all numbers are positive. */
  function logarithmic(low, high, begin, end) {
    const scale = linear(Math.log(low), Math.log(high), begin, end);
    return (value) => scale(Math.log(value));
  }

  /** Return multiples of 1, 2 or 5 times a power of ten from low to high, at most `most`. */
  function linearTicks(low, high, most) {
    const rough = (high - low) / (most - 1);
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = power * [1, 2, 5, 10].find((digit) => digit * power >= rough * 0.999);
    const ticks = [];
    for (let index = Math.ceil(low / step); index * step <= high * (1 + 1e-9); index += 1) {
      ticks.push(index * step);
    }
    return ticks;
  }

  /** Return every second value, or third…, so that at most `most` are left. */
  function thinned(values, most) {
    const every = Math.ceil(values.length / most);
    return values.filter((_, index) => index % every === 0);
  }

  /** Return round numbers for a logarithmic axis, at most `most`. */
  function logTicks(low, high, most) {
    const first = Math.floor(Math.log10(low));
    const count = Math.ceil(Math.log10(high)) - first;
    const decades = Array.from({ length: count }, (_, index) => 10 ** (first + index));
    const inside = (value) => value >= low && value <= high;
    const fine = decades.flatMap((decade) => [decade, 2 * decade, 5 * decade]).filter(inside);
    if (fine.length < 3) return linearTicks(low, high, 5);
    return fine.length <= most ? fine : thinned(decades.filter(inside), most);
  }

  /** Draw a horizontal axis with ticks of {at, text}; return its height. */
  function addAxis(drawing, left, right, y, ticks) {
    addPath(drawing, "axis", `M${round(left)} ${y}H${round(right)}`, { stroke: INK });
    for (const { at, text } of ticks) {
      addPath(drawing, "tick", `M${round(at)} ${y}v4`, { stroke: INK });
      addText(drawing, text, at, y + 17, { class: "ticks", "text-anchor": "middle" });
    }
    return 24;
  }

  // -- a picture's frame ------------------------------------------------------------------------

  const frames = new WeakMap(); // of each <svg>: how it is drawn, its size, and what it tells

  /**
   * Draw a picture now, and again whenever its element's width changes.
   *
   * paint(drawing) adds to {width, parts, items} and returns the height. items: what tells a number
   * to the pointer, {x, y, width, height, lines}; lines() are a heading and what follows.
   */
  function show(svg, title, paint) {
    if (!frames.has(svg)) {
      frames.set(svg, { outerWidth: svg.getBoundingClientRect().width });
      listen(svg);
      new ResizeObserver(() => onResize(svg)).observe(svg);
    }
    Object.assign(frames.get(svg), { title, paint });
    redraw(svg);
  }

  function onResize(svg) {
    const frame = frames.get(svg);
    const { width } = svg.getBoundingClientRect();
    if (Math.abs(width - frame.outerWidth) < 0.5) return;
    frame.outerWidth = width;
    // Not now: a new height while sizes are observed is an error on the console.
    requestAnimationFrame(() => redraw(svg));
  }

  /** Draw what was shown last. */
  function redraw(svg) {
    const frame = frames.get(svg);
    const width = Math.max(LEAST_WIDTH, Math.round(frame.outerWidth));
    const parts = element("g", {
      "aria-hidden": "true", "font-size": TEXT, fill: INK, "stroke-width": 0.8,
    });
    const drawing = { width, parts, items: [] };
    const height = Math.max(LEAST_HEIGHT, Math.ceil(frame.paint(drawing)));
    Object.assign(frame, { width, height, items: drawing.items, item: null });
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.replaceChildren(parts, element("g", { class: "tip", "aria-hidden": "true" }));
  }

  // -- the pointer: keys and screen readers have the tables ----------------------------------------

  const boxAround = ({ x, y, width, height }, margin) => ({
    x: round(x - margin), y: round(y - margin), width: round(width + 2 * margin),
    height: round(height + 2 * margin),
  });

  function listen(svg) {
    svg.addEventListener("pointermove", (event) => tell(svg, itemAt(svg, event)));
    svg.addEventListener("pointerdown", (event) => tell(svg, itemAt(svg, event)));
    svg.addEventListener("pointerleave", () => tell(svg, null));
  }

  /** Return the item under the pointer, or the nearest one within reach, or null. */
  function itemAt(svg, event) {
    const { items, width } = frames.get(svg);
    const box = svg.getBoundingClientRect();
    const factor = width / box.width;
    const x = (event.clientX - box.left) * factor;
    const y = (event.clientY - box.top) * factor;
    let nearest = null;
    let least = REACH;
    for (const item of items) {
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
    const frame = frames.get(svg);
    if (frame.item === item) return;
    frame.item = item;
    const tip = svg.querySelector(".tip");
    tip.replaceChildren();
    if (item === null) return;
    const text = document.createElement("div"); // since SVG cannot break lines
    text.textContent = item.lines().join("\n");
    const holder = element("foreignObject", { width: frame.width, height: frame.height });
    holder.append(text);
    tip.append(element("rect", { ...boxAround(item, 3), rx: 3 }), holder);
    const width = text.offsetWidth + 1; // since that is rounded
    const height = text.offsetHeight + 1;
    const x = item.x + item.width / 2 - width / 2;
    const above = item.y - height - 9;
    const y = above >= 2 ? above : item.y + item.height + 9;
    setAttributes(holder, {
      x: within(x, 2, frame.width - width - 2), y: within(y, 2, frame.height - height - 2),
      width, height,
    });
  }

  // -- legends ----------------------------------------------------------------------------------

  const SIGN = 28; // pixels: width of a sign

  /**
   * Add signs and their texts in as many columns as there is room for; return the height.
   *
   * entries: {text, draw}; draw(x, y) puts a sign from x on around the middle y.
   */
  function addLegend(drawing, top, entries) {
    const width = SIGN + 6 + widest(entries.map((entry) => entry.text)) + 18;
    const columns = Math.max(1, Math.floor((drawing.width - LEFT) / width));
    entries.forEach((entry, index) => {
      const x = LEFT + (index % columns) * width;
      const y = top + LINE * (Math.floor(index / columns) + 0.5);
      entry.draw(x, y);
      addText(drawing, entry.text, x + SIGN + 6, y + 4);
    });
    return LINE * Math.ceil(entries.length / columns) + 4;
  }

  /** Return a legend's entry of a filled box. */
  function boxEntry(drawing, text, attributes) {
    const draw = (x, y) =>
      addBoxes(drawing, "sign", [{ x, y: y - 5, width: SIGN, height: 10 }], attributes);
    return { text, draw };
  }

  // -- one step as a timeline -------------------------------------------------------------------

  const ROW = 28; // pixels: height of a row's bars
  const READY = 9; // of the marks above the messages' bars
  const WAIT = "url(#stripes-wait)";
  const EXPOSED = "url(#stripes-wire)";
  const HIDDEN = { fill: SECTIONS.wire, "fill-opacity": 0.6 };

  /**
   * Draw one step: what computes, and each message.
   *
   * @param {SVGElement} svg
   * @param {object} data of the page; not used
   * @param {{strategy: string, nodes: number, timeline: Object, kept: ?Object}} model of
   *     Timeline.timeline; kept: another one, drawn above it
   */
  function timeline(svg, data, model) {
    show(svg, `One step of ${model.strategy}`, (drawing) => paintTimeline(drawing, model));
  }

  function paintTimeline(drawing, { kept = null, ...shown }) {
    addStripes(drawing, "stripes-wait", SECTIONS.wait);
    addStripes(drawing, "stripes-wire", SECTIONS.wire);
    const right = drawing.width - RIGHT;
    const longest = Math.max(shown.timeline.total_seconds, kept?.timeline.total_seconds ?? 0);
    const x = linear(0, longest, LEFT, right);
    let y = 0;
    if (kept !== null) y = LINE + addStep(drawing, x, { ...kept, prefix: "kept: " }, y);
    y = addStep(drawing, x, shown, y);
    const moments = linearTicks(0, longest, Math.floor((right - LEFT) / 64) + 1);
    const ticks = moments.map((value) => ({ at: x(value), text: timeTick(value) }));
    y += addAxis(drawing, LEFT, right, y, ticks);
    return y + 4 + addLegend(drawing, y + 4, timelineSigns(drawing, shown.timeline));
  }

  /** Draw a step below its heading; return where it ends. */
  function addStep(drawing, x, { strategy, nodes, timeline: step, prefix = "" }, above) {
    addText(drawing, `${prefix}${strategy} on ${Words.counted(nodes, "node")}`, LEFT, above + 14, {
      "font-weight": "bold",
    });
    const total = Words.duration(step.total_seconds);
    addText(drawing, `${total} ${step.about || "a step"}`, LEFT, above + 14 + LINE);
    if (step.about) {
      const mean = `the mean step takes ${Words.duration(step.mean_seconds)}`;
      addText(drawing, mean, LEFT, above + 14 + 2 * LINE);
    }
    const top = above + 14 + (step.about ? 2.5 : 1.5) * LINE;
    let y = addPasses(drawing, x, step, top);
    if (step.messages.length) y = addMessages(drawing, x, step.messages, y);
    const ends = step.passes.map((pass) => `M${round(x(pass.end))} ${top + LINE}V${y}`);
    addPath(drawing, "ends", ends.join(""), { stroke: FAINT });
    return y;
  }

  /** Return the length of intervals together. */
  function summed(intervals) {
    return intervals.reduce((sum, [begin, end]) => sum + end - begin, 0);
  }

  /** Add a pattern of diagonal stripes, which `fill` names by its id. */
  function addStripes(drawing, id, color) {
    const pattern = element("pattern", {
      id, width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)",
    });
    pattern.append(
      element("rect", { width: 6, height: 6, fill: color }),
      element("rect", { width: 2, height: 6, fill: PAPER }),
    );
    drawing.parts.append(pattern);
  }

  /** Draw the passes and where they wait; return where the next row begins. */
  function addPasses(drawing, x, { passes, exposed, total_seconds: total }, top) {
    const y = top + LINE;
    const bar = (name, begin, end) => ({
      x: x(begin), y, width: x(end) - x(begin), height: ROW,
      lines: () => {
        const share = percent((end - begin) / total);
        return [name, `${Words.duration(end - begin)}, ${share} of the step`];
      },
    });
    const computing = passes.map(({ name, begin, end }) => bar(name, begin, end));
    const waits = exposed.map(([begin, end]) => bar("computing waits for messages", begin, end));
    addText(drawing, "computing", LEFT, y - 5);
    passes.forEach(({ name }, index) =>
      addBoxes(drawing, `pass ${name}`, [computing[index]], { fill: SECTIONS[name] }));
    addBoxes(drawing, "waits", waits, { fill: WAIT });
    drawing.items.push(...computing, ...waits);
    return y + ROW;
  }

  /** Draw the messages and when each became ready; return where the next row begins. */
  function addMessages(drawing, x, messages, top) {
    const y = top + LINE + READY;
    const item = ([begin, end]) => ({ x: x(begin), y, width: x(end) - x(begin), height: ROW });
    const items = messages.map((message, index) => ({
      ...item([message.begin, message.end]), text: messageBytes(message),
      lines: () => messageLines(message, index, messages.length),
    }));
    const exposed = messages.flatMap((message) => message.exposed).map(item);
    const lane = { x: LEFT, y, width: drawing.width - RIGHT - LEFT, height: ROW };
    // Lines between thinner messages would hide them.
    const wide = items.filter(({ width }) => width >= 4);
    const lines = wide.map((bar) => `M${round(bar.x)} ${y}v${ROW}`);
    const ready = messages.map((message) => `M${round(x(message.ready))} ${y - READY + 2}v6`);
    addText(drawing, "messages", LEFT, top + LINE - 5);
    addBoxes(drawing, "lane", [lane], { fill: INK, "fill-opacity": 0.05 });
    addBoxes(drawing, "message", items, HIDDEN);
    addBoxes(drawing, "exposed", exposed, { fill: EXPOSED });
    addPath(drawing, "lines", lines.join(""), { stroke: PAPER });
    addPath(drawing, "ready", ready.join(""), { stroke: INK });
    addMessageTexts(drawing, items);
    drawing.items.push(...items);
    return y + ROW + LINE;
  }

  /** Return what a message's bar says: "25 MB", or "12 × 25 MB". */
  function messageBytes({ count, nbytes }) {
    const bytes = Words.bytes(nbytes);
    return count > 1 ? `${Words.grouped(count)} × ${bytes}` : bytes;
  }

  /** Write the bytes of messages below their bars, where there is room up to the next one. */
  function addMessageTexts(drawing, items) {
    items.forEach(({ x, y, text }, index) => {
      const end = items[index + 1]?.x ?? drawing.width;
      if (textWidth(text) + 4 <= end - x) addText(drawing, text, x, y + ROW + 13);
    });
  }

  function messageLines(message, index, count) {
    const { kind, begin, end, ready, exposed } = message;
    return [
      `message ${index + 1} of ${count}: ${kind}`,
      messageBytes(message),
      `takes ${Words.duration(end - begin)}, ${Words.duration(summed(exposed))} of it exposed`,
      `from ${Words.duration(begin)} to ${Words.duration(end)}, ready at ${Words.duration(ready)}`,
    ];
  }

  function timelineSigns(drawing, { passes, exposed }) {
    const computing = passes.map(({ name, begin, end }) =>
      boxEntry(drawing, `${name} ${Words.duration(end - begin)}`, { fill: SECTIONS[name] }));
    const waits = `waiting ${Words.duration(summed(exposed))}`;
    const ready = (x, y) =>
      addPath(drawing, "sign", `M${x + SIGN / 2} ${y - 3}v6`, { stroke: INK });
    return [
      ...computing, boxEntry(drawing, waits, { fill: WAIT }),
      boxEntry(drawing, "message, hidden", HIDDEN),
      boxEntry(drawing, "message, exposed", { fill: EXPOSED }),
      { text: "message is ready", draw: ready },
    ];
  }

  // -- strategies: colours, markers, dashes -----------------------------------------------------

  const CIRCLE = "M.5 0A.5 .5 0 1 1 -.5 0A.5 .5 0 1 1 .5 0Z"; // an outline as of data.strategies
  const OUTLINE = 2.3; // of a size of 1: how much larger an outline is drawn

  /** Return how a strategy is drawn; its dash goes with its place among all of the page's. */
  function styleOf(data, name) {
    const index = data.strategies.findIndex((strategy) => strategy.name === name);
    const { color, marker, per_tensor } = data.strategies[index];
    const detail = per_tensor ? " (per tensor)" : "";
    return { index, color, marker, detail, dash: DASHES[index % DASHES.length] };
  }

  function addMarker(drawing, kind, { marker, color }, x, y, size, attributes = {}) {
    const scale = OUTLINE * size;
    const drawn = { fill: color, stroke: color, "stroke-width": 1.2, ...attributes };
    const transform = `translate(${round(x)} ${round(y)}) scale(${round(scale)})`;
    const width = round(drawn["stroke-width"] / scale);
    addPath(drawing, kind, marker, { ...drawn, transform, "stroke-width": width });
  }

  /** Fill a small <svg> of 16 x 16 with a strategy's marker, for a list of strategies. */
  function mark(svg, data, name) {
    addMarker({ parts: svg }, "marker", styleOf(data, name), 8, 8, 4.5);
  }

  // -- curves against the number of nodes -------------------------------------------------------

  const STEPS = {
    name: "steps",
    title: "Time of a step against nodes",
    axis: "time of a step",
    keys: { value: "step_seconds", low: "low_seconds", high: "high_seconds", measured: "seconds" },
    scale: timeScale,
    tick: timeTick,
    text: Words.duration,
    about: "a step",
  };
  const EFFICIENCY = {
    name: "efficiency",
    title: "Efficiency against nodes",
    axis: "samples a second of a node, relative to one alone",
    keys: {
      value: "efficiency", low: "low_efficiency", high: "high_efficiency", measured: "efficiency",
    },
    scale: shareScale,
    tick: percent,
    text: percent,
    about: "of one node's speed",
  };
  const HOLLOW = { fill: PAPER, "stroke-width": 2 };
  const KEPT = { index: 0, color: INK, marker: CIRCLE, dash: "1 2.5", detail: "" };
  const AIM = { stroke: INK, "stroke-width": 1.5, "stroke-dasharray": "7 4" };
  const SAME = 1.5; // pixels between two curves that look as one
  const TOP = 38; // pixels: of the plot
  const BOTTOM = 290;

  /**
   * Draw the time of a step against the number of nodes; both axes are logarithmic.
   *
   * @param {SVGElement} svg
   * @param {object} data of the page
   * @param {Scaling} model
   */
  function steps(svg, data, model) {
    show(svg, STEPS.title, (drawing) => paintCurves(drawing, STEPS, data, model));
  }

  /** Draw samples a second of each node, relative to one node; parameters as of `steps`. */
  function efficiency(svg, data, model) {
    show(svg, EFFICIENCY.title, (drawing) => paintCurves(drawing, EFFICIENCY, data, model));
  }

  function paintCurves(drawing, quantity, data, model) {
    const { kept = null, targets = {} } = model;
    const curves = model.curves.map((curve) => (
      curveOf(quantity, styleOf(data, curve.strategy), { ...curve, nodes: model.nodes })));
    if (kept !== null) curves.push(curveOf(quantity, KEPT, { ...kept, strategy: `kept: ${kept.strategy}` }));
    const measured = measuredOf(quantity, data, model.measured);
    const target = targets[quantity.name] ?? null;
    const aims = target === null ? [] : [{ nodes: 1, value: target, low: target, high: target }];
    const everything = [...curves.flatMap((curve) => curve.points), ...measured, ...aims];
    const plot = plotOf(drawing, quantity, everything);
    addScales(drawing, quantity, plot);
    addReaderLine(drawing, plot, model.nodes);
    for (const { value } of aims) {
      addPath(drawing, "target", `M${round(plot.left)} ${round(plot.y(value))}H${round(plot.right)}`, AIM);
    }
    for (const curve of curves) addBand(drawing, plot, curve);
    for (const curve of curves) addCurve(drawing, plot, curve, curve.strategy === model.focus);
    for (const { nodes, value, style } of measured) {
      addMarker(drawing, "measured", style, plot.x(nodes), plot.y(value), 4.4, HOLLOW);
    }
    for (const { style, points, nodes: own } of curves) {
      const { nodes, value } = points.find((point) => point.nodes === own);
      const ring = { marker: CIRCLE, color: style.color };
      const ink = { stroke: INK, "stroke-width": 1.5 };
      addMarker(drawing, "reader", ring, plot.x(nodes), plot.y(value), 4.4, ink);
      drawing.items.push(...points.map((point) => itemOf(plot, point)));
    }
    drawing.items.push(...measured.map((point) => itemOf(plot, point)));
    const top = BOTTOM + 42;
    const signs = curveSigns(drawing, plot, curves, measured);
    for (const { value } of aims) {
      const draw = (x, y) => addPath(drawing, "sign", `M${x} ${y}h${SIGN}`, AIM);
      signs.push({ text: `target: ${quantity.text(value)}`, draw });
    }
    return top + addLegend(drawing, top, signs);
  }

  /** Return what is drawn of a curve; a point without a band has low and high of its value. */
  function curveOf({ keys, text, about }, style, { strategy, nodes: own, points }) {
    const drawn = points.map((point) => {
      const { nodes, [keys.value]: value } = point;
      const { [keys.low]: low = value, [keys.high]: high = value } = point;
      const lines = () => {
        const heading = `${strategy} on ${Words.counted(nodes, "node")}`;
        const band = low < high ? [`80 % band: ${text(low)} to ${text(high)}`] : [];
        return [heading, `${text(value)} ${about}`, ...band];
      };
      return { nodes, value, low, high, lines };
    });
    return { strategy, style, nodes: own, points: drawn };
  }

  function measuredOf({ keys, text, about }, data, measured) {
    const known = measured.filter((point) => point[keys.measured] !== null);
    return known.map(({ strategy, nodes, note, [keys.measured]: value }) => {
      const heading = `${strategy} on ${Words.counted(nodes, "node")}, measured`;
      const lines = () => [heading, `${text(value)} ${about}`, note].filter((line) => line);
      return { nodes, value, low: value, high: value, lines, style: styleOf(data, strategy) };
    });
  }

  function itemOf({ x, y }, { nodes, value, lines }) {
    return { x: x(nodes) - 3, y: y(value) - 3, width: 6, height: 6, lines };
  }

  /** Return the scales of a plot that holds these points, its left and right edge, its ticks. */
  function plotOf(drawing, quantity, points) {
    const { y, ticks } = quantity.scale(points);
    const texts = ticks.map(quantity.tick);
    const left = LEFT + widest(texts);
    const right = drawing.width - RIGHT;
    const most = Math.max(...points.map((point) => point.nodes));
    const x = logarithmic(1, most, left + 8, right);
    const powers = Array.from({ length: Math.log2(most) + 1 }, (_, index) => 2 ** index);
    const nodeCounts = thinned(powers, Math.floor((right - left) / 48));
    return { x, y, left, right, ticks, texts, nodeCounts };
  }

  /** Return a logarithmic scale of seconds and its ticks. */
  function timeScale(points) {
    const low = Math.min(...points.map((point) => point.low));
    const high = Math.max(...points.map((point) => point.high));
    const margin = Math.max(1.08, Math.sqrt(1.5 / (high / low))); // room for ticks in any case
    const y = logarithmic(low / margin, high * margin, BOTTOM, TOP);
    return { y, ticks: logTicks(low / margin, high * margin, 8) };
  }

  /** Return a linear scale of shares from 0 to at least 1, and its ticks. */
  function shareScale(points) {
    const high = Math.max(1, ...points.map((point) => point.high));
    return { y: linear(0, high, BOTTOM, TOP), ticks: linearTicks(0, high, 8) };
  }

  function addScales(drawing, quantity, { x, y, left, right, ticks, texts, nodeCounts }) {
    addText(drawing, quantity.axis, LEFT, 13, { fill: MUTED });
    ticks.forEach((value, index) => {
      const at = round(y(value));
      addPath(drawing, "gridline", `M${round(left)} ${at}H${round(right)}`, { stroke: FAINT });
      addText(drawing, texts[index], left - 6, at + 4, { class: "heights", "text-anchor": "end" });
    });
    const nodes = nodeCounts.map((count) => ({ at: x(count), text: Words.grouped(count) }));
    addAxis(drawing, left, right, BOTTOM, nodes);
    addText(drawing, "nodes", (left + right) / 2, BOTTOM + 34, { "text-anchor": "middle" });
  }

  /** Mark the reader's number of nodes across the plot. */
  function addReaderLine(drawing, { x, left, right }, nodes) {
    const at = round(x(nodes));
    addPath(drawing, "own", `M${at} ${TOP}V${BOTTOM}`, { stroke: INK, "stroke-dasharray": "1 3" });
    addText(drawing, Words.counted(nodes, "node"), at, TOP - 8, {
      "text-anchor": at < (left + right) / 2 ? "start" : "end", "font-weight": "bold",
    });
  }

  const corners = ({ x, y }, points, key) =>
    points.map((point) => `${round(x(point.nodes))} ${round(y(point[key]))}`);

  function addBand(drawing, plot, { points, style }) {
    if (!points.some((point) => point.low < point.high)) return;
    const outline = [...corners(plot, points, "high"), ...corners(plot, points, "low").reverse()];
    const color = { fill: style.color, "fill-opacity": 0.16 };
    addPath(drawing, "band", `M${outline.join("L")}Z`, color);
  }

  /** Draw a line, with a marker at every fourth point, not where other lines have theirs. */
  function addCurve(drawing, plot, { points, style }, isFocus) {
    addPath(drawing, "curve", `M${corners(plot, points, "value").join("L")}`, {
      fill: "none", stroke: style.color, "stroke-width": isFocus ? 3 : 1.6,
      "stroke-dasharray": style.dash, "stroke-linejoin": "round",
    });
    const marked = points.filter((_, index) => (index + style.index) % 4 === 0);
    for (const { nodes, value } of marked) {
      addMarker(drawing, "marker", style, plot.x(nodes), plot.y(value), 3);
    }
  }

  /** Return what a curve is called: curves that cannot be told apart are named together. */
  function curveName({ y }, curves, curve) {
    const isSame = (other) => other.points.every(({ nodes, value }) => {
      const own = curve.points.find((point) => point.nodes === nodes);
      return own === undefined || Math.abs(y(own.value) - y(value)) < SAME;
    });
    const name = `${curve.strategy}${curve.style.detail}`;
    const first = curves.find(isSame);
    return first === curve ? name : `${name} = ${first.strategy}`;
  }

  function curveSigns(drawing, plot, curves, measured) {
    const entries = curves.map((curve) => ({
      text: curveName(plot, curves, curve), draw: (x, y) => {
        const { style } = curve;
        addPath(drawing, "sign", `M${x} ${y}h${SIGN}`, {
          stroke: style.color, "stroke-width": 1.6, "stroke-dasharray": style.dash,
        });
        addMarker(drawing, "sign", style, x + SIGN / 2, y, 3.5);
      },
    }));
    entries.push(boxEntry(drawing, "80 % band", { fill: INK, "fill-opacity": 0.16 }));
    if (!measured.length) return entries;
    const circle = { marker: CIRCLE, color: INK };
    const draw = (x, y) => addMarker(drawing, "sign", circle, x + SIGN / 2, y, 4.4, HOLLOW);
    return [...entries, { text: "measured", draw }];
  }

  // -- a picture as a file ----------------------------------------------------------------------

  /** Return a picture above a line of text as an SVG file, with the colours and font it has now. */
  function standalone(svg, about) {
    const { title, ...drawn } = frames.get(svg);
    const width = Math.max(drawn.width, about ? 2 * LEFT + textWidth(about) : 0);
    const height = drawn.height + (about ? LINE : 0);
    const line = element("text", { x: LEFT, y: height - 6, fill: INK, "font-size": TEXT }, about);
    const style = getComputedStyle(svg);
    const copy = element("svg", {
      viewBox: `0 0 ${width} ${height}`, width, height, role: "img",
      "font-family": style.fontFamily,
    });
    const paper = element("rect", { width, height, fill: PAPER });
    copy.append(element("title", {}, title), paper, svg.firstChild.cloneNode(true));
    if (about) copy.append(line);
    const text = new XMLSerializer().serializeToString(copy);
    return text.replace(/var\((--\w+)\)/g, (_, name) => style.getPropertyValue(name));
  }

  /** Download a picture as `name`.svg, which looks the same outside the page; `about`: a line. */
  function save(svg, name, about = "") {
    const link = document.createElement("a");
    link.href = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(standalone(svg, about))}`;
    link.download = `${name}.svg`;
    link.click();
  }

  return { timeline, steps, efficiency, mark, save };
})();
