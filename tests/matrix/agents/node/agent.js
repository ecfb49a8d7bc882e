// Node: the OpenAI SDK, chat completions (whole and streamed) and responses, with OpenTelemetry's own auto-instrumentation.
const { OpenAI } = require("openai");

const MODEL = "gpt-4.1";
const DESCRIBED = {
  name: "population",
  description: "How many people live in a city.",
  parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
};
const population = ({ city }) => `${city} has ${[...city].reduce((sum, letter) => sum + letter.codePointAt(0), 0) * 10} people`;
const client = new OpenAI();

async function chat(question, streamed = false) {
  const messages = [{ role: "user", content: question }];
  for (;;) {
    const asked = { model: MODEL, messages, tools: [{ type: "function", function: DESCRIBED }] };
    const completion = streamed ? await client.chat.completions.stream(asked).finalChatCompletion() : await client.chat.completions.create(asked);
    const said = completion.choices[0].message;
    if (!said.tool_calls?.length) return said.content;
    messages.push(said);
    for (const call of said.tool_calls) {
      messages.push({ role: "tool", tool_call_id: call.id, content: population(JSON.parse(call.function.arguments)) });
    }
  }
}

async function responses(question) {
  const input = [{ role: "user", content: question }];
  for (;;) {
    const response = await client.responses.create({ model: MODEL, input, tools: [{ type: "function", ...DESCRIBED, strict: false }] });
    const calls = response.output.filter((item) => item.type === "function_call");
    if (!calls.length) return response.output_text;
    input.push(...response.output);
    for (const call of calls) {
      input.push({ type: "function_call_output", call_id: call.call_id, output: population(JSON.parse(call.arguments)) });
    }
  }
}

const run = { chat, "chat-stream": (question) => chat(question, true), responses };
run[process.argv[2]](process.argv[3]).then(console.log, (error) => {
  console.error(error);
  process.exitCode = 1;
});
