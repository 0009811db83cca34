// @openai/agents and the openai package, with a server of ours behind them; run in a folder that has both installed:
//   node ../agents.mjs URL MODEL
// prints a line of JSON for each case: what failed, or null. What is asserted of chat and Responses, whole and
// streamed, is what OpenAI's compatibility test of gpt-oss looks at: reasoning where it has to be, calls of the tool
// with arguments of its schema, the events of a stream.
import { createRequire } from 'node:module';
import { join } from 'node:path';

const require = createRequire(join(process.cwd(), 'here.js'));
const { Agent, Runner, OpenAIChatCompletionsModel, OpenAIResponsesModel, setTracingDisabled, tool } = require('@openai/agents');
const { OpenAI } = require('openai');
const { Ajv } = require('ajv');
const { z } = require('zod');

const [url, name] = process.argv.slice(2);
setTracingDisabled(true);

const client = new OpenAI({ baseURL: url, apiKey: 'none', maxRetries: 0, timeout: 120_000 });
const KINDS = { chat: OpenAIChatCompletionsModel, responses: OpenAIResponsesModel };
const PARAMETERS = {
  type: 'object',
  properties: { city: { type: 'string', description: 'The city' } },
  required: ['city'],
  additionalProperties: false,
};

function check(condition, words) {
  if (!condition) throw new Error(words);
}

function agent(tools, extra = {}) {
  const called = [];
  const getWeather = tool({
    name: 'get_weather',
    description: 'Get the weather',
    parameters: PARAMETERS,
    strict: false,
    execute: async (found) => (called.push(found.city), '{"temperature": 21}'),
  });
  return [new Agent({ name: 'test', tools: tools ? [getWeather] : [], ...extra }), called];
}

function runner(kind, settings = {}) {
  const modelSettings = { temperature: 0, maxTokens: 200, ...settings };
  return new Runner({ model: new KINDS[kind](client, name), modelSettings });
}

async function run(kind, text, { tools = false, stream = false, settings, extra } = {}) {
  const [made, called] = agent(tools, extra);
  const result = await runner(kind, settings).run(made, text, { stream, maxTurns: 4 });
  const events = [];
  if (stream) {
    for await (const event of result) {
      if (event.type === 'raw_model_stream_event' && event.data.type === 'model') events.push(event.data.event);
    }
    await result.completed;
  }
  return { result, called, events };
}

// a whole answer of chat: message.reasoning is a text that says something, in one of the responses
function reasonsInChat(responses) {
  return responses.some(({ providerData }) => providerData.choices[0].message.reasoning?.length > 0);
}

// a whole answer of Responses: a reasoning item with texts
function reasonsInResponses(responses) {
  const items = responses.flatMap(({ providerData }) => providerData?.output ?? []).filter((item) => item.type === 'reasoning');
  return items.length > 0 && items.every((item) => item.content.length > 0
    && item.content.every((part) => part.type === 'reasoning_text' && part.text.length > 0));
}

function calledRightly(result) {
  const calls = result.newItems.filter((item) => item.type === 'tool_call_item').map((item) => item.rawItem);
  const valid = new Ajv().compile(PARAMETERS);
  return calls.length > 0 && calls.every((call) => call.name === 'get_weather' && valid(JSON.parse(call.arguments)));
}

const SUM = ['What is 3 + 4?', '3 + 4 = 7.'];
const WEATHER = ['What is the weather in Paris?', '21']; // the words are the model's own

const CASES = {
  async chat_answers_with_reasoning() {
    const { result } = await run('chat', SUM[0]);
    check(result.finalOutput === SUM[1], result.finalOutput);
    check(reasonsInChat(result.rawResponses), 'no message.reasoning');
  },
  async chat_streams_with_reasoning() {
    const { result, events } = await run('chat', SUM[0], { stream: true });
    check(result.finalOutput === SUM[1], result.finalOutput);
    check(events.some((event) => event.choices?.[0]?.delta.reasoning?.length > 0), 'no delta.reasoning');
  },
  async responses_answer_with_reasoning() {
    const { result } = await run('responses', SUM[0]);
    check(result.finalOutput === SUM[1], result.finalOutput);
    check(reasonsInResponses(result.rawResponses), 'no reasoning item with reasoning_text');
  },
  async responses_stream_with_reasoning() {
    const { result, events } = await run('responses', SUM[0], { stream: true });
    check(result.finalOutput === SUM[1], result.finalOutput);
    for (const type of ['response.reasoning_text.delta', 'response.reasoning_text.done']) {
      check(events.some((event) => event.type === type), `no ${type}`);
    }
  },
  ...Object.fromEntries(Object.keys(KINDS).flatMap((kind) => [false, true].map((stream) => [
    `${kind}_use_a_tool${stream ? '_streamed' : ''}`,
    async () => {
      const { result, called } = await run(kind, WEATHER[0], { tools: true, stream });
      check(called.join() === 'Paris', `called with ${JSON.stringify(called)}`);
      check(result.finalOutput.includes(WEATHER[1]), result.finalOutput);
      check(calledRightly(result), 'a call that is not of the schema');
    },
  ]))),
  ...Object.fromEntries(Object.keys(KINDS).map((kind) => [
    `${kind}_obey_a_forced_tool`,
    async () => {
      const { called } = await run(kind, WEATHER[0], { tools: true, settings: { toolChoice: 'required' } });
      check(called[0] === 'Paris', `called with ${JSON.stringify(called)}`);
    },
  ])),
  ...Object.fromEntries(Object.keys(KINDS).map((kind) => [
    `${kind}_give_structured_output`,
    async () => {
      const outputType = z.object({ season: z.enum(['spring', 'autumn']), even: z.boolean() });
      const { result } = await run(kind, SUM[0], { extra: { outputType } });
      check(['spring', 'autumn'].includes(result.finalOutput.season), JSON.stringify(result.finalOutput));
    },
  ])),
  async the_sdk_streams_a_call_of_responses() {
    const tools = [{ type: 'function', name: 'get_weather', description: 'Get the weather', parameters: PARAMETERS, strict: false }];
    const stream = await client.responses.create({ model: name, input: WEATHER[0], tools, stream: true, temperature: 0 });
    const done = [];
    for await (const event of stream) {
      if (event.type === 'response.output_item.done') done.push(event.item);
    }
    const call = done.find((item) => item.type === 'function_call');
    check(JSON.parse(call?.arguments ?? '{}').city === 'Paris', JSON.stringify(done));
  },
};

for (const [name, work] of Object.entries(CASES)) {
  let failure = null;
  try {
    await work();
  } catch (error) {
    failure = (error?.stack ?? String(error)).slice(0, 3000);
  }
  console.log(JSON.stringify({ case: name, failure }));
}
