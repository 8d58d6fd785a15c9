// How long to wait before the next attempt to connect.
//
// The delays are random, so that pages that lost the same server at the same moment do not all return at once.

// A server that is starting is ready within seconds: the range of the delay.
const SOON_SECONDS = [1, 3];
// The delays after one, two, ... failed attempts: if the server cannot be reached, and if it has no free session.
const LOST_SECONDS = [1, 2, 3, 5];
const FULL_SECONDS = [2, 4, 8, 15];

// `reason` as in error-texts.js; `tries` is the number of failed attempts before.
export function secondsToWait(reason, tries) {
  if (reason.soon) return SOON_SECONDS[0] + (SOON_SECONDS[1] - SOON_SECONDS[0]) * Math.random();
  const steps = reason.full ? FULL_SECONDS : LOST_SECONDS;
  return steps[Math.min(tries, steps.length - 1)] * (0.8 + 0.4 * Math.random());
}
