// OpenAI's SDK for Node: chat completions, or responses with VARIANT=responses.
import { INSTRUCTIONS, KEY, KIND, MODEL, TOOL_NAME, TOOL_SCHEMA, TOOL_TEXT, URL_, load, measure, run } from './conversations.mjs';

const { OpenAI } = await load('openai');
const client = new OpenAI({ baseURL: `${URL_}/v1`, apiKey: KEY });
const definition = { name: TOOL_NAME, description: TOOL_TEXT, parameters: TOOL_SCHEMA };

function chat() {
  const messages = [{ role: 'system', content: INSTRUCTIONS }];
  return async (text) => {
    const turn = { text: '', pieces: 0, measured: [] };
    messages.push({ role: 'user', content: text });
    while (!turn.text) {
      const stream = client.chat.completions.stream({ model: MODEL, messages, tools: [{ type: 'function', function: definition }] });
      stream.on('content', () => { turn.pieces += 1; });
      const { message } = (await stream.finalChatCompletion()).choices[0];
      messages.push(message);
      for (const call of message.tool_calls ?? []) {
        const { pump } = JSON.parse(call.function.arguments);
        turn.measured.push(pump);
        messages.push({ role: 'tool', tool_call_id: call.id, content: measure(pump) });
      }
      turn.text = message.content ?? '';
    }
    return turn;
  };
}

function responses() {
  const input = [];
  return async (text) => {
    const turn = { text: '', pieces: 0, measured: [] };
    input.push({ role: 'user', content: text });
    while (!turn.text) {
      const stream = client.responses.stream({
        model: MODEL, instructions: INSTRUCTIONS, input, tools: [{ type: 'function', strict: true, ...definition }],
      });
      for await (const event of stream) turn.pieces += event.type === 'response.output_text.delta' ? 1 : 0;
      const response = await stream.finalResponse();
      for (const { parsed_arguments: _, ...item } of response.output) {
        input.push(item);
        if (item.type === 'function_call') {
          const { pump } = JSON.parse(item.arguments);
          turn.measured.push(pump);
          input.push({ type: 'function_call_output', call_id: item.call_id, output: measure(pump) });
        }
      }
      turn.text = response.output_text;
    }
    return turn;
  };
}

await run(KIND === 'responses' ? responses : chat);
