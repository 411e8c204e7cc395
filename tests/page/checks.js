// What tests ask of a page that is shown. Added to every tab as `checks`.
globalThis.checks = {
  /** How wide the content is. */
  width: () => Math.max(document.documentElement.scrollWidth, document.querySelector(".view, .scroll").scrollWidth),

  /** Whether so many answers are there, all whole. */
  answered: (count) =>
    document.querySelectorAll(".turn.assistant").length === count && !document.querySelector(".turn.live"),

  /** What the focus is on, by name. */
  focused: () => document.activeElement.getAttribute("aria-label") || document.activeElement.textContent.trim(),

  /** What lies under a toast, as the browser finds it at points all over it; that the page itself is there is fine. */
  covered() {
    const found = new Set();
    for (const toast of document.querySelectorAll(".toast")) {
      const { left, top, width, height } = toast.getBoundingClientRect();
      for (let x = left + 2; x < left + width; x += 8) {
        for (let y = top + 2; y < top + height; y += 6) {
          for (const node of document.elementsFromPoint(x, y)) {
            if (!toast.contains(node) && !node.contains(toast)) found.add(node.outerHTML.slice(0, 80));
          }
        }
      }
    }
    return [...found];
  },

  /** Show toasts, as the page does. */
  async toast(...texts) {
    const { toast } = await import(document.querySelector("script[type=module]").src.replace("app.js", "dom.js"));
    for (const text of texts) toast(text, "bad");
  },

  /** Of charts of many widths, spans and times of the day: those with too few labels of the time, or with labels that meet. */
  async badTicks() {
    const { clockTicks } = await import(document.querySelector("script[type=module]").src.replace("app.js", "plot.js"));
    const found = [];
    for (const width of [220, 300, 440, 700]) {
      for (let span = 60; span <= 600; span += 17) {
        for (let now = 1e9; now < 1e9 + 600; now += 19) {
          const ticks = clockTicks(now - span, now, width);
          const apart = ticks.length > 1 ? ((ticks[1][0] - ticks[0][0]) / span) * width : 0;
          if (apart < 6.3 * ticks[0]?.[1].length) found.push([width, span, now, ticks.length]);
        }
      }
    }
    return found;
  },

  /** What a screen reader has no name for. */
  unnamed: () =>
    [...document.querySelectorAll("button, input:not([hidden]), select, textarea, a[href]")]
      .filter((n) => n.checkVisibility() && !(n.getAttribute("aria-label") || n.textContent.trim() || n.labels?.length))
      .map((n) => n.outerHTML.slice(0, 100)),

  /** Text with less contrast than WCAG's AA asks for. */
  faint() {
    const pen = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    const known = new Map();
    const parsed = (colour) => {
      if (!known.has(colour)) {
        pen.clearRect(0, 0, 1, 1);
        pen.fillStyle = colour;
        pen.fillRect(0, 0, 1, 1);
        known.set(colour, [...pen.getImageData(0, 0, 1, 1).data]);
      }
      return known.get(colour);
    };
    const light = (colour) => {
      const [r, g, b] = colour.map((v) => (v / 255 <= 0.03928 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4));
      return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const found = [];
    const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walk.nextNode()) {
      const node = walk.currentNode.parentElement, text = walk.currentNode.data.trim();
      const left = node.closest(":disabled, .offstage, .skip, math, noscript, option");
      if (!text || left || !node.checkVisibility({ opacityProperty: true })) continue;
      let back = [0, 0, 0, 0];
      for (let under = node; under && back[3] < 255; under = under.parentElement) back = parsed(getComputedStyle(under).backgroundColor);
      const [a, b] = [light(parsed(getComputedStyle(node).color)), light(back)].sort((x, y) => y - x);
      const contrast = (a + 0.05) / (b + 0.05);
      if (contrast < 4.5) found.push(`${text.slice(0, 30)}: ${contrast.toFixed(2)}`);
    }
    return found;
  },

  /** Count the frames from now on that came late, in milliseconds between two. */
  frames() {
    const gaps = [];
    let last = performance.now();
    const tick = () => {
      const now = performance.now();
      gaps.push(now - last);
      last = now;
      requestAnimationFrame(tick);
    };
    requestAnimationFrame(tick);
    globalThis.gaps = gaps;
  },

  /** From now on the server's answers are these: pieces that come in groups, so many milliseconds apart. */
  answer(pieces, group, pause) {
    const real = globalThis.fetch;
    globalThis.fetch = (path, options) => {
      if (path !== "/v1/chat/completions") return real(path, options);
      const chunk = (delta, more = {}) => `data: ${JSON.stringify({ choices: [{ index: 0, delta, finish_reason: null }], ...more })}\n\n`;
      const encoder = new TextEncoder();
      let at = 0;
      const body = new ReadableStream({
        async pull(control) {
          if (at >= pieces.length) {
            const usage = { prompt_tokens: 1, completion_tokens: pieces.length };
            control.enqueue(encoder.encode(`data: ${JSON.stringify({ choices: [], usage })}\n\ndata: [DONE]\n\n`));
            control.close();
            return;
          }
          if (pause) await new Promise((wake) => setTimeout(wake, pause));
          control.enqueue(encoder.encode(pieces.slice(at, at + group).map((content) => chunk({ content })).join("")));
          at += group;
        },
      });
      return Promise.resolve(new Response(body, { headers: { "content-type": "text/event-stream" } }));
    };
  },
};
