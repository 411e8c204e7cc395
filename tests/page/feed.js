// A status stream of the test's own, in place of the server's: `feed.send(event, data)`, `feed.end()`, and `feed.down`, which
// refuses connections. Added to tabs of tests about what the dashboard shows; numbers are seconds before now.
{
  const real = globalThis.fetch, encoder = new TextEncoder();
  const NAMES = ["generated", "prefilled", "cached", "running", "waiting", "kv_bytes", "cache_bytes", "cache_disk_bytes", "reserved_bytes"];
  const now = () => Date.now() / 1000;
  const model = (requests) => ({
    name: "stub", state: "ready", stage: "ready", error: null, residency: "loaded", pinned: false, context_window: 4096, restarts: 0, kv_bytes: 0, kv_budget: 100,
    memory: { weights: 4, kv_in_use: 3, ceiling: 10 },
    cache_bytes: 0, cache_disk_bytes: 0, totals: { requests: 1, cached_tokens: 1, prefilled_tokens: 1, generated_tokens: 7 }, requests,
  });
  let control = null;
  globalThis.feed = {
    down: false,
    connections: 0,
    first: [],
    send(event, data) { control.enqueue(encoder.encode(`event: ${event}\ndata: ${JSON.stringify(data)}\n\n`)); },
    end() { control.error(new TypeError("gone")); },
    /** A history of one sample a second over spans of [from, to] seconds ago. */
    history(...spans) {
      const time = spans.flatMap(([from, to]) => Array.from({ length: from - to + 1 }, (_, i) => now() - from + i));
      return { samples: { time, ...Object.fromEntries(NAMES.map((name) => [name, time.map((_, i) => (i % 40) * 1000)])) } };
    },
    status(requests = 0) {
      const running = Array.from({ length: requests }, (_, i) => ({ id: `r${i}`, phase: "decode", progress: 1, prompt_tokens: 5, made_tokens: 3, age_seconds: 1, endpoint: "/v1/x" }));
      return { memory: { limit: 100, reserved: 10, weights: 4, kv_in_use: 3, held: 8, other_servers: 0 }, models: [model(running)], sample: { time: now(), ...Object.fromEntries(NAMES.map((name) => [name, 5])) } };
    },
  };
  globalThis.fetch = (path, options) => {
    if (path !== "/v1/status/stream") return real(path, options);
    if (feed.down) return Promise.reject(new TypeError("down"));
    const body = new ReadableStream({ start(made) { control = made; } });
    options.signal.addEventListener("abort", () => { try { control.error(options.signal.reason); } catch { /* it is over */ } });
    feed.connections += 1;
    for (const [event, data] of feed.first) setTimeout(() => feed.send(event, data()));
    return Promise.resolve(new Response(body, { headers: { "content-type": "text/event-stream" } }));
  };
}
