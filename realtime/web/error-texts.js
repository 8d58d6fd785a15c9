// The texts for errors: of microphones and files, of refused uploads and sessions, and of closed sockets.
//
// A *reason* says why the server cannot be used: `text` for the user, and how to go on. `final`: trying again without a
// change is useless. `key`: the access key is wrong or missing. `soon`: the server is starting. `full`: it has no free
// session. `unexplained`: the server answers everything else, and no other cause was found.

import { MAX_FILE_BYTES } from "./file-source.js";

const REQUEST_TIMEOUT_MS = 4000;
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

export async function microphoneErrorText(error, key) {
  if (error.name === "NoRecorderError") {
    // The server did not send recorder-worklet.js.
    const reason = await refusalReason(key);
    return reason.final ? reason.text : `${reason.text}. Start again in a moment.`;
  }
  return MICROPHONE[error.name] ?? `The microphone could not be opened: ${error.message}`;
}

export function fileErrorText(error) {
  return FILE[error.name] ?? `The file could not be opened: ${error.message}`;
}

// The reason for which the upload route refused a file, from its response.
export async function uploadRefusalReason(name, status, body, key) {
  if (status === 401) return wrongKey(key);
  const message = errorMessage(body);
  // Status 400 may also be about another field of the form, the language for example.
  const isFileUnreadable = status === 400 && (parsedError(body)?.param ?? "file") === "file";
  if (status === 503 || status === 429) return (await unreadyReason()) ?? { full: true, text: message || "The server is full" };
  if (!message) return { final: true, text: `The server did not take ${name} (status ${status}).` };
  return { final: true, text: isFileUnreadable ? `${name} could not be read: ${message}` : message };
}

// The text for a socket that the server closed.
export function closeText(code, reason) {
  if (code === 1012) return "The server is restarting";
  if (code === 1013) return "The server is full";
  if (code === 1008) return `The server closed the session (${reason})`;
  if (code === 1011) return "The server had a problem";
  return "Server lost";
}

// The reason for which the server is not ready, or null if it is.
export async function unreadyReason() {
  try {
    const answer = await request("ready");
    if (answer.ok) return null;
    const { status } = await answer.json().catch(() => ({}));
    return { soon: true, text: status === "draining" ? "The server is restarting" : "The server is starting" };
  } catch {
    return { text: "Server lost" };
  }
}

// The reason for which a socket was refused. A browser does not tell a page, so the page finds it by HTTP requests that
// the server refuses for the same causes.
export async function refusalReason(key) {
  try {
    const headers = key ? { Authorization: `Bearer ${key}` } : {};
    const models = await request("v1/models", { headers });
    if (models.status === 401) return wrongKey(key);
    if (models.status === 403) return { final: true, text: errorMessage(await models.text()) || REFUSED };
    const notReady = await unreadyReason();
    if (notReady) return notReady;
    const capacity = await (await request("capacity")).json();
    if (capacity.streams_free < 1) return { full: true, text: "The server is full" };
    // A browser sends `Origin` only with sockets and with requests such as POST, so only these are refused because of
    // it.
    const posted = await request("v1/audio/transcriptions", { method: "POST", headers });
    if (posted.status === 403) return { final: true, text: errorMessage(await posted.text()) || REFUSED };
    return { unexplained: true, full: true, text: "The server refuses more sessions for now" };
  } catch {
    return { text: "Server lost" };
  }
}

// With a timeout: on a dead connection no response ever arrives.
function request(path, options = {}) {
  return fetch(path, { cache: "no-store", signal: AbortSignal.timeout(REQUEST_TIMEOUT_MS), ...options });
}

// The error object in a response body, or undefined.
function parsedError(body) {
  try {
    return JSON.parse(body).error;
  } catch {
    return undefined;
  }
}

// The error's message in a response body; empty if there is none.
function errorMessage(body) {
  return parsedError(body)?.message ?? "";
}

function wrongKey(key) {
  const text = key
    ? "The server does not accept this access key. Check it in the settings."
    : "This server needs an access key. Enter it in the settings.";
  return { final: true, key: true, text };
}
