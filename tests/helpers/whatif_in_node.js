"use strict";

// Load the page's scripts, in order, into one scope, as the page does, and answer calls of Engine:
// JSON on standard input, {data, calls: [[function, ...arguments]]}, and a list on standard output.
const { readFileSync } = require("node:fs");
const { runInThisContext } = require("node:vm");

for (const path of process.argv.slice(2)) {
  runInThisContext(readFileSync(path, "utf8"), { filename: path });
}
const engine = runInThisContext("Engine");
const { data, calls } = JSON.parse(readFileSync(0, "utf8"));
const answers = calls.map(([name, ...given]) => engine[name](data, ...given));
process.stdout.write(JSON.stringify(answers));
