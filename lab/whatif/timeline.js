"use strict";

/**
 * One step of a strategy in detail: when its passes and messages begin and end, and what all
 * messages spend their time on. Computes with Engine, in seconds; touches no DOM.
 */
const Timeline = (() => {
  /** Return the moment at which so much of a pass is computed: messages slow it down. */
  const momentOf = (trace, computed) => {
    const message = trace.find(({ after }) => computed <= after) || trace[trace.length - 1];
    const ahead = computed - message.computed; // below 0: computed before the message begins
    return message.begin + (ahead > 0 ? ahead / message.speed : ahead);
  };

  const shown = ({ kind, operation, count }, times, begin, end, ready) => (
    { kind, nbytes: operation.nbytes, count: count * times, begin, end, ready });

  /** Return the messages of the forward pass: all start with the step, and end in order. */
  const besideForward = ({ gathers }) =>
    gathers.map(({ line, seconds, end }) => shown(line, 1, end - seconds, end, 0));

  /** Return the messages beside backward, which lasts from `from` to `to`. */
  const besideBackward = ({ backward }, passSeconds, trace, from, to) =>
    backward.map(({ line, share }, index) => {
      const { begin, end } = trace[index];
      // Where a message stops backward almost, rounding alone moves a moment beyond its end.
      const ready = Math.min(to, from + momentOf(trace, share * passSeconds));
      return shown(line, 1, from + begin, from + end, ready);
    });

  /** Return the messages after backward, from `begin` on; equal ones in a row are one entry. */
  const afterBackward = ({ later }, network, begin, ready) => {
    const found = [];
    let now = begin;
    for (let first = 0; first < later.length; ) {
      const line = later[first];
      let next = first + 1;
      while (later[next] === line) next += 1;
      const end = now + (next - first) * Engine.lineSeconds(line, network);
      found.push(shown(line, next - first, now, end, ready));
      now = end;
      first = next;
    }
    return found;
  };

  /** Return the parts of a message that lie in these spans. */
  const within = (message, spans) =>
    spans
      .map(([begin, end]) => [Math.max(begin, message.begin), Math.min(end, message.end)])
      .filter(([begin, end]) => begin < end);

  /** Return what a reader of the timeline must know, "" if nothing. */
  const aboutOf = ({ plan, gathers }) => {
    const sentences = [];
    if (plan.period > 1) sentences.push(`a step that sends; one of ${plan.period} steps does`);
    if (gathers.length > 1) {
      sentences.push("weights arrive two messages at a time; each is drawn from the last one's end");
    }
    return sentences.join("; ");
  };

  /**
   * Return one typical step of a strategy, in seconds from its start: the passes, the messages and
   * what of them nothing hides.
   *
   * Weights that the next forward needs are sent when a step starts; the waits of its layers stand
   * together before it. `about` : "" of any step. `mean_seconds` : the step of `Engine.row`, which
   * is shorter than `total_seconds` where only some steps send.
   *
   * @param {Object} data of the page
   * @param {Object} state of the page (state.js)
   * @param {string} name of the strategy
   */
  const timeline = (data, state, name) => {
    const { settingOf, scheduleOf, price, computeOf, besidePass, stepSeconds } = Engine.parts;
    const setting = settingOf(data, state);
    const schedule = scheduleOf(setting, name, state.nodes);
    const { network } = setting.costs;
    price(data, schedule, network);
    const compute = computeOf(setting, schedule, setting.costs, schedule.sends);
    const trace = [];
    const forward = besidePass(schedule.forward, compute.before, 0);
    const backward = besidePass(schedule.backward, compute.backward, schedule.laterSeconds, trace);
    const forwardEnd = compute.before + forward.slowed + forward.exposed;
    const backwardEnd = forwardEnd + compute.backward + backward.slowed;
    const sent = backwardEnd + backward.exposed;
    const total = sent + schedule.updateShare * compute.update;
    const exposed = [
      [0, forward.exposed],
      [backwardEnd, sent],
    ].filter(([begin, end]) => begin < end);
    const lastEnd = trace.length ? forwardEnd + trace[trace.length - 1].end : forwardEnd;
    const messages = [
      ...besideForward(schedule),
      ...besideBackward(schedule, compute.backward, trace, forwardEnd, backwardEnd),
      ...afterBackward(schedule, network, Math.max(lastEnd, backwardEnd), backwardEnd),
    ];
    const pass = (passName, begin, end) => ({ name: passName, begin, end });
    return {
      total_seconds: total,
      mean_seconds: stepSeconds(schedule, compute),
      about: aboutOf(schedule),
      passes: [
        pass("forward", forward.exposed, forwardEnd),
        pass("backward", forwardEnd, backwardEnd),
        pass("update", sent, total),
      ],
      messages: messages.map((message) => ({ ...message, exposed: within(message, exposed) })),
      exposed,
    };
  };

  /** Return the seconds of all messages of a period, hidden or not, by what they are spent on. */
  const terms = (data, state, name) => {
    const setting = Engine.parts.settingOf(data, state);
    const { backward, later, gathers } = Engine.parts.scheduleOf(setting, name, state.nodes);
    const sums = { latency: 0, bandwidth: 0, "root's link": 0, summation: 0, compression: 0 };
    const beside = [...backward, ...gathers].map(({ line }) => line);
    for (const line of [...beside, ...later]) {
      const seconds = Engine.lineTerms(line, setting.costs.network);
      sums.latency += seconds.latency;
      sums[line.byRoot ? "root's link" : "bandwidth"] += seconds.passing;
      sums.summation += seconds.summation;
      sums.compression += seconds.compression;
    }
    return sums;
  };

  return { timeline, terms };
})();
