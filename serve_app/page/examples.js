// Owns the prompts that an empty playground offers.
// Never sends one by itself.

const PERSON = {
  type: "object",
  properties: { name: { type: "string" }, age: { type: "integer" }, languages: { type: "array", items: { type: "string" } } },
  required: ["name", "age", "languages"],
  additionalProperties: false,
};
const SHIPS = ["Petrel", "Aurora", "Kittiwake", "Meridian", "Fulmar", "Halcyon", "Sandpiper"];
const LOG_TOKENS = 1500, LINE_TOKENS = 20;

/** A log book as long as a third of what the model takes, but not longer than a page or two. */
function logBook() {
  const tokens = Math.min(LOG_TOKENS, modelLength() / 3), nights = Math.max(2, Math.floor(tokens / LINE_TOKENS));
  const line = (_, i) => `Night ${i + 1}: the ${SHIPS[(i * 3) % SHIPS.length]} passed at ${19 + (i % 4)}:${10 + ((i * 7) % 50)}.`;
  return `${Array.from({ length: nights }, line).join("\n")}\n\nWhich ship passed in night ${Math.ceil(nights / 2)}, and when?`;
}

const EXAMPLES = [
  { title: "Explain", about: "a short list", text: () => "Why is the sky blue? Answer in three short points." },
  { title: "Write code", about: "a function with an example", text: () => "Write a Python function that tells whether a word is a palindrome, with an example." },
  {
    title: "JSON by a schema",
    about: "an answer that always parses",
    text: () => "Invent a lighthouse keeper.",
    told: "With response_format: a JSON schema of name, age and languages.",
    extra: { response_format: { type: "json_schema", json_schema: { name: "keeper", strict: true, schema: PERSON } } },
  },
  { title: "Read a long prompt", about: "watch its chunks in the chart", text: logBook },
];

async function tryExample({ text, ...rest }) {
  if (await haveKey()) await send(text(), rest);
}

function showExamples() {
  const buttons = EXAMPLES.map((example) => {
    const button = make("button", [make("strong", [example.title]), make("span", [example.about], "hint")]);
    button.type = "button";
    button.addEventListener("click", () => tryExample(example));
    return button;
  });
  $("examples").append(...buttons);
}
