"use strict";

/**
 * What a strategy sends in a step, from its plan's lines: common/sync/plans in JavaScript.
 *
 * A plan is what common/sync/plans/as_data.py returns. `operations` lists its messages along the
 * slowest path, `sender` says how many bytes a rank sends. Nothing here touches the page.
 *
 * @typedef {{shape: number[], itemsize: number, entries: number, nbytes: number}} Gradient
 *   Bytes are those of the gradient, itemsize those of an entry.
 * @typedef {{nbytes: number, itemsize: number, entries: number, gradients: Gradient[],
 *   ready: number, needed: number}} Piece
 *   What one message carries; see common/sync/plans/pieces.py.
 * @typedef {{gradients: Gradient[], ranks: number, options: Object}} Step
 * @typedef {{kind: string, nbytes: number, count: number, summed: number, copied: number,
 *   compressor: string, compressed: number, ready: ?number, needed: ?number, among: string, partner: ?function(number): ?number}} Operation
 *   See Operation in common/sync/message_cost.py.
 */
const Plans = (() => {
  const MIB = 1024 * 1024;
  const FIRST_BUCKET_MB = 1;
  const LATER_BUCKETS_MB = 25;
  const POWERSGD_LEAST_GAIN = 2;

  const sum = (numbers) => numbers.reduce((total, number) => total + number, 0);
  const product = (numbers) => numbers.reduce((total, number) => total * number, 1);
  const bytesOf = (gradients) => sum(gradients.map((gradient) => gradient.nbytes));

  // ---- pieces ----

  /** Return a piece of these gradients. */
  function pieceOf(gradients, ready, needed) {
    const nbytes = bytesOf(gradients);
    const itemsize = gradients.length ? gradients[0].itemsize : 4;
    return { nbytes, itemsize, entries: Math.floor(nbytes / itemsize), gradients, ready, needed };
  }

  /** Return the pieces of consecutive gradients. Backward completes the last one first. */
  function inForwardOrder(parts) {
    const whole = sum(parts.map(bytesOf));
    let before = 0;
    return parts.map((part) => {
      const piece = pieceOf(part, whole - before, before);
      before += piece.nbytes;
      return piece;
    });
  }

  /** Return the gradients of each layer: one with two or more dimensions begins a layer. */
  function layersOf(gradients) {
    const layers = [];
    for (const gradient of gradients) {
      if (gradient.shape.length > 1 || layers.length === 0) layers.push([]);
      layers[layers.length - 1].push(gradient);
    }
    return layers;
  }

  /** Return one list of gradients for each itemsize. */
  function byItemsize(gradients) {
    const alike = new Map();
    for (const gradient of gradients) {
      if (!alike.has(gradient.itemsize)) alike.set(gradient.itemsize, []);
      alike.get(gradient.itemsize).push(gradient);
    }
    return [...alike.values()];
  }

  /**
   * Return the indices of each bucket's gradients, as common/sync/bucketing.py fills them: a bucket
   * closes once it reaches its limit; each itemsize has its own.
   */
  function assignBuckets(gradients, bucketMb) {
    const closed = [];
    const open = new Map();
    const laterMb = bucketMb ?? LATER_BUCKETS_MB;
    const limits = new Map();
    gradients.forEach(({ itemsize, nbytes }, index) => {
      const bucket = open.get(itemsize) ?? { indices: [], nbytes: 0 };
      open.set(itemsize, bucket);
      bucket.indices.push(index);
      bucket.nbytes += nbytes;
      const limitMb = limits.get(itemsize) ?? bucketMb ?? FIRST_BUCKET_MB;
      if (bucket.nbytes < Math.floor(limitMb * MIB)) return;
      closed.push(bucket.indices);
      open.delete(itemsize);
      limits.set(itemsize, laterMb);
    });
    const left = [...open.values()].map((bucket) => bucket.indices);
    return [...closed, ...left.sort((first, second) => first[0] - second[0])];
  }

  /** Return the indices of each bucket's gradients, in the order in which buckets are sent. */
  function bucketsInOrder(gradients, { bucket_mb: bucketMb, find_unused_parameters: asBuilt }) {
    if (asBuilt) {
      const built = assignBuckets(gradients, bucketMb);
      return built.sort((first, second) => second[0] - first[0]);
    }
    const last = gradients.length - 1;
    const filled = assignBuckets([...gradients].reverse(), bucketMb);
    return filled.map((bucket) => bucket.map((index) => last - index));
  }

  /** Return the buckets, each as one vector. They are sent in order, never earlier. */
  function buckets({ gradients, options }) {
    const whole = bytesOf(gradients);
    let ready = 0;
    return bucketsInOrder(gradients, options).map((share) => {
      const first = share.reduce((least, index) => Math.min(least, index));
      ready = Math.max(ready, bytesOf(gradients.slice(first)));
      const { itemsize } = gradients[share[0]];
      const nbytes = bytesOf(share.map((index) => gradients[index]));
      const entries = nbytes / itemsize;
      return pieceOf([{ shape: [entries], itemsize, entries, nbytes }], ready, whole - ready);
    });
  }

  const PIECES = {
    gradient: ({ gradients }) => inForwardOrder(gradients.map((gradient) => [gradient])),
    buffer: ({ gradients }) =>
      byItemsize(gradients).map((alike) => pieceOf(alike, bytesOf(gradients), 0)),
    bucket: buckets,
    layer: ({ gradients }) => inForwardOrder(layersOf(gradients)),
    model: ({ gradients }) => [pieceOf(gradients, bytesOf(gradients), 0)],
  };

  const cut = new WeakMap(); // pieces by gradients: a page asks for the same at many node counts

  /** Return the pieces into which the gradients of a step are cut, in order. */
  function piecesOf(each, step) {
    const { gradients, options } = step;
    if (!cut.has(gradients)) cut.set(gradients, new Map());
    const known = cut.get(gradients);
    const key = [each, options.bucket_mb, options.find_unused_parameters].join();
    if (!known.has(key)) known.set(key, PIECES[each](step));
    return known.get(key);
  }

  // ---- numbers and conditions ----

  /** Return the entries of PowerSGD's P and Q for a gradient, or null if it stays as it is. */
  function thinEntries(shape, rank) {
    const rows = shape.length ? shape[0] : 1;
    const columns = product(shape.slice(1));
    const width = Math.min(rows, columns, rank);
    if ((rows + columns) * width * POWERSGD_LEAST_GAIN >= rows * columns) return null;
    return [rows * width, columns * width];
  }

  /** Return the bytes of P (0) or Q (1) of all gradients that PowerSGD compresses. */
  function thinBytes(piece, step, matrix) {
    const found = piece.gradients.map(({ shape, itemsize }) => {
      const thin = thinEntries(shape, step.options.powersgd_rank);
      return thin ? thin[matrix] * itemsize : 0;
    });
    return sum(found);
  }

  /** Return the bytes of all gradients that PowerSGD does not compress. */
  function uncompressedBytes(piece, step) {
    const rank = step.options.powersgd_rank;
    return bytesOf(piece.gradients.filter(({ shape }) => thinEntries(shape, rank) === null));
  }

  /** Return the bytes of 1/N of each gradient's rows, rounded up. */
  function rowsBytes(piece, step) {
    const found = piece.gradients.map(({ shape: [rows, ...others], itemsize }) => {
      return Math.ceil(rows / step.ranks) * product(others) * itemsize;
    });
    return sum(found);
  }

  const keptEntries = (piece, step) =>
    Math.min(piece.entries, Math.ceil(step.options.topk_ratio * piece.entries));

  const VALUES = {
    size: (piece) => piece.nbytes,
    part: (piece, step) => Math.ceil(piece.entries / step.ranks) * piece.itemsize,
    rows: rowsBytes,
    uncompressed: uncompressedBytes,
    P: (piece, step) => thinBytes(piece, step, 0),
    Q: (piece, step) => thinBytes(piece, step, 1),
    itemsize: (piece) => piece.itemsize,
    entries: (piece) => piece.entries,
    "kept entries": keptEntries,
    gradients: (piece) => piece.gradients.length,
    ranks: (piece, step) => step.ranks,
    "other ranks": (piece, step) => step.ranks - 1,
    "earlier micro-batches": (piece, step) => step.options.accumulation_steps - 1,
  };

  /** Return how many ranks a full node has, as the plan's option says; without one, 1. */
  const ranksOnANode = (step) => Math.min(step.options.ranks_per_node || 1, step.ranks);

  const CONDITIONS = {
    "several ranks": (piece, step) => step.ranks > 1,
    "nodes of several ranks": (piece, step) => ranksOnANode(step) > 1,
    "several nodes of several ranks": (piece, step) =>
      ranksOnANode(step) > 1 && step.ranks > ranksOnANode(step),
    "several nodes of one rank": (piece, step) => ranksOnANode(step) === 1 && step.ranks > 1,
    "entries of 2 bytes": (piece) => piece.itemsize === 2,
    "other entries": (piece) => piece.itemsize !== 2,
    find_unused_parameters: (piece, step) => step.options.find_unused_parameters,
    "layer by layer": (piece, step) => step.ranks > 1 && !step.options.fetches_ahead,
    "fetched ahead": (piece, step) => step.ranks > 1 && step.options.fetches_ahead,
  };

  // ---- rounds of point-to-point messages: common/sync/plans/patterns.py ----

  const bitLength = (number) => 32 - Math.clz32(number);
  const largestPower = (ranks) => 2 ** (bitLength(ranks) - 1);
  const levels = (count) => Array.from({ length: count }, (_, level) => level);

  /** Return a round in which every rank adds what it receives. */
  function addingRound(nbytes, partner, count = 1) {
    const sizes = { nbytes, count, summed: nbytes, copied: 0, compressor: "", compressed: 0 };
    return { kind: "exchange", ...sizes, ready: null, needed: null, among: "all", partner };
  }

  /** Return a rank's parent or child in each round of the tree, at twice the distance each time. */
  function treeRounds(piece, ranks) {
    return levels(bitLength(ranks - 1)).map((level) => {
      const distance = 2 ** level;
      return addingRound(piece.nbytes, (rank) => {
        const partner = rank ^ distance;
        return rank % distance === 0 && partner < ranks ? partner : null;
      });
    });
  }

  /** Return how many children a rank has in a binomial tree with root 0. */
  function treeChildren(rank, ranks) {
    const lowestBit = rank === 0 ? ranks : rank & -rank;
    let children = 0;
    for (let step = 1; step < lowestBit && rank + step < ranks; step *= 2) children += 1;
    return children;
  }

  function treeSent(piece, rank, ranks) {
    const parents = rank > 0 ? 1 : 0;
    return (treeChildren(rank, ranks) + parents) * piece.nbytes;
  }

  function ringRounds(piece, ranks) {
    const longest = Math.ceil(piece.entries / ranks) * piece.itemsize;
    return [addingRound(longest, null, ranks - 1)];
  }

  /** Return the bytes of all chunks but the rank's own, and of all but the next one. */
  function ringSent(piece, rank, ranks) {
    const shortest = Math.floor(piece.entries / ranks);
    const longerOnes = piece.entries % ranks;
    const sent = [rank, (rank + 1) % ranks].map((skipped) => {
      const entries = skipped < longerOnes ? shortest + 1 : shortest;
      return (piece.entries - entries) * piece.itemsize;
    });
    return sum(sent);
  }

  function halvingRounds(piece, ranks) {
    const power = largestPower(ranks);
    const beyond = (rank) => ((rank ^ power) < ranks ? rank ^ power : null);
    const surplus = ranks > power ? [addingRound(piece.nbytes, beyond)] : [];
    const halvings = levels(bitLength(power) - 1).map((level) => {
      const part = Math.ceil(piece.entries / 2 ** (level + 1)) * piece.itemsize;
      const distance = power / 2 ** (level + 1);
      return addingRound(part, (rank) => (rank < power ? rank ^ distance : null));
    });
    return [...surplus, ...halvings];
  }

  /** Return the bytes that a rank gives in each halving, and of those it keeps in each doubling. */
  function halvingSent(piece, rank, ranks) {
    const power = largestPower(ranks);
    if (rank >= power) return piece.nbytes;
    let sent = rank + power < ranks ? piece.nbytes : 0;
    let [start, stop] = [0, piece.entries];
    for (let distance = power / 2; distance >= 1; distance /= 2) {
      sent += (stop - start) * piece.itemsize;
      const middle = Math.floor((start + stop) / 2);
      if (rank & distance) start = middle;
      else stop = middle;
    }
    return sent;
  }

  const PATTERNS = {
    tree: { rounds: treeRounds, sent: treeSent },
    ring: { rounds: ringRounds, sent: ringSent },
    halving_doubling: { rounds: halvingRounds, sent: halvingSent },
  };

  /** Return the rounds that leave the sum of a piece on every rank; none for one rank. */
  function roundsOf(pattern, piece, ranks) {
    if (ranks === 1) return [];
    const adding = PATTERNS[pattern].rounds(piece, ranks);
    const [first, ...others] = adding;
    const copying = { ...first, count: 1, copied: piece.nbytes };
    const repeated = first.count > 1 ? [{ ...first, count: first.count - 1 }] : [];
    const passingOn = [...adding].reverse().map((round) => ({ ...round, summed: 0 }));
    return [copying, ...repeated, ...others, ...passingOn];
  }

  // ---- lines ----

  /** Return a whole number times a product of named numbers. */
  function amount({ factor, of }, piece, step) {
    let found = factor;
    for (const name of of) found *= VALUES[name](piece, step);
    return found;
  }

  /** Return the bytes of gradients that backward has computed when a line may leave. */
  const readyFor = (line, pieces, index) =>
    line.ahead ? (pieces[index - 2]?.ready ?? 0) : pieces[index].ready;

  /** Return the operation of a line for a piece; null if there is none. */
  function operationOf(line, pieces, index, step) {
    const piece = pieces[index];
    if (!piece) return null;
    if (line.only_if && !CONDITIONS[line.only_if](piece, step)) return null;
    const count = amount(line.count, piece, step);
    if (count === 0) return null;
    return {
      kind: line.kind, count, among: line.among, partner: null,
      nbytes: amount(line.nbytes, piece, step),
      summed: amount(line.summed, piece, step),
      copied: amount(line.copied, piece, step),
      compressor: line.compressor,
      compressed: amount(line.compressed, piece, step),
      ready: line.when === "in backward" ? readyFor(line, pieces, index) : null,
      needed: line.when === "in forward" ? piece.needed : null,
    };
  }

  /** Return the operations of a group's lines for each piece; a line "ahead" is one piece early. */
  function groupOperations(group, step) {
    const inOrder = piecesOf(group.each, step);
    const pieces = group.reverse ? [...inOrder].reverse() : inOrder;
    if (group.pattern) return pieces.flatMap((piece) => roundsOf(group.pattern, piece, step.ranks));
    const turns = levels(pieces.length + 1);
    const found = turns.flatMap((turn) =>
      group.lines.map((line) => operationOf(line, pieces, line.ahead ? turn : turn - 1, step)),
    );
    return found.filter((operation) => operation !== null);
  }

  /** Return the step of a plan with the reader's options in place of its own. */
  function stepOf(plan, gradients, ranks, ranksPerNode, bucketMb, fetchesAhead = false) {
    const options = { ...plan.options, fetches_ahead: fetchesAhead };
    if ("ranks_per_node" in options) options.ranks_per_node = ranksPerNode;
    if ("bucket_mb" in options) options.bucket_mb = bucketMb ?? options.bucket_mb;
    return { gradients, ranks, options };
  }

  /**
   * List what `plan.period` steps send along the slowest path, in order.
   *
   * @param {Object} plan
   * @param {Gradient[]} gradients in the order of the parameters; not to be changed afterwards
   * @param {number} ranks
   * @param {number} ranksPerNode for plans that depend on it
   * @param {?number} bucketMb MiB, for plans with buckets; null: the plan's own
   * @param {boolean} fetchesAhead whether the software is NCCL
   * @returns {Operation[]}
   */
  function operations(plan, gradients, ranks, ranksPerNode, bucketMb, fetchesAhead) {
    const step = stepOf(plan, gradients, ranks, ranksPerNode, bucketMb, fetchesAhead);
    return plan.groups.flatMap((group) => groupOperations(group, step));
  }

  // ---- bytes ----

  /** Return the bytes that a rank sends in one collective: `sends_of` of message_cost.py. */
  function sentInCollective(kind, nbytes, rank, ranks) {
    const others = ranks - 1;
    const isRoot = rank === 0;
    if (kind === "all_reduce") return (2 * others * nbytes) / ranks;
    if (kind === "all_gather") return others * nbytes;
    if (kind === "reduce_scatter") return (others * nbytes) / ranks;
    if (kind === "reduce") return ((isRoot ? others : ranks) * nbytes) / ranks;
    if (kind === "gather") return isRoot ? 0 : nbytes;
    if (kind === "scatter") return isRoot ? others * nbytes : 0;
    if (kind === "broadcast") return treeChildren(rank, ranks) * nbytes;
    throw new Error(`no bytes are known of ${kind}`);
  }

  /** Return a rank's place among those that take part (null if it does not), and their number. */
  function placeAmong(among, rank, { ranks, options }) {
    const onANode = options.ranks_per_node || 1;
    if (among === "all") return [rank, ranks];
    const place = rank % onANode;
    if (among === "leaders") return [place ? null : rank / onANode, Math.ceil(ranks / onANode)];
    return [place, Math.min(onANode, ranks - (rank - place))];
  }

  /** Return the bytes of all collectives of one kind among the same ranks: each sends a share. */
  function totalsOf(collectives) {
    const totals = new Map();
    for (const { kind, among, nbytes, count } of collectives) {
      const key = `${kind} ${among}`;
      const total = totals.get(key) ?? { kind, among, nbytes: 0 };
      total.nbytes += count * nbytes;
      totals.set(key, total);
    }
    return [...totals.values()];
  }

  /**
   * Return the function that gives the bytes that a rank sends in `plan.period` steps.
   *
   * @returns {function(number): number} of the rank
   */
  function sender(plan, gradients, ranks, ranksPerNode, bucketMb, fetchesAhead) {
    const step = stepOf(plan, gradients, ranks, ranksPerNode, bucketMb, fetchesAhead);
    const rounds = plan.groups
      .filter((group) => group.pattern)
      .flatMap((group) => piecesOf(group.each, step).map((piece) => [group.pattern, piece]));
    const collectives = plan.groups
      .filter((group) => !group.pattern)
      .flatMap((group) => groupOperations(group, step));
    const totals = totalsOf(collectives);
    return (rank) => {
      const inRounds = rounds.map(([pattern, piece]) => PATTERNS[pattern].sent(piece, rank, ranks));
      const inCollectives = totals.map(({ kind, among, nbytes }) => {
        const [place, members] = placeAmong(among, rank, step);
        return place === null ? 0 : sentInCollective(kind, nbytes, place, members);
      });
      return sum(inRounds) + sum(inCollectives);
    };
  }

  const known = { VALUES, CONDITIONS, PIECES, PATTERNS }; // all that a plan may name
  return { operations, sender, known };
})();
