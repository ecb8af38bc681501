"use strict";

/**
 * What the reader has chosen: a plain object, checked here, written into the page's link and into a
 * `lab predict` command. A link holds what differs from the first preset, then that of a kept state,
 * and ends in "end", so that a link that was cut is noticed. Touches no DOM.
 * data.py describes a State, fields.toml its fields: `data.fields`.
 */
const State = (() => {
  const END = "end";
  const KEPT = "kept"; // what follows is of the state beside it

  const copy = (state) => ({ ...state, strategies: [...state.strategies] });

  /** Return the first preset's state. */
  const defaults = (data) => copy(data.presets[0].state);

  const isNumber = (field) => field.least !== undefined;

  const grouped = (number) => number.toLocaleString("en-US", { maximumFractionDigits: 3 });

  function rangeText(field) {
    const kind = field.whole ? "a whole number" : "a number";
    return `${kind} from ${grouped(field.least)} to ${grouped(field.most)}`;
  }

  /** Return what is wrong with one value alone, as a sentence; null if nothing is. */
  function valueProblem(field, value) {
    if (field.empty && value === null) return null;
    if (isNumber(field)) {
      const inRange = typeof value === "number" && value >= field.least && value <= field.most;
      const fits = inRange && (!field.whole || Number.isInteger(value));
      return fits ? null : `${field.label}: got ${value ?? "nothing"}, give ${rangeText(field)}.`;
    }
    if (field.choices && !field.choices.includes(value)) {
      return `${field.label}: got ${value}, give one of ${field.choices.join(", ")}.`;
    }
    return null;
  }

  function namesProblem(data, state) {
    const strategies = data.strategies.map((entry) => entry.name);
    if (state.strategies.length === 0) {
      return { field: "strategies", text: "Strategies: choose one or more to draw." };
    }
    const named = (name, value, names) => {
      if (names.includes(value)) return null;
      return { field: name, text: `${data.fields[name].label}: ${value} is not in this page.` };
    };
    for (const name of state.strategies) {
      const problem = named("strategies", name, strategies);
      if (problem) return problem;
    }
    return (
      named("model", state.model, [...data.models.map((entry) => entry.name), "own"]) ??
      named("focus", state.focus, state.strategies) ??
      named("measured", state.measured, [null, ...data.measured.map((entry) => entry.id)])
    );
  }

  /** Whether the software's limit is that of an adapter, times their number. */
  const usesAdapters = (state) =>
    state.costs === "typical" &&
    state.transport !== "rdma-gpudirect" &&
    state.software_gbit === null;

  /** Return which values contradict each other, as {field, text}; null if none do. */
  function contradiction(data, state) {
    const own = data.calibration.model;
    const overRdma = state.costs === "typical" && state.transport.startsWith("rdma");
    if (state.backend === "gloo" && overRdma) {
      return { field: "transport", text: "Transport: Gloo sends by TCP; choose that, or NCCL." };
    }
    if (state.adapters !== null && !usesAdapters(state)) {
      const text = "Adapters a node: they change nothing here; leave it empty.";
      return { field: "adapters", text };
    }
    if (state.costs === "calibrated" && (state.model !== own || state.step_ms !== null)) {
      const text = `Costs: the calibration has the steps of ${own} alone; choose typical costs.`;
      return { field: "costs", text };
    }
    if (state.step_ms === null && state.model !== own) {
      const text = `Step time: only that of ${own} is calibrated; type the time of your step.`;
      return { field: "step_ms", text };
    }
    const least = Engine.leastSamples(data, state);
    if (state.batch_size < least) {
      const text = `Batch size: got ${state.batch_size}, give ${least} or more: BatchNorm needs it.`;
      return { field: "batch_size", text };
    }
    return null;
  }

  /** Return what is wrong as {field, text}; null if the state can be predicted. */
  function problem(data, state) {
    for (const [name, field] of Object.entries(data.fields)) {
      const text = valueProblem(field, state[name]);
      if (text) return { field: name, text };
    }
    return namesProblem(data, state) ?? contradiction(data, state);
  }

  /** Return what is wrong as one sentence; null if the state can be predicted. */
  const check = (data, state) => problem(data, state)?.text ?? null;

  const textOf = (field, value) => (field.list ? value.join(",") : String(value ?? ""));

  /** Whether two states are the same. */
  function same(data, first, second) {
    return Object.entries(data.fields).every(
      ([name, field]) => textOf(field, first[name]) === textOf(field, second[name]),
    );
  }

  /** Return the names of the settings that change a state's predictions. */
  function settingsOf(data, state) {
    const unused = [];
    if (state.model !== "own") unused.push("parameters");
    if (state.ranks_per_node === 1) unused.push("inside_gbit");
    if (state.step_ms === null) unused.push("batch");
    const names = Object.keys(data.fields).filter((name) => !unused.includes(name));
    return names.filter((name) => data.fields[name].unit !== undefined);
  }

  function partsOf(data, state) {
    const standard = defaults(data);
    const parts = [];
    for (const [name, field] of Object.entries(data.fields)) {
      const text = textOf(field, state[name]);
      if (text === textOf(field, standard[name])) continue;
      parts.push(`${field.key}=${encodeURIComponent(text).replaceAll("%2C", ",")}`);
    }
    return parts;
  }

  /** Return the state, and a kept one if there is one, as the end of a link: "#n=8&r=25&end". */
  function encode(data, state, kept = null) {
    const beside = kept === null ? [] : [KEPT, ...partsOf(data, kept)];
    return `#${[...partsOf(data, state), ...beside, END].join("&")}`;
  }

  function valueOf(field, text) {
    if (field.list) return [...new Set(text.split(","))].filter((name) => name !== "");
    if (field.empty && text === "") return null;
    if (!isNumber(field)) return field.before?.[text] ?? text;
    return /^\d+(\.\d+)?(e[+-]?\d+)?$/.test(text) ? Number(text) : text;
  }

  function unescaped(text) {
    try {
      return decodeURIComponent(text);
    } catch {
      return null;
    }
  }

  /**
   * Return the state of a link's end, as {state}, or what is wrong with it, as {problem}; kept: the
   * state beside it, if there is one.
   *
   * @param {string} text "#n=8&end"; "" and "#" are the defaults
   */
  function decode(data, text) {
    const parts = text.replace(/^#/, "").split("&");
    if (parts.length === 1 && parts[0] === "") return { state: defaults(data) };
    if (parts.pop() !== END) {
      return { problem: 'The link is not complete: it does not end in "&end". Copy it again.' };
    }
    const middle = parts.indexOf(KEPT);
    if (middle < 0) return stateOf(data, parts);
    const found = stateOf(data, parts.slice(0, middle));
    const { state: kept, problem: wrong } = stateOf(data, parts.slice(middle + 1));
    return wrong ? { problem: wrong } : { kept, ...found };
  }

  /** Return the state that these parts of a link say, as {state}, or what is wrong, as {problem}. */
  function stateOf(data, parts) {
    const state = defaults(data);
    const seen = new Set();
    for (const part of parts) {
      const [key, ...rest] = part.split("=");
      const [name, field] = Object.entries(data.fields).find((entry) => entry[1].key === key) ?? [];
      const value = unescaped(rest.join("="));
      if (name === undefined || value === null || seen.has(name)) {
        return { problem: `The link has "${part}", which this page does not know.` };
      }
      seen.add(name);
      state[name] = valueOf(field, value);
    }
    const wrong = check(data, state);
    return wrong ? { problem: `The link cannot be shown. ${wrong}` } : { state };
  }

  const quoted = (text) => (/^[\w./:@%+-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`);

  function modelFlags(data, state) {
    if (state.step_ms === null) return [];
    const named =
      state.model === "own" ? ["--parameters", state.parameters] : ["--model", state.model];
    return [...named, "--step-time", `${state.step_ms}ms`, "--batch", state.batch];
  }

  function linkFlags(state) {
    const flags = ["--rate", `${state.rate_gbit}gbit`];
    if (state.latency_us !== null) flags.push("--latency", `${state.latency_us}us`);
    if (state.ranks_per_node > 1 && state.inside_gbit !== null) {
      flags.push("--rate-inside", `${state.inside_gbit}gbit`);
    }
    if (state.costs === "calibrated") return flags;
    flags.push("--backend", state.backend, "--transport", state.transport);
    if (state.adapters !== null) flags.push("--adapters", state.adapters);
    if (state.software_gbit !== null) flags.push("--software-gbit", state.software_gbit);
    return flags;
  }

  function calibrationFlags(data, state) {
    const { path, is_reference: isReference } = data.calibration;
    if (state.costs === "typical" && isReference) return [];
    return ["--calibration", path];
  }

  /** Return the `lab predict` command that predicts the same. */
  function command(data, state) {
    const words = [
      "lab", "predict",
      ...calibrationFlags(data, state),
      ...modelFlags(data, state),
      ...(state.gradient_type === "fp32" ? [] : ["--gradient-type", state.gradient_type]),
      "--batch-size", state.batch_size,
      "--scaling", state.scaling,
      "--nodes", state.nodes,
      ...(state.ranks_per_node > 1 ? ["--ranks-per-node", state.ranks_per_node] : []),
      ...linkFlags(state),
      ...(state.bucket_mb === null ? [] : ["--bucket-mb", state.bucket_mb]),
      "--sync", ...state.strategies,
    ];
    return words.map((word) => quoted(String(word))).join(" ");
  }

  /** Return the transport with the likelier generation of nodes: generation_of of cluster.py. */
  function likelierTransport(data, { backend, transport, rate_gbit: rate }) {
    const [kind] = transport.split("-");
    const [earlier, later] = data.generations[kind];
    const laterFrom = data.later_from[`${backend} ${kind}`] ?? Infinity;
    return 1e9 * rate < laterFrom ? earlier : later;
  }

  return {
    defaults, copy, same, problem, check, encode, decode, command, usesAdapters, settingsOf,
    likelierTransport,
  };
})();
