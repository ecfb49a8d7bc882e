// An agent that knows nothing of agl-otel: the OpenAI SDK, a question, an answer. Where the model is, where spans go and whose
// they are stands in the environment (OPENAI_*, OTEL_*, AGL_TASK).
const { OpenAI } = require("openai");

async function main() {
  const task = JSON.parse(process.env.AGL_TASK ?? '{"question": "What is 2 + 2?"}');
  const client = new OpenAI({ maxRetries: 0 });
  const reply = await client.chat.completions.create({
    model: process.env.OPENAI_MODEL ?? "m",
    messages: [{ role: "user", content: task.question }],
  });
  console.log(reply.choices[0].message.content);
}

main().catch((error) => {
  console.error(error);
  process.exitCode = 1;
});
