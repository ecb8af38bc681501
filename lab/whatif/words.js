"use strict";

/**
 * Numbers and sentences for a reader, as `lab predict` prints them: `Words.sentence` is the answer
 * of lab/predict/printing.py, and the numbers are those of lab/predict/readable.py. Touches no DOM.
 */
const Words = (() => {
  const DURATIONS = [["h", 3600], ["s", 1], ["ms", 1e-3], ["µs", 1e-6], ["ns", 1e-9]];
  const BYTES = [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3], ["B", 1]];
  const MUCH = 0.5; // of a step: messages that take more limit it
  const LITTLE = 0.05; // of a step: messages that take less do not

  // What Engine.terms counts, in words.
  const TERMS = {
    latency: "starting them (latency)",
    bandwidth: "bytes on the links (bandwidth)",
    "root's link": "rank 0's link, which all bytes pass",
    summation: "adding gradients",
  };

  /** Return the digits that Python's format has, which rounds a tie to the even digit. */
  function rounded(value, digits) {
    const away = value.toFixed(digits);
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

  /** Return a range of times in one unit: "182 to 240 ms". */
  function range(low, high, between = " to ") {
    if (high <= 0) return `0${between}0 s`;
    const { digits, name, size } = scaled(high, DURATIONS);
    return `${three(low / size)}${between}${digits} ${name}`;
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

  function nameOf(change, row) {
    if (change === "network") return "a network twice as fast";
    if (change === "compute") return "processors twice as fast";
    return `${grouped(2 * row.nodes)} nodes instead of ${grouped(row.nodes)}`;
  }

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

  function gainRange(row, change) {
    const [low, high] = row.gain_ranges[change];
    return `(80 %: ${times(low)} to ${times(high)})`;
  }

  /** Return what a change does that is not the best one. */
  function effect(little, gain) {
    if (gain < 1 - little / 2) return `would make it slower (${times(gain)})`;
    if (gain < 1 + little) return `would bring almost nothing (${times(gain)})`;
    return `would bring ${times(gain)} times`;
  }

  const sentenceOf = (text) => `${text[0].toUpperCase()}${text.slice(1)}.`;

  /** Return what each purchase would bring, the best one first. */
  function purchasesText(data, state, row) {
    const { little } = data.constants;
    const gainOf = (change) => times(row.gains[change]);
    const inTurn = purchases(data, state, row).sort((a, b) => row.gains[b] - row.gains[a]);
    const [first, rival] = bestPurchases(data, state, row);
    if (rival === undefined && row.gains[first] < 1 + little) {
      const each = inTurn.map((change) => `${nameOf(change, row)} ${gainOf(change)}`);
      return `Nothing would bring much: ${each.join(", ")} times the speed.`;
    }
    let text = `${nameOf(first, row)} would bring most: ${gainOf(first)} times the speed`;
    if (rival !== undefined) {
      text =
        `what brings more is not decided: ${nameOf(first, row)} ${gainOf(first)} times the speed ` +
        `${gainRange(row, first)}, or ${nameOf(rival, row)} ${gainOf(rival)} ` +
        gainRange(row, rival);
    }
    const others = inTurn.filter((change) => change !== first && change !== rival);
    const effects = others.map((change) => `${nameOf(change, row)} ${effect(little, row.gains[change])}`);
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
    const certain = range(row.low_seconds, row.high_seconds);
    const sentences = [
      `${state.focus} on ${counted(row.nodes, "node")} takes ${duration(row.step_seconds)} a step ` +
        `(80 %: ${certain}).`,
      purchasesText(data, state, row),
      `No network can bring more than ${times(row.gains["no messages"])} times the speed.`,
    ];
    if (state.scaling === "weak" && 2 * row.nodes <= data.constants.largest_nodes) {
      sentences.push(
        `${grouped(2 * row.nodes)} nodes would train ${times(row.gains.nodes)} times the samples a ` +
          "second, in global batches twice as large.",
      );
    }
    return sentences.join(" ");
  }

  /** Return the typical value of a prior of the state's backend and transport, or undefined. */
  function typical(data, state, name) {
    const sections = [`${state.backend}-${state.transport}`, state.backend, "any"];
    const wanted = sections.map((section) => `${section}.${name}`);
    return data.priors.find((prior) => wanted.includes(prior.name))?.typical;
  }

  /** Return from which rate on the nodes' software limits the links; "" if it does not. */
  function softwareLimit(data, state) {
    if (state.costs === "calibrated") return "";
    const most = typical(data, state, "most_gbit");
    const enough = most / Math.min(1, typical(data, state, "line_share"));
    if (2 * state.rate_gbit <= enough) return "";
    const software = `${state.backend === "gloo" ? "Gloo" : "NCCL"} over ${state.transport.toUpperCase()}`;
    return (
      `Links above ${three(enough)} Gbit/s would bring nothing more, since a node's software ` +
      `passes ${rounded(most, 1)} Gbit/s at most (typical of ${software}).`
    );
  }

  /** Return the largest of the terms with its share of their sum, or null. */
  function largestTerm(terms) {
    const sum = Object.values(terms).reduce((total, seconds) => total + seconds, 0);
    if (sum <= 0) return null;
    const name = best(Object.keys(terms), (term) => terms[term]);
    return { name, share: terms[name] / sum, sum };
  }

  /**
   * Return what limits the step, as one sentence; and where the messages' time goes, as another.
   *
   * @param {object} terms of Engine.terms for the focus: seconds by what they are spent on
   * @returns {{limit: string, detail: string}}
   */
  function limits(row, terms) {
    const term = largestTerm(terms);
    if (term === null) {
      return { limit: "Computing alone takes this step's time: no gradients are sent.", detail: "" };
    }
    const added = row.sync_seconds + row.slowed_seconds;
    const share = added / row.step_seconds;
    let limit = `Computing takes most of this step; messages add ${percent(share, 0)} of it.`;
    if (share > MUCH) limit = `Messages limit this step: they add ${percent(share, 0)} of it.`;
    if (share < LITTLE) limit = `Computing limits this step: messages add ${percent(share)} of it.`;
    let detail =
      `All messages take ${duration(term.sum)}, ${percent(term.share, 0)} of that for ` +
      `${TERMS[term.name]}. ${duration(row.sync_seconds)} are exposed: nothing is computed meanwhile`;
    if (row.slowed_seconds > 0) {
      detail += `; beside messages, backward takes ${duration(row.slowed_seconds)} longer`;
    }
    return { limit, detail: `${detail}.` };
  }

  /** Return how wrong the predictions of such clusters were, as a sentence; "" if not known. */
  function error(data, state) {
    if (state.costs === "calibrated") return "";
    const family = data.families.find((entry) => entry.backend === state.backend);
    if (family === undefined) return "";
    return (
      `For ${family.label}, predictions of other people's clusters were off by ` +
      `${rounded(100 * family.median, 1)} % (median of ${family.rows} measured steps; nine in ten ` +
      `by less than ${rounded(100 * family.p90, 0)} %).`
    );
  }

  /** Return what predicts these steps, as a sentence of a table's caption or a picture. */
  function about(data, state) {
    const model = state.model === "own" ? `a model of ${grouped(state.parameters)} parameters` : state.model;
    const ranks = state.ranks_per_node === 1 ? "" : ` of ${state.ranks_per_node} ranks`;
    const owner = state.scaling === "weak" ? "a rank" : "all ranks together";
    return (
      `${model}, ${counted(state.nodes, "node")}${ranks}, ${state.rate_gbit} Gbit/s, ` +
      `${counted(state.batch_size, "sample")} for ${owner}`
    );
  }

  return {
    duration, bytes, range, times, percent, efficiency, counted, grouped, three,
    sentence, softwareLimit, limits, error, about, bestPurchases,
  };
})();
if (typeof module !== "undefined") module.exports = Words;
