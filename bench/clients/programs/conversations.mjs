// Runs the conversations of one client program and prints what came of them as a line of JSON, as
// conversations.py does. A program calls run() with a function that begins a session and returns its `ask`.
import { createRequire } from 'node:module';
import { pathToFileURL } from 'node:url';

const { GATEWAY_URL, GATEWAY_KEY, GATEWAY_MODEL, MODULES, SESSIONS = '4', TURNS = '20', FIRST_SITE = '0', VARIANT = '' } = process.env;
export const [URL_, KEY, MODEL, KIND] = [GATEWAY_URL, GATEWAY_KEY, GATEWAY_MODEL, VARIANT];
const turns = Number(TURNS);
const resolver = createRequire(`${MODULES}/`);

export const load = async (name) => {
  const found = import.meta.resolve ? resolver.resolve(name) : name;
  return import(pathToFileURL(found));
};

export const INSTRUCTIONS = (
  'You look after the pumps of a reservoir. Measure the depth when you are asked to, say what '
  + 'you find in a few words, and name the pump. Never guess a depth that you have not measured. '
).repeat(2);
export const TOOL_NAME = 'measure';
export const TOOL_TEXT = 'Measure the depth at a pump, in metres.';
export const TOOL_SCHEMA = {
  type: 'object', properties: { pump: { type: 'integer' } }, required: ['pump'], additionalProperties: false,
};
export const measure = (pump) => `The depth at pump ${pump} is ${pump + 3} m.`;

function question(session, turn) {
  if (turn === turns >> 1) return `Please call the tool ${TOOL_NAME} with {"pump": ${turn}} and report.`;
  return `This is message ${turn} about site ${session}. How deep is the water at pump ${turn}, and `
    + `what should the operator of site ${session} do about the valve, the filter and the log?`;
}

async function converse(ask, session, found) {
  for (let turn = 0; turn < turns; turn += 1) {
    const { text = '', pieces = 0, measured = [] } = await ask(question(session, turn));
    if (!text.trim()) throw new Error(`turn ${turn} has no text`);
    const wanted = turn === turns >> 1 ? [turn] : [];
    if (JSON.stringify(measured) !== JSON.stringify(wanted)) throw new Error(`turn ${turn} measured ${measured}, not ${wanted}`);
    found.turns += 1;
    found.streamed += pieces > 1 ? 1 : 0;
    found.calls += measured.length;
  }
}

export async function run(start) {
  const found = { turns: 0, streamed: 0, calls: 0, errors: [] };
  const numbers = Array.from({ length: Number(SESSIONS) }, (_, number) => number + Number(FIRST_SITE));
  const outcomes = await Promise.allSettled(numbers.map((number) => converse(start(number), number, found)));
  for (const outcome of outcomes) {
    if (outcome.status === 'rejected') {
      console.error(outcome.reason);
      found.errors.push(String(outcome.reason).slice(0, 300));
    }
  }
  console.log(JSON.stringify(found));
}
