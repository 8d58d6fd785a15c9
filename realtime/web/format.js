// Formats times, durations, dates, percentages and file sizes for the page.

export function clock(seconds) {
  const total = Math.max(0, Math.floor(seconds));
  const hours = Math.floor(total / 3600);
  const minutes = Math.floor((total % 3600) / 60);
  const rest = String(total % 60).padStart(2, "0");
  return hours ? `${hours}:${String(minutes).padStart(2, "0")}:${rest}` : `${minutes}:${rest}`;
}

// With hundredths of a second, for single words.
export function exactClock(seconds) {
  const hundredths = Math.round(Math.max(0, seconds) * 100);
  return `${clock(Math.floor(hundredths / 100))}.${String(hundredths % 100).padStart(2, "0")}`;
}

export function shortSeconds(seconds) {
  return seconds < 10 ? `${Math.max(0, seconds).toFixed(1)} s` : `${Math.round(seconds)} s`;
}

// A duration in rounded units.
export function roughly(seconds) {
  if (seconds < 5) return "a few seconds";
  if (seconds < 90) return `about ${Math.round(seconds / 5) * 5} s`;
  if (seconds < 5400) return `about ${Math.round(seconds / 60)} min`;
  return `about ${Math.floor(seconds / 3600)} h ${Math.round((seconds % 3600) / 60)} min`;
}

export function percent(fraction) {
  return `${Math.floor(100 * fraction)} %`;
}

export function dateAndTime(milliseconds) {
  return new Date(milliseconds).toLocaleString([], { dateStyle: "medium", timeStyle: "short" });
}

export function fileSize(bytes) {
  const size = bytes / 2 ** 20;
  return `${size < 10 ? Math.max(0.1, size).toFixed(1) : Math.round(size)} MB`;
}
