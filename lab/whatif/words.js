"use strict";

/**
 * Numbers and sentences for a reader, as `lab predict` prints them: `Words.sentence` is the answer
 * of lab/predict/printing.py, and the numbers are those of common/say.py. Touches no DOM.
 */
const Words = (() => {
  const DURATIONS = [["h", 3600], ["s", 1], ["ms", 1e-3], ["µs", 1e-6], ["ns", 1e-9]];
  const BYTES = [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3], ["B", 1]];
  const CLOSE = 0.05; // to nothing or to all: shares are written with a decimal

  /** Return the digits that Python's format has, which rounds a tie to the even digit. */
  function rounded(value, digits) {
    const away = value.toFixed(digits);
    if (!Number.isInteger(2 * value * 10 ** digits)) return away; // no tie; the rest takes long
    const exact = value.toFixed(Math.min(100, digits + 60));
    const rest = exact.slice(exact.indexOf(".") + 1 + digits);
    if (!/^50*$/.test(rest)) return away;
    const cut = exact.slice(0, exact.length - rest.length).replace(/\.$/, "");
    return /[02468]$/.test(cut) ? cut : away;
  }

  const withCommas = (digits) => digits.replace(/\B(?=(\d{3})+(?!\d))/g, ",");

  /** Return three significant digits without trailing zeros and without an exponent. */
  function three(value) {
    if (value === 0) return "0";
    const magnitude = Number(value.toExponential(2).split("e")[1]);
    if (magnitude > 2) {
      const unit = 10 ** (magnitude - 2);
      return withCommas(String(Number(rounded(value / unit, 0)) * unit));
    }
    const digits = rounded(value, Math.min(100, 2 - magnitude));
    return digits.includes(".") ? digits.replace(/\.?0+$/, "") : digits;
  }

  /** Return `value` in the largest unit that leaves at least 1, as {digits, name, size}. */
  function scaled(value, units) {
    const [name, size] = units.find((unit) => Number(three(value / unit[1]).replaceAll(",", "")) >= 1)
      ?? units.at(-1);
    return { digits: three(value / size), name, size };
  }

  function withUnit(value, units) {
    const { digits, name } = scaled(value, units);
    return `${digits} ${name}`;
  }

  /** Return a time as text: "563 ms". */
  const duration = (seconds) => (seconds <= 0 ? "0 s" : withUnit(seconds, DURATIONS));

  /** Return a number of bytes as text: "36.9 MB". */
  const bytes = (count) => (count <= 0 ? "0 B" : withUnit(count, BYTES));

  /** Return a range of times in the unit of one of them: "182 to 240 ms". */
  function range(low, high, between = " to ", typical = high) {
    if (high <= 0) return `0${between}0 s`;
    const { name, size } = scaled(typical, DURATIONS);
    return `${three(low / size)}${between}${three(high / size)} ${name}`;
  }

  /** Return how many times as fast: "1.36". */
  function times(value) {
    if (value >= 100) return withCommas(rounded(value, 0));
    if (value >= 10) return rounded(value, 1);
    return value >= 0.01 ? rounded(value, 2) : "<0.01";
  }

  /** Return a share as text: "12.3 %". */
  const percent = (share, digits = 1) => `${rounded(100 * share, digits)} %`;

  /** Return an efficiency as text. */
  const efficiency = (share) => (share >= 0.001 ? percent(share) : "<0.1 %");

  const grouped = (whole) => withCommas(String(whole));

  /** Return "1 node", "4,096 nodes". */
  const counted = (count, noun) => `${grouped(count)} ${noun}${count === 1 ? "" : "s"}`;

  const nameOf = (data, change, row) =>
    Engine.said(data, change, { doubled: grouped(2 * row.nodes), nodes: grouped(row.nodes) });

  /** Return what a reader may buy: more nodes only as far as they are predicted. */
  function purchases(data, state, row) {
    const { purchases: all, largest_nodes: largest } = data.constants;
    return all[state.scaling].filter((change) => change !== "nodes" || 2 * row.nodes <= largest);
  }

  const best = (names, valueOf) => names.reduce((a, b) => (valueOf(b) > valueOf(a) ? b : a));

  /** Return the purchase that gains most, and the one that may gain more, where that is open. */
  function bestPurchases(data, state, row) {
    const { decided, little } = data.constants;
    const names = purchases(data, state, row);
    const first = best(names, (change) => row.gains[change]);
    const others = names.filter((change) => change !== first);
    const rival = best(others, (change) => row.best_shares[change]);
    const isDecided = row.best_shares[first] >= decided;
    return isDecided || row.gain_ranges[rival][1] < 1 + little ? [first] : [first, rival];
  }

  function gainRange(data, row, change) {
    const [low, high] = row.gain_ranges[change].map(times);
    return Engine.said(data, "factors", { low, high });
  }

  /** Return what a change does that is not the best one. */
  function effect(data, change, row) {
    const { little } = data.constants;
    const gain = row.gains[change];
    let size = gain < 1 + little ? "little" : "more";
    if (gain < 1 - little / 2) size = "slower";
    return Engine.said(data, size, { change: nameOf(data, change, row), factor: times(gain) });
  }

  /** Return a text as a sentence; "" stays. */
  const sentenceOf = (text) => text && `${text[0].toUpperCase()}${text.slice(1)}.`;

  /** Return what each purchase would bring, the best one first. */
  function purchasesText(data, state, row) {
    const { little } = data.constants;
    const gainOf = (change) => times(row.gains[change]);
    const inTurn = purchases(data, state, row).sort((a, b) => row.gains[b] - row.gains[a]);
    const [first, rival] = bestPurchases(data, state, row);
    if (rival === undefined && row.gains[first] < 1 + little) {
      const each = inTurn.map((change) => `${nameOf(data, change, row)} ${gainOf(change)}`).join(", ");
      return Engine.said(data, "nothing", { each });
    }
    const fields = { best: nameOf(data, first, row), factor: gainOf(first) };
    if (rival !== undefined) {
      fields.range = gainRange(data, row, first);
      fields.rival = nameOf(data, rival, row);
      fields.rival_factor = gainOf(rival);
      fields.rival_range = gainRange(data, row, rival);
    }
    const text = Engine.said(data, rival === undefined ? "most" : "open", fields);
    const others = inTurn.filter((change) => change !== first && change !== rival);
    const effects = others.map((change) => effect(data, change, row));
    return sentenceOf([text, ...effects].join("; "));
  }

  /**
   * Return how long a step of the focus takes and what would help most: the answer of
   * `lab predict`. "" for one node, and for a strategy that exchanges nothing.
   *
   * @param {object} row of Engine.row for the focus
   */
  function sentence(data, state, row) {
    if (row.nodes === 1 || state.focus === "none") return "";
    const sentences = [
      Engine.said(data, "step", {
        strategy: state.focus,
        nodes: counted(row.nodes, "node"),
        seconds: duration(row.step_seconds),
        range: range(row.low_seconds, row.high_seconds, " to ", row.step_seconds),
      }),
      purchasesText(data, state, row),
      Engine.said(data, "no_messages", { factor: times(row.gains["no messages"]) }),
    ];
    if (state.scaling === "weak" && 2 * row.nodes <= data.constants.largest_nodes) {
      const fields = { nodes: grouped(2 * row.nodes), factor: times(row.gains.nodes) };
      sentences.push(Engine.said(data, "weak_nodes", fields));
    }
    return sentences.join(" ");
  }

  /** Return a prior of the state's backend and transport, or undefined. */
  const priorOf = (data, state, name) =>
    Engine.priorsOf(data, state).find(({ path }) => path[1] === name)?.prior;

  const typical = (data, state, name) => priorOf(data, state, name)?.typical;

  const softwareOf = (data, state) =>
    `${state.backend === "gloo" ? "Gloo" : "NCCL"} over ${data.transports[state.transport]}`;

  /** Return the least rate at which a typical node's software limits a link. */
  const enoughGbit = (data, state) =>
    mostGbit(data, state) / Math.min(1, typical(data, state, "line_share"));

  const mostGbit = (data, state) => Engine.softwareGbit(data, state)?.typical ?? Infinity;

  /** Return the range that a typical node's software passes, for its control. */
  function softwareRange(data, state) {
    if (state.costs === "calibrated") return "";
    const most = Engine.softwareGbit(data, { ...state, software_gbit: null });
    if (most === null) return "Empty: all that the links bring, as with GPUDirect.";
    return (
      `At most, of a node. Empty: ${three(most.typical)}, typical of ${softwareOf(data, state)} ` +
      `(80 %: ${three(most.low)} to ${three(most.high)}).`
    );
  }

  /** Return from which rate on the nodes' software limits the links; "" if it does not. */
  function softwareLimit(data, state) {
    if (state.costs === "calibrated") return "";
    const enough = enoughGbit(data, state);
    if (2 * state.rate_gbit <= enough) return "";
    const whose = state.software_gbit === null ? "typical software" : "your software";
    return `Links above ${three(enough)} Gbit/s would bring nothing more: ${whose} passes no more.`;
  }

  /** Return the share of a step that takes half the time where a change brings this gain. */
  const halved = (gain) => 2 * (1 - 1 / gain);

  const LINKS_GAIN = 1.1; // of links twice as fast, from which on they are the limit

  /** Return what limits messages of many bytes, of which no purchase changes more. */
  function bytesLimit(data, state, row, links) {
    if (row.nodes === 1) return "inside";
    if (row.gains.network > LINKS_GAIN) return links;
    const isFast = state.costs === "calibrated" || 2 * state.rate_gbit >= enoughGbit(data, state);
    const inside = state.inside_gbit ?? typical(data, state, "inside_gbit");
    const isSlowInside = !isFast || inside < mostGbit(data, state);
    return state.ranks_per_node > 1 && isSlowInside ? "inside" : "software";
  }

  /** Return what limits a step: what the best purchase changes, unless what none does is more. */
  function limiter(data, state, row, terms) {
    const unchanged = messagesShare(row) - halved(row.gains.network);
    const changed = purchases(data, state, row).map((change) => halved(row.gains[change]));
    const links = terms["root's link"] > terms.bandwidth ? "root's link" : "links";
    if (unchanged > Math.max(...changed)) {
      const term = best(Object.keys(terms), (name) => terms[name]);
      return term in data.limits && term !== links ? term : bytesLimit(data, state, row, links);
    }
    const [first, rival] = bestPurchases(data, state, row);
    if (rival && row.nodes > 1 && [first, rival].includes("network")) return "open";
    if (first === "network") return links;
    return messagesShare(row) > 0.5 ? "both" : "computing";
  }

  const messagesShare = (row) => (row.sync_seconds + row.slowed_seconds) / row.step_seconds;

  /** Return a share, of nearly nothing and of nearly all with a decimal: 99.6 % is not 100 %. */
  const ofAll = (share) =>
    (share < CLOSE || share > 1 - CLOSE ? efficiency(share) : percent(share, 0));

  /** Return what messages add to a step, as a sentence. */
  function added(row) {
    const parts = [];
    if (row.sync_seconds > 0) parts.push(`${duration(row.sync_seconds)} that nothing hides`);
    const slowing = `${duration(row.slowed_seconds)} by which they slow computing`;
    if (row.slowed_seconds > 0) parts.push(slowing);
    if (parts.length === 0) return "Computing hides all messages.";
    return `Messages are ${ofAll(messagesShare(row))} of it: ${parts.join(", and ")}.`;
  }

  /**
   * Return what limits the step, which agrees with `sentence`; and where the messages' time goes.
   *
   * @param {object} terms of Timeline.terms for the focus: seconds by what they are spent on
   * @returns {{limit: string, detail: string}}
   */
  function limits(data, state, row, terms) {
    const sum = Object.values(terms).reduce((total, seconds) => total + seconds, 0);
    if (sum <= 0) {
      const isAlone = row.nodes * state.ranks_per_node === 1;
      const why = isAlone ? "one rank sends no gradients" : "no gradients are averaged";
      return { limit: `Computing takes all of this step: ${why}.`, detail: "" };
    }
    const { period } = data.strategies.find((entry) => entry.name === state.focus).plan;
    const messages = period > 1 ? `All messages of ${period} steps` : "All messages";
    const term = best(Object.keys(terms), (name) => terms[name]);
    const inside = term === "bandwidth" && state.ranks_per_node > 1 ? ", between nodes and inside" : "";
    const isSaid = duration(sum) === duration(row.sync_seconds);
    const all = isSaid ? "Of their time" : `${messages} take ${duration(sum)}; of that`;
    const detail = `${all} ${ofAll(terms[term] / sum)} is for ${data.terms[term]}${inside}.`;
    return { limit: `${data.limits[limiter(data, state, row, terms)]}. ${added(row)}`, detail };
  }

  /** Return how wrong the predictions of such clusters were, as sentences; "" if not known. */
  function error(data, state) {
    const family = data.families.find((entry) => entry.backend === state.backend);
    if (state.costs === "calibrated" || family === undefined) return "";
    return (
      `For ${family.label}, predictions of other people's clusters were off by ` +
      `${rounded(100 * family.median, 1)} % (median of ${family.rows} measured steps; nine in ten ` +
      `by less than ${rounded(100 * family.p90, 0)} %).${unchecked(data, state)}`
    );
  }

  /** Return what the published steps of the backend are of, if the state is not; else "". */
  function unchecked(data, state) {
    const sets = data.measured.filter((set) => set.is_published && set.family === state.backend);
    const steps = sets.flatMap(({ points, state: { ranks_per_node: ranks } }) =>
      points.map(({ nodes, strategy }) => ({ nodes, strategy, ranks: nodes * ranks })));
    const fewest = Math.min(...steps.map((step) => step.nodes));
    const most = Math.max(...steps.map((step) => step.nodes));
    const mostRanks = Math.max(...steps.map((step) => step.ranks));
    const strategies = [...new Set(steps.map((step) => step.strategy))];
    const isFar = state.nodes < fewest || state.nodes > most;
    const isLarge = state.nodes * state.ranks_per_node > mostRanks;
    if (!isFar && !isLarge && strategies.includes(state.focus)) return "";
    return (
      ` None of these steps is like yours: they are of ${fewest} to ${grouped(most)} nodes, at ` +
      `most ${grouped(mostRanks)} ranks, and ${strategies.join(", ")}.`
    );
  }

  /** Return the batch that is predicted: "256 samples, 64 a node". */
  function batch(data, state) {
    const ranks = state.nodes * state.ranks_per_node;
    if (ranks === 1) return counted(state.batch_size, "sample");
    if (state.scaling === "weak") {
      return `${counted(state.batch_size, "sample")} a rank, ${grouped(samplesOf(data, state))} in all`;
    }
    const all = samplesOf(data, state);
    const owner = state.ranks_per_node === 1 ? "node" : "rank";
    const most = all % ranks === 0 ? "" : "up to ";
    return `${counted(all, "sample")}, ${most}${grouped(Math.ceil(all / ranks))} a ${owner}`;
  }

  /** Return the samples of all ranks in a step. */
  function samplesOf(data, state) {
    const ranks = state.nodes * state.ranks_per_node;
    if (state.scaling === "weak") return ranks * state.batch_size;
    return Math.max(state.batch_size, ranks * Engine.leastSamples(data, state));
  }

  /** Return the settings in words: a line for the page, for paper and for saved pictures. */
  function about(data, state) {
    let model = state.model === "own" ? `${grouped(state.parameters)} parameters` : state.model;
    if (isExample(data, state)) model += " (an example step)";
    const ranks = state.ranks_per_node === 1 ? "" : ` of ${state.ranks_per_node} ranks`;
    const software = state.costs === "calibrated" ? "costs as calibrated" : softwareOf(data, state);
    return (
      `${model} on ${counted(state.nodes, "node")}${ranks}, ${software} at ` +
      `${state.rate_gbit} Gbit/s, ${batch(data, state)}`
    );
  }

  const exampleOf = (data, state) => data.examples[state.model] ?? data.examples.own;

  /** Whether the step is the model's example, and not of the reader. */
  function isExample(data, state) {
    const { step_ms: milliseconds, batch } = exampleOf(data, state);
    return state.step_ms === milliseconds && state.batch === batch;
  }

  /** Return whose step time it is, for its control. */
  function stepSource(data, state) {
    if (!isExample(data, state)) return "Measured on one rank alone. Empty: as calibrated.";
    return `Only an example: ${exampleOf(data, state).about}. Type that of your own rank alone.`;
  }

  // -- two states, and targets ------------------------------------------------------------------

  /** Return what differs between two states: "10 to 25 Gbit/s, 4 to 8 nodes"; "" if nothing. */
  function changes(data, first, second) {
    const valueOf = (state, name) => {
      const value = state[name] ?? data.fields[name].empty;
      return value.toLocaleString("en-US");
    };
    const differing = State.settingsOf(data, second).filter((name) => first[name] !== second[name]);
    const parts = differing.map((name) =>
      `${valueOf(first, name)} to ${valueOf(second, name)} ${data.fields[name].unit}`.trim());
    return parts.join(", ");
  }

  /** Return how the steps of two states compare, as a sentence. */
  function comparison(data, kept, state) {
    const differing = changes(data, kept, state);
    if (differing === "") return "Kept. Change a control: both are drawn and compared.";
    const [before, after] = [kept, state].map((each) => Engine.step(data, each, each.focus).step_seconds);
    const { value, range: shares } = Engine.ratio(data, kept, state);
    const samples = samplesOf(data, state) / samplesOf(data, kept);
    const what = samples === 1 ? "times as fast" : "times the samples a second";
    const found = `${differing}: ${range(before, after, " to ", after)} a step, ${times(samples * value)} ${what}`;
    if (shares === null) return `${found}.`;
    const [low, high] = shares.map((share) => samples * share);
    const open = low < 1 && high > 1 ? "; which is faster is open" : "";
    return `${found} (80 %: ${times(low)} to ${times(high)})${open}.`;
  }

  /** Return on which nodes the focus reaches the reader's targets, as sentences; "" without one. */
  function targets(data, state) {
    const { least_efficiency: least, most_step_ms: most } = state;
    const sentences = [];
    if (least !== null) sentences.push(efficiencyTarget(Engine.triedPoints(data, state), least));
    if (most !== null) sentences.push(stepTarget(Engine.triedPoints(data, state), 1e-3 * most));
    return sentences.join(" ");
  }

  function efficiencyTarget(points, least) {
    const found = points.findLast((point) => 100 * point.efficiency >= least);
    const target = `an efficiency of ${three(least)} %`;
    if (found === undefined) return `No number of nodes reaches ${target}.`;
    const nodes = counted(found.nodes, "node");
    if (found === points.at(-1)) return `${nodes}, the most that are tried, still have ${target}.`;
    return `No more than ${nodes} can have ${target}.`;
  }

  function stepTarget(points, seconds) {
    const first = points.findIndex((point) => point.step_seconds <= seconds);
    const fastest = best(points, (point) => -point.step_seconds);
    if (first < 0) {
      return (
        `No number of nodes has a step of ${duration(seconds)}: the fastest takes ` +
        `${duration(fastest.step_seconds)}, on ${counted(fastest.nodes, "node")}.`
      );
    }
    const last = points.findLastIndex((point) => point.step_seconds <= seconds);
    const between = points.slice(first, last + 1);
    const some = between.every((point) => point.step_seconds <= seconds) ? "" : "some of ";
    const from = first === last ? "" : `${grouped(points[first].nodes)} to `;
    return `A step takes at most ${duration(seconds)} on ${some}${from}${counted(points[last].nodes, "node")}.`;
  }

  return {
    duration, bytes, range, times, percent, efficiency, counted, grouped, three,
    sentence, sentenceOf, softwareLimit, limits, error, batch, about, bestPurchases,
    softwareRange, exampleOf, stepSource, comparison, targets,
  };
})();
