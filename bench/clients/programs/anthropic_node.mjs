// Anthropic's SDK for Node: messages.
import { INSTRUCTIONS, KEY, MODEL, TOOL_NAME, TOOL_SCHEMA, TOOL_TEXT, URL_, load, measure, run } from './conversations.mjs';

const { Anthropic } = await load('@anthropic-ai/sdk');
const client = new Anthropic({ baseURL: URL_, apiKey: KEY });
const tools = [{ name: TOOL_NAME, description: TOOL_TEXT, input_schema: TOOL_SCHEMA }];

await run(() => {
  const messages = [];
  return async (text) => {
    const turn = { text: '', pieces: 0, measured: [] };
    messages.push({ role: 'user', content: text });
    while (!turn.text) {
      const stream = client.messages.stream({ model: MODEL, max_tokens: 4096, system: INSTRUCTIONS, messages, tools });
      stream.on('text', () => { turn.pieces += 1; });
      const { content } = await stream.finalMessage();
      messages.push({ role: 'assistant', content });
      const results = [];
      for (const block of content) {
        if (block.type === 'text') turn.text += block.text;
        if (block.type === 'tool_use') {
          turn.measured.push(block.input.pump);
          results.push({ type: 'tool_result', tool_use_id: block.id, content: measure(block.input.pump) });
        }
      }
      if (results.length) messages.push({ role: 'user', content: results });
    }
    return turn;
  };
});
