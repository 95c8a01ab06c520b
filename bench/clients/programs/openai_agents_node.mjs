// OpenAI's Agents SDK for Node: responses, or chat completions with VARIANT=chat.
import { INSTRUCTIONS, KEY, KIND, MODEL, TOOL_NAME, TOOL_SCHEMA, TOOL_TEXT, URL_, load, measure, run } from './conversations.mjs';

const agents = await load('@openai/agents');
const { OpenAI } = await load('openai');
agents.setTracingDisabled(true); // traces go to OpenAI
if (KIND === 'chat') agents.setOpenAIAPI('chat_completions');
agents.setDefaultOpenAIClient(new OpenAI({ baseURL: `${URL_}/v1`, apiKey: KEY }));

await run(() => {
  let turn = null;
  let history = [];
  const execute = async ({ pump }) => {
    turn.measured.push(pump);
    return measure(pump);
  };
  const tools = [agents.tool({ name: TOOL_NAME, description: TOOL_TEXT, parameters: TOOL_SCHEMA, strict: true, execute })];
  const agent = new agents.Agent({ name: 'pumps', instructions: INSTRUCTIONS, model: MODEL, tools });
  return async (text) => {
    turn = { text: '', pieces: 0, measured: [] };
    const result = await agents.run(agent, [...history, { role: 'user', content: text }], { stream: true });
    for await (const event of result) turn.pieces += event.type === 'raw_model_stream_event' && event.data.type === 'output_text_delta' ? 1 : 0;
    await result.completed;
    history = result.history;
    turn.text = String(result.finalOutput ?? '');
    return turn;
  };
});
