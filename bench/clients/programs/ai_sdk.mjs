// Vercel's AI SDK: @ai-sdk/openai (responses), @ai-sdk/anthropic or @ai-sdk/openai-compatible.
import { INSTRUCTIONS, KEY, KIND, MODEL, TOOL_SCHEMA, TOOL_TEXT, URL_, load, measure, run } from './conversations.mjs';

const { jsonSchema, stepCountIs, streamText, tool } = await load('ai');

async function model() {
  if (KIND === 'anthropic') {
    const { createAnthropic } = await load('@ai-sdk/anthropic');
    return createAnthropic({ baseURL: `${URL_}/v1`, apiKey: KEY })(MODEL);
  }
  if (KIND === 'compatible') {
    const { createOpenAICompatible } = await load('@ai-sdk/openai-compatible');
    return createOpenAICompatible({ name: 'gateway', baseURL: `${URL_}/v1`, apiKey: KEY, includeUsage: true })(MODEL);
  }
  const { createOpenAI } = await load('@ai-sdk/openai');
  return createOpenAI({ baseURL: `${URL_}/v1`, apiKey: KEY })(MODEL);
}

const chosen = await model();

await run(() => {
  const messages = [];
  return async (text) => {
    const turn = { text: '', pieces: 0, measured: [] };
    messages.push({ role: 'user', content: text });
    const execute = async ({ pump }) => {
      turn.measured.push(pump);
      return measure(pump);
    };
    const tools = { measure: tool({ description: TOOL_TEXT, inputSchema: jsonSchema(TOOL_SCHEMA), execute }) };
    let failure = null;
    const result = streamText({
      // Otherwise it sends ids in place of the model's messages, which no engine keeps.
      providerOptions: { openai: { store: false } },
      model: chosen, system: INSTRUCTIONS, messages, tools, stopWhen: stepCountIs(3), onError: ({ error }) => { failure = error; },
    });
    for await (const piece of result.textStream) {
      turn.pieces += 1;
      turn.text += piece;
    }
    if (failure) throw failure;
    messages.push(...(await result.response).messages);
    return turn;
  };
});
