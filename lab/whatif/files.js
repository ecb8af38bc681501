"use strict";

/**
 * Files of measured steps, read into sets that the page can show: results.json of a comparison,
 * tables, and folders of runs, as they come with the page or are dropped onto it. Nothing is
 * uploaded.
 *
 * Read downward: files to measurements, measurements to sets, and the browser's files. Whatever a
 * file holds, the reader gets a sentence. Touches no DOM.
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
const MeasuredFiles = (() => {
  const FORMAT = 1; // of results.json
  const MOST_BYTES = 50e6;
  const MOST_FILES = 5000;
  const MOST_PROBLEMS = 3; // that are said at once
  const MOST_STEPS = 2000; // of a file
  const SECONDS = { least: 1e-5, most: 1000 }; // of a step, as in the page's field
  const GBIT = { least: 1e-6, most: 1e6 };
  const SAMPLES = { least: 1, most: 1e9, whole: true };
  const OF_A_RUN = ["summary.json", "ranks.json", "config.json"];
  const COLUMNS = ["nodes", "strategy", "global_batch", "step_seconds"];
  const RATES = { kbit: 1e-6, mbit: 1e-3, gbit: 1, tbit: 1e3 };
  const WANTED = "results.json, a table (.csv), or summary.json and ranks.json of a run";

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

  // -- the browser's files ------------------------------------------------------------------------

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

  return { FORMAT, readTexts, read, droppedFiles };
})();
if (typeof module !== "undefined") module.exports = MeasuredFiles;
