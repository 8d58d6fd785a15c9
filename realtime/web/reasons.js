// What went wrong, in plain words.

import { MAX_FILE_BYTES } from "./file-source.js";

const ASK_MS = 4000;
const REFUSED = "This server does not serve pages of this address.";

const MICROPHONE = {
  NotAllowedError: "The browser may not use the microphone. Allow it in the address bar, then start again.",
  SecurityError: "Browsers give a page the microphone only over https or on this very machine. Files work here all the same.",
  NotFoundError: "No microphone was found. Plug one in, or open a file.",
  OverconstrainedError: "The chosen microphone is gone. Choose another one, then start again.",
  NoSoundError: "No sound was shared. Choose a tab or the screen again, and tick the box that shares its sound.",
  NotReadableError: "The microphone is in use by another program, or does not answer.",
};

const FILE = {
  EncodingError: "This file could not be read as sound. WAV, MP3, FLAC, Ogg, Opus and M4A usually work.",
  QuotaExceededError: `This file is too large for a browser (more than ${MAX_FILE_BYTES / 2 ** 20} MB). In the settings, let files be sent whole.`,
};

export async function microphoneProblem(error, key) {
  if (error.name === "NoRecorderError") {
    // The server did not give the page its recorder.
    const why = await whyRefused(key);
    return why.final ? why.text : `${why.text}. Start again in a moment.`;
  }
  return MICROPHONE[error.name] ?? `The microphone could not be opened: ${error.message}`;
}

export function fileProblem(error) {
  return FILE[error.name] ?? `The file could not be opened: ${error.message}`;
}

// What the upload route answered to a file; `final` says that sending it again is no use.
export async function whyNotTaken(name, status, body, key) {
  if (status === 401) return wrongKey(key);
  const said = sentence(body);
  // Other fields of the form may be wrong too, the language for example.
  const unread = status === 400 && (parsed(body)?.param ?? "file") === "file";
  if (status === 503 || status === 429) return (await whyNotReady()) ?? { full: true, text: said || "The server is full" };
  if (!said) return { final: true, text: `The server did not take ${name} (status ${status}).` };
  return { final: true, text: unread ? `${name} could not be read: ${said}` : said };
}

// Why an open socket was closed by the other side.
export function lostBecause(code, reason) {
  if (code === 1012) return "The server is restarting";
  if (code === 1013) return "The server is full";
  if (code === 1008) return `The server closed the session (${reason})`;
  if (code === 1011) return "The server had a problem";
  return "Server lost";
}

// Why there is no session to be had now, or null if the server is ready for one.
export async function whyNotReady() {
  try {
    const answer = await ask("ready");
    if (answer.ok) return null;
    const { status } = await answer.json().catch(() => ({}));
    return { soon: true, text: status === "draining" ? "The server is restarting" : "The server is starting" };
  } catch {
    return { text: "Server lost" };
  }
}

// A browser hides why a socket was refused, so the same questions are asked over HTTP.
// `final` says that trying again without a change is no use, `well` that nothing else was found.
export async function whyRefused(key) {
  try {
    const headers = key ? { Authorization: `Bearer ${key}` } : {};
    const models = await ask("v1/models", { headers });
    if (models.status === 401) return wrongKey(key);
    if (models.status === 403) return { final: true, text: sentence(await models.text()) || REFUSED };
    const unready = await whyNotReady();
    if (unready) return unready;
    const capacity = await (await ask("capacity")).json();
    if (capacity.streams_free < 1) return { full: true, text: "The server is full" };
    // Only requests that change something, and sockets, tell the server which page they come from.
    const posted = await ask("v1/audio/transcriptions", { method: "POST", headers });
    if (posted.status === 403) return { final: true, text: sentence(await posted.text()) || REFUSED };
    return { well: true, full: true, text: "The server refuses more sessions for now" };
  } catch {
    return { text: "Server lost" };
  }
}

// On a line that is dead nothing ever comes back.
function ask(path, how = {}) {
  return fetch(path, { cache: "no-store", signal: AbortSignal.timeout(ASK_MS), ...how });
}

// The error in an answer of the server, or undefined.
function parsed(body) {
  try {
    return JSON.parse(body).error;
  } catch {
    return undefined;
  }
}

// Its sentence; empty if there is none.
function sentence(body) {
  return parsed(body)?.message ?? "";
}

function wrongKey(key) {
  const text = key
    ? "The server does not accept this access key. Check it in the settings."
    : "This server needs an access key. Enter it in the settings.";
  return { final: true, key: true, text };
}
