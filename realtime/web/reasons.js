// What went wrong, in plain words.

import { MAX_FILE_BYTES } from "./file-source.js";

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

export function microphoneProblem(error) {
  return MICROPHONE[error.name] ?? `The microphone could not be opened: ${error.message}`;
}

export function fileProblem(error) {
  return FILE[error.name] ?? `The file could not be opened: ${error.message}`;
}

// What the upload route answered; empty if all went well.
export function uploadProblem(status, body) {
  if (status === 200) return "";
  if (status === 401) return "This server needs an access key. Check it in the settings.";
  try {
    const { message } = JSON.parse(body).error;
    return status === 400 ? `This file could not be read: ${message}` : message;
  } catch {
    return `The server did not take the file (status ${status}).`;
  }
}

// Why an open socket was closed by the other side.
export function lostBecause(code, reason) {
  if (code === 1012) return "The server is restarting";
  if (code === 1013) return "The server is full";
  if (code === 1008) return `The server closed the session (${reason})`;
  if (code === 1011) return "The server had a problem";
  return "Server lost";
}

// A browser hides why a socket was refused, so the same questions are asked over HTTP.
// `final` says that trying again without a change is no use.
export async function whyRefused(key) {
  try {
    const headers = key ? { Authorization: `Bearer ${key}` } : {};
    if ((await fetch("v1/models", { headers })).status === 401) return wrongKey(key);
    if (!(await fetch("ready")).ok) return { text: "The server is starting" };
    const capacity = await (await fetch("capacity")).json();
    if (capacity.streams_free < 1) return { text: "The server is full" };
    return { refused: true, text: "The server refuses more sessions for now" };
  } catch {
    return { text: "Server lost" };
  }
}

function wrongKey(key) {
  const text = key
    ? "The server does not accept this access key. Check it in the settings."
    : "This server needs an access key. Enter it in the settings.";
  return { final: true, key: true, text };
}
