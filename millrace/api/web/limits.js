// Limits of answers on the page: a token limit and the loop guard, and the sentences that report them.

import { count } from "./format.js";

/** Tokens of an answer where neither the settings nor the server's configuration set a limit. */
export const MAX_TOKENS = 4096;

/** The fields of a request; `profile` is what the server's configuration sets for the model. */
export function limitsOf(settings, profile) {
  const limit = settings.max_tokens ?? profile?.max_tokens ?? MAX_TOKENS;
  return { max_tokens: limit, loop_guard: profile?.loop_guard ?? true };
}

/** Why an answer was cut, and how to continue; empty where it was not. */
export function notice(meta = {}) {
  if (meta.looped) return "The answer repeated itself and was ended. Answer again, or change the temperature in the settings.";
  if (meta.finish === "length" && meta.generated >= meta.limit) return `The answer reached the limit of ${count(meta.limit)} tokens. Send “go on” to continue it, or change the limit in the settings.`;
  return "";
}
