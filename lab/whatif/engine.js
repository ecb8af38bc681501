"use strict";

/**
 * The formulas of `lab predict`, for one state of the page. Every constant comes with the page's
 * data, every operation from Plans; seconds, bytes and bits throughout. Touches no DOM.
 *
 * Read downward: stages of an operation, its seconds on a network (event_model.py), the costs of a
 * network (cluster.py, scenario.py, calibrated_draws.py), a rank's computing (compute_model.py),
 * both together (event_model.py), and what a reader sees (tables.py).
 */
const Engine = (() => {
  // Stages of an operation ------------------------------------------------------------------------

  const stage = (share, between, inside, onLink, onRank, headerBytes = 0) => ({
    share, // of the operation's bytes in each message
    between, // messages of the longest chain that go to another node
    inside, // and that stay inside one
    onLink, // messages on the busiest node's link, in one direction
    onRank, // messages between the busiest rank and the others of its node
    headerBytes, // of each message on a link but the first
  });

  const BETWEEN_NODES = stage(1, 1, 0, 1, 0); // an exchange of ranks with a link each

  /** Each message goes on to the next rank `hops` times. */
  const ring = (hops, share, ranks, perNode) => {
    const nodes = Math.ceil(ranks / perNode);
    const between = nodes > 1 ? Math.ceil((hops * nodes) / ranks) : 0;
    const onLink = nodes > 1 ? hops : 0;
    const onRank = perNode > 1 ? hops : 0;
    return stage(share, between, hops - between, onLink, onRank);
  };

  /** A binomial tree: in each round, ranks send to one that is as far away. */
  const tree = (ranks, perNode) => {
    let crossing = 0;
    let beside = 0;
    let rounds = 0;
    for (let distance = 1; distance < ranks; distance *= 2) {
      const end = Math.min(ranks - distance, 2 * distance * perNode);
      for (let sender = 0; sender < end; sender += 2 * distance) {
        if ((sender % perNode) + distance >= perNode) {
          crossing += 1;
          break;
        }
      }
      if (distance < perNode) beside += 1;
      rounds += 1;
    }
    return stage(1, crossing, rounds - crossing, crossing, beside);
  };

  /** An exchange of each rank with its partner; a few nodes stand for all. */
  const exchange = (partner, ranks, perNode) => {
    if (perNode === 1) return BETWEEN_NODES;
    const partnerOf = partner || ((rank) => (rank + 1) % ranks);
    const nodes = Math.ceil(ranks / perNode);
    let leaving = 0;
    let staying = 0;
    for (const node of [0, Math.floor(nodes / 2), Math.max(0, nodes - 2), nodes - 1]) {
      const begin = node * perNode;
      const end = Math.min(ranks, begin + perNode);
      let others = 0;
      for (let rank = begin; rank < end; rank += 1) {
        const other = partnerOf(rank);
        if (other === null) continue;
        if (other >= begin && other < end) staying = 1;
        else others += 1;
      }
      leaving = Math.max(leaving, others);
    }
    if (leaving) return stage(1, 1, 0, leaving, staying);
    return stage(1, 0, 1, 0, staying);
  };

  /** Return the stages of an operation of N ranks in order, K of them on each node. */
  const stagesOf = (data, operation, ranks, perNode) => {
    const { kind } = operation;
    if (kind === "exchange") return [exchange(operation.partner, ranks, perNode)];
    if (kind === "all_reduce") return [ring(2 * (ranks - 1), 1 / ranks, ranks, perNode)];
    if (kind === "reduce_scatter") return [ring(ranks - 1, 1 / ranks, ranks, perNode)];
    if (kind === "all_gather") return [ring(ranks - 1, 1, ranks, perNode)];
    if (kind === "broadcast") return [tree(ranks, perNode)];
    const elsewhere = Math.max(0, ranks - perNode);
    const beside = Math.min(ranks, perNode) - 1;
    const inside = elsewhere ? 0 : Math.min(1, beside);
    const toRoot = stage(1, Math.min(1, elsewhere), inside, elsewhere, beside);
    if (kind === "reduce") {
      return [ring(ranks - 1, 1 / ranks, ranks, perNode), { ...toRoot, share: 1 / ranks }];
    }
    return [{ ...toRoot, headerBytes: data.constants.packet_bytes }]; // gather and scatter
  };

  // Seconds of an operation on a network ------------------------------------------------------------

  const SUMMING = ["all_reduce", "reduce", "reduce_scatter"];
  const ROOTED = ["gather", "scatter"];

  /** Return an operation with what it loads: all that does not depend on the network's costs. */
  const lineOf = (data, operation, ranks, perNode) => {
    if (operation.among === "node") return loaded(data, operation, Math.min(ranks, perNode), perNode);
    if (operation.among === "leaders") return loaded(data, operation, Math.ceil(ranks / perNode), 1);
    return loaded(data, operation, ranks, perNode);
  };

  const loaded = (data, operation, ranks, perNode) => {
    const { kind, nbytes, count, copied, compressor, compressed } = operation;
    const stages = stagesOf(data, operation, ranks, perNode).map((found) => ({
      ...found,
      bytes: found.share * nbytes,
      linkBytes:
        found.onLink * found.share * nbytes + Math.max(0, found.onLink - 1) * found.headerBytes,
    }));
    const ringAdds = SUMMING.includes(kind) ? ((ranks - 1) / ranks) * nbytes : 0;
    return {
      operation, kind, count, stages, copied, compressor, compressed, ranks, perNode,
      starts: 1,
      added: ringAdds + operation.summed,
      sharesLink: perNode > 1,
      leavesNode: ranks > perNode,
      byRoot: ROOTED.includes(kind),
    };
  };

  /** Return the seconds of a stage's latencies, and those in which its bytes pass. */
  const stageSeconds = (found, between, inside) => {
    const onLink = found.linkBytes * between.beta;
    let alphas = found.between * between.alpha;
    if (!found.onRank) return { alphas, passing: onLink };
    // The longest of its messages in a row, of a busy link, and of a busy rank.
    alphas += found.inside * inside.alpha;
    let passing = (found.between * between.beta + found.inside * inside.beta) * found.bytes;
    if (found.between && between.alpha + onLink > alphas + passing) {
      alphas = between.alpha;
      passing = onLink;
    }
    const atRank = found.onRank * found.bytes * inside.beta;
    if (inside.alpha + atRank > alphas + passing) {
      alphas = inside.alpha;
      passing = atRank;
    }
    return { alphas, passing };
  };

  /** NCCL's double binary tree over nodes; inside a node its ranks are a chain. */
  const doubleTree = (line, network) => {
    const { ranks, perNode } = line;
    const { nbytes } = line.operation;
    const between = rateOf(network, "all_reduce");
    const nodes = Math.ceil(ranks / perNode);
    const alphas = 2 * Math.ceil(Math.log2(nodes)) * between.alpha;
    const passing = (((2 * (nodes - 1)) / nodes) * nbytes * between.beta) / network.treeShare;
    if (perNode === 1) return { alphas, passing };
    const inside = rateOf(network.inside, "all_reduce");
    return {
      alphas: alphas + 2 * (perNode - 1) * inside.alpha,
      passing: Math.max(passing, 2 * nbytes * inside.beta),
    };
  };

  const rateOf = (network, kind) => network.kinds[kind] || network.rate;

  /** Return what an operation's seconds are spent on; see event_model.operation_terms. */
  const lineTerms = (line, network) => {
    const { count } = line;
    const between = rateOf(network, line.kind);
    const inside = line.sharesLink ? rateOf(network.inside, line.kind) : between;
    const whole = line.sharesLink && !line.leavesNode ? inside : between;
    let alphas = 0;
    let passing = 0;
    for (const found of line.stages) {
      const seconds = stageSeconds(found, between, inside);
      alphas += seconds.alphas;
      passing += seconds.passing;
    }
    if (line.kind === "all_reduce" && line.leavesNode && network.treeShare) {
      const tree = doubleTree(line, network);
      if (tree.alphas + tree.passing < alphas + passing) ({ alphas, passing } = tree);
    }
    const latency = line.starts * whole.start + alphas;
    return {
      latency: count * Math.max(latency, whole.floor - passing),
      passing: count * passing,
      summation: count * (line.added * network.gamma + line.copied * network.copy),
      compression: count * line.compressed * (network.compress[line.compressor] ?? 0),
    };
  };

  const lineSeconds = (line, network) => {
    const terms = lineTerms(line, network);
    return terms.latency + terms.passing + terms.summation + terms.compression;
  };

  /** Return the share of a message's time by which it delays a concurrent backward. */
  const delayShare = (data, line, network) => {
    if (!network.software) return network.overlap;
    // What a link takes longer than the software does, a message waits without working.
    const busy = lineSeconds(line.inSoftware, network.software);
    return (network.overlap * busy) / Math.max(line.seconds, data.constants.near_zero);
  };

  // Costs of a network ------------------------------------------------------------------------------

  const rate = (alpha, beta, floor = 0, start = 0) => ({ alpha, beta, floor, start });

  const typicalLatency = (data, rateBits) =>
    data.constants.latencies.find((step) => rateBits <= step.most_bits).seconds;

  /** Return the value of a prior at z; `most`: of a share, 1. */
  const priorAt = (data, prior, z) => {
    const upward = (prior.high / prior.typical) ** (Math.max(z, 0) / data.constants.high_z);
    const downward = (prior.low / prior.typical) ** (Math.max(-z, 0) / data.constants.high_z);
    return Math.min(prior.most, prior.typical * upward * downward);
  };

  /** Return the normal value of a row in one draw; 0 for the typical value, draw null. */
  const normalAt = (data, row, draw) =>
    draw === null ? 0 : data.draws.values[data.draws.orders[row][draw]];

  /**
   * Return the priors of a state's backend and transport, each with its row of draws. Of two with
   * one name, that of the more special section, which stands below.
   */
  const priorsOf = (data, state) => {
    const special = `${state.backend}-${state.transport}-`;
    const found = data.priors
      .map((prior, row) => ({ prior, row, path: prior.name.split(".") }))
      .filter(({ path }) => path[0] === "any" || special.startsWith(`${path[0]}-`));
    return [...new Map(found.map((entry) => [entry.path[1], entry])).values()];
  };

  /** Return how many adapters a node's software serves; see cluster.TypicalCluster.of. */
  const adaptersOf = (data, state) => {
    if (state.adapters !== null) return state.adapters;
    if (state.transport !== "rdma-host") return 1;
    return Math.max(1, roundEven((1e9 * state.rate_gbit) / data.constants.bits_of_adapter));
  };

  /** Return the Gbit/s that a node's software passes as {low, typical, high}; null: all that come. */
  const softwareGbit = (data, state) => {
    const given = state.software_gbit;
    if (given !== null) return { low: given, typical: given, high: given };
    const most = priorsOf(data, state).find(({ path }) => path[1] === "most_gbit");
    if (most === undefined) return null;
    const adapters = adaptersOf(data, state);
    const { low, typical, high } = most.prior;
    return { low: adapters * low, typical: adapters * typical, high: adapters * high };
  };

  /** Return the values of priors.toml by name: typical ones, or those of one draw. */
  const clusterValues = (data, known, draw) => {
    const values = { call_us: 0, sum_gbytes: Infinity, most_gbit: Infinity, tree_share: 0 };
    for (const { prior, row, path } of known) {
      values[path[1]] = priorAt(data, prior, normalAt(data, row, draw));
    }
    return { root_call_us: values.call_us, inside_us: values.message_us, ...values };
  };

  /** Return the seconds of compressing a byte, by compressor. */
  const compressSeconds = (values) => ({
    search: 1e-9 / values.search_gbytes,
    project: 1e-9 / values.project_gbytes,
    cast: 1e-9 / values.cast_gbytes,
  });

  const latencySeconds = (data, state, rateBits) => {
    if (state.latency_us !== null) return 1e-6 * state.latency_us;
    const overRdma = state.costs === "typical" && state.transport.startsWith("rdma");
    return overRdma ? data.constants.rdma_latency : typicalLatency(data, rateBits);
  };

  /** Return the costs of a typical cluster: its network, one twice as fast, and its values. */
  const typicalCosts = (data, state, known, draw) => {
    const values = clusterValues(data, known, draw);
    const insideGbit = state.inside_gbit === null ? values.inside_gbit : state.inside_gbit;
    const inSoftware = 1e-6 * values.message_us;
    const alpha = latencySeconds(data, state, 1e9 * state.rate_gbit) + inSoftware;
    const mostGbit = state.software_gbit ?? adaptersOf(data, state) * values.most_gbit;
    const over = (gbit) => {
      const beta = 8e-9 / Math.min(values.line_share * gbit, mostGbit);
      const byRoot = rate(alpha, beta, 0, 1e-6 * values.root_call_us);
      return {
        rate: rate(alpha, beta, 0, 1e-6 * values.call_us),
        kinds: { gather: byRoot, scatter: byRoot },
        gamma: 1e-9 / values.sum_gbytes,
        copy: 0,
        overlap: values.overlap_cost,
        treeShare: values.tree_share,
        compress: compressSeconds(values),
        inside: { rate: rate(1e-6 * values.inside_us, 8e-9 / insideGbit), kinds: {} },
        software: null,
      };
    };
    const remainder = draw === null ? 1 : values.unexplained;
    const [network, faster] = [over(state.rate_gbit), over(2 * state.rate_gbit)];
    return { network, faster, values, remainder };
  };

  const changedRates = (network, change) => {
    const kinds = {};
    for (const [kind, known] of Object.entries(network.kinds)) kinds[kind] = change(known);
    return { ...network, rate: change(network.rate), kinds };
  };

  const withLatencyUpTo = (network, most) =>
    changedRates(network, (known) => ({ ...known, alpha: Math.min(most, known.alpha) }));

  const withBetaFrom = (network, least) =>
    changedRates(network, (known) => ({ ...known, beta: Math.max(least, known.beta) }));

  const linkBeta = (data, rateBits) => (8 * data.constants.headers) / rateBits;

  /** Return the calibrated network itself, or one draw of it: slow, or fast, for all kinds. */
  const calibratedNetwork = (data, known, draw) => {
    const { network, spreads } = data.calibration;
    const kinds = {};
    for (const [kind, known] of Object.entries(network.kinds)) {
      const [alphaSpread, betaSpread] = spreads[kind];
      kinds[kind] = rate(
        Math.max(0, known.alpha_seconds + alphaSpread * normalAt(data, 0, draw)),
        Math.max(0, known.beta_seconds_per_byte + betaSpread * normalAt(data, 1, draw)),
        known.floor_seconds,
        known.start_seconds,
      );
    }
    return {
      rate: rate(network.alpha_seconds, network.beta_seconds_per_byte),
      kinds,
      gamma: network.gamma_seconds_per_byte,
      copy: network.copy_seconds_per_byte,
      overlap: network.overlap_cost,
      compress: { ...compressSeconds(clusterValues(data, known, draw)), ...network.compress_seconds },
      inside: null,
      software: null,
    };
  };

  /** Return what messages inside a node cost: as calibrated over loopback, else a typical link. */
  const calibratedInside = (data, state, measured, latency) => {
    const { calibration, constants } = data;
    const insideBits = state.inside_gbit === null ? null : 1e9 * state.inside_gbit;
    if (calibration.ranks === calibration.ranks_here) {
      if (insideBits === null) return withLatencyUpTo(measured, latency);
      return withLatencyUpTo(withBetaFrom(measured, linkBeta(data, insideBits)), latency);
    }
    const bits = insideBits === null ? constants.typical_inside_bits : insideBits;
    const link = rate(typicalLatency(data, bits), linkBeta(data, bits));
    return withLatencyUpTo({ ...measured, rate: link, kinds: {} }, latency);
  };

  /** Return the costs of links that the calibrated software uses. */
  const calibratedCosts = (data, state, known, draw) => {
    const measured = calibratedNetwork(data, known, draw);
    const rateBits = 1e9 * state.rate_gbit;
    const latency = latencySeconds(data, state, rateBits);
    const inside = calibratedInside(data, state, measured, latency);
    const software = withLatencyUpTo(measured, 0);
    const over = (bits) => {
      const onLink = withBetaFrom(measured, linkBeta(data, bits));
      const links = changedRates(onLink, (known) => ({ ...known, alpha: latency }));
      return { ...links, inside, software };
    };
    const remainder = 1 + data.constants.remainder * normalAt(data, 2, draw);
    return { network: over(rateBits), faster: over(2 * rateBits), values: null, remainder };
  };

  // The state's model and its computing -------------------------------------------------------------

  /** Round half to even, as Python does. */
  const roundEven = (value) => {
    const rounded = Math.round(value);
    return rounded - value === 0.5 ? 2 * Math.round(value / 2) : rounded;
  };

  /** Return the gradients of a model of which only the size is known, in equal matrices. */
  const equalMatrices = (parameters, most) => {
    const tensors = Math.min(most, parameters);
    const ofATensor = parameters / tensors;
    const rows = Math.max(1, roundEven(Math.sqrt(ofATensor)));
    const columns = Math.max(1, roundEven(ofATensor / rows));
    return [[tensors, [rows, columns], 4]];
  };

  const modelOf = (data, state) => {
    if (state.model !== "own") return data.models.find((known) => known.name === state.model);
    const gradients = equalMatrices(state.parameters, data.constants.tensors);
    const { update_bytes } = data.constants;
    return { gradients, ready_bytes: null, ready_shares: null, least_samples: 1, update_bytes };
  };

  /** Return the fewest samples of a rank's step: BatchNorm needs two. */
  const leastSamples = (data, state) => {
    const least = modelOf(data, state).least_samples;
    return state.step_ms === null ? least : Math.min(least, state.batch);
  };

  /** Return the gradients in the order of the parameters, with entries of `itemsize` bytes. */
  const gradientsOf = (model, itemsize) => {
    const found = [];
    for (const [count, shape, ownItemsize] of model.gradients) {
      const size = itemsize || ownItemsize;
      const entries = shape.reduce((product, length) => product * length, 1);
      const gradient = { shape, itemsize: size, entries, nbytes: entries * size };
      for (let copy = 0; copy < count; copy += 1) found.push(gradient);
    }
    return found;
  };

  /** Return how many bytes backward has made after each gradient, and its share of backward. */
  const readinessOf = (model, gradients) => {
    const asGiven = gradientsOf(model, null);
    let made = 0;
    const inTurn = asGiven.map((_, index) => (made += asGiven[asGiven.length - 1 - index].nbytes));
    const bytes = model.ready_bytes || inTurn;
    const shares = model.ready_shares || inTurn.map((nbytes) => nbytes / made);
    const before = BigInt(made); // products may have more than 53 bits
    const after = BigInt(gradients.reduce((sum, gradient) => sum + gradient.nbytes, 0));
    return { bytes: bytes.map((nbytes) => Number((BigInt(nbytes) * after) / before)), shares };
  };

  /** Return the first index whose value is at least `value`; values do not fall. */
  const bisectLeft = (values, value) => {
    let first = 0;
    let end = values.length;
    while (first < end) {
      const middle = (first + end) >> 1;
      if (values[middle] < value) first = middle + 1;
      else end = middle;
    }
    return first;
  };

  const readyShare = (readiness, nbytes) => {
    const index = bisectLeft(readiness.bytes, nbytes);
    return index === readiness.shares.length ? 1 : readiness.shares[index];
  };

  const neededShare = (readiness, nbytes) => {
    if (!readiness.bytes.length) return 0;
    const last = readiness.bytes[readiness.bytes.length - 1];
    return 1 - readiness.shares[bisectLeft(readiness.bytes, last - nbytes)];
  };

  /** Return the seconds of a rank with `samples` samples, one of `ranksHere` on its machine. */
  const computeAt = (profiles, samples, ranksHere) => {
    const above = profiles.filter((profile) => profile.ranks <= ranksHere).length;
    const low = profiles[Math.max(0, above - 1)];
    const high = profiles[Math.min(above, profiles.length - 1)];
    let share = 0; // 0 at low, 1 at high
    if (low.ranks < ranksHere && ranksHere < high.ranks) {
      share = Math.log(ranksHere / low.ranks) / Math.log(high.ranks / low.ranks);
    }
    const crowding = Math.max(1, ranksHere / profiles[profiles.length - 1].ranks);
    const fixed = (name) => crowding * (low[name] + share * (high[name] - low[name]));
    const shared = (name) =>
      ranksHere * (((1 - share) * low[name]) / low.ranks + (share * high[name]) / high.ranks);
    return {
      before: fixed("before_fixed_seconds") + samples * shared("before_sample_seconds"),
      backward: fixed("backward_fixed_seconds") + samples * shared("backward_sample_seconds"),
      update: shared("update_seconds"),
    };
  };

  const wholeStep = (compute) => compute.before + compute.backward + compute.update;

  /** Return the profile of a reader's own rank, whose step divides as the calibrated one does. */
  const ownProfiles = (data, state) => {
    const large = computeAt(data.calibration.profiles, data.constants.large_step, 1);
    const factor = (1e-3 * state.step_ms) / wholeStep(large);
    return [
      {
        ranks: 1,
        before_fixed_seconds: 0,
        before_sample_seconds: (factor * large.before) / state.batch,
        backward_fixed_seconds: 0,
        backward_sample_seconds: (factor * large.backward) / state.batch,
        update_seconds: factor * large.update,
      },
    ];
  };

  const times = ({ before, backward, update }, factor) => (
    { before: factor * before, backward: factor * backward, update: factor * update });

  // A setting: all of a state but the number of nodes and what is drawn -----------------------------

  // The cluster, and what of a state decides what is sent.
  const OF_MESSAGES = [
    "model", "parameters", "gradient_type", "costs", "backend", "transport", "ranks_per_node",
  ];
  const OF_SETTING = [
    ...OF_MESSAGES, "adapters", "software_gbit", "rate_gbit", "inside_gbit", "latency_us", "step_ms",
    "batch", "scaling", "batch_size", "bucket_mb",
  ];
  const KEPT = 4; // a slider of nodes changes no setting, and one of the rate no messages

  const settings = new Map();
  const messages = new Map();

  /** Return the value of a key, made once. */
  const remembered = (values, key, make) => {
    if (!values.has(key)) values.set(key, make());
    return values.get(key);
  };

  /** Return what was made of these values of a state, while they are among the last. */
  const kept = (values, data, state, names, make) => {
    const key = JSON.stringify(names.map((name) => state[name]));
    if (values.has(key) && values.get(key).data !== data) values.delete(key);
    if (!values.has(key) && values.size >= KEPT) values.delete(values.keys().next().value);
    return remembered(values, key, make);
  };

  const settingOf = (data, state) =>
    kept(settings, data, state, OF_SETTING, () => newSetting(data, state));

  const newSetting = (data, state) => {
    const costsAt = state.costs === "calibrated" ? calibratedCosts : typicalCosts;
    // Calibrations do not measure compression: it costs what it does on CPUs with Gloo.
    const onCpus = { backend: "gloo", transport: "tcp-vm" };
    const known = priorsOf(data, state.costs === "calibrated" ? onCpus : state);
    const drawn = () => data.draws.values.map((_, draw) => costsAt(data, state, known, draw));
    const made = new Map();
    const ownNodes = state.step_ms !== null;
    return {
      ...kept(messages, data, state, OF_MESSAGES, () => newMessages(data, state)),
      state: { ...state },
      ownNodes,
      profiles: ownNodes ? ownProfiles(data, state) : data.calibration.profiles,
      leastSamples: leastSamples(data, state),
      costs: costsAt(data, state, known, null),
      drawn: () => remembered(made, "draws", drawn),
      profiled: new Map(),
      steps: new Map(),
    };
  };

  /** Return the gradients of a state, and room for the schedules of its messages. */
  const newMessages = (data, state) => {
    const model = modelOf(data, state);
    const gradients = gradientsOf(model, data.constants.gradient_bytes[state.gradient_type]);
    const entries = gradients.reduce((sum, gradient) => sum + gradient.entries, 0);
    return {
      data,
      gradients,
      readiness: readinessOf(model, gradients),
      updateBytes: model.update_bytes * entries,
      schedules: new Map(),
    };
  };

  /** Return what a rank computes in a step, by the profiles alone, and its samples. */
  const profiledAt = (setting, nodes) =>
    remembered(setting.profiled, nodes, () => newProfiled(setting, nodes));

  const newProfiled = (setting, nodes) => {
    const { state, ownNodes, profiles } = setting;
    const ranks = nodes * state.ranks_per_node;
    const divisor = state.scaling === "strong" ? ranks : 1;
    const samples = Math.max(setting.leastSamples, Math.ceil(state.batch_size / divisor));
    const ranksHere = ownNodes ? 1 : Math.min(ranks, state.ranks_per_node);
    return { samples, compute: computeAt(profiles, samples, ranksHere) };
  };

  /** Return the reader's own step at a rank's samples; its update takes as long as its bytes. */
  const ownCompute = (setting, values, profiled) => {
    const { data, state, updateBytes } = setting;
    const loss = state.ranks_per_node > 1 ? 1 + values.node_loss : 1;
    const step = 1e-3 * state.step_ms;
    const byBytes = (1e-9 * updateBytes) / values.update_gbytes;
    const update = Math.min(byBytes, data.constants.most_update * step);
    const batches = profiled.samples / state.batch;
    const batchShare = values.fixed_share + (1 - values.fixed_share) * batches;
    const { before, backward } = profiled.compute;
    const factor = ((loss * step - update) * batchShare) / (before + backward);
    return { ...times(profiled.compute, factor), update };
  };

  /** Return what a state decides of what strategies send; NCCL fetches weights ahead. */
  const planOptions = (state) => {
    const byNccl = state.costs === "typical" && state.backend === "nccl";
    return [state.ranks_per_node, state.bucket_mb, byNccl];
  };

  // A strategy's messages beside computing ----------------------------------------------------------

  /**
   * Return a strategy's messages on a number of nodes: the lines that differ, and in which order
   * they go beside backward, after it, and beside the next forward.
   */
  const scheduleOf = (setting, name, nodes) => {
    const { plan } = setting.data.strategies.find((known) => known.name === name);
    const buckets = "bucket_mb" in plan.options ? setting.state.bucket_mb : "";
    const make = () => newSchedule(setting, plan, nodes);
    return remembered(setting.schedules, `${name} ${nodes} ${buckets}`, make);
  };

  const newSchedule = (setting, plan, nodes) => {
    const { state, gradients, readiness } = setting;
    const ranks = nodes * state.ranks_per_node;
    let operations = [];
    if (ranks > 1) {
      operations = Plans.operations(plan, gradients, ranks, ...planOptions(state));
    }
    const lines = new Map(); // many gradients have the same size
    const backward = [];
    const gathers = [];
    const later = [];
    for (const operation of operations) {
      const line = lineFor(setting, lines, operation, ranks);
      if (operation.needed !== null) {
        gathers.push(messageOf(line, 1 - neededShare(readiness, operation.needed)));
      } else if (operation.ready !== null) {
        backward.push(messageOf(line, readyShare(readiness, operation.ready)));
      } else {
        later.push(line);
      }
    }
    return {
      plan,
      nodes,
      ranks,
      backward,
      gathers, // in the order of the next forward, which waits for them
      forward: [...gathers].reverse(), // the same in a mirror: from the end of forward
      later, // lines that begin after backward
      laterSums: addedUp(setting, later),
      laterSeconds: 0, // on the network at hand
      beside: [...new Set([...backward, ...gathers].map(({ line }) => line))],
      updateShare: plan.shards_update ? 1 / ranks : 1,
      // Else ranks train alone, and none waits for another.
      sends: plan.groups.some((group) => group.pattern || group.lines.length),
    };
  };

  /** Return a message that may begin after a share of its pass; seconds: on the network at hand. */
  const messageOf = (line, share) => ({ line, share, seconds: 0, end: 0 });

  /** Return the line of an operation, the same for all equal ones; partners are not compared. */
  const lineFor = (setting, lines, operation, ranks) => {
    const ofThatSize = remembered(lines, operation.nbytes, () => []);
    const known = ofThatSize.find((line) => isAlike(line.operation, operation));
    if (known) return known;
    const line = {
      ...lineOf(setting.data, operation, ranks, setting.state.ranks_per_node),
      inSoftware: lineOf(setting.data, operation, ranks, 1),
      seconds: 0, delay: 0, speed: 1, // on the network at hand
    };
    ofThatSize.push(line);
    return line;
  };

  const isAlike = (first, second) =>
    first.kind === second.kind &&
    first.count === second.count &&
    first.summed === second.summed &&
    first.copied === second.copied &&
    first.compressor === second.compressor &&
    first.compressed === second.compressed &&
    first.among === second.among &&
    !first.partner &&
    !second.partner;

  /** Whether lines of a kind add up to one: no compression, shared link, floor or tree. */
  const isLinear = (network, line) => {
    const mayBeTree = line.kind === "all_reduce" && network.treeShare > 0;
    return !line.compressed && !line.sharesLink && !rateOf(network, line.kind).floor && !mayBeTree;
  };

  /**
   * Return fewer lines that take as long as these, one after the other, each with how often.
   *
   * Of linear ones, one with the sums stands for all of a kind.
   */
  const addedUp = (setting, lines) => {
    const sums = new Map();
    const alone = new Map();
    for (const line of lines) {
      if (!isLinear(setting.costs.network, line)) {
        alone.set(line, (alone.get(line) || 0) + 1);
        continue;
      }
      const sum = remembered(sums, line.kind, () => noLoad(line));
      const [load] = sum.stages;
      for (const found of line.stages) {
        load.between += line.count * found.between;
        load.linkBytes += line.count * found.linkBytes;
      }
      sum.starts += line.count * line.starts;
      sum.added += line.count * line.added;
      sum.copied += line.count * line.copied;
    }
    for (const sum of sums.values()) alone.set(sum, 1);
    return [...alone].map(([line, times]) => ({ line, times }));
  };

  const noLoad = (line) => ({
    ...line, count: 1, starts: 0, added: 0, copied: 0, compressed: 0,
    stages: [{ between: 0, linkBytes: 0, onRank: 0 }],
  });

  /**
   * Set when each message ends, if all start at once and two at a time share the link, and its
   * seconds since the end of the one before it.
   */
  const sendInPairs = (messages) => {
    let now = 0;
    let left = 0; // seconds of the message under way, if alone on the link
    let underWay = null;
    for (const message of messages) {
      const alone = message.line.seconds;
      if (alone < left) {
        now += 2 * alone;
        message.end = now;
        left -= alone;
        continue;
      }
      now += 2 * left;
      if (underWay) underWay.end = now;
      left = alone - left;
      underWay = message;
    }
    if (underWay) underWay.end = now + left;
    let before = 0;
    for (const message of messages) {
      message.end = Math.max(before, message.end); // it waits for the one before it
      message.seconds = message.end - before;
      before = message.end;
    }
  };

  /** Set what a schedule's messages take on a network, and how they slow what is beside them. */
  const price = (data, schedule, network) => {
    for (const line of schedule.beside) {
      line.seconds = lineSeconds(line, network);
      line.delay = delayShare(data, line, network);
      line.speed = Math.max(1 - line.delay, data.constants.near_zero);
    }
    for (const message of schedule.backward) message.seconds = message.line.seconds;
    sendInPairs(schedule.gathers);
    schedule.laterSeconds = 0;
    for (const { line, times } of schedule.laterSums) {
      schedule.laterSeconds += times * lineSeconds(line, network);
    }
  };

  /**
   * Let messages go one after the other beside a pass, and return how it slows down, and what is
   * left after it: see event_model.exposed_seconds.
   *
   * later : seconds of messages that begin after the pass. trace : filled, if given, with when each
   * message begins and ends, how much is computed then, and how fast beside it.
   */
  const besidePass = (messages, passSeconds, later, trace = null) => {
    let now = 0;
    let computed = 0;
    let slowed = 0;
    for (const { line, share, seconds } of messages) {
      const wait = Math.max(0, share * passSeconds - computed);
      computed += wait;
      now += wait;
      const { speed } = line;
      const beside = Math.min(seconds, (passSeconds - computed) / speed);
      const after = computed + speed * beside;
      if (trace) trace.push({ begin: now, end: now + seconds, computed, after, speed });
      slowed += line.delay * beside;
      computed = after;
      now += seconds;
    }
    if (later) now += Math.max(0, passSeconds - computed) + later;
    return { slowed, exposed: Math.max(0, now - (passSeconds + slowed)) };
  };

  /** Return the seconds of computing, by how much messages slow it, and those nothing hides. */
  const stepParts = (schedule, compute) => {
    const { period } = schedule.plan;
    const backward = besidePass(schedule.backward, compute.backward, schedule.laterSeconds);
    const forward = besidePass(schedule.forward, compute.before, 0);
    return {
      computed: compute.before + compute.backward + schedule.updateShare * compute.update,
      slowed: (forward.slowed + backward.slowed) / period,
      exposed: (forward.exposed + backward.exposed) / period,
    };
  };

  /** Return the seconds of a step on the network at hand. */
  const stepSeconds = (schedule, compute) => {
    const parts = stepParts(schedule, compute);
    return parts.computed + parts.slowed + parts.exposed;
  };

  /** Return what a rank computes in a step: that of the slowest node, if others wait for it. */
  const computeOf = (setting, schedule, costs, othersWait) => {
    const { nodes } = schedule;
    const profiled = profiledAt(setting, nodes);
    if (!costs.values) return profiled.compute;
    const alone = setting.ownNodes
      ? ownCompute(setting, costs.values, profiled)
      : profiled.compute;
    const straggling = 1 + costs.values.straggler * Math.sqrt(2 * Math.log(nodes));
    return othersWait ? times(alone, straggling) : alone;
  };

  /** Return the seconds of a step at these costs. */
  const secondsAt = (setting, schedule, costs) => {
    price(setting.data, schedule, costs.network);
    return stepSeconds(schedule, computeOf(setting, schedule, costs, schedule.sends));
  };

  const typicalSeconds = (setting, name, nodes) =>
    secondsAt(setting, scheduleOf(setting, name, nodes), setting.costs);

  /** Return the seconds of a step in each draw, without what no formula explains. */
  const drawnSeconds = (setting, name, nodes) =>
    remembered(setting.steps, `${name} ${nodes}`, () => {
      const schedule = scheduleOf(setting, name, nodes);
      return setting.drawn().map((costs) => secondsAt(setting, schedule, costs));
    });

  // What a reader sees ------------------------------------------------------------------------------

  /** Return the ends of the 80 % interval, by linear interpolation as numpy does. */
  const interval = (data, values) => {
    const sorted = Float64Array.from(values).sort();
    return data.constants.interval.map((share) => {
      const place = share * (sorted.length - 1);
      const below = Math.floor(place);
      const above = Math.min(below + 1, sorted.length - 1);
      return sorted[below] + (place - below) * (sorted[above] - sorted[below]);
    });
  };

  const doubledNodes = (data, nodes) => Math.min(2 * nodes, data.constants.largest_nodes);

  /** Return how many times as many samples a second each change brings, at these costs. */
  const gainsAt = (setting, schedule, costs, steps) => {
    const { data, state } = setting;
    const compute = computeOf(setting, schedule, costs, schedule.sends);
    price(data, schedule, costs.faster);
    const onFaster = stepSeconds(schedule, compute);
    price(data, schedule, costs.network);
    const computedTwice = stepSeconds(schedule, times(compute, 0.5));
    const more = state.scaling === "weak" ? doubledNodes(data, schedule.nodes) / schedule.nodes : 1;
    return {
      network: steps.here / onFaster,
      compute: steps.here / computedTwice,
      nodes: (more * steps.here) / steps.doubled,
      "no messages": steps.here / wholeStep(computeOf(setting, schedule, costs, true)),
    };
  };

  /** Return the share of the draws in which each purchase gains most. */
  const bestShares = (gains, purchases) => {
    const wins = purchases.map(() => 0);
    for (const gain of gains) {
      const values = purchases.map((purchase) => gain[purchase]);
      wins[values.indexOf(Math.max(...values))] += 1;
    }
    return Object.fromEntries(purchases.map((name, index) => [name, wins[index] / gains.length]));
  };

  /** Return the bytes that rank 0 sends in a step, and the mean over some of the other ranks. */
  const bytesSent = (setting, schedule) => {
    const { data, state, gradients } = setting;
    const { ranks, plan } = schedule;
    if (ranks === 1) return { root: 0, others: 0 };
    const last = data.constants.sampled_ranks - 1;
    const sampled = new Set();
    for (let index = 0; index <= last; index += 1) {
      sampled.add(1 + Math.floor(((ranks - 2) * index) / last));
    }
    const sent = Plans.sender(plan, gradients, ranks, ...planOptions(state));
    const others = [...sampled].reduce((sum, rank) => sum + sent(rank), 0);
    return { root: sent(0) / plan.period, others: others / sampled.size / plan.period };
  };

  /** Return a sentence of lab/predict/sentences.toml with its fields filled. */
  const said = (data, name, fields = {}) =>
    data.sentences[name].replace(/\{(\w+)\}/g, (_, field) => fields[field]);

  /** Return the condition under which a row holds; "" if there is none. */
  const noteOf = (setting, name, ranks) => {
    const { state, leastSamples } = setting;
    const { data } = setting;
    if (name === "none" && ranks > 1) return said(data, "no_exchange");
    if (state.scaling !== "strong" || ranks * leastSamples <= state.batch_size) return "";
    const owner = state.ranks_per_node === 1 ? "node" : "rank";
    const batch = (ranks * leastSamples).toLocaleString("en-US");
    const needed = leastSamples > 1 ? "needs_samples" : "needs_sample";
    const needs = said(data, needed, { samples: leastSamples, owner });
    return said(data, "larger_batch", { batch, needs });
  };

  /**
   * Return a strategy's step at the state, of a row of `lab predict --json` what takes little time.
   *
   * @param {Object} data of the page
   * @param {Object} state of the page (state.js)
   * @param {string} name of the strategy
   */
  const step = (data, state, name) => {
    const setting = settingOf(data, state);
    const { nodes } = state;
    const schedule = scheduleOf(setting, name, nodes);
    price(data, schedule, setting.costs.network);
    const parts = stepParts(schedule, computeOf(setting, schedule, setting.costs, schedule.sends));
    const bytes = bytesSent(setting, schedule);
    const [low, high] = stepRange(setting, name, nodes);
    return {
      sync: name,
      ranks_per_node: state.ranks_per_node,
      ...pointOf(setting, baseOf(setting, state, name), name, nodes),
      compute_seconds: parts.computed + parts.slowed,
      slowed_seconds: parts.slowed,
      sync_seconds: parts.exposed,
      bytes_sent_root: bytes.root,
      bytes_sent_others: bytes.others,
      low_seconds: low,
      high_seconds: high,
      note: noteOf(setting, name, schedule.ranks),
      caveat: schedule.ranks > 1 ? schedule.plan.caveat : "",
    };
  };

  /** Return the whole row: the step, what changes would bring, and how certain all that is. */
  const row = (data, state, name) => {
    const found = step(data, state, name);
    const setting = settingOf(data, state);
    const { nodes } = state;
    const doubled = doubledNodes(data, nodes);
    const schedule = scheduleOf(setting, name, nodes);
    const typical = { here: found.step_seconds, doubled: typicalSeconds(setting, name, doubled) };
    const drawnHere = drawnSeconds(setting, name, nodes);
    const drawnDoubled = drawnSeconds(setting, name, doubled);
    const gains = setting.drawn().map((costs, draw) =>
      gainsAt(setting, schedule, costs, { here: drawnHere[draw], doubled: drawnDoubled[draw] }),
    );
    const gainRanges = {};
    for (const change of Object.keys(gains[0])) {
      gainRanges[change] = interval(data, gains.map((gain) => gain[change]));
    }
    return {
      ...found,
      gains: gainsAt(setting, schedule, setting.costs, typical),
      speedup_range: speedupRange(setting, baseOf(setting, state, name), name, nodes),
      gain_ranges: gainRanges,
      best_shares: bestShares(gains, data.constants.purchases[state.scaling]),
    };
  };

  /**
   * Return the strategy to which a speed-up refers: of those drawn that exchange gradients, the
   * fastest on one node; of one that exchanges nothing, itself.
   */
  const baseOf = (setting, state, name) => {
    const exchanges = (strategy) => scheduleOf(setting, strategy, 1).sends;
    if (!exchanges(name)) return name;
    const secondsOf = (strategy) => typicalSeconds(setting, strategy, 1);
    const others = state.strategies.filter(exchanges);
    return others.reduce((a, b) => (secondsOf(b) < secondsOf(a) ? b : a), name);
  };

  /** Return a strategy's typical step on a number of nodes, and what it gains over the base. */
  const pointOf = (setting, base, name, nodes) => {
    const seconds = typicalSeconds(setting, name, nodes);
    const more = setting.state.scaling === "weak" ? nodes : 1;
    const speedup = (more * typicalSeconds(setting, base, 1)) / seconds;
    return { nodes, step_seconds: seconds, speedup, efficiency: speedup / nodes };
  };

  const isOneRank = ({ state }, nodes) => nodes * state.ranks_per_node === 1; // the reader's own step

  /** Return the seconds of a step in each draw, with what no formula explains. */
  const likelySeconds = (setting, name, nodes) => {
    const here = drawnSeconds(setting, name, nodes);
    if (isOneRank(setting, nodes)) return here;
    return setting.drawn().map((costs, draw) => here[draw] * costs.remainder);
  };

  const stepRange = (setting, name, nodes) => {
    const seconds = typicalSeconds(setting, name, nodes);
    if (isOneRank(setting, nodes)) return [seconds, seconds];
    return interval(setting.data, likelySeconds(setting, name, nodes));
  };

  const speedupRange = (setting, base, name, nodes) => {
    if (nodes === 1 && base === name) return [1, 1];
    const more = setting.state.scaling === "weak" ? nodes : 1;
    const alone = drawnSeconds(setting, base, 1);
    const here = likelySeconds(setting, name, nodes);
    return interval(setting.data, here.map((seconds, draw) => (more * alone[draw]) / seconds));
  };

  /**
   * Return how many times as long the focus' step takes in one state as in another, with the 80 %
   * interval; null where the costs are of two kinds, which have no draws in common.
   *
   * Both steps are of the same draws: what makes both slower leaves their ratio as it is.
   */
  const ratio = (data, state, other) => {
    const [setting, otherSetting] = [settingOf(data, state), settingOf(data, other)];
    const seconds = typicalSeconds(setting, state.focus, state.nodes);
    const value = seconds / typicalSeconds(otherSetting, other.focus, other.nodes);
    if (state.costs !== other.costs) return { value, range: null };
    const drawn = likelySeconds(setting, state.focus, state.nodes);
    const others = likelySeconds(otherSetting, other.focus, other.nodes);
    return { value, range: interval(data, drawn.map((step, draw) => step / others[draw])) };
  };

  /** Return the numbers of nodes of scaling.py, as far as the batch has samples for their ranks. */
  const triedNodes = (data, state) => {
    const { nodes_tried: tried, few_samples: few } = data.constants;
    if (state.scaling === "weak") return tried;
    const nodesFor = (samples) => state.batch_size / (samples * state.ranks_per_node);
    const limit = Math.max(1, Math.floor(nodesFor(leastSamples(data, state))));
    const jumps = Array.from({ length: few }, (_, index) => Math.ceil(nodesFor(index + 1)));
    const all = new Set([...tried, limit, ...jumps]);
    return [...all].filter((nodes) => nodes <= limit).sort((a, b) => a - b);
  };

  /** Return the points of the focus' curve on the numbers of nodes that `lab predict` tries. */
  const triedPoints = (data, state) =>
    curve(data, state, state.focus, triedNodes(data, state), { band: false });

  /**
   * Return a strategy's step on each number of nodes; `band`: with the 80 % intervals.
   *
   * @param {number[]} nodesList
   * @param {{band: boolean}} options
   */
  const curve = (data, state, name, nodesList, { band }) => {
    const setting = settingOf(data, state);
    const base = baseOf(setting, state, name);
    return nodesList.map((nodes) => {
      const point = pointOf(setting, base, name, nodes);
      if (!band) return point;
      const [lowSeconds, highSeconds] = stepRange(setting, name, nodes);
      const [slowest, fastest] = speedupRange(setting, base, name, nodes);
      return {
        ...point,
        low_seconds: lowSeconds,
        high_seconds: highSeconds,
        low_efficiency: slowest / nodes,
        high_efficiency: fastest / nodes,
      };
    });
  };

  // What timeline.js takes a step apart with.
  const parts = { settingOf, scheduleOf, price, computeOf, besidePass, stepSeconds };

  return {
    row, step, curve, ratio, triedPoints, said, priorsOf, softwareGbit, leastSamples, lineTerms,
    lineSeconds, parts,
  };
})();
