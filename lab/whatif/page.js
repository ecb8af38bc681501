"use strict";

/**
 * The page itself: reads the controls, computes once a change, and fills sentence, pictures and
 * tables. `Page.show` shows a state, `Page.state` returns the one that is shown.
 *
 * A change that cannot be leaves everything as it was, but for a sentence beside its control.
 */
const Page = (() => {
  const byId = (id) => document.getElementById(id);
  const byValue = (first, second) => first - second;

  const CURVE_NODES = Array.from({ length: 13 }, (_, index) => 2 ** index); // 1, 2, 4, … 4,096
  const MOST_BANDS = 4; // curves with a band each; of more, only that of the focus has one
  const LINK_PAUSE = 300; // ms without a change until the link is written: browsers limit that
  const SPEECH_PAUSE = 700; // ms without a change until a screen reader hears the answer
  const WIDE = "(min-width: 900px)";
  let data = null;
  let state = null;
  let results = null; // what `compute` returned last
  let frame = null; // of the next drawing
  let changedControl = null; // the control of the last entry of the history
  let pendingLink = null; // not in the history yet
  let mine = null; // the reader's settings before a measured set or a question replaced them
  let kept = null; // the state beside the shown one
  const timers = { link: null, speech: null };

  function later(name, pause, run) {
    clearTimeout(timers[name]);
    timers[name] = setTimeout(run, pause);
  }

  // -- computing --------------------------------------------------------------------------------

  /** Return everything that is shown of the state. */
  function compute() {
    const { strategies, focus } = state;
    const isFew = strategies.length <= MOST_BANDS;
    const curves = strategies.map((name) => curveOf(state, name, isFew || name === focus));
    return {
      focus: Engine.row(data, state, focus),
      rows: strategies.map((strategy) => Engine.step(data, state, strategy)),
      curves,
      nodes: nodesOf(state),
      timeline: timelineOf(state),
      terms: Timeline.terms(data, state, focus),
      kept: kept && { ...timelineOf(kept), ...curveOf(kept, kept.focus, false) },
    };
  }

  const timelineOf = (shown) => ({
    strategy: shown.focus, nodes: shown.nodes, timeline: Timeline.timeline(data, shown, shown.focus),
  });

  const curveOf = (shown, strategy, band) => (
    { strategy, points: Engine.curve(data, shown, strategy, nodesOf(shown), { band }) });

  const nodesOf = (shown) => [...new Set([...CURVE_NODES, shown.nodes])].sort(byValue);

  // -- drawing ----------------------------------------------------------------------------------

  /** Compute and draw everything that depends on the state. */
  function draw() {
    cancelAnimationFrame(frame);
    frame = null;
    results = compute();
    drawAnswer();
    drawPictures();
    for (const details of document.querySelectorAll("details[data-table]")) {
      if (details.open) fillTable(details.dataset.table);
    }
    byId("command").replaceChildren(...commandWords());
    document.dispatchEvent(new CustomEvent("drawn"));
  }

  /** Return the command as words that a line does not break, at their hyphens either. */
  function commandWords() {
    const words = State.command(data, state).split(" ");
    return words.flatMap((word, index) => (index ? [" ", cell("span", word)] : [cell("span", word)]));
  }

  function drawSoon() {
    if (frame === null) frame = requestAnimationFrame(draw);
  }

  function drawAnswer() {
    const { focus } = results;
    const { limit, detail } = Words.limits(data, state, focus, results.terms);
    const answer = Words.sentence(data, state, focus);
    const software = answer === "" ? "" : Words.softwareLimit(data, state);
    const nodes = Words.counted(focus.nodes, "node");
    const short = `${state.focus} on ${nodes} takes ${Words.duration(focus.step_seconds)} a step.`;
    const notes = [focus.note, focus.caveat].map(Words.sentenceOf);
    const parts = [answer || short, software, ...notes];
    const sentence = parts.filter((part) => part !== "").join(" ");
    const settings = Words.about(data, state);
    byId("settings").textContent = tidy(settings);
    byId("limit").textContent = tidy(limit);
    byId("sentence").textContent = tidy(sentence);
    byId("help-twice").hidden = !/network twice as fast/i.test(sentence);
    byId("comparison").textContent = kept && tidy(Words.comparison(data, kept, state));
    byId("targets").textContent = tidy(Words.targets(data, state));
    byId("forget").hidden = kept === null;
    byId("detail").textContent = tidy(detail);
    byId("error").textContent = tidy(Words.error(data, state));
    byId("short").textContent = tidy(`${state.focus}: ${stepText(focus)}`);
    later("speech", SPEECH_PAUSE, () => {
      byId("spoken").textContent = `${settings}. ${limit} ${sentence}`;
    });
  }

  /** Keep a number and its unit on one line. */
  const tidy = (text) => text.replace(/(\d) (%|s|ms|µs|[kMG]B|Gbit\/s|nodes?|times)(?!\w)/g, "$1\u00a0$2");

  function drawPictures() {
    const measured = Measured.points(data, state);
    const targets = {
      steps: state.most_step_ms && 1e-3 * state.most_step_ms,
      efficiency: state.least_efficiency && 0.01 * state.least_efficiency,
    };
    const scaling = {
      nodes: state.nodes, focus: state.focus, curves: results.curves, measured, targets,
      kept: results.kept,
    };
    Pictures.timeline(byId("timeline"), data, { ...results.timeline, kept: results.kept });
    Pictures.steps(byId("steps"), data, scaling);
    Pictures.efficiency(byId("efficiency"), data, scaling);
    fillTable("strategies");
  }

  // -- tables -----------------------------------------------------------------------------------

  function cell(tag, text, kind = "") {
    const made = document.createElement(tag);
    made.textContent = text;
    if (kind) made.className = kind;
    return made;
  }

  /**
   * Fill a table.
   *
   * @param {[string, string][]} columns heading and kind: "" for names, "number" or "text"
   * @param {string[][]} rows texts; the first one of a row is its heading
   */
  function fill(table, columns, rows) {
    const head = document.createElement("thead");
    const headings = document.createElement("tr");
    for (const [heading, kind] of columns) {
      const made = cell("th", heading, kind);
      made.scope = "col";
      headings.append(made);
    }
    head.append(headings);
    const body = document.createElement("tbody");
    for (const texts of rows) {
      const row = document.createElement("tr");
      texts.forEach((text, index) => {
        const made = cell(index === 0 ? "th" : "td", text, columns[index][1]);
        if (index === 0) made.scope = "row";
        row.append(made);
      });
      body.append(row);
    }
    table.replaceChildren(head, body);
  }

  /** Return a step of a row or a curve, with its range if it has one: "655 ms (592–832 ms)". */
  function stepText({ step_seconds: seconds, low_seconds: low, high_seconds: high }) {
    const text = Words.duration(seconds);
    return low === high ? text : `${text} (${Words.range(low, high, "–", seconds)})`;
  }

  const TABLES = {
    timeline() {
      const ms = Words.duration;
      const { passes, messages } = results.timeline.timeline;
      const exposed = (message) =>
        message.exposed.reduce((total, [begin, end]) => total + end - begin, 0);
      const rows = [
        ...passes.map(({ name, begin, end }) => [name, "", ms(begin), ms(end), ""]),
        ...messages.map((message) => [
          `${message.count > 1 ? `${Words.grouped(message.count)} × ` : ""}${message.kind}`,
          Words.bytes(message.nbytes), ms(message.begin), ms(message.end), ms(exposed(message)),
        ]),
      ];
      const columns = [
        ["what", ""], ["bytes", "number"], ["begins", "number"], ["ends", "number"],
        ["exposed", "number"],
      ];
      return [columns, rows];
    },
    steps: () => overNodes(stepText),
    efficiency: () => overNodes((point) => Words.efficiency(point.efficiency)),
    strategies() {
      const columns = [
        ["strategy", ""], ["step (80 %)", "number"], ["speed-up", "number"],
        ["rank 0 sends", "number"], ["each other rank", "number"], ["exposed", "number"],
        ["slowed by", "number"], ["note", "text"],
      ];
      const rows = results.rows.map((row) => [
        row.sync, stepText(row), Words.times(row.speedup),
        Words.bytes(row.bytes_sent_root), Words.bytes(row.bytes_sent_others),
        Words.duration(row.sync_seconds), Words.duration(row.slowed_seconds),
        row.note || row.caveat,
      ]);
      return [columns, rows];
    },
    priors() {
      const columns = [
        ["what", "text"], ["low", "number"], ["typical", "number"], ["high", "number"],
        ["source", "text"],
      ];
      const rows = Engine.priorsOf(data, state).map(({ prior }) => [
        prior.meaning, ...[prior.low, prior.typical, prior.high].map(Words.three), prior.source,
      ]);
      byId("about-priors").textContent =
        state.costs === "typical"
          ? "80 % of clusters lie between low and high. The bands are drawn from these."
          : "Not used now: costs are as calibrated.";
      return [columns, rows];
    },
  };

  function overNodes(textOf) {
    const columns = [["nodes", "number"], ...state.strategies.map((name) => [name, "number"])];
    const rows = results.nodes.map((nodes, index) => [
      Words.grouped(nodes), ...results.curves.map((curve) => textOf(curve.points[index])),
    ]);
    return [columns, rows];
  }

  function fillTable(id) {
    fill(byId(`table-${id}`), ...TABLES[id]());
  }

  // -- controls ---------------------------------------------------------------------------------

  const currentPreset = () => data.presets.find((preset) => State.same(data, preset.state, state));

  /** Write the state into all controls but the one that the reader is typing into. */
  function writeControls(typedInto = null) {
    for (const name of Object.keys(data.fields)) {
      const control = byId(`c-${name}`);
      if (control && control !== typedInto) control.value = state[name] ?? "";
      const slider = byId(`slide-${name}`);
      if (!slider) continue;
      if (slider !== typedInto) slider.value = nearest(data.fields[name].slider, state[name]);
      slider.setAttribute("aria-valuetext", `${state[name]}${name === "nodes" ? "" : " Gbit/s"}`);
    }
    for (const strategy of data.strategies) {
      byId(`s-${strategy.name}`).checked = state.strategies.includes(strategy.name);
    }
    const preset = currentPreset();
    for (const button of document.querySelectorAll("[data-preset]")) {
      button.setAttribute("aria-pressed", String(button.dataset.preset === preset?.id));
    }
    byId("about-preset").textContent = preset?.about ?? "";
    byId("help-batch_size").textContent = Words.batch(data, state);
    byId("back").hidden = mine === null || State.same(data, mine, state);
    byId("own-step").hidden = state.step_ms === null;
    byId("calibrated-step").hidden = state.step_ms !== null;
    const isCalibrated = state.costs === "calibrated";
    for (const why of document.querySelectorAll("[data-fixed]")) {
      why.hidden = !isCalibrated;
      byId(`c-${why.dataset.fixed}`).disabled = isCalibrated;
    }
    byId("c-batch").disabled = state.step_ms === null;
    byId("c-inside_gbit").disabled = state.ranks_per_node === 1;
    byId("c-adapters").disabled = !State.usesAdapters(state);
    byId("help-software_gbit").textContent = Words.softwareRange(data, state);
    byId("help-step_ms").textContent = Words.stepSource(data, state);
    byId("field-parameters").hidden = state.model !== "own";
    clearProblems();
  }

  function clearProblems() {
    byId("message").hidden = true;
    for (const problem of document.querySelectorAll(".problem")) problem.hidden = true;
    for (const control of document.querySelectorAll("[aria-invalid]")) {
      control.removeAttribute("aria-invalid");
    }
  }

  /**
   * Show a sentence beside its field, and in the page's message line unless the reader is there.
   *
   * @param {?string} field that the sentence is of
   * @param {boolean} isThere whether the reader is typing into that field
   */
  function say(text, field = null, isThere = false) {
    byId("message").textContent = text;
    byId("message").hidden = isThere;
    const problem = field && byId(`problem-${field}`);
    if (!problem) return;
    problem.textContent = text;
    problem.hidden = false;
    byId(`c-${field}`)?.setAttribute("aria-invalid", "true");
  }

  /** Return what a control says; a text that is no number stays a text, for the message. */
  function valueOf(name, control) {
    if (control.type !== "number") return control.value;
    if (control.validity.badInput) return "no number";
    return control.value === "" ? null : Number(control.value);
  }

  /** Return the place of the entry that is closest to a value. */
  function nearest(values, value) {
    const distances = values.map((entry) => Math.abs(Math.log(entry / value)));
    return distances.indexOf(Math.min(...distances));
  }

  /** Return the wanted state with what must follow from the change of one control. */
  function adapted(wanted, name) {
    const own = data.calibration.model;
    if (name === "costs" && wanted.costs === "calibrated") {
      return { ...wanted, model: own, step_ms: null, adapters: null, software_gbit: null };
    }
    if (name === "model") return withExample(wanted);
    if (name === "backend" && wanted.backend === "gloo") wanted = { ...wanted, transport: "tcp-vm" };
    const isLikelier = state.transport === State.likelierTransport(data, state);
    if (name === "backend" || (name === "rate_gbit" && isLikelier)) {
      wanted = { ...wanted, transport: State.likelierTransport(data, wanted) };
    }
    if (!State.usesAdapters(wanted)) wanted = { ...wanted, adapters: null };
    if (name === "focus" && !wanted.strategies.includes(wanted.focus)) {
      return { ...wanted, strategies: inProjectOrder([...wanted.strategies, wanted.focus]) };
    }
    if (name === "strategies" && !wanted.strategies.includes(wanted.focus)) {
      return { ...wanted, focus: wanted.strategies[0] };
    }
    if (name === "batch" && state.scaling === "weak" && state.batch === state.batch_size) {
      return { ...wanted, batch_size: wanted.batch };
    }
    if (name === "scaling") return { ...wanted, batch_size: sameBatch(wanted) };
    return wanted;
  }

  /** Return the state with the example step of its model; the calibration has the steps of its own. */
  function withExample(wanted) {
    if (wanted.model === data.calibration.model) return { ...wanted, step_ms: null };
    const { step_ms, batch } = Words.exampleOf(data, wanted);
    const size = wanted.scaling === "weak" ? batch : wanted.batch_size;
    return { ...wanted, step_ms, batch, batch_size: size };
  }

  /** Return the batch that keeps the samples of a step where scaling changes. */
  function sameBatch(wanted) {
    const ranks = wanted.nodes * wanted.ranks_per_node;
    const { least, most } = data.fields.batch_size;
    const size = wanted.scaling === "strong" ? state.batch_size * ranks : state.batch_size / ranks;
    const fewest = Math.max(least, Engine.leastSamples(data, wanted));
    return Math.min(most, Math.max(fewest, Math.ceil(size)));
  }

  const inProjectOrder = (names) =>
    data.strategies.map((entry) => entry.name).filter((name) => names.includes(name));

  /** Take over the change of one control, or say why it cannot be. */
  function change(name, value, control) {
    const wanted = adapted({ ...State.copy(state), [name]: value }, name);
    const problem = State.problem(data, wanted);
    if (problem) {
      const shown = state[problem.field];
      const still = typeof shown === "number" ? `; the page still shows ${shown}.` : ".";
      const text = problem.text.replace(/\.$/, still);
      clearProblems();
      say(text, problem.field, control.id === `c-${problem.field}`);
      return;
    }
    state = wanted;
    writeControls(control);
    remember(name);
    drawSoon();
  }

  function onControl(event) {
    const control = event.target;
    const [kind, name] = control.id.split(/-(.*)/);
    if (kind === "c") change(name, valueOf(name, control), control);
    if (kind === "slide") change(name, data.fields[name].slider[control.value], control);
    if (kind !== "s") return;
    const checked = [...document.querySelectorAll(".checks input:checked")];
    change("strategies", checked.map((box) => box.value), control);
    if (state.strategies.includes(name) !== control.checked) control.checked = !control.checked;
  }

  /** Take a comma for a decimal point: browsers drop it, and 1,5 would become 15. */
  function onTyping(event) {
    const { target, data: typed } = event;
    const field = data.fields[target.id.slice(2)];
    if (target.type !== "number" || field.whole || !typed?.includes(",")) return;
    event.preventDefault();
    document.execCommand("insertText", false, typed.replaceAll(",", "."));
  }

  /** After typing: show what holds where the typed value cannot be. */
  function onLeave(event) {
    const control = event.target;
    if (control.getAttribute("aria-invalid") !== "true" && byId("message").hidden) {
      writeControls();
    }
  }

  // -- the link ---------------------------------------------------------------------------------

  /** Write the state into the link: one entry of the history for all changes of one control. */
  function remember(name) {
    const isNew = name === null || name !== changedControl;
    if (isNew) writeLink();
    changedControl = name;
    byId("copied").textContent = ""; // of the state before
    pendingLink = State.encode(data, state, kept);
    if (!isNew) {
      later("link", LINK_PAUSE, writeLink);
    } else if (pendingLink !== location.hash) {
      history.pushState(null, "", pendingLink);
    }
  }

  /** Write the link that waits until the reader pauses. */
  function writeLink() {
    clearTimeout(timers.link);
    if (pendingLink !== null) history.replaceState(null, "", pendingLink);
    pendingLink = null;
  }

  /** Show what the link says; return whether it says something that can be. */
  function readLink() {
    if (byId(location.hash.slice(1))) return false;
    const { state: found, kept: beside = null, problem } = State.decode(data, location.hash);
    if (problem) {
      say(problem);
      return false;
    }
    pendingLink = null;
    changedControl = null;
    mine = null;
    state = found;
    kept = beside;
    writeControls();
    draw();
    return true;
  }

  /** Keep a state beside the shown one, or none. */
  function keep(wanted) {
    kept = wanted;
    remember(null);
    draw();
  }

  function jump(event) {
    const target = byId(event.currentTarget.dataset.jump);
    event.preventDefault();
    target.scrollIntoView();
    target.focus({ preventScroll: true });
  }

  /** Copy a text, and say so in an <output>. */
  async function copy(text, what, output = byId("copied")) {
    try {
      await navigator.clipboard.writeText(text);
      output.textContent = `${what} copied.`;
    } catch {
      output.textContent = `This browser does not permit it: ${text}`;
    }
  }

  function copyLink() {
    const base = location.href.split("#")[0];
    const isFile = location.protocol === "file:";
    copy(base + State.encode(data, state, kept), isFile ? "Link for whoever has this file" : "Link");
  }

  // -- beginning --------------------------------------------------------------------------------

  /**
   * Show a state; a sentence says why if it cannot be, and the state before stays.
   *
   * @param {?Object} own the reader's settings, to which `back` returns; null: the shown state's
   */
  function show(wanted, own = mine ?? state) {
    const problem = State.problem(data, wanted);
    if (problem) {
      say(problem.text, problem.field);
      return false;
    }
    mine = own;
    state = State.copy(wanted);
    writeControls();
    remember(null);
    draw();
    return true;
  }

  /** Return to the reader's own settings, with these changes; false if they are shown. */
  const back = (changes = {}) => mine !== null && show({ ...mine, ...changes }, null);

  function listen() {
    const controls = byId("controls");
    controls.addEventListener("input", onControl);
    controls.addEventListener("focusout", onLeave);
    controls.addEventListener("beforeinput", onTyping);
    controls.addEventListener("submit", (event) => event.preventDefault());
    for (const button of document.querySelectorAll("[data-preset]")) {
      const preset = data.presets.find((entry) => entry.id === button.dataset.preset);
      button.addEventListener("click", () => show(preset.state, null));
    }
    for (const button of document.querySelectorAll("[data-save]")) {
      const id = button.dataset.save;
      button.addEventListener("click", () =>
        Pictures.save(byId(id), `whatif-${id}`, Words.about(data, state)));
    }
    for (const details of document.querySelectorAll("details[data-table]")) {
      details.addEventListener("toggle", () => details.open && fillTable(details.dataset.table));
    }
    for (const link of document.querySelectorAll("[data-jump]")) link.addEventListener("click", jump);
    byId("back").addEventListener("click", () => back());
    byId("keep").addEventListener("click", () => keep(State.copy(state)));
    byId("forget").addEventListener("click", () => keep(null));
    const inSight = ([answer]) => byId("short").classList.toggle("told", answer.isIntersecting);
    new IntersectionObserver(inSight).observe(byId("answer"));
    byId("copy-link").addEventListener("click", copyLink);
    byId("copy-command").addEventListener("click", () => copy(State.command(data, state), "Command"));
    window.addEventListener("popstate", readLink);
    const openIfWide = ({ matches }) => byId("more").toggleAttribute("open", matches);
    const wide = matchMedia(WIDE);
    wide.addEventListener("change", openIfWide);
    openIfWide(wide);
  }

  function start() {
    data = JSON.parse(byId("data").textContent);
    state = State.defaults(data);
    byId("lab").hidden = false;
    for (const mark of document.querySelectorAll(".mark")) {
      Pictures.mark(mark, data, mark.dataset.strategy);
    }
    listen();
    writeControls();
    if (!readLink()) draw();
    Measured.start(data);
    Questions.start(data);
    mine = null; // what the page begins with is nobody's
    byId("back").hidden = true;
  }

  document.addEventListener("DOMContentLoaded", start);

  return { show, back, draw, say, copy, fill, cell, state: () => State.copy(state), data: () => data };
})();
