"use strict";

/**
 * Measured steps beside the predicted ones: published sets, the reader's, and this project's.
 *
 * Read downward: what a set shows in a state, and the section of the page. All but the section
 * touches no DOM. data.py describes a MeasuredSet.
 */
const Measured = (() => {
  const MOST_ROWS = 100; // of the table: each takes milliseconds
  const CLOSE = 0.01; // two values of a setting that are the same but for rounding
  const DRAWN = ["nodes", "focus"]; // not a setting of a set, whose points differ in them

  // -- what a set shows in a state --------------------------------------------------------------

  const setCalled = (data, id) => data.measured.find((set) => set.id === id) ?? null;

  function isClose(first, second) {
    if (typeof first !== "number" || typeof second !== "number") return first === second;
    return Math.abs(first - second) <= CLOSE * Math.max(first, second);
  }

  /** Return the settings of a state that are not those of a set, by name. */
  function differences(data, set, state) {
    const settings = State.settingsOf(data, state).filter((name) => !DRAWN.includes(name));
    return settings.filter((name) => name in set.state && !isClose(set.state[name], state[name]));
  }

  /** Return the measured efficiency where the step of one node was measured too, else null. */
  function efficiency(state, point) {
    const isAlone = state.ranks_per_node === 1 && state.batch === state.batch_size;
    if (!isAlone || state.step_ms === null) return null;
    const shared = state.scaling === "strong" ? point.nodes : 1;
    return (1e-3 * state.step_ms) / (shared * point.seconds);
  }

  /** Return the points of the chosen set for the pictures; none if the state is another one. */
  function points(data, state) {
    const set = setCalled(data, state.measured);
    if (set === null || differences(data, set, state).length > 0) return [];
    return set.points
      .filter((point) => state.strategies.includes(point.strategy))
      .map((point) => ({ ...point, note: "", efficiency: efficiency(state, point) }));
  }

  /**
   * Return measured and predicted step of the first points, in seconds, the error as a fraction,
   * and on which side of the band a point lies, with the digits that are shown.
   */
  function compared(data, set, state) {
    const shown = (seconds) => Number(seconds.toPrecision(3));
    return set.points.slice(0, MOST_ROWS).map((point) => {
      const [step] = Engine.curve(data, state, point.strategy, [point.nodes], { band: true });
      const error = step.step_seconds / point.seconds - 1;
      let side = "inside";
      if (shown(point.seconds) < shown(step.low_seconds)) side = "below";
      if (shown(point.seconds) > shown(step.high_seconds)) side = "above";
      return { ...point, ...step, error, side };
    });
  }

  /** Return what follows where most points lie on one side of the band; "" if they do not. */
  function sidesText(rows) {
    const most = ["below", "above"].find(
      (side) => rows.filter((row) => row.side === side).length > rows.length / 2);
    if (most === undefined) return "";
    const count = rows.filter((row) => row.side === most).length;
    const all = rows.length === 1 ? "This step was" : `All ${count} steps were`;
    const which = count === rows.length ? all : `${count} of these ${rows.length} steps were`;
    const [shorter, faster] = most === "below" ? ["shorter", "faster"] : ["longer", "slower"];
    return `${which} ${shorter} than the band: something here is ${faster} than on typical clusters. lab predict --fit takes what was measured.`;
  }

  // -- the section of the page ------------------------------------------------------------------

  const byId = (id) => document.getElementById(id);

  /** Show a set: the state becomes the set's, as far as it says one. */
  function choose(data, id) {
    if (id === "" && Page.back({ measured: null })) return true;
    const set = setCalled(data, id);
    const before = Page.state();
    const state = { ...before, ...(set?.state ?? {}), measured: set?.id ?? null };
    const isOtherModel = state.model !== before.model;
    if (isOtherModel && set?.state.step_ms === undefined) state.step_ms = null;
    return Page.show(state);
  }

  function fillTable(data, set, state) {
    const columns = [
      ["strategy", ""], ["nodes", "number"], ["measured", "number"], ["predicted (80 %)", "number"],
      ["error", "number"],
    ];
    const compares = compared(data, set, state);
    const rows = compares.map((point) => {
      const range = Words.range(point.low_seconds, point.high_seconds, "–");
      const sign = point.error < 0 ? "−" : "+";
      const side = point.side === "inside" ? "" : `, ${point.side} the band`;
      return [
        point.strategy, Words.grouped(point.nodes), Words.duration(point.seconds),
        `${Words.duration(point.step_seconds)} (${range})`,
        `${sign}${Words.percent(Math.abs(point.error), 0)}${side}`,
      ];
    });
    Page.fill(byId("table-measured"), columns, rows);
    const { length } = set.points;
    const cut = length > MOST_ROWS ? `The first ${MOST_ROWS} of ${Words.grouped(length)} steps. ` : "";
    byId("measured-sides").textContent = cut + sidesText(compares);
  }

  /** List what was published about each step. */
  function fillNotes(set) {
    const notes = (set?.points ?? []).filter((point) => point.note !== "");
    const items = notes.map(({ strategy, nodes, note }) => (
      Page.cell("li", `${strategy} on ${Words.counted(nodes, "node")}: ${note}`)));
    byId("measured-notes").hidden = items.length === 0;
    byId("measured-notes").querySelector("ul").replaceChildren(...items);
  }

  const shown = { key: null, id: null };

  /** Follow the page's state: the table of the chosen set, or why its points are not drawn. */
  function follow(data) {
    const state = Page.state();
    const set = setCalled(data, state.measured);
    byId("measured-set").value = set?.id ?? "";
    const differing = set === null ? [] : differences(data, set, state);
    const hasTable = set !== null && differing.length === 0;
    byId("measured-about").textContent = set?.about ?? "";
    byId("measured-off").hidden = differing.length === 0;
    for (const id of ["measured-scroll", "measured-sides"]) byId(id).hidden = !hasTable;
    byId("measured-error").hidden = !set?.is_published;
    if (differing.length) {
      const names = differing.map((name) => data.fields[name].label.toLowerCase()).join(", ");
      byId("measured-off").firstChild.textContent =
        `These steps were measured with other settings (${names}), so they are not drawn.`;
    }
    if (shown.id !== state.measured) fillNotes(set);
    shown.id = state.measured;
    const key = hasTable ? JSON.stringify([set.id, { ...state, nodes: 0, strategies: [], focus: "" }]) : null;
    if (key !== null && key !== shown.key) fillTable(data, set, state);
    shown.key = key;
  }

  function listen(data) {
    byId("measured-set").addEventListener("change", (event) => choose(data, event.target.value));
    byId("measured-off").querySelector("button")
      .addEventListener("click", () => choose(data, Page.state().measured));
    document.addEventListener("drawn", () => follow(data));
  }

  /** Begin to follow the page; the first of the reader's own sets that came with the page is shown. */
  function start(data) {
    listen(data);
    byId("measured-problem").textContent = data.problem;
    byId("measured-problem").hidden = data.problem === null;
    const isAsked = location.hash.length > 1;
    if (data.begin !== null && !isAsked) choose(data, data.begin);
    else follow(data);
  }

  return { start, setCalled, points, compared, sidesText, differences, choose };
})();
