"use strict";

/**
 * Measured steps beside the predicted ones: sets that come with the page, and files that the reader
 * drops onto it. Nothing is uploaded.
 *
 * Read downward: files to measurements (results.json, tables, runs), measurements to sets, what a
 * set shows in a state, and the section of the page. All but the section touches no DOM.
 *
 * @typedef {{path: string, text: string}} TextFile path: from the folder that was dropped
 * @typedef {{strategy: string, nodes: number, ranks_per_node: number, batch: number,
 *     seconds: number, sync_seconds: ?number, rate_gbit: ?number, model: ?string}} Step
 *     batch: samples of all ranks; sync_seconds: exposed; null: the file does not say
 * @typedef {{name: string, about: string, backend: ?string, own: ?{ranks: number,
 *     seconds: number, samples: number}, steps: Step[]}} Measurement
 *     own: the step of one rank alone, as measured on so many ranks
 * @typedef {{id: string, title: string, about: string, family: string, state: Object,
 *     points: {strategy: string, nodes: number, seconds: number, note: string}[]}} MeasuredSet
 *     state: what the measurement says of it; the reader's own state has the rest
 */
const Measured = (() => {
  const FORMAT = 1; // of results.json
  const MOST_BYTES = 50e6;
  const MOST_FILES = 5000;
  const MOST_PROBLEMS = 3; // that are said at once
  const MOST_STEPS = 2000; // of a file
  const MOST_ROWS = 100; // of the table: each takes milliseconds
  const SECONDS = { least: 1e-5, most: 1000 }; // of a step, as in the page's field
  const GBIT = { least: 1e-6, most: 1e6 };
  const SAMPLES = { least: 1, most: 1e9, whole: true };
  const CLOSE = 0.01; // two values of a setting that are the same but for rounding
  const OF_A_RUN = ["summary.json", "ranks.json", "config.json"];
  const COLUMNS = ["nodes", "strategy", "global_batch", "step_seconds"];
  const RATES = { kbit: 1e-6, mbit: 1e-3, gbit: 1, tbit: 1e3 };
  const WANTED = "results.json, a table (.csv), or summary.json and ranks.json of a run";
  const DRAWN = ["nodes", "strategies", "focus", "measured"]; // what is shown; all else is a setting

  /** What is wrong with a file, in one sentence for the reader. */
  class Refused extends Error {}

  const refuseIf = (isWrong, sentence) => {
    if (isWrong) throw new Refused(sentence);
  };

  const ranksOf = (step) => step.nodes * step.ranks_per_node;

  // -- values -----------------------------------------------------------------------------------

  const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);

  /** Return a value for a sentence: a long one is cut. */
  const shortly = (value) => (JSON.stringify(value) ?? "nothing").slice(0, 40);

  /** Return a number that is within the limits of a field, as State.FIELDS has them. */
  function number(value, where, { least, most, whole = false }) {
    const fits = Number.isFinite(value) && value >= least && value <= most;
    const kind = whole ? "a whole number" : "a number";
    refuseIf(
      !fits || (whole && !Number.isInteger(value)),
      `${where}: got ${shortly(value)}, expected ${kind} from ${least} to ${Words.grouped(most)}.`,
    );
    return value;
  }

  /** Return the number of a field of a table; what is no number stays a text, for the sentence. */
  const numberIn = (text, where, limits) => number(isDecimal(text) ? Number(text) : text, where, limits);

  const isDecimal = (text) => /^(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$/i.test(text ?? "");

  /** Return Gbit/s of "1gbit", of bits a second, or null. */
  function rate(value, where) {
    if (value === null || value === undefined || value === "") return null;
    if (typeof value === "number") return number(value / 1e9, `${where} in Gbit/s`, GBIT);
    const [, digits, unit] = /^\s*([\d.]+)\s*([kmgt]bit)(?:\/s|ps)?\s*$/i.exec(value) ?? [];
    refuseIf(!isDecimal(digits), `${where}: got ${shortly(value)}, expected a rate such as 1gbit.`);
    return number(Number(digits) * RATES[unit.toLowerCase()], `${where} in Gbit/s`, GBIT);
  }

  function json(file) {
    let content = null;
    try {
      content = JSON.parse(file.text);
    } catch {
      throw new Refused(`${file.path} is cut off, or no JSON file: nothing of it is shown.`);
    }
    refuseIf(!isObject(content), `${file.path} is something else: expected ${WANTED}.`);
    return content;
  }

  function refuseMany(count, path, noun) {
    const most = Words.grouped(MOST_STEPS);
    refuseIf(count > MOST_STEPS, `${path} has ${Words.counted(count, noun)}: this page reads up to ${most}.`);
  }

  // -- files to measurements --------------------------------------------------------------------

  const nameOf = (path) => path.slice(path.lastIndexOf("/") + 1);
  const folderOf = (path) => path.slice(0, Math.max(0, path.lastIndexOf("/")));
  const lastOf = (folder) => nameOf(folder) || "dropped";

  /** Return the comparison of a results.json as a measurement. */
  function ofComparison(data, file) {
    const content = json(file);
    const { path } = file;
    const isComparison = Array.isArray(content.cells) && isObject(content.settings);
    refuseIf(!isComparison, `${path} is something else: expected ${WANTED}.`);
    const { format } = content;
    const isNewer = Number.isInteger(format) && format > FORMAT;
    refuseIf(isNewer, `${path} has format ${format}, this page reads ${FORMAT}: make a newer page with lab whatif.`);
    refuseIf(format !== FORMAT, `${path}: format: got ${shortly(format)}, expected ${FORMAT}.`);
    refuseMany(content.cells.length, path, "cell");
    const cells = content.cells.filter((cell) => !isObject(cell) || cell.median);
    const steps = cells.map((cell, index) => ofCell(content, cell, `${path}, cell ${index + 1}`));
    const about = content.emulated
      ? "Emulated nodes with Gloo: layers sleep for measured times, and all bytes travel."
      : "Measured by this project, with Gloo over TCP.";
    const name = folderOf(path) === "" ? path : lastOf(folderOf(path));
    return { name, about, backend: "gloo", own: computing(steps), steps };
  }

  function ofCell(content, cell, where) {
    const isCell = isObject(cell) && isObject(cell.median) && typeof cell.sync === "string";
    refuseIf(!isCell, `${where} is something else.`);
    const { nodes: ofNodes, ranks_per_node: ofRanks } = State.FIELDS;
    const ranksPerNode = number(cell.ranks_per_node ?? 1, `${where}: ranks_per_node`, ofRanks);
    const ranks = number(cell.nodes, `${where}: nodes`, ofNodes) * ranksPerNode;
    const rateGbit = rate(cell.rate, `${where}: rate`);
    const nodes = rateGbit === null ? hostsOf(cell, ranks) : cell.nodes;
    const settings = content.groups?.[cell.group ?? 0] ?? content.settings;
    return {
      strategy: cell.sync,
      nodes,
      ranks_per_node: ranks / nodes,
      batch: number(cell.batch_size, `${where}: batch_size`, SAMPLES),
      seconds: number(cell.median.step, `${where}: step`, SECONDS),
      sync_seconds: number(cell.median.sync ?? 0, `${where}: sync`, { ...SECONDS, least: 0 }),
      rate_gbit: rateGbit,
      model: settings.model ?? content.settings.model ?? null,
    };
  }

  /** Return the number of hosts of a cell's ranks: without a rate they may share one machine. */
  function hostsOf(cell, ranks) {
    const rows = cell.repeats?.find((run) => run.status === "done")?.ranks ?? [];
    const hosts = new Set(rows.map((row) => row.node ?? row.host)).size;
    return hosts > 0 && ranks % hosts === 0 ? hosts : 1;
  }

  /** Return what computes of the step on the fewest ranks, as the step of one rank alone. */
  function computing(steps) {
    const found = steps.filter((step) => step.sync_seconds !== null).map((step) => {
      const ranks = ranksOf(step);
      const seconds = step.seconds - step.sync_seconds;
      return { ranks, seconds, samples: Math.round(step.batch / ranks) };
    });
    found.sort((a, b) => a.ranks - b.ranks || a.seconds - b.seconds);
    return found[0] ?? null;
  }

  /** Return the fields of a line of a table; a field may stand in quotation marks. */
  function fieldsOf(line) {
    const fields = line.match(/("([^"]|"")*"|[^,]*)(,|$)/g).slice(0, line.endsWith(",") ? undefined : -1);
    return fields.map((field) =>
      field.replace(/,$/, "").trim().replace(/^"(.*)"$/s, "$1").replaceAll('""', '"'));
  }

  /** Return a table of steps, as for `lab predict --fit`, as a measurement. */
  function ofTable(data, file) {
    const { path } = file;
    const text = file.text.replace(/^\uFEFF/, "");
    const lines = text.split(/\r?\n/).filter((line) => line.trim() !== "" && !line.startsWith("#"));
    const header = lines.length ? fieldsOf(lines[0]) : [];
    const missing = COLUMNS.filter((name) => !header.includes(name));
    refuseIf(
      missing.length > 0,
      `${path} has no column ${missing.join(", ")}: expected ${COLUMNS.join(", ")}, separated by commas.`,
    );
    refuseIf(lines.length === 1, `${path} has no rows: expected one measured step or more.`);
    refuseMany(lines.length - 1, path, "row");
    const steps = lines.slice(1).map((line, index) => {
      const where = `${path}, row ${index + 1}`;
      const fields = fieldsOf(line);
      refuseIf(
        fields.length !== header.length,
        `${where} has ${fields.length} fields for ${header.length} columns: it is cut off, or decimals have a comma.`,
      );
      return ofRow(data, Object.fromEntries(header.map((name, at) => [name, fields[at]])), where);
    });
    return { name: path, about: "", backend: null, own: null, steps };
  }

  function ofRow(data, row, where) {
    const known = data.strategies.some((entry) => entry.name === row.strategy);
    refuseIf(!known, `${where}: strategy: got ${shortly(row.strategy)}, which this page does not know.`);
    const { nodes: ofNodes, ranks_per_node: ofRanks } = State.FIELDS;
    const inGbit = isDecimal(row.rate) ? `${row.rate}gbit` : row.rate;
    return {
      strategy: row.strategy,
      nodes: numberIn(row.nodes, `${where}: nodes`, ofNodes),
      ranks_per_node: numberIn(row.ranks_per_node || "1", `${where}: ranks_per_node`, ofRanks),
      batch: numberIn(row.global_batch, `${where}: global_batch`, SAMPLES),
      seconds: numberIn(row.step_seconds, `${where}: step_seconds`, SECONDS),
      sync_seconds: null,
      rate_gbit: rate(inGbit, `${where}: rate`),
      model: null,
    };
  }

  /** Return the runs whose files were dropped as a measurement. */
  function ofRuns(data, folders) {
    const backends = new Set();
    const steps = folders.map(([folder, files]) => {
      const { step, backend } = ofRun(folder, files);
      backends.add(backend);
      return step;
    });
    const name = folders.length === 1 ? lastOf(folders[0][0]) : `${folders.length} runs`;
    const [backend] = backends.size === 1 ? backends : [null];
    return { name, about: "Measured by this project.", backend, own: computing(steps), steps };
  }

  function ofRun(folder, files) {
    const where = nameOf(folder) || "The dropped run";
    const called = (name) => {
      const [file, second] = files.filter(({ path }) => nameOf(path) === name);
      refuseIf(second, `Two files are called ${name}: drop the runs' folders.`);
      refuseIf(!file, `${where} has no ${name}: drop the run's whole folder.`);
      return json(file);
    };
    const summary = called("summary.json");
    const { ranks } = called("ranks.json");
    const isRun = typeof summary.sync === "string" && Array.isArray(ranks) && ranks.every(isObject);
    refuseIf(!isRun || ranks.length === 0, `${where} is not the folder of a finished run.`);
    const nodes = new Set(ranks.map((row) => row.node ?? row.host)).size;
    refuseIf(ranks.length % nodes !== 0, `${where}: its nodes have different numbers of ranks.`);
    const step = {
      strategy: summary.sync,
      nodes,
      ranks_per_node: ranks.length / nodes,
      batch: number(summary.global_batch_size, `${where}: global_batch_size`, SAMPLES),
      seconds: number(summary.step_seconds, `${where}: step_seconds`, SECONDS),
      sync_seconds: summary.section_seconds?.sync ?? null,
      rate_gbit: null,
      model: summary.model ?? null,
    };
    return { step, backend: summary.backend === "nccl" ? "nccl" : "gloo" };
  }

  /**
   * Return what there is to read: its name, and how to read it. Of a comparison's folder
   * results.json counts alone; of other folders the runs and tables in it do.
   *
   * @param {TextFile[]} files
   * @returns {{name: string, measurement: function(): Measurement}[]}
   */
  function sourcesOf(data, files) {
    const compared = files.filter(({ path }) => nameOf(path) === "results.json");
    const inside = compared.map(({ path }) => folderOf(path)).filter((folder) => folder !== "");
    const sources = [];
    const runs = new Map();
    for (const file of files) {
      const { path } = file;
      const folder = folderOf(path);
      const isPart = inside.some((root) => folder === root || folder.startsWith(`${root}/`));
      if (isPart && !compared.includes(file)) continue;
      if (OF_A_RUN.includes(nameOf(path))) {
        runs.set(folder, [...(runs.get(folder) ?? []), file]);
      } else if (/\.csv$/i.test(path)) {
        sources.push({ name: path, measurement: () => ofTable(data, file) });
      } else if (folder === "" || compared.includes(file)) { // perhaps a results.json renamed
        sources.push({ name: path, measurement: () => ofComparison(data, file) });
      }
    }
    const isFinished = ([folder, own]) => folder === "" || own.some(({ path }) => nameOf(path) === OF_A_RUN[0]);
    const finished = [...runs].filter(isFinished);
    const name = finished.length === 1 ? finished[0][1][0].path : `${finished.length} runs`;
    if (finished.length) sources.push({ name, measurement: () => ofRuns(data, finished) });
    return sources;
  }

  // -- measurements to sets ---------------------------------------------------------------------

  function groupsOf(entries, keyOf) {
    const groups = new Map();
    for (const entry of entries) {
      const key = JSON.stringify(keyOf(entry));
      if (!groups.has(key)) groups.set(key, []);
      groups.get(key).push(entry);
    }
    return [...groups.values()];
  }

  /** Return the steps as {scaling, batch_size, steps}: weak if a rank's batch stays the same. */
  function byBatch(steps) {
    const ofRank = new Set(steps.map((step) => step.batch / ranksOf(step)));
    if (ofRank.size === 1 && new Set(steps.map((step) => step.nodes)).size > 1) {
      return [{ scaling: "weak", batch_size: Math.round([...ofRank][0]), steps }];
    }
    return groupsOf(steps, (step) => step.batch).map((alike) => (
      { scaling: "strong", batch_size: Math.round(alike[0].batch), steps: alike }));
  }

  /** Return the sets of a measurement: one for each model, rate, ranks on a node, and batch. */
  function setsOf(data, measurement) {
    const known = data.strategies.map((entry) => entry.name);
    const alone = measurement.steps.find((step) => ranksOf(step) === 1);
    const own = alone ? { ranks: 1, seconds: alone.seconds, samples: alone.batch } : measurement.own;
    const drawn = measurement.steps.filter(
      (step) => step.nodes > 1 && known.includes(step.strategy) && step.strategy !== "none");
    refuseIf(
      drawn.length === 0,
      `${measurement.name} has no step on two or more nodes of a strategy that this page draws.`,
    );
    return groupsOf(drawn, (step) => [step.model, step.rate_gbit, step.ranks_per_node])
      .flatMap(byBatch)
      .map((group) => setOf(data, { ...measurement, own }, group));
  }

  function setOf(data, { name, about, backend, own }, { scaling, batch_size: batchSize, steps }) {
    const [first] = steps;
    const { rate_gbit: rateGbit, ranks_per_node: ranksPerNode, model } = first;
    const strategies = data.strategies.map((entry) => entry.name)
      .filter((strategy) => steps.some((step) => step.strategy === strategy));
    const state = {
      ranks_per_node: ranksPerNode,
      scaling,
      batch_size: batchSize,
      nodes: Math.max(...steps.map((step) => step.nodes)),
      strategies,
      focus: strategies.at(-1),
    };
    const isKnown = data.models.some((entry) => entry.name === model);
    if (isKnown) Object.assign(state, { model, gradient_type: "fp32", bucket_mb: null });
    const typicalLinks = { latency_us: null, inside_gbit: null };
    if (rateGbit !== null) Object.assign(state, typicalLinks, { rate_gbit: rateGbit });
    if (backend !== null) Object.assign(state, { costs: "typical", backend, transport: "tcp" });
    if (own !== null) {
      const stepMs = Number((1e3 * own.seconds).toPrecision(5));
      Object.assign(state, { costs: "typical", step_ms: stepMs, batch: own.samples });
    }
    const sentences = [about];
    if (rateGbit === null) sentences.push("The links are not stated: yours stay.");
    if (!isKnown) sentences.push("The model is not stated, or not in this page: yours stays.");
    if (own === null) sentences.push("The step of one rank alone is not stated: yours stays.");
    if (own?.ranks > 1) {
      sentences.push("One rank alone was not measured: its step is taken to be a step of these less its exposed communication.");
    }
    const nodes = [...new Set(steps.map((step) => step.nodes))].sort((a, b) => a - b).join(", ");
    const ranks = ranksPerNode === 1 ? "" : ` of ${ranksPerNode} ranks`;
    const links = rateGbit === null ? "" : `, ${rateGbit} Gbit/s`;
    const samples = `${Words.counted(batchSize, "sample")} ${scaling === "weak" ? "a rank" : "in all"}`;
    return {
      id: name.replace(/[^\w.-]+/g, "-"),
      title: `${model ?? "Steps"}: ${nodes} nodes${ranks}${links}, ${samples} (${name})`,
      about: sentences.filter((sentence) => sentence !== "").join(" "),
      family: backend ?? "",
      state,
      points: steps.map(({ strategy, nodes, seconds }) => ({ strategy, nodes, seconds, note: "" })),
    };
  }

  /** Return the sets with ids that no other set has: where one has it, a number follows. */
  function withIds(sets, taken) {
    const ids = new Set(taken);
    return sets.map((set) => {
      let { id } = set;
      for (let again = 2; ids.has(id); again += 1) id = `${set.id}-${again}`;
      ids.add(id);
      return { ...set, id };
    });
  }

  /**
   * Return the sets of those files that can be read, and what is wrong with the others.
   *
   * @param {Object} data of the page
   * @param {TextFile[]} files
   * @returns {{sets: MeasuredSet[], problem: ?string}}
   */
  function readTexts(data, files) {
    const sources = sourcesOf(data, files);
    const sets = [];
    const problems = [];
    for (const { name, measurement } of sources) {
      try {
        sets.push(...setsOf(data, measurement()));
      } catch (error) { // whatever a file may hold
        const isKnown = error instanceof Refused;
        problems.push(isKnown ? error.message : `${name} is not as lab compare or lab train writes it.`);
      }
    }
    if (sources.length === 0) problems.push(`Nothing to show in what was dropped: expected ${WANTED}.`);
    const problem = problems.slice(0, MOST_PROBLEMS).join(" ") || null;
    return { sets: withIds(sets, data.measured.map((set) => set.id)), problem };
  }

  const isRead = ({ path }) => {
    const name = nameOf(path);
    return folderOf(path) === "" || ["results.json", ...OF_A_RUN].includes(name) || /\.csv$/i.test(name);
  };

  /**
   * Return the sets of files of the browser.
   *
   * @param {{path: string, file: File}[]} dropped
   * @returns {Promise<{sets: MeasuredSet[], problem: ?string}>}
   */
  async function read(data, dropped) {
    const wanted = dropped.filter(isRead);
    const refused = (problem) => ({ sets: [], problem });
    if (wanted.length > MOST_FILES) return refused(`These are ${wanted.length} files: drop fewer.`);
    const large = wanted.find(({ file }) => file.size > MOST_BYTES);
    if (large) return refused(`${large.path} is too large: this page reads up to 50 MB.`);
    const texts = [];
    for (const { path, file } of wanted) {
      try {
        texts.push({ path, text: await file.text() });
      } catch {
        return refused(`${path} cannot be read: is it a folder, or was it moved?`);
      }
    }
    return readTexts(data, texts);
  }

  /** Put the sets of the files that came with the page before the published ones. */
  function prepare(data) {
    for (const set of data.measured) set.isPublished = true;
    const { files = [], shipped = [] } = data;
    data.measured = [...readTexts(data, shipped).sets, ...data.measured];
    const own = readTexts(data, files);
    data.measured = [...own.sets, ...data.measured];
    data.begin = own.sets[0]?.id ?? null;
    data.problem = files.length === 0 ? null : own.problem;
  }

  // -- what a set shows in a state --------------------------------------------------------------

  const setCalled = (data, id) => data.measured.find((set) => set.id === id) ?? null;

  function isClose(first, second) {
    if (typeof first !== "number" || typeof second !== "number") return first === second;
    return Math.abs(first - second) <= CLOSE * Math.max(first, second);
  }

  /** Return the names of the settings that change a state's predictions. */
  function settingsOf(state) {
    const unused = [...DRAWN];
    if (state.model !== "own") unused.push("parameters");
    if (state.ranks_per_node === 1) unused.push("inside_gbit");
    if (state.step_ms === null) unused.push("batch");
    return Object.keys(State.FIELDS).filter((name) => !unused.includes(name));
  }

  /** Return the settings of a state that are not those of a set, by name. */
  function differences(set, state) {
    return settingsOf(state).filter((name) => name in set.state && !isClose(set.state[name], state[name]));
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
    if (set === null || differences(set, state).length > 0) return [];
    return set.points
      .filter((point) => state.strategies.includes(point.strategy))
      .map((point) => ({ ...point, note: "", efficiency: efficiency(state, point) }));
  }

  /** Return the bytes of a state's gradients. */
  function gradientBytes(data, { model, parameters, gradient_type: type }) {
    const found = data.models.find((entry) => entry.name === model);
    const entries = found?.gradients.map(([count, shape]) => count * shape.reduce((a, b) => a * b, 1));
    const sum = entries?.reduce((a, b) => a + b, 0) ?? parameters;
    return sum * data.constants.gradient_bytes[type];
  }

  /**
   * Return how far a set's settings are from a state's: first other backends and transports count,
   * then how often the bytes, then the rate, then the ranks on a node would have to double.
   */
  function distance(data, set, state) {
    const its = { ...state, ...set.state };
    const isOther = its.backend !== state.backend || its.transport !== state.transport;
    const doublings = [
      gradientBytes(data, its) / gradientBytes(data, state),
      its.rate_gbit / state.rate_gbit,
      its.ranks_per_node / state.ranks_per_node,
    ].map((ratio) => Math.min(9, Math.round(Math.abs(Math.log2(ratio)))));
    return [Number(isOther), ...doublings].reduce((sum, digit) => 10 * sum + digit, 0);
  }

  /** Return the set that was measured with settings nearest to a state's; null if there is none. */
  function nearest(data, state) {
    const distances = data.measured.map((set) => distance(data, set, state));
    return data.measured[distances.indexOf(Math.min(...distances))] ?? null;
  }

  /** Return a set and one of its points, that of the state's strategy if it has one. */
  function nearestText(set, state) {
    const point = set.points.find(({ strategy }) => strategy === state.focus) ?? set.points[0];
    const seconds = Words.duration(point.seconds);
    return `Nearest measured: ${set.title}: ${point.strategy} took ${seconds} on ${Words.counted(point.nodes, "node")}.`;
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
    const which = count === rows.length ? `All these ${Words.counted(count, "step")}` : `${count} of these ${rows.length} steps`;
    const [shorter, faster] = most === "below" ? ["shorter", "faster"] : ["longer", "slower"];
    return `${which} were ${shorter} than the band: something here is ${faster} than on typical clusters. lab predict --fit takes what was measured.`;
  }

  // -- the section of the page ------------------------------------------------------------------

  const PARTS = `
    <div class="field"><label for="measured-set">Show</label><select id="measured-set"></select></div>
    <p id="measured-nearest"><span></span> <button type="button" class="quiet">Show it</button></p>
    <p id="measured-about" class="muted"></p>
    <p id="measured-off" class="note" hidden><span></span> <button type="button">Back to its settings</button></p>
    <div class="scroll" id="measured-scroll" tabindex="0" role="region" aria-label="Table: measured and predicted steps" hidden><table id="table-measured"></table></div>
    <p id="measured-sides"></p>
    <p id="measured-error" class="muted"></p>
    <details id="measured-notes" class="numbers" hidden><summary>As published</summary><ul></ul></details>
    <div id="measured-drop" class="drop"><p>Your own: drop <code>results.json</code>, a table (<code>.csv</code>) or folders of runs anywhere onto this page. They stay in this page: nothing is uploaded or stored.</p>
      <p class="buttons"><button type="button" data-pick="files">Choose files</button> <button type="button" data-pick="folder">Choose a folder</button></p>
      <input type="file" id="measured-files" multiple hidden aria-label="Files of measurements"><input type="file" id="measured-folder" webkitdirectory hidden aria-label="A folder of measurements">
    </div>
    <p id="measured-problem" class="note bad" role="alert" hidden></p>
    <p id="measured-said" class="unseen" role="status"></p>`;

  const byId = (id) => document.getElementById(id);

  function made(tag, text, attributes = {}) {
    const element = Object.assign(document.createElement(tag), attributes);
    element.textContent = text;
    return element;
  }

  function option(set) {
    return made("option", set.title, { value: set.id });
  }

  /** Offer all sets, the nearest one first. */
  function fillChoices(data, first) {
    const others = data.measured.filter((set) => set !== first);
    const groups = [
      ["Nearest to your settings", first ? [first] : []],
      ["Yours, and this project's", others.filter((set) => !set.isPublished)],
    ];
    for (const { backend, label } of data.families) {
      const ofFamily = others.filter((set) => set.isPublished && set.family === backend);
      groups.push([`Published, ${label}`, ofFamily]);
    }
    byId("measured-set").replaceChildren(made("option", "nothing measured", { value: "" }));
    for (const [label, sets] of groups) {
      const group = Object.assign(document.createElement("optgroup"), { label });
      group.append(...sets.map(option));
      if (sets.length) byId("measured-set").append(group);
    }
  }

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
      made("li", `${strategy} on ${Words.counted(nodes, "node")}: ${note}`)));
    byId("measured-notes").hidden = items.length === 0;
    byId("measured-notes").querySelector("ul").replaceChildren(...items);
  }

  const shown = { key: null, id: null, nearest: undefined };

  /** Name the nearest set, and offer it first. */
  function followNearest(data, state) {
    const first = nearest(data, state);
    if (first !== shown.nearest) fillChoices(data, first);
    shown.nearest = first;
    byId("measured-nearest").hidden = first === null || first.id === state.measured;
    byId("measured-nearest").firstChild.textContent = first === null ? "" : nearestText(first, state);
  }

  /** Follow the page's state: the table of the chosen set, or why its points are not drawn. */
  function follow(data) {
    const state = Page.state();
    const set = setCalled(data, state.measured);
    followNearest(data, state);
    byId("measured-set").value = set?.id ?? "";
    const differing = set === null ? [] : differences(set, state);
    const hasTable = set !== null && differing.length === 0;
    byId("measured-about").textContent = set?.about ?? "";
    byId("measured-off").hidden = differing.length === 0;
    for (const id of ["measured-scroll", "measured-sides"]) byId(id).hidden = !hasTable;
    byId("measured-error").textContent = set === null ? "" : stated(data, set, state);
    if (differing.length) {
      const names = differing.map((name) => State.FIELDS[name].label.toLowerCase()).join(", ");
      byId("measured-off").firstChild.textContent =
        `These steps were measured with other settings (${names}), so they are not drawn.`;
    }
    if (shown.id !== state.measured) fillNotes(set);
    shown.id = state.measured;
    const key = hasTable ? JSON.stringify([set.id, { ...state, nodes: 0, strategies: [], focus: "" }]) : null;
    if (key !== null && key !== shown.key) fillTable(data, set, state);
    shown.key = key;
  }

  /** Return the stated error of a set's family. */
  function stated(data, set, state) {
    const family = Words.error(data, { ...state, costs: "typical", backend: set.family || state.backend });
    if (!set.isPublished) return family;
    return `${family} That error predicts each group without its own rows; this page's priors were fitted to all of them.`;
  }

  /** Take away what was said of files before. */
  function clear() {
    for (const id of ["measured-problem", "message"]) byId(id).hidden = true;
    byId("measured-said").textContent = "";
  }

  /** Say what is wrong with files. */
  function refuse(problem) {
    byId("measured-problem").textContent = problem;
    byId("measured-problem").hidden = false;
    byId("measured").scrollIntoView({ block: "nearest" });
  }

  /** Take over dropped or chosen files: the first of their sets is shown. */
  async function take(data, dropped) {
    const { sets, problem } = await read(data, dropped);
    if (problem !== null) refuse(problem);
    if (sets.length === 0) return;
    const before = data.measured;
    data.measured = [...sets.map((set) => ({ ...set, isDropped: true })), ...before];
    if (!choose(data, sets[0].id)) {
      data.measured = before;
      return;
    }
    shown.nearest = undefined; // the list has others now
    follow(data);
    byId("measured-said").textContent = `${Words.counted(sets.length, "set")} of measured steps added.`;
  }

  /** Return all files of a file's or a folder's handle, with their paths. */
  async function filesIn(handle, path = handle.name) {
    if (handle.kind === "file") return [{ path, file: await handle.getFile() }];
    const files = [];
    for await (const inner of handle.values()) {
      files.push(...(await filesIn(inner, `${path}/${inner.name}`)));
      if (files.length > MOST_FILES) return files;
    }
    return files;
  }

  /** Return the same of an entry, for browsers that have no handles. */
  async function filesOfEntry(entry) {
    const path = entry.fullPath.replace(/^\//, "");
    if (entry.isFile) {
      return new Promise((resolve, reject) => {
        entry.file((file) => resolve([{ path, file }]), reject);
      });
    }
    const reader = entry.createReader();
    const files = [];
    for (;;) {
      const entries = await new Promise((resolve, reject) => reader.readEntries(resolve, reject));
      if (entries.length === 0 || files.length > MOST_FILES) return files;
      for (const inner of entries) files.push(...(await filesOfEntry(inner)));
    }
  }

  /**
   * Return the files of a drop. What was dropped is lost after the first await.
   *
   * Chromium cannot read entries on a page that is a file itself; Firefox has no handles.
   */
  async function droppedFiles({ items, files }) {
    const dropped = [...items].filter((item) => item.kind === "file");
    const plain = [...files].map((file) => ({ path: file.name, file }));
    if (dropped.every((item) => item.getAsFileSystemHandle)) {
      const handles = await Promise.all(dropped.map((item) => item.getAsFileSystemHandle()));
      if (!handles.every(Boolean)) return plain;
      return (await Promise.all(handles.map((handle) => filesIn(handle)))).flat();
    }
    const entries = dropped.map((item) => item.webkitGetAsEntry?.());
    if (!entries.every(Boolean)) return plain;
    return (await Promise.all(entries.map(filesOfEntry))).flat();
  }

  async function onDrop(data, event) {
    event.preventDefault();
    document.body.classList.remove("dragging");
    if (![...event.dataTransfer.types].includes("Files")) return;
    clear();
    const files = await droppedFiles(event.dataTransfer).catch(() => null);
    if (files === null) refuse("The browser cannot read what was dropped: choose it with a button.");
    else await take(data, files);
  }

  function listen(data) {
    byId("measured-set").addEventListener("change", (event) => choose(data, event.target.value));
    byId("measured-off").querySelector("button")
      .addEventListener("click", () => choose(data, Page.state().measured));
    byId("measured-nearest").querySelector("button")
      .addEventListener("click", () => choose(data, shown.nearest.id));
    for (const kind of ["files", "folder"]) {
      const input = byId(`measured-${kind}`);
      document.querySelector(`[data-pick="${kind}"]`).addEventListener("click", () => input.click());
      input.addEventListener("change", async () => {
        clear();
        const files = [...input.files].map((file) => (
          { path: file.webkitRelativePath || file.name, file }));
        input.value = ""; // the same file may be chosen again
        await take(data, files);
      });
    }
    // The whole page is the target: else the browser leaves it for the dropped file.
    document.addEventListener("dragover", (event) => {
      event.preventDefault();
      document.body.classList.add("dragging");
    });
    document.addEventListener("dragleave", () => document.body.classList.remove("dragging"));
    document.addEventListener("drop", (event) => onDrop(data, event));
    document.addEventListener("drawn", () => follow(data));
  }

  /** Fill the section; the first of the reader's own sets that came with the page is shown. */
  function start(data) {
    byId("measured").insertAdjacentHTML("beforeend", PARTS);
    listen(data);
    if (data.problem !== null) refuse(data.problem);
    const isAsked = location.hash.length > 1;
    if (data.begin !== null && !isAsked) choose(data, data.begin);
    else follow(data);
  }

  return {
    FORMAT, prepare, start, read, readTexts, setCalled, points, compared, sidesText, nearest,
    nearestText, differences, choose,
  };
})();
if (typeof module !== "undefined") module.exports = Measured;
