// llama.cpp as a child process: one JSON line in for each prompt of token ids, one out with its times.
// usage: node llama.mjs MODEL.gguf THREADS   (node-llama-cpp is looked for from the current folder)
import {createRequire} from "node:module";
import {createInterface} from "node:readline";
import {pathToFileURL} from "node:url";

const require = createRequire(process.cwd() + "/");
const {getLlama} = await import(pathToFileURL(require.resolve("node-llama-cpp")));
const [, , path, count] = process.argv;
const threads = Number(count);
const llama = await getLlama({gpu: false, build: "never", maxThreads: threads, logLevel: "error"});
const model = await llama.loadModel({modelPath: path});
console.log(JSON.stringify({ready: true, resident: process.memoryUsage().rss}));

const seconds = (since) => (performance.now() - since) / 1000;
for await (const line of createInterface({input: process.stdin})) {
  const {prompt, out} = JSON.parse(line);
  const context = await model.createContext({
    contextSize: prompt.length + out + 8, batchSize: 512, threads: {ideal: threads, min: threads},
  });
  const sequence = context.getSequence();
  let begin = performance.now();
  await sequence.evaluateWithoutGeneratingNewTokens(prompt.slice(0, -1));
  const prefill = seconds(begin);
  let generated = 0, decode = 0;
  for await (const _ of sequence.evaluate(prompt.slice(-1), {temperature: 0, yieldEogToken: true})) {
    // The first one is the prompt's last token's: the time runs from it.
    if (generated === 0) begin = performance.now();
    decode = seconds(begin);
    if (++generated > out) break;
  }
  console.log(JSON.stringify({prefill, decode, generated: generated - 1, resident: process.memoryUsage().rss}));
  await context.dispose();
}
