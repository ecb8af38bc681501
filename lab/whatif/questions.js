"use strict";

/**
 * Guess first: a question, the reader's number, and only then the pictures, what was measured, and
 * by how much the guess was off. Answers are computed by Engine, never written down.
 *
 * Read downward: quantities, a question's answer and sentences, and the section of the page. All
 * but the section touches no DOM. Guesses live in this page alone.
 * questions.py describes a Question and what is Asked.
 *
 * @typedef {{value: number, range: ?[number, number]}} Quantity range: of 80 % of clusters
 * @typedef {{value: number, range: ?[number, number], measured: ?number}} Answer in the unit
 */
const Questions = (() => {
  const UNITS = { times: 1, s: 1, ms: 1e-3, MB: 1e6, "%": 0.01, nodes: 1, "of 100": 0.01 };
  const POINTS = ["%", "of 100"]; // of these a guess is off by points
  const NEAR_POINTS = 10;
  const NEAR = 1.5; // times
  const RULE =
    `A guess is right inside the model's 80 % band, or if it is off by less than ${NEAR} times; of ` +
    `"times as fast" the gain counts, which is what is above 1. A share may be off by ${NEAR_POINTS} points.`;
  const HALF = 0.5; // the efficiency of the quantity "half"

  // -- quantities -------------------------------------------------------------------------------

  const ofStep = (row) => ({ value: row.step_seconds, range: [row.low_seconds, row.high_seconds] });

  // Each from (row, asked) of the strategy's step.
  const OF_ROW = {
    step: ofStep,
    compute: (row) => ({ value: row.compute_seconds, range: null }),
    exposed: (row) => ({ value: row.sync_seconds / row.step_seconds, range: null }),
    bytes: (row) => ({ value: row.bytes_sent_root, range: null }),
    speedup: (row) => ({ value: row.speedup, range: row.speedup_range }),
    efficiency: (row) => (
      { value: row.efficiency, range: row.speedup_range.map((times) => times / row.nodes) }),
    gain: (row, { change }) => ({ value: row.gains[change], range: row.gain_ranges[change] }),
    best: (row, { change }) => ({ value: row.best_shares[change], range: null }),
  };

  /** Return the first number of nodes tried whose efficiency is below a half, else the last one. */
  function half(data, state) {
    const points = Engine.triedPoints(data, state);
    const found = points.find((point) => point.efficiency < HALF) ?? points.at(-1);
    return { value: found.nodes, range: null };
  }

  /**
   * Return a quantity in seconds, bytes, a fraction or a ratio.
   *
   * @param {Object} data of the page
   * @param {Object} state of the page
   * @param {Asked} asked
   * @returns {Quantity}
   */
  function quantity(data, state, asked) {
    const changed = { ...state, ...asked.changes, focus: asked.strategy };
    const { strategy = asked.strategy, ...changes } = asked.than;
    const other = { ...changed, ...changes, focus: strategy };
    if (asked.quantity === "ratio") return Engine.ratio(data, other, changed);
    if (asked.quantity === "longer") return Engine.ratio(data, changed, other);
    if (asked.quantity === "half") return half(data, changed);
    return OF_ROW[asked.quantity](Engine.row(data, changed, asked.strategy), asked);
  }

  // -- a question's answer ----------------------------------------------------------------------

  /** Return the state that a question asks about. */
  function stateOf(data, question) {
    const preset = data.presets.find((entry) => entry.id === question.start);
    const base = (preset ?? Measured.setCalled(data, question.start)).state;
    const measured = Measured.setCalled(data, question.measured);
    return { ...State.defaults(data), ...base, ...question.changes, measured: measured?.id ?? null };
  }

  /** Return the measured answer, if the steps that it needs were measured; else null. */
  function measuredAnswer(data, state, { quantity: kind, strategy, than }) {
    const { strategy: other = strategy, ...changes } = than;
    const set = Measured.setCalled(data, state.measured);
    if (set === null || Object.keys(changes).length > 0) return null;
    const secondsOf = (name) => set.points.find(
      (point) => point.strategy === name && point.nodes === state.nodes)?.seconds ?? null;
    const own = secondsOf(strategy);
    const against = secondsOf(other);
    if (own === null || against === null) return null;
    const values = { step: own, ratio: against / own, longer: own / against };
    return values[kind] ?? null;
  }

  /**
   * Return a question's answer in its unit.
   *
   * @returns {Answer}
   */
  function answer(data, question) {
    const state = stateOf(data, question);
    const scale = UNITS[question.unit];
    const { value, range } = quantity(data, state, question.asked);
    const measured = measuredAnswer(data, state, question.asked);
    return {
      value: value / scale,
      range: range && range.map((end) => end / scale),
      measured: measured === null ? null : measured / scale,
    };
  }

  const WHOLE = ["nodes", "of 100"];

  const digits = (value, unit) => (
    WHOLE.includes(unit) ? Words.grouped(Math.round(value)) : Words.three(value));

  const withUnit = (value, unit) => `${digits(value, unit)} ${unit}`;

  /** Return a sentence with its {names} replaced by numbers; `given` are those known already. */
  function fill(data, question, sentence, given = {}) {
    const state = stateOf(data, question);
    return sentence.replace(/\{(\w+)\}/g, (_, name) => {
      if (name in given) return given[name];
      const asked = question.values[name];
      return withUnit(quantity(data, state, asked).value / UNITS[asked.unit], asked.unit);
    });
  }

  /** Return the question as a sentence. */
  const text = (data, question) => fill(data, question, question.text);

  /** Return why the answer is what it is. */
  function why(data, question, found) {
    const given = { answer: withUnit(found.value, question.unit) };
    return fill(data, question, question.explanation, given);
  }

  /**
   * Return the number of a guess, or what is wrong with it as one sentence.
   *
   * @param {string} typed "3.6", "3.6 times"
   * @returns {{guess: number} | {problem: string}}
   */
  function check(question, typed) {
    const [least, most] = question.range;
    const wanted = `a number from ${Words.grouped(least)} to ${Words.grouped(most)}`;
    const plain = typed.trim();
    const written = plain.endsWith(question.unit) ? plain.slice(0, -question.unit.length).trim() : plain;
    if (written === "") return { problem: `Guess first: ${wanted}.` };
    if (!/^[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$/i.test(written)) {
      return { problem: `Got "${plain}", give ${wanted}, with a point for decimals.` };
    }
    const guess = Number(written);
    if (guess < least || guess > most) return { problem: `Got ${plain}, give ${wanted}.` };
    return { guess };
  }

  /** Return whether a guess is right; RULE says when. */
  function isRight({ unit }, guess, { value, range }) {
    if (guess === value) return true;
    if (range !== null && range[0] <= guess && guess <= range[1]) return true;
    if (POINTS.includes(unit)) return Math.abs(guess - value) <= NEAR_POINTS;
    const base = unit === "times" ? 1 : 0;
    const ratio = (guess - base) / (value - base);
    return ratio >= 1 / NEAR && ratio <= NEAR;
  }

  /** Return by how much a guess is off. */
  function offText(unit, guess, value) {
    const isShare = POINTS.includes(unit);
    const off = Math.round(isShare ? Math.abs(guess - value) : 100 * Math.abs(guess / value - 1));
    if (off === 0) return "just so";
    return `${Words.grouped(off)} ${isShare ? "points" : "%"} too ${guess < value ? "low" : "high"}`;
  }

  /** Return guess, answer and measurement in one sentence. */
  function verdict(question, guess, found) {
    const { unit } = question;
    const range = found.range ? ` (80 %: ${found.range.map(Words.three).join(" to ")})` : "";
    const measured = found.measured === null ? "" : `, measured ${withUnit(found.measured, unit)}`;
    const said = `You guessed ${withUnit(guess, unit)}, the model says ${withUnit(found.value, unit)}`;
    const right = isRight(question, guess, found) ? "right" : "not near enough";
    return `${said}${range}${measured}: ${right}, ${offText(unit, guess, found.value)}.`;
  }

  /** Return where the points beside an answer were measured; "" if there are none. */
  function source(data, question) {
    const set = Measured.setCalled(data, stateOf(data, question).measured);
    return set === null ? "" : `Measured points: ${set.title}. ${set.about}`;
  }

  const rightOf = (guesses) => guesses.filter((guess) => guess.isRight).length;

  /** Return "Right: 2 of 3". */
  const score = (guesses) => `Right: ${rightOf(guesses)} of ${guesses.length}`;

  /**
   * Return the guesses as one line: the date, the score, then question, guess and answer of each.
   *
   * @param {{id: string, guess: number, value: number, isRight: boolean}[]} guesses
   * @param {string} date "2026-11-27"
   */
  function line(guesses, date) {
    const fields = guesses.flatMap(({ id, guess, value }) => [id, guess, Number(value.toPrecision(4))]);
    return ["lab whatif", date, `${rightOf(guesses)}/${guesses.length}`, ...fields].join(",");
  }

  // -- the section of the page ------------------------------------------------------------------

  const HIDDEN = ["controls", "answer", "pictures", "measured", "sources", "share"];

  const byId = (id) => document.getElementById(id);
  const play = { data: null, at: 0, guesses: [], place: null };

  const current = () => play.data.questions[play.at];

  /** Hide what would tell the answer, or show it again. */
  function hideAnswer(isHidden) {
    for (const id of HIDDEN) byId(id).hidden = isHidden;
    document.body.classList.toggle("guessing", isHidden);
  }

  function showIntro() {
    const { data, guesses } = play;
    const isDone = guesses.length === data.questions.length;
    byId("question-intro").hidden = false;
    byId("question-form").hidden = true;
    byId("question-result").hidden = true;
    byId("question-buttons").hidden = true;
    byId("question-about").textContent = isDone
      ? "You have answered all questions."
      : `${data.questions.length} questions in the order of the lessons. Commit to a number first; then you see the pictures, and how far off you were. ${RULE} Your guesses stay in this page.`;
    byId("question-start").hidden = isDone;
    byId("question-start").textContent = `Start with question ${play.at + 1}`;
  }

  /** Show the current question, and nothing that tells its answer. */
  function ask() {
    const question = current();
    const section = byId("questions");
    hideAnswer(true);
    section.parentElement.prepend(section);
    byId("question-intro").hidden = true;
    byId("question-result").hidden = true;
    byId("question-form").hidden = false;
    byId("question-buttons").hidden = false;
    byId("question-next").hidden = true;
    byId("question-title").textContent = `Question ${play.at + 1} of ${play.data.questions.length}`;
    byId("question-text").textContent = text(play.data, question);
    byId("guess-unit").textContent = question.unit;
    byId("guess").value = "";
    sayProblem(null);
    byId("question-title").focus();
    section.scrollIntoView();
  }

  function sayProblem(problem) {
    byId("guess-problem").textContent = problem ?? "";
    byId("guess-problem").hidden = problem === null;
    byId("guess").setAttribute("aria-invalid", String(problem !== null));
  }

  /** Take the guess, and show the answer with its pictures. */
  function commit(event) {
    event.preventDefault();
    const question = current();
    const { guess, problem } = check(question, byId("guess").value);
    sayProblem(problem ?? null);
    if (problem !== undefined) {
      byId("guess").focus();
      return;
    }
    const { data, guesses } = play;
    const found = answer(data, question);
    guesses.push({ id: question.id, guess, value: found.value, isRight: isRight(question, guess, found) });
    const number = question.lesson.match(/\d+/)[0];
    byId("question-verdict").textContent = verdict(question, guess, found);
    byId("question-why").textContent = why(data, question, found);
    byId("question-source").textContent = source(data, question);
    byId("question-lesson").textContent = `${question.lesson} (lab learn ${number}).`;
    byId("question-form").hidden = true;
    byId("question-result").hidden = false;
    byId("question-next").hidden = play.at + 1 === data.questions.length;
    byId("question-score").hidden = false;
    byId("question-score").firstChild.textContent = `${score(guesses)}.`;
    play.at += 1;
    hideAnswer(false);
    Page.show(stateOf(data, question));
    byId("question-result").focus();
    byId("questions").scrollIntoView();
  }

  /** Leave the questions: the page is as before them. */
  function leave() {
    hideAnswer(false);
    Page.back();
    play.place.before(byId("questions"));
    showIntro();
    byId("questions").focus({ preventScroll: true });
    byId("questions").scrollIntoView();
  }

  function copyLine() {
    const copied = line(play.guesses, new Date().toISOString().slice(0, 10));
    Page.copy(copied, "Line", byId("question-score").querySelector("output"));
  }

  function start(data) {
    Object.assign(play, { data, at: 0, guesses: [], place: byId("sources") });
    byId("question-start").addEventListener("click", ask);
    byId("question-next").addEventListener("click", ask);
    byId("question-leave").addEventListener("click", leave);
    byId("question-form").addEventListener("submit", commit);
    byId("copy-guesses").addEventListener("click", copyLine);
    showIntro();
  }

  return {
    start, stateOf, quantity, answer, text, why, check, isRight, verdict, source, score,
    line,
  };
})();
