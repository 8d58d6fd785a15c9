// When to try again. Pages that lost the same server at the same moment must not all come back at once.

// A server that reports that it is starting is ready within seconds, so the next try comes soon.
const SOON_SECONDS = [1, 3];
const LOST_SECONDS = [1, 2, 3, 5];
const FULL_SECONDS = [2, 4, 8, 15];

// `why` as in reasons.js; `tries` counts those before.
export function secondsToWait(why, tries) {
  if (why.soon) return SOON_SECONDS[0] + (SOON_SECONDS[1] - SOON_SECONDS[0]) * Math.random();
  const steps = why.full ? FULL_SECONDS : LOST_SECONDS;
  return steps[Math.min(tries, steps.length - 1)] * (0.8 + 0.4 * Math.random());
}
