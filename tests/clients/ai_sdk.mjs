// Owns the task of tasks.py through Vercel's AI SDK: ai_sdk.mjs PROVIDER generate|stream|object|image URL MODEL, in the
// project's directory; `object` reports, and `image` looks at a picture. The provider `openai` brings its items along, and
// `openai-stored`, by the SDK's own default, refers to those that the server keeps. Never reaches another host.
import { execSync } from 'node:child_process'
import { readFileSync, writeFileSync } from 'node:fs'
import { createRequire } from 'node:module'
import { pathToFileURL } from 'node:url'

const [provider, mode, url, modelName] = process.argv.slice(2)
const require = createRequire(`${process.env.CLIENTS_NPM}/`)
const load = async (name) => import(pathToFileURL(require.resolve(name)))

const { generateText, Output, stepCountIs, streamText, tool } = await load('ai')
const { z } = await load('zod')
const options = { apiKey: 'none', baseURL: `${url}/v1` }
const effort = { openai: { reasoningEffort: 'low', store: false, include: ['reasoning.encrypted_content'] } }
const providers = {
  openai: async () => [(await load('@ai-sdk/openai')).createOpenAI(options).responses(modelName), effort],
  'openai-stored': async () => [
    (await load('@ai-sdk/openai')).createOpenAI(options).responses(modelName),
    { openai: { reasoningEffort: 'low' } },
  ],
  'openai-chat': async () => [(await load('@ai-sdk/openai')).createOpenAI(options).chat(modelName), {}],
  anthropic: async () => [
    (await load('@ai-sdk/anthropic')).createAnthropic(options)(modelName),
    { anthropic: { thinking: { type: 'enabled', budgetTokens: 2000 } } },
  ],
  compatible: async () => [
    (await load('@ai-sdk/openai-compatible')).createOpenAICompatible({ ...options, name: 'server' })(modelName),
    { server: { reasoningEffort: 'low' } },
  ],
}
const text = z.string()
const tools = {
  read_file: tool({
    description: 'Read a file.',
    inputSchema: z.object({ path: text }),
    execute: async ({ path }) => readFileSync(path, 'utf8'),
  }),
  replace_in_file: tool({
    description: 'Replace a text in a file.',
    inputSchema: z.object({ path: text, old: text, new: text }),
    execute: async (asked) => {
      writeFileSync(asked.path, readFileSync(asked.path, 'utf8').replace(asked.old, asked.new))
      return `Replaced in ${asked.path}.`
    },
  }),
  run_command: tool({
    description: 'Run a shell command.',
    inputSchema: z.object({ command: text }),
    execute: async ({ command }) => execSync(command, { encoding: 'utf8' }),
  }),
}
const [model, providerOptions] = await providers[provider]()
const prompt = 'Read greeting.txt, make it say goodbye instead of hello, then shout it by a command.'
const report = z.object({
  text,
  mood: z.enum(['calm', 'cross']),
  words: z.array(text),
  note: z.object({ line: z.number().int(), says: text }).nullable(),
})
const asked = {
  model,
  providerOptions,
  tools,
  maxRetries: 0,
  stopWhen: stepCountIs(8),
  prompt,
  onError: ({ error }) => {
    throw error
  },
}
if (mode === 'generate') {
  const { onError, ...whole } = asked
  console.log((await generateText(whole)).text)
} else if (mode === 'object') {
  const result = await generateText({ model, maxRetries: 0, prompt, output: Output.object({ schema: report }) })
  console.log(result.output.text)
} else if (mode === 'image') {
  const content = [{ type: 'text', text: prompt }, { type: 'image', image: readFileSync('picture.png') }]
  console.log((await generateText({ model, maxRetries: 0, messages: [{ role: 'user', content }] })).text)
} else {
  const result = streamText(asked)
  for await (const piece of result.textStream) process.stdout.write(piece)
  process.stdout.write('\n')
}
