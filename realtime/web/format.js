// How times, dates and counts are written on the page.

export function clock(seconds) {
  const whole = Math.max(0, Math.floor(seconds));
  const hours = Math.floor(whole / 3600);
  const minutes = Math.floor((whole % 3600) / 60);
  const rest = String(whole % 60).padStart(2, "0");
  return hours ? `${hours}:${String(minutes).padStart(2, "0")}:${rest}` : `${minutes}:${rest}`;
}

// With hundredths, for single words.
export function exactClock(seconds) {
  const hundredths = Math.round(Math.max(0, seconds) * 100);
  return `${clock(Math.floor(hundredths / 100))}.${String(hundredths % 100).padStart(2, "0")}`;
}

export function shortSeconds(seconds) {
  return seconds < 10 ? `${Math.max(0, seconds).toFixed(1)} s` : `${Math.round(seconds)} s`;
}

// A duration as people say it.
export function roughly(seconds) {
  if (seconds < 5) return "a few seconds";
  if (seconds < 90) return `about ${Math.round(seconds / 5) * 5} s`;
  if (seconds < 5400) return `about ${Math.round(seconds / 60)} min`;
  return `about ${Math.floor(seconds / 3600)} h ${Math.round((seconds % 3600) / 60)} min`;
}

export function percent(share) {
  return `${Math.floor(100 * share)} %`;
}

export function dateAndTime(milliseconds) {
  return new Date(milliseconds).toLocaleString([], { dateStyle: "medium", timeStyle: "short" });
}

export function fileSize(bytes) {
  const size = bytes / 2 ** 20;
  return `${size < 10 ? Math.max(0.1, size).toFixed(1) : Math.round(size)} MB`;
}
