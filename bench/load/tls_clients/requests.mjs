// Sends requests by one of Node's clients (CLIENT: https, fetch, openai), half of them streamed, and
// prints counts by outcome as a line of JSON. NODE_EXTRA_CA_CERTS names the authority's certificate.
import https from 'node:https';
import { createRequire } from 'node:module';

const { CLIENT, URL, COUNT, THREADS, WHOLE, STREAMED, EXPECTED, MODULES } = process.env;
const REQUESTS_PER_CLIENT = 10; // requests per client; with https also per connection
const found = { whole: 0, streamed: 0, failed: 0, errors: [] };

function textOf(stream, body) {
  if (!stream) return JSON.parse(body).choices[0].message.content;
  const events = body.split('\n').filter((line) => line.startsWith('data: ')).map((line) => line.slice(6));
  if (events.pop() !== '[DONE]') throw new Error('no [DONE]');
  return events.map((each) => JSON.parse(each).choices[0]?.delta?.content ?? '').join('');
}

function byHttps() {
  const agent = new https.Agent({ keepAlive: true });
  const ask = (stream) => new Promise((resolve, reject) => {
    const headers = { 'content-type': 'application/json' };
    const request = https.request(`${URL}/v1/chat/completions`, { method: 'POST', agent, headers }, (answer) => {
      let body = '';
      answer.setEncoding('utf8');
      answer.on('data', (piece) => { body += piece; });
      answer.on('error', reject);
      answer.on('end', () => {
        if (answer.statusCode !== 200) reject(new Error(`status ${answer.statusCode}: ${body}`));
        else try { resolve(textOf(stream, body)); } catch (error) { reject(error); }
      });
    });
    request.on('error', reject);
    request.end(stream ? STREAMED : WHOLE);
  });
  return { ask, close: () => agent.destroy() };
}

function byFetch() {
  const ask = async (stream) => {
    const answer = await fetch(`${URL}/v1/chat/completions`, {
      method: 'POST', headers: { 'content-type': 'application/json' }, body: stream ? STREAMED : WHOLE,
    });
    if (answer.status !== 200) throw new Error(`status ${answer.status}: ${await answer.text()}`);
    if (!stream) return textOf(false, await answer.text());
    let body = '';
    const decoder = new TextDecoder();
    for await (const piece of answer.body) body += decoder.decode(piece, { stream: true });
    return textOf(true, body);
  };
  return { ask, close: () => {} };
}

function byOpenai() {
  const { OpenAI } = createRequire(`${MODULES}/`)('openai');
  const client = new OpenAI({ baseURL: `${URL}/v1`, apiKey: 'none', maxRetries: 0 });
  const ask = async (stream) => {
    const answer = await client.chat.completions.create(JSON.parse(stream ? STREAMED : WHOLE));
    if (!stream) return answer.choices[0].message.content;
    let text = '';
    for await (const event of answer) text += event.choices[0]?.delta?.content ?? '';
    return text;
  };
  return { ask, close: () => {} };
}

const make = { https: byHttps, fetch: byFetch, openai: byOpenai }[CLIENT];

async function askMany(count) {
  let client = null;
  for (let number = 0; number < count; number += 1) {
    if (number % REQUESTS_PER_CLIENT === 0) {
      client?.close();
      client = make();
    }
    const stream = number % 2 === 1;
    try {
      const text = await client.ask(stream);
      if (text !== EXPECTED) throw new Error(`another text: ${text}`);
      found[stream ? 'streamed' : 'whole'] += 1;
    } catch (error) {
      found.failed += 1;
      found.errors.push(`${error} ${error.cause ?? ''}`);
    }
  }
  client.close();
}

await Promise.all(Array.from({ length: THREADS }, () => askMany(COUNT / THREADS)));
found.errors = found.errors.slice(0, 5);
console.log(JSON.stringify(found));
