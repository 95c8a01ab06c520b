// LangChain for Node: ChatOpenAI, by the Responses API with VARIANT=responses.
import { INSTRUCTIONS, KEY, KIND, MODEL, TOOL_NAME, TOOL_SCHEMA, TOOL_TEXT, URL_, load, measure, run } from './conversations.mjs';

const { ChatOpenAI } = await load('@langchain/openai');
const definition = { type: 'function', function: { name: TOOL_NAME, description: TOOL_TEXT, parameters: TOOL_SCHEMA } };
const model = new ChatOpenAI({
  model: MODEL, apiKey: KEY, configuration: { baseURL: `${URL_}/v1` }, useResponsesApi: KIND === 'responses',
}).bindTools([definition]);

await run(() => {
  const messages = [{ role: 'system', content: INSTRUCTIONS }];
  return async (text) => {
    const turn = { text: '', pieces: 0, measured: [] };
    messages.push({ role: 'user', content: text });
    while (!turn.text) {
      let answer = null;
      for await (const chunk of await model.stream(messages)) {
        turn.pieces += chunk.text ? 1 : 0;
        answer = answer === null ? chunk : answer.concat(chunk);
      }
      messages.push(answer);
      for (const call of answer.tool_calls ?? []) {
        turn.measured.push(call.args.pump);
        messages.push({ role: 'tool', tool_call_id: call.id, content: measure(call.args.pump) });
      }
      turn.text = answer.text;
    }
    return turn;
  };
});
